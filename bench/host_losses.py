"""Hosts lost at random in one long run: are the weights equal to the bit, and how soon does training continue?

    python bench/host_losses.py                     40 losses with a spare, 5 without, 10 kills of the coordinator
    python bench/host_losses.py --only spare        40 losses with a spare; about 6 minutes on a quiet host
    python bench/host_losses.py --quick             3, 1 and 3
    python bench/host_losses.py --only spare --losses 20 --seed 2 --save b.json    without the comparison, in pieces
    python bench/host_losses.py --compare a.json b.json                            one verdict on these pieces

    spare         4 hosts of one datacenter and a spare, each a launcher with a disk of its own. A random host is killed
                  (SIGKILL of its launcher; its workers end with it) and its disk is deleted. The spare takes its place;
                  a new spare is started. `next step`: from the kill to the report of a step that no worker had begun.
    fewer         the same without a spare: fewer pipelines continue; then the host returns, and the run grows back
    coordinator   the coordinator is killed and started again; the workers must go on

After every loss the next complete checkpoint is hashed. At the end an undisturbed run on one host goes through the same
steps, and every hash and every loss is compared with it. Launchers and coordinator are the commands of the user's, as
processes on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from common.report import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from free_ports import free_port

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.manifest import complete_ids, ids
from atlas.runtime.checkpoint.store import LocalStore

NUM_HOSTS, SAVE_EVERY = 4, 5
NEXT_STEP_S = 15.0
WAIT_S = 120.0
"""For anything: ten times what an idle machine needs."""
GRACE_S = 60.0
SHORT_GRACE_S = 3.0
"""Without a spare, the run waits this long for the host."""
JOB = {
    "name": "hosts",
    "model": {"layers": 4, "hidden": 32, "heads": 2, "vocab": 300, "seq_len": 32},
    "cluster": {"datacenters": [{"name": "east", "nodes": NUM_HOSTS, "gpus_per_node": 1}]},
    "precision": "fp32",
    "microbatch": 2,
    "num_microbatches": 6,
    "pp": 2,
    "cells": 2,
    "pipelines_per_cell": 1,
}
RECIPE = {"sums": "ordered", "zero": 1}
"""Of the runs that lose hosts: sums by Gloo, each pipeline steps its own slice. The undisturbed run has no ZeRO-1."""
HOW = ["--data", "shipped", "--learning-rate", "0.003", "--save-every", str(SAVE_EVERY), "--steps", "1000000"]


class Command:
    """`atlas ...` as a process; what it says is in a file."""

    def __init__(self, base: Path, name: str, *words: str) -> None:
        self.said_file = base / f"{name}.said"
        command = [sys.executable, "-m", "atlas", words[0], str(base / "job.yaml"), "--no-bar", *words[1:]]
        with self.said_file.open("a") as said:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self.said_file.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Cluster:
    """A coordinator, four hosts and perhaps a spare. `hosts`: the launcher at each place."""

    def __init__(self, base: Path, grace_s: float, stack: ExitStack) -> None:
        self.base, self.grace_s, self.stack = base, grace_s, stack
        self.port, self.num_started = free_port(), 0
        base.mkdir(parents=True)
        (base / "job.yaml").write_text(yaml.dump(JOB))
        (base / "recipe.yaml").write_text(yaml.dump(RECIPE))
        self.how = ["--recipe", str(base / "recipe.yaml"), *HOW]
        self.log = base / "steps.jsonl"
        self.coordinator = self.start_coordinator()
        self.launchers: dict[str, Command] = {}
        self.folders: dict[str, Path] = {}

    def start_coordinator(self) -> Command:
        words = ["--listen", f"127.0.0.1:{self.port}", "--state", str(self.base / "state"), "--log", str(self.log)]
        command = Command(self.base, "coordinator", "coordinator", *words, "--grace", f"{self.grace_s:g}", *self.how)
        self.stack.callback(command.kill)
        return command

    def start(self, *place: str) -> str:
        """A launcher with a new folder; its name."""
        name = f"host-{self.num_started}"
        self.num_started += 1
        self.folders[name] = self.base / name
        words = ["--dc", "east", "--coordinator", f"127.0.0.1:{self.port}", "--device", "cpu", *place, *self.how]
        words += ["--checkpoints", str(self.folders[name]), "--grace", f"{self.grace_s:g}"]
        self.launchers[name] = Command(self.base, name, "train", *words)
        self.stack.callback(self.launchers[name].kill)
        return name

    def lose(self, name: str) -> float:
        """Kill a launcher and delete its disk; when it was killed."""
        self.launchers.pop(name).kill()
        killed = time.monotonic()
        time.sleep(0.5)  # its workers end meanwhile, and write no more
        shutil.rmtree(self.folders.pop(name), ignore_errors=True)
        return killed

    @property
    def steps(self) -> dict[int, float]:
        """Losses by step, as last reported."""
        if not self.log.exists():
            return {}
        lines = self.log.read_text().splitlines()
        return {row["step"]: row["loss"] for row in map(json.loads, lines)}

    def furthest(self) -> int:
        return max(self.steps, default=0)

    def wait(self, what: str, is_true: Callable[[], bool], limit_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_true():
            if time.monotonic() > deadline or self.coordinator.process.poll() is not None:
                raise RuntimeError(f"{what} did not happen; the coordinator said: {self.coordinator.said}")
            time.sleep(0.02)

    def wait_saved(self, after: int) -> tuple[int, dict[str, str]]:
        """The step of the next complete checkpoint, and its hashes."""
        found: list[int] = []

        def is_saved() -> bool:
            try:
                found[:] = [id.step for id in complete_ids(self.stores()) if id.step > after]
            except (OSError, AtlasError):  # it is being written, or deleted
                found.clear()
            return bool(found)

        self.wait(f"a checkpoint after step {after}", is_saved)
        return found[-1], hashes(self.stores(), found[-1])

    def stores(self) -> list[LocalStore]:
        return [LocalStore(folder / name) for folder in self.folders.values() for name in ("own", "of-east")]


def hashes(stores: list[LocalStore], step: int) -> dict[str, str]:
    """SHA-256 of every layer's files, by layer, as the parts list them."""
    checkpoint = choose(stores, step=step)
    assert checkpoint is not None
    load_layers(checkpoint, checkpoint.layers)  # every byte is hashed and compared with the lists
    found: dict[str, str] = {}
    for layer in checkpoint.layers:
        weights, optimizer = checkpoint.copies(layer)
        found[layer] = f"{weights[0][1].sha256} {optimizer[0][1].sha256}"
    return found


