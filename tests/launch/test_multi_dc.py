"""A run over several datacenters, each with its own folder, survives failures and ends with the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from free_ports import free_port, free_ports, is_taken
from multi_dc_runs import (
    LIMIT_S,
    OPTIONS,
    Run,
    hashes,
    job_text,
    losses_alone,
    require_losses_of,
    run_datacenters,
    train_options,
    write_job,
)
from process_trees import below, command_of, is_alive, require_gone

from atlas.errors import AtlasError
from atlas.ir.timeline import Timeline
from atlas.launch import run_monitor
from atlas.launch.agent import Agent
from atlas.launch.rehearse import rehearse
from atlas.launch.report.events import StepEvent
from atlas.launch.site_network import PortRange, SiteNetwork
from atlas.runtime.checkpoint.copied_parts import read_records
from atlas.runtime.checkpoint.manifest import complete_ids
from atlas.runtime.checkpoint.store import LocalStore
from atlas.spec import Job

NUM_STEPS = 20
"""Workers do not wait for the launchers: on a busy host they are steps ahead of what a test sees."""
SETTINGS = train_options(NUM_STEPS, save_every=2, grace_s=1.5, patience_s=60)
TWO, THREE = ("east", "west"), ("east", "west", "south")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return write_job(tmp_path_factory.mktemp("plan"), *TWO)


@pytest.fixture(scope="module")
def undisturbed(small: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, str]]:
    folders = {dc: tmp_path_factory.mktemp(dc) for dc in TWO}
    run = run_datacenters(small, folders, SETTINGS)
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
    assert len(weights) > 3 * small.model.layers  # weights, and two moments of each


def test_all_workers_restart_after_one_is_killed_and_nothing_is_lost(
    undisturbed: tuple[Run, dict[str, str]], small: Job, tmp_path: Path
) -> None:
    strike = Strike(5, lambda pids: os.kill(pids["p0.s1"], signal.SIGKILL))
    folders = {dc: tmp_path / dc for dc in TWO}
    run = run_datacenters(small, folders, SETTINGS, on_start=strike.start, on_step=strike.step)
    assert run.codes == dict.fromkeys(TWO, 0)
    assert run.starts == 2
    assert run.said[0] == "worker p0.s1 in west was killed by SIGKILL. Restart 1 of 3 in a row, in 0.1 s"
    assert run.losses == undisturbed[0].losses
    assert hashes(folders, NUM_STEPS) == undisturbed[1]
    assert not any(map(is_alive, strike.all_pids))
    for dc, other in (TWO, TWO[::-1]):
        assert complete_ids([LocalStore(tmp_path / dc / "own"), LocalStore(tmp_path / dc / f"of-{other}")])


def test_a_datacenter_of_several_hosts_has_a_launcher_on_each(tmp_path: Path) -> None:
    """And west cannot be dialled from east: its hosts dial for both directions. Each host has its range of ports."""
    job = write_job(tmp_path, *TWO, pp=4)
    launchers = ("east 0/2", "east 1/2", "west 0/2", "west 1/2")
    folders = {name: tmp_path / name.replace("/", "-") for name in launchers}
    ranges = [PortRange(port, port + 1) for port in free_ports(2, len(launchers))]
    networks = {
        name: {"network": SiteNetwork(advertise="none" if name.startswith("west") else "", ports=ports)}
        for name, ports in zip(launchers, ranges, strict=True)
    }
    listening: set[int] = set()

    def look(run: Run, step: int) -> None:
        listening.update(port for ports in ranges for port in (ports.first, ports.last) if is_taken(port))

    run = run_datacenters(job, folders, replace(SETTINGS, steps=2), settings=networks, on_step=look)
    assert listening == {port for ports in ranges for port in (ports.first, ports.last)}, "a server and a worker each"
    assert run.codes == dict.fromkeys(launchers, 0), run.errors
    require_the_same(run.losses, losses_alone(job, 2))
    for number, folder in enumerate(folders.values()):
        parts = (folder / "own" / "step-00000002-a0").glob("*.part.json")
        assert [part.name for part in parts] == [f"p0.s{number}.part.json"], "each host saves the layers of its workers"


def test_a_frozen_worker_is_named_and_the_run_continues(
    undisturbed: tuple[Run, dict[str, str]], small: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_monitor, "STALL_S", 1.0)
    monkeypatch.setattr(run_monitor, "ANSWER_S", 5.0)  # for the other worker, on a busy host

    running = list[Run]()

    def named() -> list[str]:
        return [line for line in running[0].said if "worker p0.s1 in west does not answer" in line]

    def continue_when_named(pid: int) -> None:
        while not named() and is_alive(pid):
            time.sleep(0.02)
        os.kill(pid, signal.SIGCONT)

    def freeze(pids: dict[str, int]) -> None:
        os.kill(pids["p0.s1"], signal.SIGSTOP)
        threading.Thread(target=continue_when_named, args=(pids["p0.s1"],)).start()

    def start(run: Run, pids: Mapping[str, int]) -> None:
        running.append(run)
        strike.start(run, pids)

    strike = Strike(3, freeze)
    folders = {dc: tmp_path / dc for dc in TWO}
    run = run_datacenters(small, folders, replace(SETTINGS, patience_s=120), on_start=start, on_step=strike.step)
    assert run.starts == 1
    assert named(), run.said
    assert "on p0.s0 (east) waits for" in named()[0]
    assert hashes(folders, NUM_STEPS) == undisturbed[1]


def test_a_save_that_cannot_be_written_is_reported_and_training_continues(
    undisturbed: tuple[Run, dict[str, str]], small: Job, tmp_path: Path
) -> None:
    folders = {dc: tmp_path / dc for dc in TWO}
    (tmp_path / "west" / "own").mkdir(parents=True)
    (tmp_path / "west" / "own" / "step-00000016-a0").write_text("in the way")
    run = run_datacenters(small, folders, SETTINGS)
    assert run.starts == 1
    reported = [line for line in run.said if "checkpoint of step 16 (attempt 0) not written by p0.s1" in line]
    assert reported, run.said
    assert "Training continues" in reported[0]
    assert hashes(folders, NUM_STEPS) == undisturbed[1]
    assert [id.step for id in complete_ids([LocalStore(tmp_path / dc / "own") for dc in TWO])][-3:] == [14, 18, 20]


def test_an_emulated_run_restarts_too(
    undisturbed: tuple[Run, dict[str, str]], small: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    struck: list[int] = []

    def strike(event: StepEvent, timeline: Timeline) -> None:
        if event["step"] >= 5 and not struck:
            struck.append(next(pid for pid in below(os.getpid()) if "runtime.process" in command_of(pid)))
            os.kill(struck[0], signal.SIGKILL)

    options = replace(OPTIONS, steps=NUM_STEPS, checkpoints=tmp_path / "saves", save_every=2)
    result = rehearse(small, options, on_step=strike)
    assert struck
    assert "was killed by SIGKILL. Restart 1 of 5 in a row" in caplog.text
    assert result.first_step + len(result.run.losses) == NUM_STEPS
    assert hashes({dc: tmp_path / "saves" / dc for dc in TWO}, NUM_STEPS, store=".") == undisturbed[1]


# ---- launchers as processes ----------------------------------------------------------------------------------------
class Launcher:
    """`atlas train --dc` as a process of its own."""

    def __init__(self, name: str, folder: Path, port: int, *flags: str, stdin: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / "log").open("w+")
        command = [sys.executable, "-m", "atlas", "train", str(folder / "job.yaml"), "--dc", name, "--no-bar"]
        command += ["--device", "cpu", "--data", "shipped", "--learning-rate", "0.003", "--save-every", "2"]
        command += ["--rendezvous", f"127.0.0.1:{port}", "--checkpoints", str(folder / "saves"), *flags]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=self.log, stderr=subprocess.STDOUT, env=env, cwd=folder
        )

    @property
    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    running: list[Launcher] = []

    def launch(name: str, port: int, *flags: str, job: str = "", stdin: int | None = None) -> Launcher:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "job.yaml").write_text(job or job_text(*THREE, tight=True))
        running.append(Launcher(name, tmp_path / name, port, *flags, stdin=stdin))
        return running[-1]

    yield launch
    for launcher in running:
        launcher.process.kill()
        launcher.process.wait()
        launcher.log.close()


def steps_in(log: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, log.read_text().splitlines())}


def lose(launcher: Launcher, meanwhile: Callable[[], None] = lambda: time.sleep(0.02)) -> None:
    """Kill it and delete its disk, once the other datacenters have a whole checkpoint."""
    disk, deadline = Path(launcher.log.name).parent, time.monotonic() + LIMIT_S
    others = [disk.parent / dc for dc in THREE if dc != disk.name]
    while not complete_ids([LocalStore(path) for dc in others for path in dc.glob("saves/*") if path.is_dir()]):
        assert time.monotonic() < deadline, launcher.said
        meanwhile()
    kill(launcher)
    shutil.rmtree(disk)


def kill(launcher: Launcher) -> None:
    """And wait for its workers to end: until then they write."""
    running = below(launcher.process.pid)
    launcher.process.kill()
    launcher.process.wait()
    require_gone(running)


def require_the_same(found: Mapping[int, float], alone: Mapping[int, float]) -> None:
    for step, loss in found.items():
        assert abs(loss - alone[step]) <= 1e-5 * loss, (step, loss, alone[step])


def test_the_run_continues_without_a_lost_datacenter_from_copies_of_its_checkpoints(
    launched: Callable[..., Launcher], tmp_path: Path
) -> None:
    job, num_steps = write_job(tmp_path / "plan", *THREE, tight=True), 40
    alone = losses_alone(job, num_steps)
    port, folders = free_port(), {dc: tmp_path / dc / "saves" for dc in TWO}
    south = launched("south", port, "--steps", str(num_steps))

    def strike(pids: dict[str, int]) -> None:
        def write() -> None:
            """This worker's part of a checkpoint may be missing."""
            os.kill(pids["p0.s1"], signal.SIGCONT)
            time.sleep(0.02)
            os.kill(pids["p0.s1"], signal.SIGSTOP)
            time.sleep(1)

        os.kill(pids["p0.s1"], signal.SIGSTOP)  # or the run could end before the copy is made
        lose(south, write)
        os.kill(pids["p0.s1"], signal.SIGCONT)

    struck = Strike(2, strike)
    options = train_options(num_steps, save_every=2, grace_s=1.5, patience_s=120)
    run = run_datacenters(
        job, folders, options, port=port, auto_replan=True, on_start=struck.start, on_step=struck.step
    )
    assert run.codes == dict.fromkeys(TWO, 0), (run.errors, run.said)
    said = "\n".join(run.said)
    assert "datacenter south is lost. On the remaining datacenters: 2 stages (1 in east, 1 in west)" in said
    assert "resumed from the checkpoint of step" in said
    require_losses_of(run, num_steps)
    require_the_same(run.losses, alone)
    targets = {record.target for record in read_records(LocalStore(tmp_path / "west" / "saves" / "own"))}
    assert targets == {"east/site0:of-west"}, "saves that wait for a copy to south would never be deleted"


