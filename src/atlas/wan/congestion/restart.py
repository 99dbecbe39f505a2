"""When the streams of a path should start again.

bbr raises its rate by a quarter in every eighth round trip. When cross traffic ends, or when few streams take over what
many have shared, it needs a second to fill the path. After a new start it doubles its rate in every round trip. Knows
numbers only.
"""

from __future__ import annotations

from collections.abc import Callable

SLOW, MEMORY_S = 0.8, 60.0
"""A span is slow if it delivers less than this share of the best rate that was known in the last minute."""
SLOW_SPANS = 2
"""Slow spans in a row after which streams start again."""
FIRST_PAUSE_TRIPS, LONGEST_PAUSE_TRIPS = 8, 256
"""Round trips from one start to the next at least. They double with each start, until a span is not slow."""


class RestartRule:
    """Gets the rate of every span in which something waited for the path."""

    def __init__(self) -> None:
        self._best_bps = self._best_before_bps = self._best_since = 0.0
        self._num_full = self._num_slow = 0
        self._next_at, self._pause_trips = 0.0, FIRST_PAUSE_TRIPS

    def should_restart(
        self, rate_bps: float, known_bps: float, num_full: int, now: float, rtt_s: float, has_queue: Callable[[], bool]
    ) -> bool:
        """Whether the kernel holds the path back: the span was slow, the in-flight limit was not reached (`num_full`
        counts how often it was), and there is no queue on the path."""
        if now - self._best_since > MEMORY_S / 2:
            self._best_before_bps, self._best_bps, self._best_since = self._best_bps, 0.0, now
        self._best_bps = max(self._best_bps, known_bps)
        was_full, self._num_full = num_full != self._num_full, num_full
        if was_full or rate_bps >= SLOW * max(self._best_bps, self._best_before_bps):
            self._num_slow, self._pause_trips = 0, FIRST_PAUSE_TRIPS
            return False
        self._num_slow += 1
        if self._num_slow < SLOW_SPANS or now < self._next_at or has_queue():
            return False
        self._next_at, self._num_slow = now + self._pause_trips * rtt_s, 0
        self._pause_trips = min(2 * self._pause_trips, LONGEST_PAUSE_TRIPS)
        return True
