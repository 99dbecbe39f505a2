"""The parts of `make demo`; the whole demo is a slow test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

demo = pytest.importorskip("demo")


def test_one_connection_carries_one_window_per_round_trip() -> None:
    slow, fast = (demo.costs(slower=slower) for slower in (demo.ONE_SLOWER, 1.0))
    program = demo.program_of("varuna", slow)
    one = demo.windowed(demo.paths_of(program, slow, 1 << 16))
    many = demo.paths_of(program, fast, 1 << 16)
    assert one.keys() == many.keys()
    for pair, path in one.items():
        assert path.pair_bps == pytest.approx(many[pair].pair_bps, rel=1e-6)
        assert path.window_bytes * 8 / (2 * path.latency_s) == pytest.approx(path.pair_bps / demo.ONE_SLOWER, rel=1e-3)


def test_atlas_takes_turns_and_varuna_does_not() -> None:
    apart = demo.costs()
    assert demo.program_of("atlas", apart).sharing
    assert not demo.program_of("varuna", apart).sharing


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(ROOT / "examples" / "demo.py")]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def children(pid: int) -> set[int]:
    found = set[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(words[1]) == pid:
            found.add(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_all_four_trainings_of_the_demo_have_equal_losses(tmp_path: Path) -> None:
    process = start(tmp_path)
    told, _ = process.communicate(timeout=600)
    assert process.returncode == 0, told
    assert len(re.findall(r"│\s+equal │", told)) == 4, told
    assert "Traceback" not in told
    assert (tmp_path / "out/demo/prediction-over-measurement.html").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step 1/" in line:
                break
        workers = children(process.pid)
        assert len(workers) > 6
        os.kill(process.pid, signal.SIGINT)
        told = process.stdout.read()
        assert process.wait(120) == 130, told
    deadline = time.monotonic() + 60
    while not ended(workers):
        assert time.monotonic() < deadline, "workers outlive the demo"
        time.sleep(0.1)
