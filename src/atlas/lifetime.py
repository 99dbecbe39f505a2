"""A process ends with the process that started it, however that one ended (SIGKILL included). Two mechanisms: a fork
asks the kernel to kill it with its parent (`forked`); a process started by a command (`start_module`) watches a pipe or
socket of its starter and ends at its EOF.

`Closing` is the base of objects that are closed at the end of a `with` block. Uses only processes and descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>."""


def end_with_parent(parent: int) -> None:
    """In a fork: from now on the kernel sends it SIGKILL when the parent's forking thread ends.

    `parent`: the parent's id, taken before the fork; if the parent has ended since, the fork ends too. Only for forks
    of a main thread: other threads may end before their process does. Linux only; elsewhere the EOF of stdin must do.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def forked(run: Callable[[], int | None]) -> int:
    """The id of a fork that runs this, and ends with its result as exit code, or with its parent. It prints what it
    raises. It does not unwind its interpreter: threads of libraries may run in it."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        end_with_parent(parent)
        code = run() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def start_module(module: str, *words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """`python -m module words...` with this process's copy of Atlas. Ctrl-C is for this process alone."""
    source = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **(env or {})}
    return subprocess.Popen([sys.executable, "-m", module, *words], env=environment, start_new_session=True, **options)


def end_process(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """Waits for a process that has seen the end of its starter, and kills it if it takes longer."""
    try:
        process.wait(timeout_s)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def describe_exit(code: int) -> str:
    """An exit code in words; negative: the number of a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended early with exit code {code}"


class Closing:
    """`with` gives the object itself, and calls its `close` at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class Repeating(Closing):
    """Calls `do` every `every_s` seconds, on a thread of its own, until it is closed."""

    def __init__(self, name: str, every_s: float, do: Callable[[], None]) -> None:
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(every_s, do), daemon=True, name=name)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self, every_s: float, do: Callable[[], None]) -> None:
        while not self._closing.wait(every_s):
            do()


class Lifeline:
    """Ends this process at the EOF of a descriptor, without reading from it.

    Call `stop` before the process forks: this is a thread, and something else must watch for the EOF from then on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._stopped, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="lifeline")
        self._thread.start()

    def stop(self) -> None:
        os.close(self._stop)
        self._thread.join()
        os.close(self._stopped)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else select.POLLHUP)
        poll.register(self._stopped, select.POLLHUP)
        if all(found != self._stopped for found, _ in poll.poll()):
            os._exit(1)
