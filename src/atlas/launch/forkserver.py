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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from atlas.errors import WorkerError
from atlas.lifetime import Lifeline, end_process, forked, start_module

START_S = 120.0
"""Importing torch from a cold disk takes half a minute."""
END_S = 10.0
"""How long the fork server may take to exit before it is killed."""
KILLED = -signal.SIGKILL


class Child:
    """A process that the fork server started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._ended = threading.Event()

    def kill(self) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, negative for a signal's number; None if it is still running."""
        self._ended.wait(timeout_s)
        return self._code

    def end(self, code: int) -> None:
        self._code = code
        self._ended.set()


class ForkServer:
    """Starts processes that run `main` of `module`. One per launcher process: use `fork_server`."""

    def __init__(self, module: str) -> None:
        self._ours, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._running: dict[int, Child] = {}
        self._started: list[Child] = []
        """Started, and not yet returned by `start`. It may have ended by then."""
        self._replied = threading.Condition()
        self._is_gone = False
        with theirs:
            self._process = start_module(
                *("atlas.launch.forkserver", module, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        threading.Thread(target=self._read, daemon=True, name="fork server").start()

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def start(self, stdin: int, stdout: int, stderr: int) -> Child:
        """A child with these descriptors and the launcher's current folder and environment."""
        request = json.dumps({"cwd": str(Path.cwd()), "env": dict(os.environ)}).encode() + b"\n"
        with self._lock:
            with contextlib.suppress(OSError):
                sent = socket.send_fds(self._ours, [request], [stdin, stdout, stderr])
                self._ours.sendall(request[sent:])
            with self._replied:
                self._replied.wait_for(lambda: self._started or self._is_gone, START_S)
                if self._started:
                    return self._started.pop()
                code = self._process.poll()
        self._process.kill()  # a late reply must not be taken for the reply to the next request
        why = f"did not answer within {START_S:g} s" if code is None else f"ended with code {code}"
        raise WorkerError(f"no worker could be started: the process that forks workers {why}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        end_process(self._process, END_S)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._ours.makefile() as messages:
            for message in messages:
                event, pid, code = json.loads(message)
                with self._replied:
                    if event == "started":
                        self._running[pid] = Child(pid)
                        self._started.append(self._running[pid])
                        self._replied.notify_all()
                    else:
                        self._running.pop(pid).end(code)
        with self._replied:
            self._is_gone = True
            self._replied.notify_all()
            for child in self._running.values():
                child.end(KILLED)
        self._ours.close()


_servers: dict[str, ForkServer] = {}
_lock = threading.Lock()


def fork_server(module: str) -> ForkServer:
    """This process's fork server for `module`, started on first use."""
    with _lock:
        if module not in _servers or _servers[module].is_gone:
            _servers[module] = ForkServer(module)
            atexit.register(_servers[module].close)
        return _servers[module]


# ---- the fork server's own process -----------------------------------------------------------------------------------
def _serve(module: str, launcher: socket.socket) -> None:
    """Fork a child for each request and report each child that ends, until the launcher is gone.

    Schedulers (Slurm) send their signals to every process of a job. The launcher handles them; workers must go on until
    it has saved, and end with it.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    lifeline = Lifeline(launcher.fileno())  # the import takes seconds, and the launcher may die meanwhile
    main = importlib.import_module(module).main
    lifeline.stop()
    gc.freeze()  # imported objects stay: no worker's collector needs to visit them, or to copy their pages
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([launcher.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _report_ended(launcher)
        if launcher.fileno() in readable:
            request, descriptors = _read_request(launcher)
            if request is None:
                return
            inherited = (launcher.fileno(), woken, waker)
            pid = forked(partial(_run_child, main, request, descriptors, inherited))
            for descriptor in descriptors:
                os.close(descriptor)
            _report(launcher, "started", pid, 0)


def _read_request(launcher: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The launcher's request and the child's descriptors; None if the launcher has gone, also midway."""
    message, descriptors, _, _ = socket.recv_fds(launcher, 1 << 16, 3)
    while message and not message.endswith(b"\n"):  # the launcher waits for our reply: nothing else can follow
        more = launcher.recv(1 << 16)
        if not more:
            return None, descriptors
        message += more
    return json.loads(message) if message else None, descriptors


def _report_ended(launcher: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _report(launcher, "ended", ended[0], os.waitstatus_to_exitcode(ended[1]))


def _report(launcher: socket.socket, event: str, pid: int, code: int) -> None:
    launcher.sendall(json.dumps([event, pid, code]).encode() + b"\n")


def _run_child(
    main: Callable[[], int], request: dict[str, Any], descriptors: Sequence[int], inherited: Sequence[int]
) -> int:
    """In the child: take over its descriptors, folder and environment, and run `main`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for descriptor in inherited:
        os.close(descriptor)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return main()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