# ---- the three parts -------------------------------------------------------------------------------------------------
def with_spare(base: Path, num_losses: int, draw: random.Random) -> dict[str, Any]:
    with ExitStack() as stack:
        cluster = Cluster(base, GRACE_S, stack)
        hosts = [cluster.start("--node", f"{part}/{NUM_HOSTS}") for part in range(NUM_HOSTS)]
        saved: dict[int, dict[str, str]] = {}
        times_s: list[float] = []
        spare = cluster.start("--spare")
        for number in range(num_losses):
            cluster.wait("a spare", lambda name=spare: "waiting as a spare" in cluster.launchers[name].said)  # type: ignore[misc]
            before = cluster.furthest() + draw.randrange(1, 2 * SAVE_EVERY)
            cluster.wait("steps before the loss", lambda step=before: cluster.furthest() >= step)  # type: ignore[misc]
            victim = draw.randrange(NUM_HOSTS)
            begun = cluster.furthest() + 2
            killed = cluster.lose(hosts[victim])
            cluster.wait("the next step", lambda step=begun: cluster.furthest() > step)  # type: ignore[misc]
            times_s.append(time.monotonic() - killed)
            hosts[victim] = spare
            spare = cluster.start("--spare")
            step, found = cluster.wait_saved(begun)
            saved[step] = found
            print(f"  loss {number + 1}: host {victim}, next step after {times_s[-1]:.1f} s, checked step {step}")
        restarts = cluster.coordinator.said.count("A spare takes its place")
        return {"saved": saved, "losses": cluster.steps, "times_s": times_s, "taken": restarts}


