"""What TCP gets out of a long path: one connection is limited by its window, many by the pair's cap.

Pure arithmetic; knows no sockets (`atlas.wan`) and no jobs.
"""

from __future__ import annotations

import math


def stream_bps(window_bytes: float, latency_s: float, pair_bps: float = math.inf) -> float:
    """Rate of one connection: a window every round trip, at most the cap of the node pair. Latency is one way."""
    return pair_bps if latency_s <= 0 else min(pair_bps, 8.0 * window_bytes / (2.0 * latency_s))


def many_bps(window_bytes: float, latency_s: float, pair_bps: float, num_streams: int | None = None) -> float:
    """Rate of `num_streams` connections between one node pair; left out, of as many as it takes: the cap."""
    if num_streams is None:
        return pair_bps
    return min(pair_bps, num_streams * stream_bps(window_bytes, latency_s))


def streams_to_fill(window_bytes: float, latency_s: float, pair_bps: float) -> int:
    """The fewest connections that reach the cap of a node pair."""
    return max(1, math.ceil(pair_bps / stream_bps(window_bytes, latency_s, pair_bps)))
