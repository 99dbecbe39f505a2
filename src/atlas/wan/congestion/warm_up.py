"""Warms a path up before it is needed: sends bytes that the receiver discards, until more in flight deliver no more.
TCP keeps its window afterwards (bbr does), and the rate of the path is known.

It works like bbr's start: bytes in flight are a multiple of what the last round delivered, so a slow path is not
flooded and a fast one is full after a dozen rounds. It begins with few streams, because many that share little all stay
slow. It judges by rate, not by delay, because the answers of a starting TCP connection are late in any case. If no
queue was ever seen, it was TCP that stopped growing, by losses or by its window, and more streams may find more. Knows
numbers only; streams `await_turn`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from atlas.wan.congestion.tuning import LOSSY_STREAMS, round_s

FIRST_BYTES, MAX_PIECE_BYTES, STREAM_BYTES = 16 * 1024, 32 * 1024, 2 << 20
"""In flight at first; in one piece; in flight for each stream that takes part."""
NUM_PIECES = 8
"""Pieces in flight at least, so that answers come evenly."""
GROWTH = 1.25
"""A round counts as growth if it delivers this many times the best before it."""
FLAT_ROUNDS, STEADY_ROUNDS = 5, 3
"""Rounds without growth that end a warm-up, and rounds in a row over which its rate is averaged."""
GAIN, FLAT_GAIN = 2.7, 1.9
"""In flight over what the best round delivered: about bbr's start-up gain (2.89), and less once it does not grow any
more, because queues overflow."""


class KernelStats(NamedTuple):
    """What the kernel reports of all streams together."""

    delivered_bytes: int
    num_retransmits: int
    is_late: bool
    """There is a queue on the path."""


class WarmUp:
    """One warm-up of one channel. `over` when the rate is known; then what is in flight drains."""

    def __init__(
        self,
        rtt_s: float,
        rate_bps: float,
        now: float,
        longest_s: float,
        kernel_stats: Callable[[], KernelStats | None],
        streams: int,
    ) -> None:
        """`rate_bps`: the known rate, or zero. `kernel_stats` may return None. `streams`: how many there are."""
        self.rtt_s, self.until = rtt_s, now + longest_s
        self.limit_bytes = self._least_bytes = max(FIRST_BYTES, int(FLAT_GAIN * rate_bps / 8 * rtt_s))
        self.out_bytes = 0
        self.over = self.is_lossy = False
        self._kernel_stats, self._was_full = kernel_stats, False
        self._least_streams, self._most_streams = 1, streams
        self._lock = threading.Lock()
        self._drained, self._grown = threading.Condition(self._lock), threading.Condition(self._lock)
        self._round_since, self._num_bytes = 0.0, 0
        self._seen = self._first_seen = kernel_stats()
        self._best_bps = self._last_bps = 0.0
        self._flat: list[tuple[int, int, float]] = []
        """Rounds without growth: bytes answered, bytes delivered by the kernel's count, seconds."""

    @property
    def num_streams(self) -> int:
        return min(self._most_streams, max(self._least_streams, 1 + self.limit_bytes // STREAM_BYTES))

    @property
    def rate_bps(self) -> float:
        """What the path delivered when it was full.

        Behind a loss, answers come late and then all at once. The kernel's count is in time, but ends at the nearest
        proxy. The smaller of the two is used.
        """
        steady = [self._flat[i : i + STEADY_ROUNDS] for i in range(max(1, len(self._flat) - STEADY_ROUNDS + 1))]
        return max(map(_rate_bps, steady)) if self._flat else self._best_bps

    def await_turn(self, place: int, timeout_s: float, now: float) -> int:
        """How many bytes the stream at this place sends next; they count as in flight. Zero: none for now."""
        with self._lock:
            if not self.over and place >= self.num_streams:
                self._grown.wait(timeout_s)
            elif not self.over and not self._may_send:
                self._drained.wait(timeout_s)
            self.over = self.over or now > self.until
            if self.over or place >= self.num_streams or not self._may_send:
                return 0
            num_bytes = self._piece_bytes
            self.out_bytes += num_bytes
            if self._may_send:
                self._drained.notify()
            return num_bytes

    @property
    def _piece_bytes(self) -> int:
        return min(MAX_PIECE_BYTES, self.limit_bytes // NUM_PIECES)

    @property
    def _may_send(self) -> bool:
        return self.out_bytes + self._piece_bytes <= self.limit_bytes

    def lost(self, num_bytes: int) -> None:
        """Their stream broke: no answer will come."""
        with self._lock:
            self.out_bytes = max(0, self.out_bytes - num_bytes)

    def came_back(self, num_bytes: int, now: float) -> None:
        with self._lock:
            self.out_bytes = max(0, self.out_bytes - num_bytes)
            self._drained.notify()
            if not self._round_since:
                self._round_since, self._seen = now, self._kernel_stats()
                return
            self._num_bytes += num_bytes
            if now - self._round_since >= round_s(self.rtt_s) and not self.over:
                self._end_round(now)

    def _end_round(self, now: float) -> None:
        before, seen = self._seen, self._kernel_stats()
        self._was_full = self._was_full or seen is None or seen.is_late
        delivered = max(0, seen.delivered_bytes - before.delivered_bytes) if seen and before else self._num_bytes
        self._seen = seen
        this = (self._num_bytes, delivered, now - self._round_since)
        this_bps = _rate_bps([this])
        rate_bps = (this_bps + (self._last_bps or this_bps)) / 2  # on a busy host, answers come in bunches
        self._round_since, self._num_bytes, self._last_bps = now, 0, this_bps
        if rate_bps > GROWTH * self._best_bps:
            self._best_bps, self._flat = rate_bps, []
        else:
            self._flat.append(this)
            self._judge()
        gain = FLAT_GAIN if self._flat else GAIN
        self.limit_bytes = max(self._least_bytes, int(gain * self._best_bps / 8 * self.rtt_s))
        if self.over:
            self._drained.notify_all()
        else:
            self._drained.notify()
        self._grown.notify_all()

    def _judge(self) -> None:
        """Ends the warm-up, or lets more streams take part."""
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
