"""The state of the proxy emulator: trunks, the lanes of node pairs, connections and their two flows. Only state and
arithmetic: when a piece leaves its link, when it is due, when its window opens again. `loop.py` moves the bytes.

A byte's life: read from its sender when its link and its window have room, on the link until `depart`, delivered at
`due` = depart + latency, out of the window one latency later, when its acknowledgement would be back.
"""

from __future__ import annotations

import random
import socket
from collections import deque
from typing import NamedTuple

from atlas.wan.emulator.paths import LOOKAHEAD_S, STOCK_S, PathSpec

LOOKAHEAD_NS = round(LOOKAHEAD_S * 1e9)
CATCH_UP_NS = 20_000_000
"""A loop that wakes late still gives the link its due for this long back; a longer gap is lost, and told."""
CHUNK_S = 0.002
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1024, 128 * 1024


class DelayedBytes(NamedTuple):
    """Bytes on their way. No data: the sender closed its end."""

    due_ns: int
    data: bytes | memoryview
    ack_ns: int
    """When its window opens again, if the receiver takes it in time."""
    num_bytes: int


class TrunkDirection:
    """One way over a trunk; where a path has none, an unlimited one of its own."""

    __slots__ = ("free_ns", "lanes", "ns_per_byte", "paused")

    def __init__(self, bps: float | None) -> None:
        self.ns_per_byte = 8e9 / bps if bps else 0.0
        self.free_ns = 0.0
        self.lanes: deque[LinkDirection] = deque()
        """Those with something to send: each in its turn sends one chunk, so that pairs share fairly."""
        self.paused = False


class LinkDirection:
    """One way between two nodes: what all its connections share."""

    def __init__(self, path: PathSpec, trunk: TrunkDirection) -> None:
        self.trunk = trunk
        self.free_ns = 0.0
        self.ready: deque[Flow] = deque()
        """Flows with bytes to read, in turn."""
        self.queued = self.paused = False
        self.num_bytes = 0
        self.num_pieces = 0
        self.shape(path)

    def shape(self, path: PathSpec) -> None:
        """Takes on new figures; what is on its way keeps the old ones."""
        self.latency_ns = round(path.latency_s * 1e9)
        self.jitter_ns = path.jitter_s * 1e9
        self.window_bytes = path.flight_bytes
        self.ns_per_byte = 8e9 / path.pair_bps if path.pair_bps else 0.0
        rate = path.rate_bps or 1e12
        self.chunk_bytes = max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, round(rate / 8 * CHUNK_S)))
        self.chunk_bytes = min(self.chunk_bytes, max(1, self.window_bytes // 4))
        self.receive_buffer_bytes = max(64 * 1024, min(512 * 1024, round(rate / 8 * STOCK_S)))


class Flow:
    """One direction of one connection."""

    __slots__ = (
        "acks",
        "armed",
        "connection",
        "ended",
        "held",
        "in_flight_bytes",
        "lane",
        "last_due_ns",
        "out",
        "peak_bytes",
        "queued",
        "readable",
        "since_ns",
        "sink",
        "source",
        "waiting",
    )

    def __init__(
        self, connection: ProxiedConnection, lane: LinkDirection, source: socket.socket, sink: socket.socket
    ) -> None:
        self.connection, self.lane, self.source, self.sink = connection, lane, source, sink
        self.out: deque[DelayedBytes] = deque()
        self.acks: deque[tuple[int, int]] = deque()
        self.in_flight_bytes = self.peak_bytes = self.last_due_ns = self.since_ns = 0
        self.readable = self.queued = self.ended = self.waiting = False
        self.armed = False
        """The heap knows when the head of `out` is due."""
        self.held = False
        """The receiver does not take what is due: its fault, not our lateness."""

    def room_bytes(self, now_ns: int) -> int:
        """What the window still takes."""
        acks = self.acks
        while acks and acks[0][0] <= now_ns:
            self.in_flight_bytes -= acks.popleft()[1]
        return self.lane.window_bytes - self.in_flight_bytes

    def accept(self, data: bytes, now_ns: int) -> DelayedBytes:
        """Puts bytes on the link; when they are due. A loop that comes late does not slow the link down."""
        lane, num_bytes = self.lane, len(data)
        earliest = max(self.since_ns, now_ns - CATCH_UP_NS)
        trunk = lane.trunk
        lane.free_ns = max(lane.free_ns, earliest) + num_bytes * lane.ns_per_byte
        trunk.free_ns = max(trunk.free_ns, earliest) + num_bytes * trunk.ns_per_byte
        depart_ns = max(lane.free_ns, trunk.free_ns)
        jitter_ns = random.random() * lane.jitter_ns if lane.jitter_ns else 0.0
        due_ns = max(self.last_due_ns, int(depart_ns + lane.latency_ns + jitter_ns))
        self.last_due_ns = due_ns
        # A chunk stands for many packets: the first of them was acknowledged while the last was still on the link.
        ack_ns = due_ns + lane.latency_ns - int(num_bytes * max(lane.ns_per_byte, trunk.ns_per_byte))
        self.in_flight_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.in_flight_bytes)
        lane.num_bytes += num_bytes
        lane.num_pieces += 1
        return DelayedBytes(due_ns, data, ack_ns, num_bytes)


class ProxiedConnection:
    """Two sockets and what flows between them."""

    def __init__(
        self, number: int, near: socket.socket, far: socket.socket, there: LinkDirection, back: LinkDirection
    ) -> None:
        self.number, self.near, self.far = number, near, far
        self.there, self.back = Flow(self, there, near, far), Flow(self, back, far, near)
        self.connected = self.dead = self.stalled = False

    @property
    def flows(self) -> tuple[Flow, Flow]:
        return self.there, self.back
