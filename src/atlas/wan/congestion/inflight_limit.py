"""How many bytes may be in flight, so that the rest waits in our queue, where turns are known.

Kernel buffers, middleboxes and proxies all accept more than the path carries. So the limit follows delay, as FAST TCP's
window does: after each round trip it becomes what delays the quickest chunk by a small slack. Knows numbers only.
"""

from __future__ import annotations

import threading
from collections import deque

from atlas.ir.program import QUANTUM_NS
from atlas.wan.congestion.tuning import round_s

FIRST_BYTES, MAX_BYTES = 128 * 1024, 1 << 30
"""The limit before anything is known, and at most."""
SLACK_S, SLACK_TRIPS = 0.005, 0.15
"""Delay that is allowed beyond the quickest chunk, plus this share of a round trip: it keeps the path busy without
filling queues."""
LEAST_TRIPS, MOST_TRIPS = 1.25, 1.5
"""Bounds of the limit: what the path carries in this many round trips. Below, bbr would take our limit for the path's
rate. Above, queues overflow, which the first chunks of a burst do not show, because they are never late."""
LEAST_HOST_S, MOST_HOST_S, HOST_TRIPS = 0.012, 0.015, (0.3, 0.375)
"""Added to these for the time in which hosts answer, but at most that share of a round trip: queues are often as long
as one."""
BUSY_TRIPS = 1.1
"""What fills the path while one more chunk is handed to it."""
SHRINK, GROW = 0.5, 1.5
"""The most that a round changes the limit by."""
MEMORY_S = 30.0
"""How long the quickest chunk counts: routes change."""
PACED_BYTES = 32 * 1024
"""A path that carries less than this in a quantum is paced: the kernel's smallest buffers would hold several turns.
With 64 KB, paths of 100 Mbit/s were paced too, and the first arrival of a cell of 4 took 1.45 of ideal instead of
1.18."""
PACE, LEAD_S = 1.25, 0.003
"""The pace over the known rate, and how early a chunk leaves before the one before it is on the path."""
SWIFT_S, SWIFT_BYTES, KERNEL_BYTES = 10.0, 8 * 1024, 32 * 1024
"""How long the rate of a fast chunk counts on a slow path; the least size of such a chunk; and how much of it the
kernel holds at most when it has accepted the last byte."""
MIN_SWIFT_S = 0.001
"""The shortest time on the path that can be distinguished from noise."""
HOLD, MOST_HOLD_S = 1.1, 0.006
"""After a rest, the first slice waits this many times what it takes on the path, at most this long, for a slice of a
smaller turn that was sent elsewhere at the same moment and could not overtake it; not if its turn is the next one."""
TURN_LEAD_S, MOST_TURN_S = 0.004, 0.010
"""A slice of a larger turn than the one before waits until the path runs empty in this many seconds, at most that
long."""
FELL, LATE_S = 0.5, 0.5
"""The path is slower now if everything was late for this long and it delivered less than this share of its rate."""


