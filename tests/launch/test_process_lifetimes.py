"""Every process of a run ends with its launcher, also where the launcher is killed; nothing is left that writes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from multi_dc_runs import LIMIT_S, job_text
from process_trees import GONE_S, below, command_of, is_alive, require_gone

from atlas.launch.forkserver import Child, ForkServer

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command, which is killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        with (tmp_path / "log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *words], stdout=subprocess.PIPE, stderr=log, text=True, env=ENV, cwd=tmp_path
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until(holds: Callable[[], object], process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)


def kill_and_require_gone(launcher: subprocess.Popen[str], *kinds: str) -> None:
    """Of each of these kinds (a word of its command line) there must be a process, or the test tests nothing."""
    children = below(launcher.pid)
    commands = [command_of(pid) for pid in children]
    for kind in kinds:
        assert any(kind in command for command in commands), commands
    kill_alone(launcher, children)


def kill_alone(launcher: subprocess.Popen[str], children: list[int]) -> None:
    launcher.kill()
    launcher.wait()
    try:
        require_gone(children)
    finally:
        for pid in filter(is_alive, children):
            os.kill(pid, signal.SIGKILL)


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def num_workers(launcher: subprocess.Popen[str]) -> int:
    """And the process that forks them."""
    return sum("runtime.process" in command_of(pid) for pid in below(launcher.pid))


def test_a_killed_emulated_run_leaves_no_worker_no_rank_and_no_emulator(start: Start, tmp_path: Path) -> None:
    job = job_text("east", "west", num_microbatches=2).replace("name: small", "name: small\ntp: 2")
    (tmp_path / "job.yaml").write_text(job.replace("gpus_per_node: 1", "gpus_per_node: 2"))
    run = start("-m", "atlas", "train", "job.yaml", "--emulate", "--model", "job", "--device", "cpu", "--steps", "1000")
    until(lambda: num_workers(run) == 5, run, tmp_path)  # two workers, and the second rank of each
    until(lambda: any("emulator" in command_of(pid) for pid in below(run.pid)), run, tmp_path)
    kill_and_require_gone(run, "emulator", "runtime.process")


def test_a_killed_launcher_of_a_datacenter_leaves_no_worker_and_nothing_that_writes(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(job_text("east", pp=2))
    flags = ["--data", "shipped", "--steps", "1000000", "--save-every", "1", "--checkpoints", "saved", "--no-bar"]
    place = ["--dc", "east", "--device", "cpu", "--rendezvous", f"127.0.0.1:{free_port()}"]
    run = start("-m", "atlas", "train", "job.yaml", *place, *flags)
    until(lambda: list(tmp_path.glob("saved/own/step-00000002-*/*.part.json")), run, tmp_path)
    kill_and_require_gone(run, "runtime.process")
    written = files_in(tmp_path / "saved")
    time.sleep(0.2)
    assert files_in(tmp_path / "saved") == written, "something still writes"


def test_a_killed_service_leaves_no_dedicated_worker(start: Start, tmp_path: Path) -> None:
    kind = "prefill.dedicated_worker"
    run = start("-m", "bubbletea.cli", "serve", "--alone", "1", "--port", "0")
    until(lambda: any(kind in command_of(pid) for pid in below(run.pid)), run, tmp_path)
    kill_and_require_gone(run, kind)


# ---- the process that forks workers ----------------------------------------------------------------------------------
LAUNCH = """
import sys, time
from atlas.launch.forkserver import fork_server
made = fork_server(sys.argv[1])
print(made._process.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_a_launcher_that_dies_while_it_imports(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\nmain = lambda: 0"
    )
    launcher = start("-c", f"import sys; sys.path.insert(0, ''){LAUNCH}", "slow_import")
    assert launcher.stdout is not None
    forks = int(launcher.stdout.readline())
    until(lambda: (tmp_path / "importing").exists(), launcher, tmp_path)
    kill_alone(launcher, [forks])


def test_it_ends_where_the_launcher_dies_in_the_middle_of_a_request(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text("main = lambda: 0")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "atlas.launch.forkserver", "quick", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**ENV, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])},
        )
        theirs.close()
        ours.settimeout(LIMIT_S)
        socket.send_fds(ours, [b'{"cwd": "/", "env": {}}\n'], [0, 1, 2])
        assert b"started" in ours.recv(100)  # it has imported, and reads requests
        socket.send_fds(ours, [b'{"cwd": '], [0, 1, 2])
    try:
        process.wait(GONE_S)  # a TimeoutExpired fails the test
    finally:
        process.kill()
        process.wait()


class Late(threading.Condition):
    """Who waits for a child hears of its end before it hears of its birth."""

    def __init__(self, has_ended: threading.Event) -> None:
        super().__init__()
        self._has_ended = has_ended

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:  # type: ignore[override]
        found = super().wait_for(predicate, timeout)
        while not self._has_ended.is_set():
            self.wait(0.01)
        return found


def test_a_child_that_ends_at_once_is_handed_over_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brief.py").write_text("import os\ndef main(): os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(tmp_path)]))
    has_ended, end = threading.Event(), Child.end
    monkeypatch.setattr(Child, "end", lambda child, code: (end(child, code), has_ended.set()))
    made = ForkServer("brief")
    made._replied = Late(has_ended)
    try:
        with Path(os.devnull).open("r+b") as null:
            assert made.start(null.fileno(), null.fileno(), null.fileno()).wait(LIMIT_S) == 3
    finally:
        made.close()


def test_a_fork_whose_parent_has_died_before_it_could_ask_ends_too() -> None:
    """Between a fork and its request to be killed with its parent, the parent may die."""
    script = """
import os, time
from atlas.lifetime import end_with_parent
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.001)
    end_with_parent(parent)
    print("lives", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENV, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == ""