def without_spare(base: Path, num_losses: int, draw: random.Random) -> dict[str, Any]:
    with ExitStack() as stack:
        cluster = Cluster(base, SHORT_GRACE_S, stack)
        hosts = [cluster.start("--node", f"{part}/{NUM_HOSTS}") for part in range(NUM_HOSTS)]
        for number in range(num_losses):
            cluster.wait_saved(cluster.furthest() + draw.randrange(1, 2 * SAVE_EVERY))
            victim, begun = draw.randrange(NUM_HOSTS), cluster.furthest() + 2
            cluster.lose(hosts[victim])
            cluster.wait("the next step", lambda step=begun: cluster.furthest() > step)  # type: ignore[misc]
            hosts[victim] = cluster.start("--node", f"{victim}/{NUM_HOSTS}")
            cluster.wait("the host's return", lambda n=number: said(cluster, "is back: all hosts") > n)  # type: ignore[misc]
            grown = cluster.furthest() + 2
            cluster.wait("a step on all hosts", lambda step=grown: cluster.furthest() > step)  # type: ignore[misc]
        return {"losses": cluster.steps, "fewer": said(cluster, "1 of 2 pipelines continues")}


def said(cluster: Cluster, words: str) -> int:
    return cluster.coordinator.said.count(words)


def coordinator_kills(base: Path, num_kills: int, draw: random.Random) -> dict[str, Any]:
    with ExitStack() as stack:
        cluster = Cluster(base, GRACE_S, stack)
        for part in range(NUM_HOSTS):
            cluster.start("--node", f"{part}/{NUM_HOSTS}")
        for _ in range(num_kills):
            before = cluster.furthest() + draw.randrange(1, 2 * SAVE_EVERY)
            cluster.wait("steps before the kill", lambda step=before: cluster.furthest() >= step)  # type: ignore[misc]
            cluster.coordinator.kill()
            known = said(cluster, "the coordinator was restarted")
            cluster.coordinator = cluster.start_coordinator()
            cluster.wait("the coordinator", lambda n=known: said(cluster, "the coordinator was restarted") > n)  # type: ignore[misc]
        step, found = cluster.wait_saved(cluster.furthest())
        cluster.wait("the report of the saved step", lambda: cluster.furthest() >= step)
        restarts = said(cluster, "Restart ") + said(cluster, "resumed from the checkpoint")
        kept = said(cluster, "the coordinator was restarted")
        return {"saved": {step: found}, "losses": cluster.steps, "restarts": restarts, "kept": kept}


# ---- the undisturbed run ---------------------------------------------------------------------------------------------
def undisturbed(base: Path, num_steps: int, wanted: set[int]) -> tuple[dict[int, float], dict[int, dict[str, str]]]:
    """Losses by step, and the hashes of the checkpoints of these steps."""
    base.mkdir(parents=True)
    (base / "job.yaml").write_text(yaml.dump(JOB))
    (base / "recipe.yaml").write_text(yaml.dump({"checkpoints": {"keep": 1000}}))
    words = ["--dc", "east", "--rendezvous", f"127.0.0.1:{free_port()}", "--device", "cpu", *HOW[:-2]]
    words += ["--steps", str(num_steps), "--checkpoints", str(base / "saves"), "--log", str(base / "log")]
    command = Command(base, "undisturbed", "train", *words, "--recipe", str(base / "recipe.yaml"))
    stores, weights = [LocalStore(base / "saves" / "own")], dict[int, dict[str, str]]()
    deadline, ended = time.monotonic() + 20 * WAIT_S, False
    while not ended and time.monotonic() < deadline:
        ended = command.process.poll() is not None
        # Meanwhile, because a long run deletes its first saves. One is complete when all workers are far beyond it.
        there = {save.step for save in ids(stores[0])}
        complete = {step for step in there if ended or step + 4 * SAVE_EVERY <= max(there)}
        for step in sorted(complete & (wanted - weights.keys())):
            weights[step] = hashes(stores, step)
        time.sleep(0.0 if ended else 1.0)
    if not ended or command.process.returncode != 0:
        command.kill()
        raise RuntimeError(command.said)
    losses = {row["step"]: row["loss"] for row in map(json.loads, (base / "log").read_text().splitlines())}
    return losses, weights


