"""How much may be under way unacknowledged, so that what waits waits here, where turns are known.

Kernel buffers, middleboxes and proxies all take in more than the path carries. So the limit follows delay, as FAST
TCP's window does: after each round trip it becomes what would make the quickest chunk late by a small slack, no
more. Knows numbers only.
"""

from __future__ import annotations

import threading
from collections import deque

from atlas.ir.dispatch import QUANTUM_NS

FIRST_BYTES, MAX_BYTES = 128 * 1024, 1 << 30
MEMORY_S = 30.0
PACED_BYTES = 32 * 1024
"""A path that carries less than this in a quantum is paced: the kernel's smallest buffers would take in several."""
PACE, LEAD_S = 1.25, 0.003
"""How fast, over what the path was seen to deliver; and how far ahead of it."""
SWIFT_S, SWIFT_BYTES, KERNEL_BYTES = 10.0, 8 * 1024, 32 * 1024
"""How long a chunk that came through quickly says what the path can do; of so many bytes at least; and how many of them
the kernel still holds, at most, when it has taken the last."""
HOLD, MOST_HOLD_S = 1.1, 0.006
"""Over what a slice takes: so long the first one after a rest waits for one of a smaller turn, which may have set out
elsewhere at the same moment, and could not overtake what has left; unless its turn is the one after the last."""
TURN_LEAD_S, MOST_TURN_S = 0.004, 0.010
"""A slice of a larger turn than the one before waits until the path will run dry so soon, but no longer than that."""
FELL, LATE_S = 0.5, 0.5
"""A path on which everything was late for so long, and which brought less than this part of its rate, is slower now."""


