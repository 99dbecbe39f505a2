"""The control plane with a thousand workers: how soon does the first step begin, and what does a step cost the
coordinator?

    python bench/control_plane.py            4 datacenters of 4 launchers with 63 stub workers each, TLS, 100 ms
    python bench/control_plane.py --quick    2 x 2 launchers with 16 each

The coordinator is the real one, as a process. The launchers are real agents with real channels in one other process;
only their workers are stubs, which answer as workers do and report the records of a step every `STEP_S`. Every channel
goes through the emulator, 50 ms each way. Then one launcher ends, and the run continues with fewer pipelines; in a
second run all launchers of a datacenter end, and the run continues on a plan without it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import yaml
from common.report import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from free_ports import free_port

from atlas.ir.text import from_text
from atlas.launch.agent import Agent, AgentSettings, _Attempt, _role
from atlas.launch.control_channel import Message, unpack_text
from atlas.launch.coordinator import RunCallbacks
from atlas.launch.multi_dc import COORDINATOR, coordinate
from atlas.launch.prepared_job import digest_of
from atlas.launch.rendezvous import AgentName, RendezvousClient
from atlas.launch.site_records import SiteRecords
from atlas.launch.site_security import security_of
from atlas.launch.train_options import TrainOptions
from atlas.lifetime import Lifeline
from atlas.runtime.topology import WorkerRole
from atlas.spec import load_job
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.wan.security.certs import make_ca, make_node

DATACENTERS = ("east", "west", "north", "south")
ONE_WAY_S = 0.05
STEP_S, GRACE_S = 2.0, 3.0
NUM_STEPS = 6
"""Until the launcher ends."""
LIMIT_S = 240.0
FIRST_STEP_S, CPU_MS, MEMORY_GB, MAX_THREADS, NEXT_ATTEMPT_S = 40.0, 60.0, 1.0, 40, 5.0


def write_job(folder: Path, num_dcs: int, num_hosts: int, num_workers: int) -> Path:
    cells = num_hosts * num_workers
    job = {
        "name": "control plane",
        "model": {"layers": 8, "hidden": 32, "heads": 2, "vocab": 300, "seq_len": 32},
        "cluster": {
            "wan": {"latency_ms": 50, "pair_gbps": 1},
            "datacenters": [{"name": dc, "nodes": cells, "gpus_per_node": 1} for dc in DATACENTERS[:num_dcs]],
        },
        "precision": "fp32",
        "num_microbatches": 3,
        "pp": num_dcs,
        "cells": cells,
        "pipelines_per_cell": 1,
    }
    (folder / "job.yaml").write_text(yaml.dump(job))
    return folder / "job.yaml"


def train_options(steps: int) -> TrainOptions:
    return TrainOptions("1f1b", device="cuda", model="job", data="shipped", steps=steps, grace_s=GRACE_S)


# ---- the coordinator, as a process -----------------------------------------------------------------------------------
def run_coordinator(folder: Path, port: int) -> int:
    Lifeline(sys.stdin.fileno())
    job = load_job(folder / "job.yaml")

    def said(line: str) -> None:
        print(json.dumps({"said": line, "at": time.monotonic()}), flush=True)

    def step(event: Any, timeline: Any) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        figures = {"cpu_s": used.ru_utime + used.ru_stime, "gb": used.ru_maxrss * 1024 / 1e9}
        row = {"step": event["step"], "at": time.monotonic(), "threads": threading.active_count(), **figures}
        print(json.dumps(row), flush=True)

    settings = AgentSettings(COORDINATOR, ("127.0.0.1", port), certificates=folder / "certs", auto_replan=True)
    return coordinate(job, train_options(1000), settings, RunCallbacks(said, step), folder / "state")


# ---- launchers with stub workers -------------------------------------------------------------------------------------
class StubAgent(Agent):
    """An agent whose workers only answer."""

    stub: tuple[list[WorkerRole], threading.Event] | None = None
    begun: ClassVar[list[float]] = []
    """When attempts began, of all launchers."""

    def _begin(self, attempt: _Attempt, message: Message) -> None:
        self.begun.append(time.monotonic())
        super()._begin(attempt, message)

    def _reply(self, attempt: _Attempt, message: Message) -> None:
        if "begun" in message:
            message["begun"]["memory"] = ""  # each stands for a host of its own, and stubs take no memory
        super()._reply(attempt, message)

    def _prepare(self, attempt: _Attempt, message: Message) -> None:
        wanted = message["prepare"]
        programs = [from_text(unpack_text(group["program"])) for group in wanted["groups"]]
        roles = [_role(wanted, programs, row) for row in wanted["workers"]]
        self.stub = (roles, threading.Event())
        attempt.records = SiteRecords.of(roles)
        self._reply(attempt, {"prepared": {role.name: 0 for role in roles}})
        for number, role in enumerate(roles):
            self._from(attempt, role.name, {"listening": 10_000 + number})

    def _forward(self, attempt: _Attempt, message: Message) -> None:
        assert self.stub is not None
        name, body = str(message["to"]), message["message"]
        if "channels" in body:
            self._from(attempt, name, {"ready": True})
        elif "start_ns" in body and attempt.start_ns is None:
            attempt.start_ns = body["start_ns"]
            threading.Thread(target=self._train, args=(attempt, *self.stub), daemon=True).start()

    def _from(self, attempt: _Attempt, name: str, body: Message) -> None:
        self._forward_reply(attempt, name, body, {})

    def _train(self, attempt: _Attempt, roles: list[WorkerRole], ended: threading.Event) -> None:
        assert attempt.start_ns is not None
        step = 0
        while not ended.wait(max(0.0, (attempt.start_ns - time.monotonic_ns()) / 1e9 + (step + 1) * STEP_S)):
            begin_ns = attempt.start_ns + int(step * STEP_S * 1e9)
            for role in roles:
                self._from(attempt, role.name, step_record(role, step, begin_ns))
            step += 1

    def _end(self) -> None:
        if self.stub is not None:
            self.stub[1].set()
        super()._end()


def step_record(role: WorkerRole, step: int, begin_ns: int) -> Message:
    """As a worker sends it, with moments of every op and transfer."""
    program = role.program
    num_ops, is_last = len(program.ops(role.worker)), role.rank == program.num_ranks - 1
    starts = [begin_ns + n * 1_000_000 for n in range(num_ops)]
    transfers = [(n, begin_ns + n) for n in range(min(program.num_microbatches, program.num_transfers))]
    moments = dict.fromkeys(("ready_ns", "start_ns", "arrive_ns"), transfers)
    losses = [5.0] * program.num_microbatches if is_last else []
    numbers = {"losses": losses, "norms": [], "tokens": 96, "fills": [], "wan_faults": [0, 0]}
    ends = [at + 900_000 for at in starts]
    return {"step": step, "loss": None, "op_start_ns": starts, "op_end_ns": ends, **moments, **numbers}


def start_launchers(folder: Path, names: list[AgentName], net: ProxyNet, port: int) -> dict[AgentName, StubAgent]:
    digest = digest_of(load_job(folder / "job.yaml"), train_options(1000))
    agents: dict[AgentName, StubAgent] = {}

    def start(name: AgentName) -> None:
        at = net.listen(name.node, COORDINATOR.node, ("127.0.0.1", port))
        settings = AgentSettings(name, at, apart=True, certificates=folder / "certs", device="cpu")
        security = security_of(name, settings.certificates, ())
        client = RendezvousClient(at, COORDINATOR, name, digest, security, grace_s=60, patience_s=60)
        agent = agents[name] = StubAgent(settings, client, security, lambda line: None)
        threading.Thread(target=agent.run, daemon=True).start()

    threads = [threading.Thread(target=start, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return agents


# ---- figures ---------------------------------------------------------------------------------------------------------
def measure(folder: Path, num_dcs: int, num_hosts: int, num_workers: int, num_lost: int) -> list[dict[str, Any]]:
    """What the coordinator printed; with the moments of the first call and of the end of the last launchers."""
    write_job(folder, num_dcs, num_hosts, num_workers)
    make_ca(folder / "certs")
    for dc in (COORDINATOR.datacenter, *DATACENTERS[:num_dcs]):
        make_node(folder / "certs", dc)
    port, rows = free_port(), list[dict[str, Any]]()
    names = [AgentName(dc, part, num_hosts) for dc in DATACENTERS[:num_dcs] for part in range(num_hosts)]
    command = [sys.executable, str(Path(__file__)), "--coordinator", str(folder), str(port)]
    path = PathSpec(latency_s=ONE_WAY_S, window_bytes=None)
    with (
        ProxyNet({(name.node, COORDINATOR.node): path for name in names}) as net,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        guard = threading.Timer(LIMIT_S, process.kill)
        guard.start()
        try:
            assert process.stdout is not None
            rows.append({"called": time.monotonic()})
            agents = start_launchers(folder, names, net, port)
            num_lines, victims = 0, [agents[name] for name in names[-num_lost:]]
            for line in process.stdout:
                rows.append(json.loads(line))
                num_lines += "step" in rows[-1]
                if num_lines == NUM_STEPS and not any("ended" in row for row in rows):
                    rows.append({"ended": time.monotonic()})
                    StubAgent.begun.clear()
                    for victim in victims:
                        victim._client.close()
                        victim.finish()
                if StubAgent.begun and rows[-1].get("step") == 1 and any("ended" in row for row in rows):
                    rows.append({"again": max(StubAgent.begun)})
                    break
        finally:
            guard.cancel()
            process.kill()
            for agent in agents.values():
                agent.finish()
    return rows


def report_on(report: Report, rows: list[dict[str, Any]], lost: str) -> None:
    steps = [row for row in rows if "step" in row]
    (called,) = [row["called"] for row in rows if "called" in row]
    ended = next((row["ended"] for row in rows if "ended" in row), None)
    if not steps or ended is None:
        at_start = ("first call to the start of the first step", "CPU of the coordinator for a step")
        for line in (*(at_start if lost == "host" else ()), f"a lost {lost}: next attempt begins after grace"):
            report.void(line, f"no run: {rows[-3:]}")
        return
    if lost == "host":
        before = [row for row in steps if row["at"] < ended]
        first_s = before[0]["at"] - called - STEP_S
        report.figure("first call to the start of the first step", first_s, "s", at_most=FIRST_STEP_S)
        cpu_ms = (before[-1]["cpu_s"] - before[1]["cpu_s"]) / (len(before) - 2) * 1e3
        report.figure("CPU of the coordinator for a step", cpu_ms, "ms", at_most=CPU_MS)
        report.figure("memory of the coordinator", max(row["gb"] for row in steps), "GB", at_most=MEMORY_GB)
        report.figure("threads of the coordinator", max(row["threads"] for row in steps), "", at_most=MAX_THREADS)
    again = next((row["again"] for row in rows if "again" in row), None)
    if again is None:
        report.void(f"a lost {lost}: next attempt begins after grace", f"no next attempt: {rows[-1]}")
        return
    after_s = again - ended - GRACE_S
    report.figure(f"a lost {lost}: next attempt begins after grace", after_s, "s", at_most=NEXT_ATTEMPT_S)
    report.figure(f"a lost {lost}: its first step ends after grace", steps[-1]["at"] - ended - GRACE_S, "s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 launchers with 16 workers each")
    parser.add_argument("--coordinator", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.coordinator:
        return run_coordinator(Path(args.coordinator[0]), int(args.coordinator[1]))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    shape = (2, 2, 16) if args.quick else (4, 4, 63)
    num_workers = shape[0] * shape[1] * shape[2]
    report = Report(f"Control plane of {num_workers} stub workers", "bars of this project; TLS, 100 ms there and back")
    for lost, num_lost in (("host", 1), ("site", shape[1])):
        StubAgent.begun.clear()
        with tempfile.TemporaryDirectory(prefix="atlas-control-") as folder:
            rows = measure(Path(folder), *shape, num_lost)
        for row in rows:
            if "said" in row:
                print(row["said"], file=sys.stderr)
        report_on(report, rows, lost)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
