"""How much may be under way unacknowledged, so that what waits waits here, where turns are known.

Kernel buffers, middleboxes and proxies all take in more than the path carries. So the limit follows delay, as FAST
TCP's window does: after each round trip it becomes what would make the quickest chunk late by a small slack, no
more. At first, until anything is late at all, it doubles. Knows numbers only.
"""

from __future__ import annotations

import threading
from collections import deque

FIRST_BYTES, MAX_BYTES = 16 * 1024, 1 << 30
MEMORY_S = 30.0


class Flight:
    """Fed with what came back, and how long after the kernel had taken it."""

    def __init__(self, rtt_s: float) -> None:
        self.rtt_s, self.limit_bytes = rtt_s, FIRST_BYTES
        self.least_bytes = FIRST_BYTES
        """However late things are: what the path was seen to hold. Below it, lateness is not our queue, and less under
        way would only make bbr believe in less."""
        self.starting = True
        """Nothing was late yet."""
        self._lock = threading.Lock()
        self._lows: deque[tuple[float, float]] = deque()
        """The quickest of some rounds, increasing: the first is the quickest of all that count."""
        self._begin, self._quickest_s, self._was_full = 0.0, float("inf"), False

    @property
    def slack_s(self) -> float:
        """How much later than the quickest we like to be: enough to keep the path busy, too little to fill queues."""
        return 0.005 + 0.15 * self.rtt_s

    def filled(self) -> None:
        """Somebody wanted to send and was held back by the limit."""
        self._was_full = True

    def came_back(self, took_s: float, now: float) -> None:
        with self._lock:
            self._quickest_s = min(self._quickest_s, took_s)
            if now - self._begin >= max(1.1 * self.rtt_s, 0.01):
                self._end_round(now)

    def _end_round(self, now: float) -> None:
        quickest_s, was_full = self._quickest_s, self._was_full
        while self._lows and now - self._lows[0][0] > MEMORY_S:
            self._lows.popleft()
        while self._lows and self._lows[-1][1] >= quickest_s:
            self._lows.pop()
        self._lows.append((now, quickest_s))
        base_s = self._lows[0][1]
        self._begin, self._quickest_s, self._was_full = now, float("inf"), False
        if self.starting and quickest_s > base_s + self.slack_s / 2:
            self.starting = False
        change = (base_s + self.slack_s) / quickest_s
        if change > 1 and not was_full:
            return
        change = 2.0 if self.starting else max(0.5, min(1.5, change))
        self.limit_bytes = max(self.least_bytes, min(MAX_BYTES, int(self.limit_bytes * change)))
