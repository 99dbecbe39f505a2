"""What goes wrong is told within seconds, by name, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from atlas.cost.table import kind_costs, uniform_costs
from atlas.errors import ProgramError, WorkerError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.launch.emulate import Setup, emulate
from atlas.launch.paths import require_emulable
from atlas.launch.smoke import smoke_program
from atlas.runtime.assignment import stand_in
from atlas.schedules.classic import one_f_one_b

TRAINING = stand_in(width=16, length=8, microbatch=2)


def is_alive(pid: int) -> bool:
    """A zombie, dead but not yet reaped by whoever adopted it, counts as gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (signal.SIGKILL, r"worker p0\.s1 was killed by SIGKILL"),
        (signal.SIGSTOP, r"waits for .* of p0\.s1: nothing came within 2 s"),
    ],
    ids=["killed", "frozen"],
)
def test_a_lost_worker_is_reported_and_nothing_is_left(how: signal.Signals, says: str) -> None:
    program = with_optimizer(one_f_one_b(Layout(1, 2, 4, ("us-east", "us-west"))))
    per_kind_ns = kind_costs(forward_ns=30_000_000, backward_ns=60_000_000)
    costs = uniform_costs(1, 2, per_kind_ns, wan_boundaries=(0,), wan_ns=10_000_000, wan_latency_ns=10_000_000)
    pids: dict[str, int] = {}
    struck = [0.0]

    def strike() -> None:
        struck[0] = time.monotonic()
        os.kill(pids["p0.s1"], how)

    def on_start(running: Mapping[str, int]) -> None:
        pids.update(running)
        threading.Timer(0.8, strike).start()

    with pytest.raises(WorkerError, match=says):
        emulate(program, costs, TRAINING, Setup(10, patience_s=2.0), on_start=on_start)
    assert time.monotonic() - struck[0] < 6
    assert len(pids) == 2
    assert not any(map(is_alive, pids.values()))


def offspring(pid: int) -> list[int]:
    """Its children, and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = children.get(pid, [])
    return found + [grandchild for child in found for grandchild in children.get(child, [])]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "launcher killed"])
def test_workers_do_not_outlive_their_launcher(how: signal.Signals, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "atlas.launch.smoke"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, text=True) as launcher:
        deadline = time.monotonic() + 30
        while len(workers := offspring(launcher.pid)) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(workers) >= 5, "the nursery and four workers"
        time.sleep(0.3)
        launcher.send_signal(how)
        _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in errors
    deadline = time.monotonic() + 15
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
    if how == signal.SIGINT:
        assert not list(tmp_path.glob("atlas-*")), "only a launcher that was killed outright may leave its logs"


def test_what_cannot_be_emulated_is_said_before_anything_starts() -> None:
    program, costs = smoke_program()
    shared = uniform_costs(2, 2, costs.compute_ns[0, 0], wan_boundaries=(0,), wan_ns=1, sharing=True)
    with pytest.raises(ProgramError, match="do not agree on whether pipelines take turns"):
        require_emulable(program, shared)
    overlapping = uniform_costs(2, 2, costs.compute_ns[0, 0], wan_boundaries=(0,), wan_ns=1, servers=4)
    with pytest.raises(ProgramError, match="serves several transfers at once"):
        require_emulable(program, overlapping)
