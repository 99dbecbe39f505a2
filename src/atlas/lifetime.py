"""A process ends with the process that started it, however that one ended (SIGKILL included). Two mechanisms: a fork
asks the kernel to be killed with its parent; a process that was started by command watches a pipe or socket that its
starter holds, and ends at its EOF.

Knows processes and descriptors. Does not know what they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """In a fork: from now on it gets SIGKILL when the parent's forking thread ends.

    `parent`: its id, taken before the fork; where it has ended meanwhile, so does the fork. Only for forks of a main
    thread: other threads may end before their process does. Only Linux has this; elsewhere the EOF of stdin must do.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Lifeline:
    """Ends this process at the EOF of a descriptor; reads nothing from it. `stop` before the process forks: it is a
    thread, and somebody else must notice the EOF from then on."""

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
