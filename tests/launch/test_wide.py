"""A run over several datacenters, each with its own folder: what strikes it, and that it ends as if nothing had."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from wide_runs import QUICK, Run, free_port, hashes, job_text, run_wide, write_job

from atlas.errors import AtlasError
from atlas.launch import lead
from atlas.launch.conductor import Terms
from atlas.runtime.checkpoint import LocalStore, complete_ids
from atlas.spec import Job

NUM_STEPS = 8
TERMS = Terms(NUM_STEPS, save_every=2, grace_s=1.5, patience_s=10, restarts=QUICK)
TWO, THREE = ("east", "west"), ("east", "west", "south")


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return write_job(tmp_path_factory.mktemp("plan"), *TWO)


@pytest.fixture(scope="module")
def undisturbed(small: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, str]]:
    folders = {dc: tmp_path_factory.mktemp(dc) for dc in TWO}
    run = run_wide(small, folders, TERMS)
    assert run.codes == dict.fromkeys(TWO, 0)
    assert not run.errors
    return run, hashes(folders, NUM_STEPS)


class Strike:
    """Calls `act` with the process ids once, when a step is done."""

    def __init__(self, at_step: int, act: Callable[[dict[str, int]], None]) -> None:
        self.at_step, self.act = at_step, act
        self.pids: dict[str, int] = {}
        self.all_pids: set[int] = set()
        self.done = False

    def start(self, run: Run, pids: Mapping[str, int]) -> None:
        self.pids = dict(pids)
        self.all_pids |= set(pids.values())

    def step(self, run: Run, step: int) -> None:
        if step >= self.at_step and not self.done:
            self.done = True
            self.act(self.pids)


def test_saves_are_copied_to_the_next_datacenter(undisturbed: tuple[Run, dict[str, str]], small: Job) -> None:
    run, weights = undisturbed
    assert run.starts == 1
    assert sorted(run.losses) == list(range(1, NUM_STEPS + 1))
    assert run.losses[NUM_STEPS] < run.losses[1]
    assert len(weights) == 2 * (small.model.layers + 2)


def test_a_killed_worker_is_started_again_with_all_others_and_nothing_is_lost(
    undisturbed: tuple[Run, dict[str, str]], small: Job, tmp_path: Path
) -> None:
    strike = Strike(5, lambda pids: os.kill(pids["p0.s1"], signal.SIGKILL))
    folders = {dc: tmp_path / dc for dc in TWO}
    run = run_wide(small, folders, TERMS, on_start=strike.start, on_step=strike.step)
    assert run.codes == dict.fromkeys(TWO, 0)
    assert run.starts == 2
    assert run.said[0] == "worker p0.s1 in west was killed by SIGKILL. Restart 1 of 3 in a row, in 0.1 s"
    assert run.losses == undisturbed[0].losses
    assert hashes(folders, NUM_STEPS) == undisturbed[1]
    assert not any(map(is_alive, strike.all_pids))
    for dc, other in (TWO, TWO[::-1]):
        assert complete_ids([LocalStore(tmp_path / dc / "own"), LocalStore(tmp_path / dc / f"of-{other}")])


def test_a_frozen_worker_is_named_and_waited_for(
    undisturbed: tuple[Run, dict[str, str]], small: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "STUCK_S", 1.0)

    def freeze(pids: dict[str, int]) -> None:
        os.kill(pids["p0.s1"], signal.SIGSTOP)
        threading.Timer(4.0, os.kill, (pids["p0.s1"], signal.SIGCONT)).start()

    strike = Strike(3, freeze)
    folders = {dc: tmp_path / dc for dc in TWO}
    run = run_wide(small, folders, TERMS, on_start=strike.start, on_step=strike.step)
    assert run.starts == 1
    named = [line for line in run.said if "worker p0.s1 in west does not answer" in line]
    assert named, run.said
    assert "on p0.s0 (east) waits for" in named[0]
    assert hashes(folders, NUM_STEPS) == undisturbed[1]


def test_a_save_that_cannot_be_written_is_told_and_training_goes_on(
    undisturbed: tuple[Run, dict[str, str]], small: Job, tmp_path: Path
) -> None:
    folders = {dc: tmp_path / dc for dc in TWO}
    (tmp_path / "west" / "own").mkdir(parents=True)
    (tmp_path / "west" / "own" / "step-00000004-a0").write_text("in the way")
    run = run_wide(small, folders, TERMS)
    assert run.starts == 1
    told = [line for line in run.said if "checkpoint of step 4 (attempt 0) not written by p0.s1" in line]
    assert told, run.said
    assert "Training goes on" in told[0]
    assert hashes(folders, NUM_STEPS) == undisturbed[1]
    assert [id.step for id in complete_ids([LocalStore(tmp_path / dc / "own") for dc in TWO])] == [2, 6, 8]


# ---- launchers as processes ----------------------------------------------------------------------------------------
class Launcher:
    """`atlas train --dc` as a process of its own."""

    def __init__(self, name: str, folder: Path, port: int, *flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / "log").open("w+")
        command = [sys.executable, "-m", "atlas", "train", str(folder / "job.yaml"), "--dc", name, "--no-bar"]
        command += ["--device", "cpu", "--data", "shipped", "--learning-rate", "0.003", "--save-every", "2"]
        command += ["--rendezvous", f"127.0.0.1:{port}", "--checkpoints", str(folder / "saves"), *flags]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=env, cwd=folder)

    @property
    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def wait_for(self, words: str, timeout_s: float = 35) -> None:
        deadline = time.monotonic() + timeout_s
        while words not in self.said:
            assert time.monotonic() < deadline, self.said
            assert self.process.poll() is None or words in self.said, self.said
            time.sleep(0.05)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    running: list[Launcher] = []

    def launch(name: str, port: int, *flags: str, job: str = "") -> Launcher:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "job.yaml").write_text(job or job_text(*THREE))
        running.append(Launcher(name, tmp_path / name, port, *flags))
        return running[-1]

    yield launch
    for launcher in running:
        launcher.process.kill()
        launcher.process.wait()
        launcher.log.close()


def steps_in(log: Path) -> dict[int, float]:
    import json

    return {line["step"]: line["loss"] for line in map(json.loads, log.read_text().splitlines())}


def test_a_lost_datacenter_is_left_behind_and_its_shards_come_from_the_copy(
    launched: Callable[..., Launcher], tmp_path: Path
) -> None:
    job = write_job(tmp_path / "plan", *THREE)
    alone = run_wide(job, {dc: tmp_path / "whole" / dc for dc in THREE}, Terms(12, save_every=2, restarts=QUICK))
    port, log = free_port(), tmp_path / "steps.jsonl"
    flags = ["--steps", "12", "--grace", "1.5", "--auto-replan"]
    east = launched("east", port, *flags, "--log", str(log))
    others = {dc: launched(dc, port, *flags) for dc in THREE[1:]}
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("east/saves/of-south/step-00000002-a0/*.part.json")):
        assert time.monotonic() < deadline, east.said
        time.sleep(0.02)
    others["south"].process.kill()
    others["south"].process.wait()
    shutil.rmtree(tmp_path / "south")
    assert east.process.wait(30) == 0, east.said
    assert others["west"].process.wait(10) == 0
    assert "datacenter south is lost" in east.said
    assert "goes on from the checkpoint of step" in east.said
    found = steps_in(log)
    assert sorted(found) == list(range(1, 13))
    for step, loss in alone.losses.items():
        assert abs(found[step] - loss) <= 1e-5 * loss, (step, found[step], loss)


def test_ctrl_c_in_any_datacenter_saves_and_leaves_nothing_running(
    launched: Callable[..., Launcher], tmp_path: Path
) -> None:
    port, job = free_port(), job_text(*TWO, num_microbatches=16)
    launchers = [launched(dc, port, "--steps", "100000", job=job) for dc in TWO]
    launchers[0].wait_for("step ")
    before = children_of(launchers)
    assert len(before) >= 2
    launchers[1].process.send_signal(signal.SIGINT)
    assert [launcher.process.wait(15) for launcher in launchers] == [130, 130], launchers[0].said
    assert "and saved: the same command goes on from there" in launchers[1].said
    assert "Traceback" not in launchers[0].said + launchers[1].said
    assert not any(map(is_alive, before))
    assert complete_ids([LocalStore(tmp_path / dc / "saves" / "own") for dc in TWO])


def children_of(launchers: list[Launcher]) -> list[int]:
    parents, found = {launcher.process.pid for launcher in launchers}, []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) in parents:
                found.append(int(entry.name))
    return found


def test_a_lost_datacenter_ends_the_run_where_nobody_allowed_more(small: Job, tmp_path: Path) -> None:
    folders = {dc: tmp_path / dc for dc in TWO}
    job = write_job(tmp_path, *TWO)
    port = free_port()
    (tmp_path / "west").mkdir()
    (tmp_path / "west" / "job.yaml").write_text(job_text(*TWO))
    west = Launcher("west", tmp_path / "west", port)
    strike = Strike(3, lambda pids: west.process.kill())
    terms = Terms(100_000, save_every=2, grace_s=1.0, patience_s=10, restarts=QUICK)
    try:
        run = run_wide(job, folders, terms, sites=["east"], port=port, on_start=strike.start, on_step=strike.step)
    finally:
        west.process.kill()
        west.process.wait()
        west.log.close()
    error = run.errors["east"]
    assert isinstance(error, AtlasError)
    assert "datacenter west is lost" in str(error)
    assert "--without west" in str(error)
    assert not any(map(is_alive, strike.all_pids))
