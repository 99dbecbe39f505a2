"""How many streams a channel gets, and whether they have threads of their own, so that the threads of a node do not
grow with the number of its peers.

A node has a number of streams with threads for each kind of channel, divided among the channels of that kind. Where
there are more channels than that, a channel has one stream, and a few threads serve all of them (`shared_threads`).
Knows numbers only; the caller holds a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum

from atlas.wan.congestion.tuning import NEAR_STREAMS


class ChannelKind(Enum):
    NEAR = "in the datacenter"
    FAR = "between datacenters"
    MESH = "in the datacenter, to all workers of one stage"
    LIGHT = "small messages only"


LIMITS = {ChannelKind.NEAR: 32, ChannelKind.FAR: 48, ChannelKind.MESH: 16, ChannelKind.LIGHT: 16}
"""Streams with threads of their own, two each. 48 are four channels of twelve: both boundaries of a stage, tied
embeddings and one other group of pipelines. A mesh has a limit of its own, so that the many channels of gradient sums
leave threads to activations."""
INBOUND_LIMITS = {ChannelKind.NEAR: 48, ChannelKind.FAR: 64}
"""Streams of peers with a thread of their own. The receiver does not know which are light or of a mesh."""


class StreamBudget:
    """Of one endpoint."""

    def __init__(self, max_streams: int) -> None:
        self._wanted = {
            ChannelKind.NEAR: min(NEAR_STREAMS, max_streams),
            ChannelKind.FAR: max_streams,
            ChannelKind.MESH: min(NEAR_STREAMS, max_streams),
            ChannelKind.LIGHT: 1,
        }
        self._expected, self._opened, self._used = (Counter[ChannelKind]() for _ in range(3))

    def expect(self, channels: Mapping[ChannelKind, int]) -> None:
        """So many channels will be opened. Without this, the first ones get more streams than later ones."""
        self._expected = Counter(channels)

    def outgoing(self, kind: ChannelKind) -> int:
        """How many streams with threads of their own a channel gets that is being opened; 0: one without."""
        self._opened[kind] += 1
        limit = max(LIMITS[kind], self._wanted[kind])
        share = limit // max(self._expected[kind], self._opened[kind])
        num_streams = max(0, min(self._wanted[kind], share, limit - self._used[kind]))
        self._used[kind] += num_streams
        return num_streams
