"""Opening a path before it is needed: bytes that nobody wants, until more of them bring no more back. TCP remembers it
afterwards (bbr does), and we learn what the path delivers.

As bbr starts: what may be under way is a multiple of what the last round brought, so that a narrow path is not flooded
and a wide one is full after a dozen rounds. With few streams at first: many that share little all stay slow. Judged by
rate and not by delay, since a TCP that starts is late by itself. Knows numbers only; streams send while `may_send`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_BYTES, MOST_BYTES, STREAM_BYTES = 16 * 1024, 32 * 1024, 256 * 1024
"""Under way at first; in one piece at most; under way for each stream that takes part."""
GROWTH, FLAT_ROUNDS = 1.25, 5
GAIN, FLAT_GAIN = 2.7, 1.9
"""Under way, over what the best round brought; less once it grows no more, since queues overflow."""


class WarmUp:
    """One warm-up of one channel. `over` once it has learnt what it can; then what is under way drains."""

    def __init__(
        self, rtt_s: float, rate_bps: float, now: float, longest_s: float, delivered_bytes: Callable[[], int | None]
    ) -> None:
        """`rate_bps`: what is known already, or zero. `delivered_bytes`: by the kernel's count, if it has one."""
        self.rtt_s, self.until, self.delivered_bytes = rtt_s, now + longest_s, delivered_bytes
        self.limit_bytes = max(FIRST_BYTES, int(FLAT_GAIN * rate_bps / 8 * rtt_s))
        self.out_bytes = 0
        self.over = False
        self._lock = threading.Lock()
        self._round_since, self._num_bytes, self._kernel_bytes = 0.0, 0, delivered_bytes()
        self._best_bps = self._last_bps = 0.0
        self._flat: list[tuple[int, int, float]] = []
        """Rounds that brought no more: bytes answered, bytes delivered by the kernel's count, seconds."""

    @property
    def num_streams(self) -> int:
        return 1 + self.limit_bytes // STREAM_BYTES

    @property
    def rate_bps(self) -> float:
        """What the path delivered when it was full.

        Answers tell late of what waited behind a loss, then all at once; the kernel's count tells of it in time, but
        ends at the nearest proxy. Neither says less than the truth for long.
        """
        if not self._flat:
            return self._best_bps
        answered, delivered = (sum(flat[i] for flat in self._flat) for i in (0, 1))
        return min(answered, delivered) * 8 / sum(seconds for _, _, seconds in self._flat)

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
                self._round_since, self._kernel_bytes = now, self.delivered_bytes()
                return
            self._num_bytes += num_bytes
            if now - self._round_since >= max(1.1 * self.rtt_s, 0.01) and not self.over:
                self._end_round(now)

    def _end_round(self, now: float) -> None:
        before, self._kernel_bytes = self._kernel_bytes, self.delivered_bytes()
        counted = before is not None and self._kernel_bytes is not None
        delivered = max(0, (self._kernel_bytes or 0) - (before or 0)) if counted else self._num_bytes
        this = (self._num_bytes, delivered, now - self._round_since)
        this_bps = min(this[:2]) * 8 / this[2]
        rate_bps = (this_bps + (self._last_bps or this_bps)) / 2  # answers bunch up on a busy host
        self._round_since, self._num_bytes, self._last_bps = now, 0, this_bps
        if rate_bps > GROWTH * self._best_bps:
            self._best_bps, self._flat = rate_bps, []
        else:
            self._flat.append(this)
            self.over = len(self._flat) >= FLAT_ROUNDS
        gain = FLAT_GAIN if self._flat else GAIN
        self.limit_bytes = max(FIRST_BYTES, int(gain * self._best_bps / 8 * self.rtt_s))
