"""How many streams, how fast each, how long a chunk: chosen from what was measured, by plain functions.

A stream carries a window per round trip, so a long fat path needs several; more than needed hurts bursts. The pace
keeps the sum of the streams near what the path delivers. Knows numbers only.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from atlas.ir.dispatch import chunk_bytes
from atlas.wan.transport.wire import MAX_CHUNK_BYTES

NEAR_RTT_S = 0.002
"""Below it, the peer is in the same datacenter: nothing needs to be paced or kept short."""
NEAR_STREAMS, LOSSY_STREAMS = 2, 6
LOSSY = 3e-4
"""Retransmitted bytes over delivered ones, from which on a path counts as lossy."""
MIN_CHUNK_BYTES, FAR_CHUNK_BYTES, NEAR_LEAST_BYTES = 16 * 1024, 1 << 20, 1 << 20
LEAST_CHUNK_BYTES, FREE_CHUNK_BYTES = 64 * 1024, 256 * 1024
MIN_LOWAT_BYTES, MAX_LOWAT_BYTES, NEAR_LOWAT_BYTES = 32 * 1024, 256 * 1024, 512 * 1024
HEADROOM, HEADROOM_ALONE = 2.0, 1.25
"""The pace of all streams, over what the path was seen to deliver: one stream alone must not be held back, and what is
under way is bounded anyway. It only keeps a burst from leaving all at once."""
LOSS_SPAN_S, ENOUGH_BYTES = 20.0, 16 << 20
SAMPLE_S, NUM_SPANS = 0.05, 4
MEMORY_S = 20.0


@dataclass(frozen=True)
class Choice:
    """`pacing_bps` of each stream; None: as fast as the kernel likes."""

    num_streams: int
    chunk_bytes: int
    lowat_bytes: int
    pacing_bps: float | None
    least_chunk_bytes: int = LEAST_CHUNK_BYTES
    """Towards the end of a message, chunks shrink to this."""

    def with_streams(self, num_streams: int) -> Choice:
        pacing_bps = self.pacing_bps and self.pacing_bps * self.num_streams / num_streams
        return replace(self, num_streams=num_streams, pacing_bps=pacing_bps)


@cache
def window_bytes() -> int:
    """What one stream can have under way, by this kernel's limits; the peer's are taken to be the same."""
    try:
        rmem = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])
        wmem = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    except (OSError, IndexError, ValueError):
        rmem, wmem = 6 << 20, 4 << 20
    return max(1 << 17, min(rmem // 2, wmem * 2 // 3))


def choose(rtt_s: float, rate_bps: float | None, max_streams: int, window: int, *, lossy: bool = False) -> Choice:
    """Until a rate is known, all streams run freely: that is how it becomes known."""
    if rtt_s < NEAR_RTT_S:
        return Choice(min(NEAR_STREAMS, max_streams), MAX_CHUNK_BYTES, NEAR_LOWAT_BYTES, None, NEAR_LEAST_BYTES)
    if rate_bps is None:
        return Choice(max_streams, FREE_CHUNK_BYTES, MAX_LOWAT_BYTES, None)
    needed = math.ceil(1.5 * rate_bps / 8 * rtt_s / window)
    # Where packets get lost, a stream that waits for a repair leaves the path to the others.
    num_streams = min(max_streams, max(LOSSY_STREAMS if lossy else 1, needed))
    # The quantum is the link's; several streams put several chunks on it at once, each of which takes longer.
    chunk = chunk_bytes(rate_bps * min(1.0, 2 / num_streams), MIN_CHUNK_BYTES, FAR_CHUNK_BYTES)
    lowat = max(MIN_LOWAT_BYTES, min(MAX_LOWAT_BYTES, chunk // num_streams))
    headroom = HEADROOM_ALONE if num_streams == 1 else HEADROOM
    return Choice(num_streams, chunk, lowat, rate_bps * headroom / num_streams, min(chunk, LEAST_CHUNK_BYTES))


class LossWatch:
    """Whether a path loses packets: by what the kernel sent twice in the last seconds. A warm-up overflows queues, so
    what is lost meanwhile does not count."""

    def __init__(self) -> None:
        self._lossy, self._seen = False, (0.0, 0, 0)

    def warmed(self, *, is_lossy: bool) -> None:
        self._lossy, self._seen = self._lossy or is_lossy, (0.0, 0, 0)

    def is_lossy(self, now: float, delivered_bytes: int, sent_twice_bytes: int) -> bool:
        if now - self._seen[0] > LOSS_SPAN_S or sent_twice_bytes < self._seen[2]:
            self._seen = (now, delivered_bytes, sent_twice_bytes)
        delivered, sent_twice = delivered_bytes - self._seen[1], sent_twice_bytes - self._seen[2]
        if delivered > ENOUGH_BYTES:
            self._lossy = sent_twice > LOSSY * delivered
        return self._lossy


class RateMeter:
    """What a path delivers while something waits: the best of the last seconds, from acknowledged bytes.

    Acknowledgements bunch up, after a loss or when this host is busy, so what counts is the mean of several spans in a
    row; a short burst counts only where nothing better is known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, float]] = deque()
        self._since: float | None = None
        self._num_bytes = 0
        self._spans: deque[float] = deque(maxlen=NUM_SPANS)
        self._has_told = False

    def pause(self) -> None:
        """Nothing waits: what comes next says nothing about the time until it comes."""
        with self._lock:
            self._since = None
            self._spans.clear()

    def learn(self, rate_bps: float, now: float) -> None:
        """From a warm-up, or because the path has become slower: what it brought before is forgotten."""
        with self._lock:
            self._samples = deque([(now, rate_bps)] if rate_bps else [])

    def raise_by(self, factor: float) -> None:
        """What is known is too little; unless there was time to see that for ourselves."""
        with self._lock:
            if not self._has_told:
                self._samples = deque((when, factor * bps) for when, bps in self._samples)

    def acknowledged(self, num_bytes: int, now: float) -> None:
        with self._lock:
            if self._since is None:
                self._since, self._num_bytes, self._has_told = now, 0, False
                return
            self._num_bytes += num_bytes
            if now - self._since < SAMPLE_S:
                return
            self._spans.append(self._num_bytes * 8 / (now - self._since))
            self._since, self._num_bytes = now, 0
            while len(self._samples) > 1 and now - self._samples[0][0] > MEMORY_S:
                self._samples.popleft()
            if len(self._spans) < NUM_SPANS and self._samples:
                return
            self._has_told = len(self._spans) == NUM_SPANS
            mean_bps = sum(self._spans) / len(self._spans)
            while self._samples and self._samples[-1][1] <= mean_bps:
                self._samples.pop()
            self._samples.append((now, mean_bps))

    @property
    def rate_bps(self) -> float | None:
        with self._lock:
            return self._samples[0][1] if self._samples else None