class InflightLimit:
    """Fed with what came back, and how long after the kernel had taken it."""

    def __init__(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self.least_bytes, self.most_bytes = 0, MAX_BYTES
        self._limit_bytes = FIRST_BYTES
        self._lock = threading.Lock()
        self._lows: deque[tuple[float, float]] = deque()
        """The quickest of some rounds, increasing: the first is the quickest of all that count."""
        self._begin, self._quickest_s, self._was_full = 0.0, float("inf"), False
        self._slowest_s, self._held_back = 0.0, False
        self._late_since, self._late_bytes, self._last_back = 0.0, 0, 0.0
        self._fallen_bps: float | None = None
        self._rate_bps, self._gone_at, self._dry_at = float("inf"), 0.0, 0.0
        self._swift_bps, self._swift_before_bps, self._swift_since = 0.0, 0.0, 0.0

    @property
    def limit_bytes(self) -> int:
        return max(self.least_bytes, min(self.most_bytes, self._limit_bytes))

    @property
    def slack_s(self) -> float:
        """How much later than the quickest we like to be: enough to keep the path busy, too little to fill queues."""
        return 0.005 + 0.15 * self.rtt_s

    def learn(self, rate_bps: float, chunk_bytes: int = 0, rtt_s: float | None = None) -> None:
        """What the path was seen to deliver bounds the limit on both sides. Below what it holds, lateness is not our
        queue, and less under way would only make bbr believe in less; far above it, queues overflow, which the first
        chunks of a burst, never late, do not tell. Beside what a path holds, a chunk is on its way onto it, or it would
        idle after each."""
        self._rate_bps, self.rtt_s = rate_bps, rtt_s or self.rtt_s
        rate_bps = self.rate_bps
        beside = int(1.1 * rate_bps / 8 * self.rtt_s) + chunk_bytes + 1
        # Beside the round trip, what hosts take to answer; but queues are a round trip long, often enough.
        self.least_bytes = max(int(rate_bps / 8 * (1.25 * self.rtt_s + min(0.012, 0.3 * self.rtt_s))), beside)
        self.most_bytes = max(int(rate_bps / 8 * (1.5 * self.rtt_s + min(0.015, 0.375 * self.rtt_s))), beside)

    @property
    def is_slow(self) -> bool:
        return self._rate_bps * QUANTUM_NS / 8e9 < PACED_BYTES

    @property
    def rate_bps(self) -> float:
        """What was learnt; of a slow path not less than a single chunk has shown to be possible, since what is held
        back by its pace never shows more."""
        swift_bps = max(self._swift_bps, self._swift_before_bps)
        return max(self._rate_bps, swift_bps) if self.is_slow else self._rate_bps

    @property
    def pace_bps(self) -> float:
        return PACE * self.rate_bps if self.is_slow else float("inf")

    def pause_s(self, now: float) -> float:
        """How long the next chunk waits for those before it to be on the path; they may be many kernels' worth."""
        return self._gone_at - LEAD_S - now

    def left(self, num_bytes: int, now: float) -> None:
        """A chunk was handed to a stream."""
        self._gone_at = max(self._gone_at, now) + num_bytes * 8 / self.pace_bps
        self._dry_at = min(max(self._dry_at, now) + num_bytes * 8 / self.rate_bps, now + TURN_LEAD_S + MOST_TURN_S)

    def hold(self, num_bytes: int, now: float) -> None:
        """After a rest, a slice has come."""
        self._dry_at = now + TURN_LEAD_S + min(MOST_HOLD_S, HOLD * num_bytes * 8 / self.rate_bps)

    def turn_s(self, now: float) -> float:
        """How long a larger turn still waits: more slices of the smaller one may be on their way."""
        return self._dry_at - TURN_LEAD_S - now

    def filled(self) -> None:
        """Somebody wanted to send and was held back by the limit."""
        self._was_full = self._held_back = True

    def had_room(self) -> bool:
        """Asked when everything has come back: whether the limit held something back, and yet nothing was late. Then
        the path takes more; bursts that are over before their rate can be told make themselves felt like this."""
        with self._lock:
            low_s = self._lows[0][1] if self._lows else 0.0
            had_room = self._held_back and 0.0 < self._slowest_s < low_s + self.slack_s
            self._slowest_s, self._held_back = 0.0, False
            return had_room

    def fallen_bps(self) -> float | None:
        """What the path delivers, if that was found to be far less than was learnt. Told once."""
        with self._lock:
            fallen_bps, self._fallen_bps = self._fallen_bps, None
            return fallen_bps

    def came_back(self, took_s: float, now: float, num_bytes: int = 0) -> None:
        with self._lock:
            if now - self._swift_since > SWIFT_S:
                self._swift_bps, self._swift_before_bps, self._swift_since = 0.0, self._swift_bps, now
            if num_bytes >= SWIFT_BYTES:
                swift_bps = min(num_bytes, KERNEL_BYTES) * 8 / max(took_s - self.rtt_s, 0.001)
                self._swift_bps = max(self._swift_bps, swift_bps)
            if now - took_s > self._last_back:  # for a moment nothing was under way
                self._late_since, self._late_bytes = now, 0
            self._late_bytes, self._last_back = self._late_bytes + num_bytes, now
            self._quickest_s, self._slowest_s = min(self._quickest_s, took_s), max(self._slowest_s, took_s)
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
        self._judge_rate(now, is_late=quickest_s > self._lows[0][1] + 2 * self.slack_s)
        change = (self._lows[0][1] + self.slack_s) / quickest_s
        if change < 1 or was_full:
            self._limit_bytes = int(self.limit_bytes * max(0.5, min(1.5, change)))

    def _judge_rate(self, now: float, *, is_late: bool) -> None:
        """While everything is late, something queues on the path, so what comes back is all that it carries; whether
        anything waits here does not matter."""
        late_s = now - self._late_since
        if is_late and late_s < LATE_S:
            return
        if is_late and (rate_bps := self._late_bytes * 8 / late_s) < FELL * self._rate_bps:
            self._fallen_bps, self._swift_bps, self._swift_before_bps = rate_bps, 0.0, 0.0
        self._late_since, self._late_bytes = now, 0
