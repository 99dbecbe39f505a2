"""How much may be under way unacknowledged, so that what waits waits here, where turns are known.

Kernel buffers, middleboxes and proxies all take in more than the path carries. So the limit follows delay, as FAST
TCP's window does: after each round trip it becomes what would make the quickest chunk late by a small slack, no
more. Knows numbers only.
"""

from __future__ import annotations

import threading
from collections import deque

FIRST_BYTES, MAX_BYTES = 128 * 1024, 1 << 30
MEMORY_S = 30.0


class Flight:
    """Fed with what came back, and how long after the kernel had taken it."""

    def __init__(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self.least_bytes, self.most_bytes = 0, MAX_BYTES
        self._limit_bytes = FIRST_BYTES
        self._lock = threading.Lock()
        self._lows: deque[tuple[float, float]] = deque()
        """The quickest of some rounds, increasing: the first is the quickest of all that count."""
        self._begin, self._quickest_s, self._was_full = 0.0, float("inf"), False

    @property
    def limit_bytes(self) -> int:
        return max(self.least_bytes, min(self.most_bytes, self._limit_bytes))

    @property
    def slack_s(self) -> float:
        """How much later than the quickest we like to be: enough to keep the path busy, too little to fill queues."""
        return 0.005 + 0.15 * self.rtt_s

    def learn(self, rate_bps: float, chunk_bytes: int = 0) -> None:
        """What the path was seen to deliver bounds the limit on both sides. Below what it holds, lateness is not our
        queue, and less under way would only make bbr believe in less; far above it, queues overflow, which the first
        chunks of a burst, never late, do not tell. A path that holds less than a chunk has a second one under way, or
        it would idle a round trip after each."""
        self.least_bytes = max(int(rate_bps / 8 * (1.25 * self.rtt_s + 0.012)), chunk_bytes + 1)
        self.most_bytes = max(int(rate_bps / 8 * (1.5 * self.rtt_s + 0.015)), chunk_bytes + 1)

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
        self._begin, self._quickest_s, self._was_full = now, float("inf"), False
        change = (self._lows[0][1] + self.slack_s) / quickest_s
        if change < 1 or was_full:
            self._limit_bytes = int(self.limit_bytes * max(0.5, min(1.5, change)))