def compare(report: Report, found: list[tuple[str, dict[str, Any]]], base: Path) -> None:
    """`found`: results of parts; a part may have been measured in several pieces."""
    last = max(max(part["losses"]) for _, part in found)
    wanted = {step for _, part in found for step in part.get("saved", ())}
    losses, weights = undisturbed(base, last + SAVE_EVERY - last % SAVE_EVERY, wanted)

    def equal(parts: list[dict[str, Any]], name: str) -> None:
        checked = [(step, hashes) for part in parts for step, hashes in part["saved"].items()]
        same = sum(weights.get(step) == hashes for step, hashes in checked)
        report.figure(f"{name}: weights equal to the bit", same, "of", at_least=len(checked))

    if spare := [part for name, part in found if name == "spare"]:
        name = "losses of a host with a spare"
        equal(spare, name)
        report.figure(f"{name}: spare took the place", sum(part["taken"] for part in spare), "times")
        worst = max(max(part["times_s"]) for part in spare)
        report.figure(f"{name}: next step, worst", worst, "s", at_most=NEXT_STEP_S)
        wrong = sum(losses[step] != loss for part in spare for step, loss in part["losses"].items())
        report.figure(f"{name}: steps with another loss", wrong, "steps", at_most=0)
    if fewer := [part for name, part in found if name == "fewer"]:
        name = "losses of a host without a spare"
        worst = max(abs(losses[step] - loss) / loss for part in fewer for step, loss in part["losses"].items())
        report.figure(f"{name}: loss off by, worst", worst, "", at_most=1e-5)
        count = sum(part["fewer"] for part in fewer)
        report.figure(f"{name}: fewer pipelines went on", count, "times", at_least=1)
    if kills := [part for name, part in found if name == "coordinator"]:
        name = "kills of the coordinator"
        report.figure(f"{name}: workers went on", sum(part["kept"] for part in kills), "times")
        report.figure(f"{name}: restarts of workers", sum(part["restarts"] for part in kills), "", at_most=0)
        equal(kills, name)
        wrong = sum(losses[step] != loss for part in kills for step, loss in part["losses"].items())
        report.figure(f"{name}: steps with another loss", wrong, "steps", at_most=0)


def read_piece(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """What `--save` has written; steps are numbers again."""

    def numbered(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
        return {int(key) if key.isdecimal() else key: value for key, value in pairs}

    return [(name, part) for name, part in json.loads(file.read_text(), object_pairs_hook=numbered)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 losses with a spare, 1 without, 3 kills")
    parser.add_argument("--only", choices=("spare", "fewer", "coordinator"))
    parser.add_argument("--losses", type=int, help="of the part that --only names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write what happened there; compare it later")
    parser.add_argument("--compare", type=Path, nargs="+", help="compare these pieces; lose no host")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # launchers are ended on the way out
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    counts = (3, 1, 3) if args.quick else (40, 5, 10)
    parts = dict(zip(("spare", "fewer", "coordinator"), counts, strict=True))
    runs = {"spare": with_spare, "fewer": without_spare, "coordinator": coordinator_kills}
    found = [part for file in args.compare or () for part in read_piece(file)]
    with tempfile.TemporaryDirectory(prefix="atlas-hosts-") as folder:
        for name, count in parts.items():
            if args.only in (None, name) and not args.compare:
                draw = random.Random(f"{name} {args.seed}")
                found.append((name, runs[name](Path(folder) / name, args.losses or count, draw)))
        if args.save is not None:
            args.save.write_text(json.dumps(found))
            return 0
        report = Report("Lost hosts", "an undisturbed run on one host, step by step")
        compare(report, found, Path(folder) / "undisturbed")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
