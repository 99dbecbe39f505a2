"""Opening a path before it is needed: bytes that nobody wants, until more of them bring no more back. TCP remembers it
afterwards (bbr does), and we learn what the path delivers.

As bbr starts: what may be under way is a multiple of what the last round brought, so that a narrow path is not flooded
and a wide one is full after a dozen rounds. With few streams at first: many that share little all stay slow. Judged by
rate and not by how late answers are, since a TCP that starts is late by itself; but where nothing ever queued, it was
TCP that stopped growing, by losses or by its window, and more streams may find more. Knows numbers only; streams
`await_turn`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from atlas.wan.congestion.tuning import LOSSY_STREAMS

FIRST_BYTES, MOST_BYTES, STREAM_BYTES = 16 * 1024, 32 * 1024, 2 << 20
"""Under way at first; in one piece at most; under way for each stream that takes part."""
GROWTH, FLAT_ROUNDS, STEADY_ROUNDS = 1.25, 5, 3
GAIN, FLAT_GAIN = 2.7, 1.9
"""Under way, over what the best round brought; less once it grows no more, since queues overflow."""


class KernelStats(NamedTuple):
    """What the kernel says of all streams together."""

    delivered_bytes: int
    num_retransmits: int
    is_late: bool
    """Something queues on the path."""


class WarmUp:
    """One warm-up of one channel. `over` once it has learnt what it can; then what is under way drains."""

    def __init__(
        self,
        rtt_s: float,
        rate_bps: float,
        now: float,
        longest_s: float,
        look: Callable[[], KernelStats | None],
        streams: int,
    ) -> None:
        """`rate_bps`: what is known already, or zero. `look`: None where the kernel does not tell. `streams`: how many
        there are."""
        self.rtt_s, self.until = rtt_s, now + longest_s
        self.limit_bytes = self._least_bytes = max(FIRST_BYTES, int(FLAT_GAIN * rate_bps / 8 * rtt_s))
        self.out_bytes = 0
        self.over = self.is_lossy = False
        self._look, self._was_full = look, False
        self._least_streams, self._most_streams = 1, streams
        self._lock = threading.Lock()
        self._room, self._grown = threading.Condition(self._lock), threading.Condition(self._lock)
        self._round_since, self._num_bytes = 0.0, 0
        self._seen = self._first_seen = look()
        self._best_bps = self._last_bps = 0.0
        self._flat: list[tuple[int, int, float]] = []
        """Rounds that brought no more: bytes answered, bytes delivered by the kernel's count, seconds."""

    @property
    def num_streams(self) -> int:
        return min(self._most_streams, max(self._least_streams, 1 + self.limit_bytes // STREAM_BYTES))

    @property
    def rate_bps(self) -> float:
        """What the path delivered when it was full.

        Answers tell late of what waited behind a loss, then all at once; the kernel's count tells of it in time, but
        ends at the nearest proxy. Neither says less than the truth for long.
        """
        steady = [self._flat[i : i + STEADY_ROUNDS] for i in range(max(1, len(self._flat) - STEADY_ROUNDS + 1))]
        return max(map(_rate_bps, steady)) if self._flat else self._best_bps

    def await_turn(self, place: int, timeout_s: float, now: float) -> int:
        """How many bytes the stream at this place sends next; they count as under way. Zero: none for now."""
        with self._lock:
            if not self.over and place >= self.num_streams:
                self._grown.wait(timeout_s)
            elif not self.over and not self._has_room:
                self._room.wait(timeout_s)
            self.over = self.over or now > self.until
            if self.over or place >= self.num_streams or not self._has_room:
                return 0
            num_bytes = self._piece_bytes
            self.out_bytes += num_bytes
            if self._has_room:
                self._room.notify()
            return num_bytes

    @property
    def _piece_bytes(self) -> int:
        return min(MOST_BYTES, self.limit_bytes // 8)

    @property
    def _has_room(self) -> bool:
        return self.out_bytes + self._piece_bytes <= self.limit_bytes

    def lost(self, num_bytes: int) -> None:
        """Their stream broke: nobody will hear of them again."""
        with self._lock:
            self.out_bytes = max(0, self.out_bytes - num_bytes)

    def came_back(self, num_bytes: int, now: float) -> None:
        with self._lock:
            self.out_bytes = max(0, self.out_bytes - num_bytes)
            self._room.notify()
            if not self._round_since:
                self._round_since, self._seen = now, self._look()
                return
            self._num_bytes += num_bytes
            if now - self._round_since >= max(1.1 * self.rtt_s, 0.01) and not self.over:
                self._end_round(now)

    def _end_round(self, now: float) -> None:
        before, seen = self._seen, self._look()
        self._was_full = self._was_full or seen is None or seen.is_late
        delivered = max(0, seen.delivered_bytes - before.delivered_bytes) if seen and before else self._num_bytes
        self._seen = seen
        this = (self._num_bytes, delivered, now - self._round_since)
        this_bps = _rate_bps([this])
        rate_bps = (this_bps + (self._last_bps or this_bps)) / 2  # answers bunch up on a busy host
        self._round_since, self._num_bytes, self._last_bps = now, 0, this_bps
        if rate_bps > GROWTH * self._best_bps:
            self._best_bps, self._flat = rate_bps, []
        else:
            self._flat.append(this)
            self._judge()
        gain = FLAT_GAIN if self._flat else GAIN
        self.limit_bytes = max(self._least_bytes, int(gain * self._best_bps / 8 * self.rtt_s))
        if self.over:
            self._room.notify_all()
        else:
            self._room.notify()
        self._grown.notify_all()

    def _judge(self) -> None:
        """Whether that was all."""
        if len(self._flat) < FLAT_ROUNDS:
            return
        if self._was_full or self.is_lossy or self.num_streams == self._most_streams:
            self.over = True
            return
        has_lost = self._seen and self._first_seen and self._seen.num_retransmits > self._first_seen.num_retransmits
        self._least_streams = LOSSY_STREAMS if has_lost else 2 * self.num_streams
        self.is_lossy, self._flat = bool(has_lost), []


def _rate_bps(rounds: list[tuple[int, int, float]]) -> float:
    answered, delivered = (sum(one[i] for one in rounds) for i in (0, 1))
    return min(answered, delivered) * 8 / sum(seconds for _, _, seconds in rounds)
