"""Ops that are launched ahead of the device: the host queues the next one while the device computes, and reads spans
later, in order. A device without a queue does each at once.

Knows work and spans; not what an op does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from atlas.runtime.device import Device, Running, Span

T = TypeVar("T")
MAX_QUEUED = 8
"""Ops. Enough to hide launches of milliseconds; few enough that a failed op is noticed soon."""


class _Launched(NamedTuple):
    running: Running[Any]
    then: Callable[[Span], None]


class OpQueue:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._launched: deque[_Launched] = deque()

    def launch(self, work: Callable[[], T], cost_ns: int, ready_ns: int, then: Callable[[Span], None]) -> T:
        """Queue `work`; `then` is called with its span, later, on this thread. Returns what the work returned."""
        running = self._device.begin(work, cost_ns, ready_ns)
        self._launched.append(_Launched(running, then))
        self.settle(MAX_QUEUED)
        return running.result

    def settle(self, most: int = 0) -> None:
        """Read the spans of all ops that are done; wait until at most this many are left."""
        while self._launched and (len(self._launched) > most or self._launched[0].running.done):
            running, then = self._launched.popleft()
            span = running.wait()
            self._device.ran(span)
            then(span)
