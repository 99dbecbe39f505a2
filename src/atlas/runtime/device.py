"""The accelerator as an interface: run this, say when it began and ended. Here the plain CPU, and the paced device,
which does the real arithmetic of a small model and then stays busy for as long as the cost model says.

Knows clocks and work. Does not know ops, Programs or tensors; CUDA comes as a third device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Span(NamedTuple):
    """On the monotonic clock."""

    start_ns: int
    end_ns: int


class Device(Protocol):
    def run(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> tuple[T, Span]:
        """Does `work`, whose inputs were there at `ready_ns`."""
        ...


class Cpu:
    """As fast as it goes."""

    def run(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> tuple[T, Span]:
        start_ns = time.monotonic_ns()
        result = work()
        return result, Span(start_ns, time.monotonic_ns())


class Paced:
    """Busy for `cost_ns` from the moment both the device and the inputs were there.

    That moment, not the one in which Python woke up, begins the op, as work queued on a CUDA stream begins
    when the stream is free: deadlines are absolute, and the host's small delays do not add up. Work that takes
    longer than its cost does delay the device; `overrun_ns` says how much, and a run with much of it is void.
    """

    def __init__(self) -> None:
        self.free_ns = 0
        self.overrun_ns = 0

    def run(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> tuple[T, Span]:
        start_ns = max(self.free_ns, ready_ns)
        result = work()
        end_ns = start_ns + cost_ns
        late_ns = time.monotonic_ns() - end_ns
        if late_ns > 0:
            self.overrun_ns += late_ns
            end_ns += late_ns
        else:
            time.sleep(-late_ns / 1e9)
        self.free_ns = end_ns
        return result, Span(start_ns, end_ns)
