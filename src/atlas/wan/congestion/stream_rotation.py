"""Which streams of a channel work, and which rest.

bbr pauses for 0.2 s when its estimate of the least delay is ten seconds old, even in the middle of a burst, but not on
the first answer after a long rest. So streams work in shifts shorter than that, rest for longer, and wake with a ping.
Three shifts suffice. A stream that breaks leaves; its replacement is cold and joins at the end. Knows places in an
order, no sockets. If there are too few streams for shifts, the oldest ones work all the time.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

SHIFTS, SHIFT_S, WAKE_S = 3, 8.0, 0.8
"""Number of shifts, how long each works (bbr's ten seconds less a margin), and how early the next one is woken."""
REST_S = 40.0
"""Time between pings of a resting stream: shorter than the idle timeouts of middleboxes, which begin at a minute."""
T = TypeVar("T")


class StreamRotation(Generic[T]):
    """The first `num_workers` members of the order work."""

    def __init__(self, now: float) -> None:
        self._order: list[T] = []
        self._lock = threading.Lock()
        self._since = now
        self._waking: set[int] = set()

    def place(self, member: T) -> int:
        order = self._order
        return order.index(member) if member in order else len(order)

    def apply(self, num_workers: int) -> bool:
        """Whether there are enough streams for all shifts."""
        return SHIFTS * num_workers <= len(self._order)

    def join(self, member: T) -> None:
        with self._lock:
            self._order = [*self._order, member]

    def leave(self, member: T) -> None:
        with self._lock:
            self._order = [other for other in self._order if other is not member]

    def change(self, num_workers: int) -> None:
        """Lets the next shift take over."""
        with self._lock:
            order, end = self._order, SHIFTS * num_workers
            self._order = order[num_workers:end] + order[:num_workers] + order[end:]

    def watch(self, num_workers: int, now: float) -> bool:
        """Called a few times a second: wakes the next shift in time. True if it has taken over."""
        worked_s = now - self._since
        if worked_s < SHIFT_S - WAKE_S or not self.apply(num_workers):
            return False
        if worked_s < SHIFT_S:
            self._waking = {id(member) for member in self._order[num_workers : 2 * num_workers]}
            return False
        self._since, self._waking = now, set()
        self.change(num_workers)
        return True

    def silence_s(self, member: T, num_workers: int, heartbeat_s: float) -> float:
        """The time between its pings. Zero, once, for a stream that is being woken."""
        if id(member) in self._waking:
            self._waking = self._waking - {id(member)}
            return 0.0
        rests = self.apply(num_workers) and self.place(member) >= num_workers
        return REST_S if rests else heartbeat_s
