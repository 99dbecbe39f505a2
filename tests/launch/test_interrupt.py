"""Ctrl-C in `atlas train`: the step under way is finished and saved, and nothing is left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atlas.launch.saves import find_saves

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"


def group_of(parent: int) -> list[int]:
    """The processes below one, while they live."""
    found, parents = [parent], {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    for _ in range(3):
        found += [pid for pid, above in parents.items() if above in found and pid not in found]
    return found[1:]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ctrl_c_saves_and_leaves_nothing_running(tmp_path: Path) -> None:
    flags = ["--set=pp=2", "--set=pipelines_per_cell=1", "--set=num_microbatches=2", "--steps", "1000"]
    words = ["train", str(TINY), "--emulate", "--checkpoints", str(tmp_path / "saved"), "--log", str(tmp_path / "log")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "atlas.cli", *words, *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as job:
        deadline = time.monotonic() + 60
        while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
            assert job.poll() is None and time.monotonic() < deadline, job.stderr and job.stderr.read()  # noqa: PT018
            time.sleep(0.1)
        running = group_of(job.pid)
        assert len(running) >= 2
        job.send_signal(signal.SIGINT)
        out, errors = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "Traceback" not in errors
    num_done = find_saves(tmp_path / "saved", ("east", "west")).first_step
    assert 1 <= num_done < 1000
    assert f"Stopped after step {num_done}" in out
    assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]
