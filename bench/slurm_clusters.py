"""Two real Slurm clusters on this machine, one for each datacenter, with the files of `atlas launch --target slurm`.

    apt-get install slurmctld slurmd slurm-client
    python bench/slurm_clusters.py [--quick]

Each cluster has a slurmctld and two slurmd (a third one in east, for a spare), as root, without munge. 40 steps:

    undisturbed   both jobs run to the end
    disturbed     `scancel --signal=TERM` of one job, later `scontrol requeue` of it: both are queued again and resume
    node down     a node of east dies, and Slurm is told: the spare takes its place, and the job goes on

The weights of all three are compared, bit by bit. Needs root; not measured elsewhere.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from common.report import Report, not_measured
from launch_files import JOB, bits

from atlas.cli import main as atlas
from atlas.runtime.checkpoint.manifest import complete_ids
from atlas.runtime.checkpoint.store import LocalStore

CLUSTERS = {"east": ("n0", "n1", "n2"), "west": ("m0", "m1")}
STEPS, SAVE_EVERY = 40, 5
WAIT_S = 240.0
RECIPE: dict[str, Any] = {
    "steps": STEPS,
    "data": {"shards": "shipped"},
    "learning_rate": {"peak": 3e-3, "warmup": 4, "decay": "cosine"},
    "checkpoints": {"every": SAVE_EVERY, "keep": 100},
    "network": {"grace": 10.0},
}
CONF = """\
ClusterName={name}
SlurmctldHost={host}
SlurmctldPort={port}
SlurmdParameters=config_overrides
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
TaskProlog={base}/ports.sh
SelectType=select/linear
SchedulerParameters=sched_interval=2
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=3600
NodeName={nodes} NodeHostname={host} Port=[{first}-{last}] CPUs=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> int:
    """The first of so many consecutive ports that nobody listens on."""
    for first in range(17_000, 30_000, 50):
        try:
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


class SlurmCluster:
    """One controller and a daemon for each node. All nodes are this machine: `ports.sh` gives each its own range."""

    def __init__(self, base: Path, name: str, nodes: tuple[str, ...], stack: ExitStack) -> None:
        self.base, self.name = base, name
        base.mkdir(parents=True)
        for folder in ("state", *(f"spool-{node}" for node in nodes)):
            (base / folder).mkdir()
        first = free_ports(50)
        prefix = nodes[0][0]
        (base / "slurm.conf").write_text(
            CONF.format(
                name=name,
                host=socket.gethostname(),
                base=base,
                port=first,
                nodes=f"{prefix}[0-{len(nodes) - 1}]",
                first=first + 1,
                last=first + len(nodes),
            )
        )
        ranges = "".join(
            f'{node}) echo "export ATLAS_PORTS={first + 10 * (k + 1)}-{first + 10 * k + 19}";;\n'
            for k, node in enumerate(nodes)
        )
        (base / "ports.sh").write_text(f'#!/bin/bash\ncase "$SLURMD_NODENAME" in\n{ranges}esac\n')
        (base / "ports.sh").chmod(0o755)
        self.env = {**os.environ, "SLURM_CONF": str(base / "slurm.conf")}
        for command in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in nodes)):
            with (base / "daemons.log").open("a") as log:
                daemon = subprocess.Popen([*command, "-f", str(base / "slurm.conf")], stdout=log, stderr=log)
            stack.callback(_end, daemon)
        wait("the nodes", lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split().count("idle") == len(nodes), 60)

    def ask(self, *words: str, cwd: Path | None = None) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, cwd=cwd, check=False)
        return done.stdout

    def submit(self, folder: Path, *flags: str) -> str:
        words = ["sbatch", "--parsable", f"--output={folder}/{self.name}.log", *flags, f"{self.name}.sbatch"]
        return self.ask(*words, cwd=folder).strip()

    def state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait(what: str, is_true: Callable[[], bool], limit_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.2)


