"""A fork server: one process that imports what workers need once and forks each of them. Importing torch costs
a worker two seconds of CPU time; a dozen workers on a laptop would take a quarter of a minute.

Knows processes, descriptors and exit codes; not what the children do. The fork server ends with its launcher (the
socket between them closes), and the children end with the fork server (the kernel kills them): `atlas.lifetime`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import atlas
from atlas.errors import WorkerError
from atlas.lifetime import Lifeline, end_with_parent

START_S = 120.0
"""A cold disk takes half a minute over torch."""
END_S = 10.0
"""How long a fork server may take to end when it is told to, before it is killed."""
KILLED = -signal.SIGKILL


class Child:
    """A process of the fork server's, as whoever asked for it sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._ended = threading.Event()

    def kill(self) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, negative for a signal's number; None where it lives on."""
        self._ended.wait(timeout_s)
        return self._code

    def end(self, code: int) -> None:
        self._code = code
        self._ended.set()


class ForkServer:
    """Where `module`'s `main` is started from; one for a launcher's life: use `fork_server`."""

    def __init__(self, module: str) -> None:
        self._ours, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._living: dict[int, Child] = {}
        self._born: list[Child] = []
        """Started, and not yet given to who asked for it. It may have ended by then."""
        self._answered = threading.Condition()
        self._is_gone = False
        # They import the atlas we are, not another that is installed.
        source = str(Path(atlas.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "atlas.launch.forkserver", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is the launcher's to hear; it ends the rest
            )
        threading.Thread(target=self._hear, daemon=True, name="nursery").start()

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def start(self, stdin: int, stdout: int, stderr: int) -> Child:
        """A child with these descriptors, and with our folder and environment of this moment."""
        request = json.dumps({"cwd": str(Path.cwd()), "env": dict(os.environ)}).encode() + b"\n"
        with self._lock:
            with contextlib.suppress(OSError):
                sent = socket.send_fds(self._ours, [request], [stdin, stdout, stderr])
                self._ours.sendall(request[sent:])
            with self._answered:
                self._answered.wait_for(lambda: self._born or self._is_gone, START_S)
                if self._born:
                    return self._born.pop()
                how = self._how_it_ended()
        self._process.kill()  # its late answer must not be taken for that to the next request
        raise WorkerError(f"no worker could be started: the process that forks workers {how}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_S)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):  # who is in such a hurry is not told where we were
            self._process.kill()
            self._process.wait()

    def _hear(self) -> None:
        with contextlib.suppress(OSError), self._ours.makefile() as messages:
            for message in messages:
                event, pid, code = json.loads(message)
                with self._answered:
                    if event == "born":
                        self._living[pid] = Child(pid)
                        self._born.append(self._living[pid])
                        self._answered.notify_all()
                    else:
                        self._living.pop(pid).end(code)
        with self._answered:
            self._is_gone = True
            self._answered.notify_all()
            for child in self._living.values():
                child.end(KILLED)
        self._ours.close()

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        return f"did not answer within {START_S:g} s" if code is None else f"ended with code {code}"


_servers: dict[str, ForkServer] = {}
_lock = threading.Lock()


def fork_server(module: str) -> ForkServer:
    """The one of this process, started when it is first wanted."""
    with _lock:
        if module not in _servers or _servers[module].is_gone:
            _servers[module] = ForkServer(module)
            atexit.register(_servers[module].close)
        return _servers[module]


# ---- the other side --------------------------------------------------------------------------------------------------
def _tend(module: str, launcher: socket.socket) -> None:
    """Forks whom it is asked for, tells who ended, until the launcher is gone."""
    lifeline = Lifeline(launcher.fileno())  # an import takes seconds, and the launcher may die meanwhile
    main = importlib.import_module(module).main
    lifeline.stop()
    gc.freeze()  # what was imported stays: no worker's collector needs to walk it, nor to copy its pages
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([launcher.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _tell_ended(launcher)
        if launcher.fileno() in readable:
            request, descriptors = _request(launcher)
            if request is None:
                return
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become(main, request, descriptors, parent, (launcher.fileno(), woken, waker))
            for descriptor in descriptors:
                os.close(descriptor)
            _tell(launcher, "born", pid, 0)


def _request(launcher: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What the launcher asks for, and the child's descriptors; None where the launcher has gone, also midway."""
    message, descriptors, _, _ = socket.recv_fds(launcher, 1 << 16, 3)
    while message and not message.endswith(b"\n"):  # it waits for our answer: nothing else can follow
        more = launcher.recv(1 << 16)
        if not more:
            return None, descriptors
        message += more
    return json.loads(message) if message else None, descriptors


def _tell_ended(launcher: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(launcher, "ended", ended[0], os.waitstatus_to_exitcode(ended[1]))


def _tell(launcher: socket.socket, event: str, pid: int, code: int) -> None:
    launcher.sendall(json.dumps([event, pid, code]).encode() + b"\n")


def _become(
    main: Any, request: dict[str, Any], descriptors: Sequence[int], parent: int, not_mine: Sequence[int]
) -> None:
    """In the child: takes its descriptors, folder and environment, runs `main`, and never returns."""
    code = 1
    try:
        end_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for descriptor in not_mine:
            os.close(descriptor)
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
            os.close(descriptor)
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        _tend(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
