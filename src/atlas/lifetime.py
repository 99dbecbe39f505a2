"""A process ends with the process that started it, however that one ended (SIGKILL included). Two mechanisms: a fork
asks the kernel to kill it with its parent; a process started by a command watches a pipe or socket of its starter and
ends at its EOF.

`Closing` is the base of objects that are closed at the end of a `with` block. Uses only processes and descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from typing import Self

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