@pytest.mark.slow
def test_the_others_continue_with_without_when_the_first_datacenter_is_lost(
    launched: Callable[..., Launcher], tmp_path: Path
) -> None:
    job = write_job(tmp_path / "plan", *THREE, tight=True)
    port, log = free_port(), tmp_path / "steps.jsonl"
    flags = ["--steps", "100000", "--grace", "1.5"]
    first = {dc: launched(dc, port, *flags) for dc in THREE}
    lose(first["east"])
    for dc in THREE[1:]:
        assert first[dc].process.wait(LIMIT_S) == 75, first[dc].said
        assert "--without" in first[dc].said
    saved = complete_ids([LocalStore(path) for dc in THREE[1:] for path in (tmp_path / dc / "saves").iterdir()])
    last = saved[-1].step + 4
    elsewhere, flags = free_port(), ["--steps", str(last), "--without", "east"]
    again = {dc: launched(dc, elsewhere, *flags, *(["--log", str(log)] if dc == "west" else [])) for dc in THREE[1:]}
    for dc in THREE[1:]:
        assert again[dc].process.wait(LIMIT_S) == 0, again[dc].said
    found = steps_in(log)
    assert sorted(found) == list(range(saved[-1].step + 1, last + 1)), "from the newest that is complete"
    require_the_same(found, losses_alone(job, last))


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["y", "no"])
def test_a_terminal_asks_before_continuing_without_a_datacenter(
    launched: Callable[..., Launcher], tmp_path: Path, answer: str
) -> None:
    ours, theirs = os.openpty()
    port, flags = free_port(), ["--steps", "12", "--grace", "1.5"]
    east = launched("east", port, *flags, stdin=theirs)
    others = {dc: launched(dc, port, *flags) for dc in THREE[1:]}
    lose(others["south"])
    deadline = time.monotonic() + LIMIT_S
    while "Continue with that? [y/N]" not in east.said:
        assert time.monotonic() < deadline, east.said
        time.sleep(0.05)
    os.write(ours, f"{answer}\n".encode())
    assert east.process.wait(LIMIT_S) == (0 if answer == "y" else 2), east.said
    assert others["west"].process.wait(LIMIT_S) == (0 if answer == "y" else 2), others["west"].said
    assert ("step 12 is done" if answer == "y" else "--without south") in east.said
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_any_datacenter_saves_and_leaves_nothing_running(
    launched: Callable[..., Launcher], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A scheduler's signal reaches workers too (Slurm), and they must not end before they are saved."""
    port, job = free_port(), job_text(*TWO, num_microbatches=16)
    (tmp_path / "steps").mkdir()
    log = tmp_path / "steps"
    launchers = [launched(dc, port, "--steps", "100000", "--log", str(log / dc), job=job) for dc in TWO]
    deadline = time.monotonic() + LIMIT_S
    while not ((log / "east").exists() and (log / "east").stat().st_size):
        assert time.monotonic() < deadline, launchers[0].said
        time.sleep(0.05)
    before = below(*(launcher.process.pid for launcher in launchers))
    assert len(before) >= 2
    for pid in below(launchers[1].process.pid) if code == 75 else ():
        os.kill(pid, number)
    launchers[1].process.send_signal(number)
    assert [launcher.process.wait(LIMIT_S) for launcher in launchers] == [code, code], launchers[0].said
    assert "and saved: the same command resumes from there" in launchers[1].said
    assert "Traceback" not in launchers[0].said + launchers[1].said
    assert not any(map(is_alive, before))
    assert complete_ids([LocalStore(tmp_path / dc / "saves" / "own") for dc in TWO])


@pytest.mark.slow  # eight launchers, each of which imports torch: 15 s
def test_torchrun_starts_one_launcher_per_worker(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(job_text("east", pp=2))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "atlas"]
    command += ["train", "job.yaml", "--dc", "east", "--device", "cpu", "--data", "shipped", "--steps", "2"]
    command += ["--rendezvous", f"127.0.0.1:{free_port()}", "--checkpoints", "saves", "--no-bar"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 2 is done") == 2
    assert len(list((tmp_path / "saves" / "own" / "step-00000002-a0").glob("p0.s*.part.json"))) == 2


def test_a_lost_datacenter_ends_the_run_without_permission_to_replan(small: Job, tmp_path: Path) -> None:
    folders = {dc: tmp_path / dc for dc in TWO}
    job = write_job(tmp_path, *TWO)
    port = free_port()
    (tmp_path / "west").mkdir()
    (tmp_path / "west" / "job.yaml").write_text(job_text(*TWO))
    west = Launcher("west", tmp_path / "west", port, "--steps", "100000")
    strike = Strike(3, lambda pids: west.process.kill())
    options = train_options(100_000, save_every=2, grace_s=1.0, patience_s=60)
    try:
        run = run_datacenters(
            job, folders, options, launchers=["east"], port=port, on_start=strike.start, on_step=strike.step
        )
    finally:
        west.process.kill()
        west.process.wait()
        west.log.close()
    error = run.errors["east"]
    assert isinstance(error, AtlasError)
    assert "datacenter west is lost" in str(error)
    assert "--without west" in str(error)
    require_gone(strike.all_pids)


def test_a_bug_in_the_coordinators_own_agent_ends_the_run_with_its_error(
    small: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on a thread there: the run must neither hang nor treat that datacenter as lost."""

    def broken(agent: Agent, attempt: object, message: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Agent, "_begin", broken)
    run = run_datacenters(write_job(tmp_path, "east"), {"east": tmp_path / "east"}, SETTINGS)
    assert isinstance(run.errors["east"], RuntimeError)
    assert run.starts == 0