class SlurmRun:
    """One run over both clusters, in a folder that all nodes share."""

    def __init__(self, base: Path, clusters: dict[str, SlurmCluster], spares: int = 0) -> None:
        self.folder, self.clusters = base / "jobs", clusters
        base.mkdir()
        (base / "job.yaml").write_text(yaml.dump(JOB))
        (base / "recipe.yaml").write_text(yaml.dump(RECIPE))
        with socket.create_server(("127.0.0.1", 0)) as server:
            rendezvous = f"127.0.0.1:{server.getsockname()[1]}"
        words = ["launch", str(base / "job.yaml"), "--recipe", str(base / "recipe.yaml"), "--target", "slurm"]
        words += ["--out", str(self.folder), "--rendezvous", rendezvous, "--device", "cpu"]
        assert atlas(words) == 0
        assert atlas(["wan", "certs", *clusters, "--out", str(self.folder / "certs")]) == 0
        nodes = {"east": 2 + spares, "west": 2}
        self.jobs = {dc: each.submit(self.folder, f"--nodes={nodes[dc]}") for dc, each in clusters.items()}

    def wait_saved(self, step: int) -> None:
        stores = [LocalStore(self.folder / "disk" / dc / "checkpoints" / "own") for dc in self.clusters]
        wait(f"a checkpoint of step {step}", lambda: any(id.step >= step for id in complete_ids(stores)))

    def said(self, dc: str) -> str:
        log = self.folder / f"{dc}.log"
        return log.read_text() if log.exists() else ""

    def states(self) -> dict[str, str]:
        return {dc: each.state(self.jobs[dc]) for dc, each in self.clusters.items()}

    def finish(self) -> str:
        """The bits, when the last step is saved everywhere and both jobs have ended."""
        over = ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
        try:
            self.wait_saved(STEPS)
            wait("the end of the jobs", lambda: all(state in over for state in self.states().values()))
        except RuntimeError:
            print("\n".join(f"{dc}: {self.states()[dc]}\n{self.said(dc)[-3000:]}" for dc in self.clusters))
            raise
        return bits("slurm", self.folder, STEPS)


def processes_on(node: str) -> list[int]:
    """Tasks and workers of a node, not its daemon."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"SLURMD_NODENAME={node}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def disturbed(base: Path, clusters: dict[str, SlurmCluster]) -> tuple[str, int]:
    """Its bits, and how often the jobs were started again."""
    run = SlurmRun(base, clusters)
    run.wait_saved(SAVE_EVERY)
    clusters["west"].ask("scancel", "--signal=TERM", run.jobs["west"])
    run.wait_saved(3 * SAVE_EVERY)
    clusters["east"].ask("scontrol", "requeue", run.jobs["east"])
    found = run.finish()
    shown = clusters["east"].ask("scontrol", "show", "job", run.jobs["east"])
    return found, int(shown.partition("Restarts=")[2].split()[0])


def node_down(base: Path, clusters: dict[str, SlurmCluster]) -> tuple[str, int]:
    """Its bits, and whether the spare took the place."""
    run = SlurmRun(base, clusters, spares=1)
    run.wait_saved(SAVE_EVERY)
    for pid in processes_on("n1"):
        os.kill(pid, signal.SIGKILL)
    clusters["east"].ask("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=bench")
    found = run.finish()
    return found, run.said("east").count("A spare takes its place")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the lost node")
    args = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        return not_measured("slurm_clusters", "needs root and Slurm: apt-get install slurmctld slurmd slurm-client")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["ATLAS_ADVERTISE"] = "127.0.0.1"
    report = Report("Two Slurm clusters", "an undisturbed run over both")
    with tempfile.TemporaryDirectory(prefix="atlas-slurm-") as folder, ExitStack() as stack:
        base = Path(folder)
        clusters = {name: SlurmCluster(base / name, name, nodes, stack) for name, nodes in CLUSTERS.items()}
        wanted = SlurmRun(base / "undisturbed", clusters).finish()
        report.figure("slurm: undisturbed run ended", 1, "runs", at_least=1)
        found, num_restarts = disturbed(base / "disturbed", clusters)
        report.figure("slurm: TERM and requeue: same bits", float(found == wanted), "", at_least=1)
        report.figure("slurm: TERM and requeue: the first job was started again", num_restarts, "times", at_least=2)
        if not args.quick:
            found, num_taken = node_down(base / "down", clusters)
            report.figure("slurm: node down: same bits", float(found == wanted), "", at_least=1)
            report.figure("slurm: node down: the spare took its place", num_taken, "times", at_least=1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