class InflightLimit:
    """Gets each acknowledgement, with the time since the kernel had accepted the chunk."""

    def __init__(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self.least_bytes, self.most_bytes = 0, MAX_BYTES
        self._limit_bytes = FIRST_BYTES
        self._lock = threading.Lock()
        self._lows: deque[tuple[float, float]] = deque()
        """(when, seconds) of the quickest chunks of some rounds, increasing: the first is the quickest that counts."""
        self._begin, self._quickest_s, self._was_full = 0.0, float("inf"), False
        self._slowest_s, self._held_back = 0.0, False
        self.num_full = 0
        """How often it held something back."""
        self._late_since, self._late_bytes, self._last_back = 0.0, 0, 0.0
        self._fallen_bps: float | None = None
        self._rate_bps, self._gone_at, self._dry_at = float("inf"), 0.0, 0.0
        self._swift_bps, self._swift_before_bps, self._swift_since = 0.0, 0.0, 0.0

    @property
    def limit_bytes(self) -> int:
        return max(self.least_bytes, min(self.most_bytes, self._limit_bytes))

    @property
    def slack_s(self) -> float:
        return SLACK_S + SLACK_TRIPS * self.rtt_s

    def learn(self, rate_bps: float, chunk_bytes: int = 0, rtt_s: float | None = None) -> None:
        """Sets the rate that the path was seen to deliver, which bounds the limit on both sides."""
        self._rate_bps, self.rtt_s = rate_bps, rtt_s or self.rtt_s
        rate_bps = self.rate_bps
        busy_bytes = int(BUSY_TRIPS * rate_bps / 8 * self.rtt_s) + chunk_bytes + 1
        least_s = LEAST_TRIPS * self.rtt_s + min(LEAST_HOST_S, HOST_TRIPS[0] * self.rtt_s)
        most_s = MOST_TRIPS * self.rtt_s + min(MOST_HOST_S, HOST_TRIPS[1] * self.rtt_s)
        self.least_bytes = max(int(rate_bps / 8 * least_s), busy_bytes)
        self.most_bytes = max(int(rate_bps / 8 * most_s), busy_bytes)

    @property
    def is_slow(self) -> bool:
        return self._rate_bps * QUANTUM_NS / 8e9 < PACED_BYTES

    @property
    def rate_bps(self) -> float:
        """The known rate. On a slow path, at least what a single chunk has reached: a paced path never shows more."""
        swift_bps = max(self._swift_bps, self._swift_before_bps)
        return max(self._rate_bps, swift_bps) if self.is_slow else self._rate_bps

    @property
    def pace_bps(self) -> float:
        return PACE * self.rate_bps if self.is_slow else float("inf")

    def pause_s(self, now: float) -> float:
        """How long the next chunk waits for those before it to be on the path."""
        return self._gone_at - LEAD_S - now

    def left(self, num_bytes: int, now: float) -> None:
        """A chunk was handed to a stream."""
        self._gone_at = max(self._gone_at, now) + num_bytes * 8 / self.pace_bps
        self._dry_at = min(max(self._dry_at, now) + num_bytes * 8 / self.rate_bps, now + TURN_LEAD_S + MOST_TURN_S)

    def hold(self, num_bytes: int, now: float) -> None:
        """A slice came after a rest."""
        self._dry_at = now + TURN_LEAD_S + min(MOST_HOLD_S, HOLD * num_bytes * 8 / self.rate_bps)

    def turn_s(self, now: float) -> float:
        """How long a larger turn still waits: more slices of the smaller turn may be coming."""
        return self._dry_at - TURN_LEAD_S - now

    def filled(self) -> None:
        """The limit held something back."""
        self._was_full = self._held_back = True
        self.num_full += 1

    def had_room(self) -> bool:
        """Called when everything is acknowledged: whether the limit held something back although nothing was late. Then
        the path carries more. Bursts that are too short for the rate meter are noticed like this."""
        with self._lock:
            low_s = self._lows[0][1] if self._lows else 0.0
            had_room = self._held_back and 0.0 < self._slowest_s < low_s + self.slack_s
            self._slowest_s, self._held_back = 0.0, False
            return had_room

    def fallen_bps(self) -> float | None:
        """The rate of the path, if it was found to be far below the known one. Returned once."""
        with self._lock:
            fallen_bps, self._fallen_bps = self._fallen_bps, None
            return fallen_bps

    def came_back(self, took_s: float, now: float, num_bytes: int = 0) -> None:
        with self._lock:
            if now - self._swift_since > SWIFT_S:
                self._swift_bps, self._swift_before_bps, self._swift_since = 0.0, self._swift_bps, now
            if num_bytes >= SWIFT_BYTES:
                swift_bps = min(num_bytes, KERNEL_BYTES) * 8 / max(took_s - self.rtt_s, MIN_SWIFT_S)
                self._swift_bps = max(self._swift_bps, swift_bps)
            if now - took_s > self._last_back:  # nothing was in flight for a moment
                self._late_since, self._late_bytes = now, 0
            self._late_bytes, self._last_back = self._late_bytes + num_bytes, now
            self._quickest_s, self._slowest_s = min(self._quickest_s, took_s), max(self._slowest_s, took_s)
            if now - self._begin >= round_s(self.rtt_s):
                self._end_round(now)

    def _end_round(self, now: float) -> None:
        quickest_s, was_full = self._quickest_s, self._was_full
        while self._lows and now - self._lows[0][0] > MEMORY_S:
            self._lows.popleft()
        while self._lows and self._lows[-1][1] >= quickest_s:
            self._lows.pop()
        self._lows.append((now, quickest_s))
        self._begin, self._quickest_s, self._was_full = now, float("inf"), False
        self._judge_rate(now, is_late=quickest_s > self._lows[0][1] + 2 * self.slack_s)
        change = (self._lows[0][1] + self.slack_s) / quickest_s
        if change < 1 or was_full:
            self._limit_bytes = int(self.limit_bytes * max(SHRINK, min(GROW, change)))

    def _judge_rate(self, now: float, *, is_late: bool) -> None:
        """While everything is late, there is a queue on the path, so what is acknowledged is all that it carries, even
        if nothing waits here."""
        late_s = now - self._late_since
        if is_late and late_s < LATE_S:
            return
        if is_late and (rate_bps := self._late_bytes * 8 / late_s) < FELL * self._rate_bps:
            self._fallen_bps, self._swift_bps, self._swift_before_bps = rate_bps, 0.0, 0.0
        self._late_since, self._late_bytes = now, 0
