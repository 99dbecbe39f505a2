"""What a run over several datacenters survives: one random event in each run, and the weights at the end are those of
the undisturbed run, to the bit.

    python bench/faults.py [--runs 40] [--seed 1] [--only EVENT]

    kill     kill -9 of a worker
    cut      every stream between two datacenters cut, and none let through for 3 s
    freeze   a worker stopped for 5 s
    disk     one datacenter's checkpoint disk full for some steps (a small tmpfs; without root: a folder that refuses)
    crash    everything killed while a checkpoint is written, and started again

Launchers, rendezvous, workers, keepers and the transport are the real ones, on loopback; the path between the two
datacenters is the emulator's proxy, so that it can be cut. Each line is JSON; a table follows. Four of these runs are
in tests/launch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from lab.lines import Lines
from wide_runs import QUICK, Run, hashes, run_wide, write_job

from atlas.launch.conductor import Terms
from atlas.wan.emulator import PathSpec, ProxyNet

EVENTS = ("kill", "cut", "freeze", "disk", "crash")
DATACENTERS = ("east", "west")
NODES = ("east/p0.s0", "west/p0.s1")
NUM_STEPS, SAVE_EVERY = 12, 2
CUT_S, FREEZE_S = 3.0, 5.0
DISK_BYTES = 16 << 20
LIMIT_S = 120.0


def folders_of(base: Path) -> dict[str, Path]:
    return {dc: base / dc for dc in DATACENTERS}


# ---- one life of all launchers, in a process of its own ------------------------------------------------------------
class Striker:
    """Strikes once, after a step that was drawn."""

    def __init__(self, event: str, seed: int, base: Path, net: ProxyNet) -> None:
        draw = random.Random(f"{event} {seed}")
        self.event, self.base, self.net = event, base, net
        self.at_step = draw.randrange(2, NUM_STEPS - 4)
        self.victim = draw.choice(DATACENTERS)
        self.until = self.at_step + draw.randrange(1, 4)
        self.pids: dict[str, int] = {}
        self.struck = False

    def step(self, run: Run, step: int) -> None:
        print(json.dumps({"step": step}), flush=True)
        if step >= self.until and self.event == "disk":
            self._fill(full=False)
        if step >= self.at_step and not self.struck:
            self.struck = True
            getattr(self, f"_{self.event}", lambda: None)()

    def _kill(self) -> None:
        os.kill(self._worker(), signal.SIGKILL)

    def _freeze(self) -> None:
        worker = self._worker()
        os.kill(worker, signal.SIGSTOP)
        threading.Timer(FREEZE_S, os.kill, (worker, signal.SIGCONT)).start()

    def _cut(self) -> None:
        self.net.cut(*NODES, refuse=True)
        threading.Timer(CUT_S, self.net.resume, NODES).start()

    def _disk(self) -> None:
        self._fill(full=True)

    def _worker(self) -> int:
        return self.pids[f"p0.s{DATACENTERS.index(self.victim)}"]

    def _fill(self, *, full: bool) -> None:
        folder = self.base / self.victim
        ballast = folder / "ballast"
        if os.geteuid() != 0:
            (folder / "own").chmod(0o500 if full else 0o700)
        elif not full:
            ballast.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError), ballast.open("wb") as file:
                while True:
                    file.write(bytes(1 << 14))
                    file.flush()


def child(event: str, seed: int, base: Path) -> int:
    """Both datacenters' launchers, and what strikes them."""
    job = write_job(base / "plan", *DATACENTERS)
    with ProxyNet({NODES: PathSpec(latency_s=0.002, window_bytes=None)}) as net:
        striker = Striker(event, seed, base, net)

        def route(src: str, dst: str, address: tuple[str, int]) -> tuple[str, int]:
            return net.listen(src, dst, address)

        terms = Terms(NUM_STEPS, save_every=SAVE_EVERY, grace_s=10, restarts=QUICK)
        run = run_wide(
            job,
            folders_of(base),
            terms,
            on_start=lambda run, pids: striker.pids.update(pids),
            on_step=striker.step,
            route=route,
        )
    print(json.dumps({"starts": run.starts, "codes": run.codes, "said": run.said, "errors": str(run.errors)}))
    return 0 if set(run.codes.values()) == {0} and len(run.codes) == len(DATACENTERS) else 1


# ---- a run from outside ----------------------------------------------------------------------------------------------
def run_case(event: str, seed: int, base: Path) -> dict[str, Any]:
    """To the end, over as many lives as it takes; what it said last, and the hashes of its weights."""
    base.mkdir(parents=True)
    began = time.monotonic()
    with _small_disk(event, seed, base):
        crashed = _launch(event, seed, base, crash=event == "crash")
        told = _launch("none", seed, base) if event == "crash" else crashed
        weights = hashes(folders_of(base), NUM_STEPS)
    return {**told, "weights": weights, "seconds": round(time.monotonic() - began, 1)}


def _launch(event: str, seed: int, base: Path, *, crash: bool = False) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--child", event, str(seed), str(base)]
    draw = random.Random(f"crash {seed}")
    at_step, delay_s = SAVE_EVERY * draw.randrange(1, NUM_STEPS // SAVE_EVERY - 1), draw.uniform(0, 0.03)
    last: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        guard = threading.Timer(LIMIT_S, process.kill)
        guard.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = json.loads(line)
                if crash and last.get("step") == at_step:
                    time.sleep(delay_s)
                    process.kill()  # its workers go with it
            process.wait(LIMIT_S)
        finally:
            guard.cancel()
            process.kill()
    if process.returncode != (-signal.SIGKILL if crash else 0):
        raise RuntimeError(f"{event} {seed}: the launchers ended with {process.returncode}: {last}")
    return last


@contextlib.contextmanager
def _small_disk(event: str, seed: int, base: Path) -> Iterator[None]:
    """A tmpfs where the victim keeps its checkpoints, if we may."""
    if event != "disk" or os.geteuid() != 0:
        yield
        return
    folder = folders_of(base)[Striker(event, seed, base, None).victim]  # type: ignore[arg-type]
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=EVENTS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child[0], int(args.child[1]), Path(args.child[2]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # disks are unmounted on the way out
    lines, same, restarts = Lines(), dict.fromkeys(EVENTS, 0), dict.fromkeys(EVENTS, 0)
    counts = dict.fromkeys(EVENTS, 0)
    with tempfile.TemporaryDirectory(prefix="atlas-faults-") as folder:
        wanted = run_case("none", 0, Path(folder) / "undisturbed")["weights"]
        for number in range(args.runs):
            event = args.only or EVENTS[number % len(EVENTS)]
            found = run_case(event, args.seed * 1000 + number, Path(folder) / f"run-{number}")
            is_same = found["weights"] == wanted
            counts[event] += 1
            same[event] += is_same
            restarts[event] += found["starts"] - 1
            row = {"run": number, "event": event, "same": is_same, "starts": found["starts"], "s": found["seconds"]}
            print(json.dumps(row), flush=True)
    for event in EVENTS:
        if counts[event]:
            ok = same[event] == counts[event]
            lines.add(f"{event}: same weights", same[event], "runs", f"= {counts[event]}", ok, restarts=restarts[event])
    total = sum(same.values())
    lines.add("all: same weights", total, "runs", f"= {args.runs}", total == args.runs)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
