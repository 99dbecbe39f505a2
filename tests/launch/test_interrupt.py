"""Ctrl-C in `atlas train`: the step under way is finished and saved, and nothing is left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas.commands.train import STOP_SIGNALS, end_on_signals
from atlas.errors import StopSignal
from atlas.launch.checkpoint_folders import find_checkpoints, first_step
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.store import LocalStore

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


@contextlib.contextmanager
def training(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run that has done its first step, and the processes below it."""
    flags = ["--set=pp=2", "--set=pipelines_per_cell=1", "--set=num_microbatches=2", "--steps", "1000"]
    words = ["train", str(TINY), "--emulate", "--checkpoints", str(folder / "saved"), "--log", str(folder / "log")]
    (folder / "logs").mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder / "logs")}
    command = [sys.executable, "-m", "atlas.cli", *words, *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as job:
        deadline = time.monotonic() + 300
        while not (folder / "log").exists() or not (folder / "log").read_text():
            assert job.poll() is None and time.monotonic() < deadline, job.stderr and job.stderr.read()  # noqa: PT018
            time.sleep(0.1)
        running = group_of(job.pid)
        assert len(running) >= 2
        yield job, running


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
class SignalledWhileDeleted:
    """A signal arrives in its destructor, where Python drops every exception."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_is_not_lost_in_a_destructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored at the end
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def delete_one() -> None:
        SignalledWhileDeleted()
        time.sleep(10)

    try:
        end_on_signals()
        with pytest.raises(StopSignal):
            delete_one()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ctrl_c_saves_and_leaves_nothing_running(tmp_path: Path) -> None:
    with training(tmp_path) as (job, running):
        job.send_signal(signal.SIGINT)
        out, errors = job.communicate(timeout=300)
    assert job.returncode == 130
    assert "Traceback" not in errors
    num_done = first_step(find_checkpoints(tmp_path / "saved", ("east", "west")))
    assert 1 <= num_done < 1000
    assert f"Stopped after step {num_done}" in out
    assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]
    assert not list((tmp_path / "logs").glob("atlas-*")), "only a launcher that was killed may leave its logs"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("later_s", [0.0, 0.03, 0.1])
def test_a_second_signal_while_it_saves_ends_it_and_damages_no_save(
    tmp_path: Path, second: signal.Signals, later_s: float
) -> None:
    with training(tmp_path) as (job, running):
        job.send_signal(signal.SIGINT)
        time.sleep(later_s)
        job.send_signal(second)
        _, errors = job.communicate(timeout=300)
    assert job.returncode in (130, 75, -second), "it may have ended before the second"
    assert "Traceback" not in errors
    deadline = time.monotonic() + 60
    while [pid for pid in running if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, "something is left running"
        time.sleep(0.05)
    saved = tmp_path / "saved"
    if (found := choose([LocalStore(path) for path in saved.iterdir()] if saved.exists() else [])) is not None:
        assert load_layers(found, found.layers).keys() == set(found.layers), "what counts as saved can be read"
