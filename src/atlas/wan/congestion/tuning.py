"""How many streams, the pace of each, and the size of chunks, chosen from measurements.

A stream carries one window per round trip, so a long fast path needs several; more than needed slows bursts down. The
pace keeps the sum of the streams near what the path delivers. Knows numbers only.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from atlas.ir.program import chunk_bytes
from atlas.weather.tcp_window import STOCK_RMEM_BYTES, STOCK_WMEM_BYTES

NEAR_RTT_S = 0.002
"""With a shorter round trip, the peer is in the same datacenter: nothing is paced, and chunks are long."""
NEAR_STREAMS, LOSSY_STREAMS = 2, 6
"""On a near path two streams fill loopback. On a lossy path, while one recovers from a loss, the others send."""
SPARE = 1.5
"""Windows of streams over what fills the path."""
LOSSY = 3e-4
"""A path is lossy if this share of its bytes is retransmitted (the bench's path loses 5e-4)."""
NEAR_CHUNK_BYTES, NEAR_LEAST_BYTES = 4 << 20, 1 << 20
"""Chunks on a near path, and at the end of a message there: fewer system calls."""
MIN_CHUNK_BYTES, FAR_CHUNK_BYTES = 16 * 1024, 1 << 20
"""Bounds of a chunk on a long path, where it is one quantum of the link."""
LEAST_CHUNK_BYTES, FREE_CHUNK_BYTES = 64 * 1024, 256 * 1024
"""Chunks at the end of a message, and while the rate is not known."""
MIN_LOWAT_BYTES, MAX_LOWAT_BYTES, NEAR_LOWAT_BYTES = 32 * 1024, 256 * 1024, 512 * 1024
"""Unsent bytes in the kernel (TCP_NOTSENT_LOWAT). Without a bound, send buffers take everything and turns have no
effect; 128 to 256 KB were measured to suffice at 100 Mbit/s."""
HEADROOM, HEADROOM_ALONE = 2.0, 1.25
"""The pace of all streams together, or of a single one, over the known rate. One of several must not be held back; what
is in flight is bounded anyway. The pace only keeps a burst from leaving at once."""
MIN_WINDOW_BYTES = 1 << 17
"""Of a stream, whatever the kernel's limits are."""
LOSS_SPAN_S, ENOUGH_BYTES = 20.0, 16 << 20
"""Time over which losses are counted, and the bytes that are needed to judge."""
SAMPLE_S, NUM_SPANS = 0.05, 4
"""A rate is the mean of this many spans of this length: acknowledgements come in bunches."""
MEMORY_S = 20.0
"""How long the best rate counts."""


ROUND_TRIPS, MIN_ROUND_S = 1.1, 0.01
"""How long acknowledgements are collected before they are judged: a little more than a round trip, and long enough to
have several."""


def round_s(rtt_s: float) -> float:
    return max(ROUND_TRIPS * rtt_s, MIN_ROUND_S)


@dataclass(frozen=True)
class StreamChoice:
    """`pacing_bps` is per stream; None: not paced."""

    num_streams: int
    chunk_bytes: int
    lowat_bytes: int
    pacing_bps: float | None
    least_chunk_bytes: int = LEAST_CHUNK_BYTES
    """Chunks shrink to this towards the end of a message."""

    def with_streams(self, num_streams: int) -> StreamChoice:
        pacing_bps = self.pacing_bps and self.pacing_bps * self.num_streams / num_streams
        return replace(self, num_streams=num_streams, pacing_bps=pacing_bps)


@cache
def window_bytes() -> int:
    """What one stream can have in flight by this kernel's limits. The peer's are assumed to be the same."""
    try:
        rmem = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])
        wmem = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    except (OSError, IndexError, ValueError):
        rmem, wmem = STOCK_RMEM_BYTES, STOCK_WMEM_BYTES
    return max(MIN_WINDOW_BYTES, min(rmem // 2, wmem * 2 // 3))


def choose(rtt_s: float, rate_bps: float | None, max_streams: int, window: int, *, lossy: bool = False) -> StreamChoice:
    """While no rate is known, all streams run unpaced, to find it."""
    if rtt_s < NEAR_RTT_S:
        return StreamChoice(min(NEAR_STREAMS, max_streams), NEAR_CHUNK_BYTES, NEAR_LOWAT_BYTES, None, NEAR_LEAST_BYTES)
    if rate_bps is None:
        return StreamChoice(max_streams, FREE_CHUNK_BYTES, MAX_LOWAT_BYTES, None)
    needed = math.ceil(SPARE * rate_bps / 8 * rtt_s / window)
    num_streams = min(max_streams, max(LOSSY_STREAMS if lossy else 1, needed))
    # The quantum is the link's. Chunks of several streams share the link, so each takes longer.
    chunk = chunk_bytes(rate_bps * min(1.0, 2 / num_streams), MIN_CHUNK_BYTES, FAR_CHUNK_BYTES)
    lowat = max(MIN_LOWAT_BYTES, min(MAX_LOWAT_BYTES, chunk // num_streams))
    headroom = HEADROOM_ALONE if num_streams == 1 else HEADROOM
    return StreamChoice(num_streams, chunk, lowat, rate_bps * headroom / num_streams, min(chunk, LEAST_CHUNK_BYTES))


class LossWatch:
    """Whether a path loses packets, by what the kernel retransmitted in the last seconds. A warm-up overflows queues,
    so its losses do not count."""

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
    """What a path delivers while something waits for it: the best rate of the last seconds, from acknowledged bytes.

    After a loss, or on a busy host, acknowledgements come in bunches. So the rate is the mean of several consecutive
    spans; a shorter burst counts only if no rate is known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, float]] = deque()
        self._since: float | None = None
        self._num_bytes = 0
        self._spans: deque[float] = deque(maxlen=NUM_SPANS)
        self._has_measured = False

    def pause(self) -> None:
        """Nothing waits for the path any more: the time until the next acknowledgement does not count."""
        with self._lock:
            self._since = None
            self._spans.clear()

    def learn(self, rate_bps: float, now: float) -> None:
        """Sets the rate, after a warm-up or because the path has become slower. Earlier rates are forgotten."""
        with self._lock:
            self._samples = deque([(now, rate_bps)] if rate_bps else [])

    def raise_by(self, factor: float) -> None:
        """Raises the known rate, unless the last burst was long enough to measure it."""
        with self._lock:
            if not self._has_measured:
                self._samples = deque((when, factor * bps) for when, bps in self._samples)

    def acknowledged(self, num_bytes: int, now: float) -> float | None:
        """Returns the rate of a span that ends now."""
        with self._lock:
            if self._since is None:
                self._since, self._num_bytes, self._has_measured = now, 0, False
                return None
            self._num_bytes += num_bytes
            if now - self._since < SAMPLE_S:
                return None
            span_bps = self._num_bytes * 8 / (now - self._since)
            self._spans.append(span_bps)
            self._since, self._num_bytes = now, 0
            while len(self._samples) > 1 and now - self._samples[0][0] > MEMORY_S:
                self._samples.popleft()
            if len(self._spans) < NUM_SPANS and self._samples:
                return span_bps
            self._has_measured = len(self._spans) == NUM_SPANS
            mean_bps = sum(self._spans) / len(self._spans)
            while self._samples and self._samples[-1][1] <= mean_bps:
                self._samples.pop()
            self._samples.append((now, mean_bps))
            return span_bps

    @property
    def rate_bps(self) -> float | None:
        with self._lock:
            return self._samples[0][1] if self._samples else None
