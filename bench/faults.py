"""Final weights of runs across datacenters with one random fault each: equal to the bit to the undisturbed run.

    python bench/faults.py [--runs 40] [--seed 1] [--only EVENT]
    python bench/faults.py --quick      # one run of each event

    kill     kill -9 of a worker
    cut      every stream between two datacenters cut, and none accepted for 3 s
    freeze   a worker stopped for 5 s
    disk     one datacenter's checkpoint disk full for some steps (a small tmpfs; without root: an unwritable folder)
    crash    everything killed while a checkpoint is written, and started again

Launchers, rendezvous, workers, checkpoint servers and the transport are the real ones, on loopback. The path between
the two datacenters goes through the emulator's proxy, so that it can be cut. A run that ended before its event is void;
one that did not end is a failure. Each line is JSON; a table follows. tests/launch has four of these runs.
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
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from lab.lines import Lines
from multi_dc_runs import Run, hashes, run_datacenters, train_options, write_job

from atlas.errors import AtlasError
from atlas.lifetime import Lifeline
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.proxy_net import ProxyNet

EVENTS = ("kill", "cut", "freeze", "disk", "crash")
DATACENTERS = ("east", "west")
NODES = ("east/p0.s0", "west/p0.s1")
NUM_STEPS, SAVE_EVERY = 12, 2
CUT_S, FREEZE_S = 3.0, 5.0
DISK_BYTES = 16 << 20
LIMIT_S = 120.0


def folders_of(base: Path) -> dict[str, Path]:
    return {dc: base / dc for dc in DATACENTERS}


# ---- one start of all launchers, in a separate process -------------------------------------------------------------
class Striker:
    """Causes one fault, after a randomly chosen step."""

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
    """`launch_here` in a process of its own, which ends with the one that started it."""
    Lifeline(sys.stdin.fileno())
    result = launch_here(event, seed, base)
    print(json.dumps(result))
    return 0 if set(result["codes"].values()) == {0} and len(result["codes"]) == len(DATACENTERS) else 1


def launch_here(event: str, seed: int, base: Path) -> dict[str, Any]:
    """The launchers of both datacenters and the fault, to the end of the run."""
    job = write_job(base / "plan", *DATACENTERS)
    with ProxyNet({NODES: PathSpec(latency_s=0.002, window_bytes=None)}) as net:
        striker = Striker(event, seed, base, net)

        def route(src: str, dst: str, address: tuple[str, int]) -> tuple[str, int]:
            return net.listen(src, dst, address)

        options = train_options(NUM_STEPS, save_every=SAVE_EVERY, grace_s=10)
        run = run_datacenters(
            job,
            folders_of(base),
            options,
            on_start=lambda run, pids: striker.pids.update(pids),
            on_step=striker.step,
            route=route,
        )
    result = {"starts": run.starts, "struck": striker.struck, "codes": run.codes, "said": run.said}
    return {**result, "errors": str(run.errors)}


# ---- a run from outside ----------------------------------------------------------------------------------------------
def run_case(event: str, seed: int, base: Path, *, apart: bool = True) -> dict[str, Any]:
    """Run to the end, with as many restarts as needed; the last reply and the hashes of the weights. `apart`: in a
    process of its own, as every run that crashes."""
    base.mkdir(parents=True)
    began = time.monotonic()
    with _small_disk(event, seed, base):
        if event == "crash":
            _launch(event, seed, base, crash=True)
        launch = _launch if apart else launch_here
        result = launch("none" if event == "crash" else event, seed, base)
        weights = hashes(folders_of(base), NUM_STEPS)
    return {**result, "weights": weights, "seconds": round(time.monotonic() - began, 1)}


def _launch(event: str, seed: int, base: Path, *, crash: bool = False) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--child", event, str(seed), str(base)]
    draw = random.Random(f"crash {seed}")
    at_step, delay_s = SAVE_EVERY * draw.randrange(1, NUM_STEPS // SAVE_EVERY - 1), draw.uniform(0, 0.03)
    last: dict[str, Any] = {}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        guard = threading.Timer(LIMIT_S, process.kill)
        guard.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = json.loads(line)
                if crash and last.get("step") == at_step:
                    time.sleep(delay_s)
                    process.kill()  # its workers end with it
            process.wait(LIMIT_S)
        finally:
            guard.cancel()
            process.kill()
    if process.returncode != (-signal.SIGKILL if crash else 0):
        raise RuntimeError(f"{event} {seed}: the launchers ended with {process.returncode}: {last}")
    return last


@contextlib.contextmanager
def _small_disk(event: str, seed: int, base: Path) -> Iterator[None]:
    """A tmpfs for the checkpoints of the affected datacenter, if root."""
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
    parser.add_argument("--runs", type=int, help="default: 40")
    parser.add_argument("--quick", action="store_true", help=f"{len(EVENTS)} runs, one of each event: two minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=EVENTS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child[0], int(args.child[1]), Path(args.child[2]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # disks are unmounted on the way out
    num_runs = args.runs or (len(EVENTS) if args.quick else 40)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="atlas-faults-") as folder:
        wanted = run_case("none", 0, Path(folder) / "undisturbed")["weights"]
        for number in range(num_runs):
            event = args.only or EVENTS[number % len(EVENTS)]
            rows.append(judged(event, args.seed * 1000 + number, Path(folder) / f"run-{number}", wanted))
            print(json.dumps({"run": number, **rows[-1]}), flush=True)
    return print_report(rows)


def judged(event: str, seed: int, base: Path, wanted: dict[str, str]) -> dict[str, Any]:
    """Whether a disturbed run has the weights of the undisturbed one; None if the fault came too late."""
    try:
        found = run_case(event, seed, base)
    except (RuntimeError, AtlasError) as error:
        return {"event": event, "same": False, "starts": 1, "error": str(error)}
    same = found["weights"] == wanted if found["struck"] or event == "crash" else None
    return {"event": event, "same": same, "starts": found["starts"], "s": found["seconds"]}


def print_report(rows: list[dict[str, Any]]) -> int:
    lines = Lines()
    for event in (*EVENTS, "all"):
        mine = [row for row in rows if event in (row["event"], "all")]
        counted = [row for row in mine if row["same"] is not None]
        if not counted and mine:
            lines.skip(f"{event}: same weights", "void: every run ended before its event")
        elif counted:
            same, restarts = sum(row["same"] for row in counted), sum(row["starts"] - 1 for row in counted)
            more = {"restarts": restarts, "void": len(mine) - len(counted)}
            lines.add(f"{event}: same weights", same, "runs", f"= {len(counted)}", same == len(counted), **more)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
