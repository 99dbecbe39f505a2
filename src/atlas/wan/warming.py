"""Opening a path before it is needed: bytes that nobody wants, until more of them bring no more back. TCP remembers it
afterwards (bbr does), and we learn what the path delivers.

As bbr starts: what may be under way is a multiple of what the last round brought, so that a narrow path is not flooded
and a wide one is full after a dozen rounds. With few streams at first: many that share little all stay slow. Judged by
rate and not by delay, since a TCP that starts is late by itself. Knows numbers only; streams send while `may_send`.
"""

from __future__ import annotations

import threading

FIRST_BYTES, MOST_BYTES, STREAM_BYTES = 16 * 1024, 32 * 1024, 64 * 1024
"""Under way at first; in one piece at most; under way for each stream that takes part."""
GROWTH, FLAT_ROUNDS = 1.25, 5
GAIN, FLAT_GAIN = 4.0, 1.8
"""Under way, over what the best round brought; less once it grows no more, since queues overflow."""


class WarmUp:
    """One warm-up of one channel. `over` once it has learnt what it can; then what is under way drains."""

    def __init__(self, rtt_s: float, rate_bps: float, now: float, longest_s: float) -> None:
        """`rate_bps`: what is known already, or zero."""
        self.rtt_s, self.until = rtt_s, now + longest_s
        self.limit_bytes = max(FIRST_BYTES, int(FLAT_GAIN * rate_bps / 8 * rtt_s))
        self.out_bytes = 0
        self.over = False
        self._lock = threading.Lock()
        self._round_since, self._num_bytes = 0.0, 0
        self._best_bps = self._last_bps = 0.0
        self._flat_bps: list[float] = []

    @property
    def num_streams(self) -> int:
        return 1 + self.limit_bytes // STREAM_BYTES

    @property
    def rate_bps(self) -> float:
        """What the path delivered when it was full."""
        return sum(self._flat_bps) / len(self._flat_bps) if self._flat_bps else self._best_bps

    def may_send(self, now: float) -> int:
        """How many bytes to send now; they count as under way. Zero: none now."""
        with self._lock:
            self.over = self.over or now > self.until
            num_bytes = min(MOST_BYTES, self.limit_bytes // 4)
            if self.over or self.out_bytes + num_bytes > self.limit_bytes:
                return 0
            self.out_bytes += num_bytes
            return num_bytes

    def lost(self, num_bytes: int) -> None:
        """Their stream broke: nobody will hear of them again."""
        with self._lock:
            self.out_bytes = max(0, self.out_bytes - num_bytes)

    def came_back(self, num_bytes: int, now: float) -> None:
        with self._lock:
            self.out_bytes = max(0, self.out_bytes - num_bytes)
            if not self._round_since:
                self._round_since = now
                return
            self._num_bytes += num_bytes
            if now - self._round_since >= max(1.1 * self.rtt_s, 0.01) and not self.over:
                self._end_round(now)

    def _end_round(self, now: float) -> None:
        this_bps = self._num_bytes * 8 / (now - self._round_since)
        rate_bps = (this_bps + (self._last_bps or this_bps)) / 2  # answers bunch up on a busy host
        self._round_since, self._num_bytes, self._last_bps = now, 0, this_bps
        if rate_bps > GROWTH * self._best_bps:
            self._best_bps, self._flat_bps = rate_bps, []
        else:
            self._flat_bps.append(this_bps)
            self.over = len(self._flat_bps) >= FLAT_ROUNDS
        gain = FLAT_GAIN if self._flat_bps else GAIN
        self.limit_bytes = max(FIRST_BYTES, int(gain * self._best_bps / 8 * self.rtt_s))
