"""Opening a path before it is needed: bytes that nobody wants, as many as may be under way, until that is no longer
growing. TCP remembers it afterwards (bbr does), and we learn what the path delivers.

Knows numbers only; the channel's streams send while `may_send`.
"""

from __future__ import annotations

import threading

from atlas.wan.flight import Flight

MOST_BYTES = 32 * 1024
STEADY_ROUNDS = 5
"""So many round trips without growth make a path open, and are what its rate is measured over."""


class WarmUp:
    """One warm-up of one channel. `over` once it has learnt what it can; then what is under way drains."""

    def __init__(self, flight: Flight, now: float, longest_s: float) -> None:
        self.flight, self.until = flight, now + longest_s
        self.out_bytes = 0
        self.over = False
        self.rate_bps = 0.0
        self._lock = threading.Lock()
        self._best_bytes, self._steady_since, self._steady_bytes = flight.limit_bytes, now, 0

    def may_send(self, now: float) -> int:
        """How many bytes to send now; they count as under way. Few at first: on a narrow path many would take long."""
        with self._lock:
            self.over = self.over or now > self.until
            num_bytes = min(MOST_BYTES, self.flight.limit_bytes // 4)
            if self.over or self.out_bytes + num_bytes > self.flight.limit_bytes:
                self.flight.filled()
                return 0
            self.out_bytes += num_bytes
            return num_bytes

    def lost(self, num_bytes: int) -> None:
        """Their stream broke: nobody will hear of them again."""
        with self._lock:
            self.out_bytes = max(0, self.out_bytes - num_bytes)

    def came_back(self, num_bytes: int, took_s: float, now: float) -> None:
        with self._lock:
            self.out_bytes = max(0, self.out_bytes - num_bytes)
            self.flight.came_back(took_s, now)
            self._steady_bytes += num_bytes
            if self.flight.limit_bytes > 1.2 * self._best_bytes:
                self._best_bytes = self.flight.limit_bytes
                self._steady_since, self._steady_bytes = now, 0
            steady_s = now - self._steady_since
            if steady_s > 0:
                self.rate_bps = self._steady_bytes * 8 / steady_s
            if not self.flight.starting and steady_s > max(STEADY_ROUNDS * self.flight.rtt_s, 0.05):
                self.over = True
