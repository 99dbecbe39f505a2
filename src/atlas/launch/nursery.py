"""A nursery: one process that imports what workers need, once, and forks each of them from there. A worker that imports
torch by itself computes for two seconds before it says its first word; a dozen on a laptop, a quarter of a minute.

Knows processes, descriptors and exit codes; not what the children do. The nursery ends with its launcher (the socket
between them closes), and the children with the nursery.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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

START_S = 120.0
"""A cold disk takes half a minute over torch."""
KILLED = -signal.SIGKILL


class Child:
    """A process of the nursery's, as whoever asked for it sees it."""

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


class Nursery:
    """Where `module`'s `main` is started from; one for a launcher's life: use `nursery`."""

    def __init__(self, module: str) -> None:
        self._ours, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._born: dict[int, Child] = {}
        self._answers: list[int] = []
        self._answered = threading.Condition()
        self._is_gone = False
        # They import the atlas we are, not another that is installed.
        source = str(Path(atlas.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "atlas.launch.nursery", module, str(theirs.fileno())],
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
                self._answered.wait_for(lambda: self._answers or self._is_gone, START_S)
                if not self._answers:
                    raise WorkerError(f"no worker could be started: their nursery {self._how_it_ended()}")
                return self._born[self._answers.pop()]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait()
        except KeyboardInterrupt:  # who is in such a hurry is not told where we were
            self._process.kill()

    def _hear(self) -> None:
        with contextlib.suppress(OSError), self._ours.makefile() as messages:
            for message in messages:
                event, pid, code = json.loads(message)
                with self._answered:
                    if event == "born":
                        self._born[pid] = Child(pid)
                        self._answers.append(pid)
                        self._answered.notify_all()
                    else:
                        self._born.pop(pid).end(code)
        with self._answered:
            self._is_gone = True
            self._answered.notify_all()
        for child in self._born.values():
            child.end(KILLED)
        self._ours.close()

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        return "says nothing" if code is None else f"ended with code {code}"


_nurseries: dict[str, Nursery] = {}
_lock = threading.Lock()


def nursery(module: str) -> Nursery:
    """The one of this process, started when it is first wanted."""
    with _lock:
        if module not in _nurseries or _nurseries[module].is_gone:
            _nurseries[module] = Nursery(module)
            atexit.register(_nurseries[module].close)
        return _nurseries[module]


# ---- the other side --------------------------------------------------------------------------------------------------
def _tend(module: str, launcher: socket.socket) -> None:
    """Forks whom it is asked for, tells who ended, until the launcher is gone."""
    main = importlib.import_module(module).main
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
            message, descriptors, _, _ = socket.recv_fds(launcher, 1 << 16, 3)
            if not message:
                return
            while not message.endswith(b"\n"):  # it waits for our answer: nothing else can follow
                message += launcher.recv(1 << 16)
            pid = os.fork()
            if pid == 0:
                launcher.close()
                _become(main, json.loads(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            _tell(launcher, "born", pid, 0)


def _tell_ended(launcher: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(launcher, "ended", ended[0], os.waitstatus_to_exitcode(ended[1]))


def _tell(launcher: socket.socket, event: str, pid: int, code: int) -> None:
    launcher.sendall(json.dumps([event, pid, code]).encode() + b"\n")


def _become(main: Any, request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """In the child: takes its place in the world, and never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        with contextlib.suppress(OSError, AttributeError):  # Linux; elsewhere the end of stdin ends it
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
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
