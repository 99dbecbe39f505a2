"""The state of the proxy emulator: trunks, links between node pairs, connections and their two flows.

Only state and arithmetic: when bytes leave their link, when they are due, when the window opens again. `loop` moves the
bytes. A byte is read from its sender when its link and its window have room, leaves the link at `depart`, is delivered
at `due` = depart + latency, and leaves the window one latency later, when its acknowledgement would be back.
"""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from atlas.wan.emulator.paths import PathSpec
from atlas.weather.draw import LEAST_SHARE, queue_delays_ns
from atlas.weather.path_model import WINDOW_NS

LOOKAHEAD_NS = 1_000_000
"""How far ahead of a link the proxy reads. All of it queues before what comes next, so it is short."""
CATCH_UP_NS = 20_000_000
"""If the loop wakes late, links make up for at most this much; a longer gap is lost and counts as lateness."""
CHUNK_S = 0.002
"""Time on the link that one read may take, so that connections and pairs share it fairly."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1024, 128 * 1024
"""Bounds of one read."""
RECEIVE_BUFFER_S = 0.01
"""What the proxy buffers for a sender: the loop may be late by this and the link stays busy."""
MIN_BUFFER_BYTES, MAX_BUFFER_BYTES = 64 * 1024, 512 * 1024
"""Bounds of that buffer."""
UNLIMITED_BPS = 1e12
"""Stands for the rate of a path without a cap."""


class DelayedBytes(NamedTuple):
    """Bytes in transit. Without data: the sender closed its end."""

    due_ns: int
    data: bytes | memoryview
    ack_ns: int
    """When the window opens again, if the receiver accepts them in time."""
    num_bytes: int


class TrunkDirection:
    """One direction of a trunk. A path without a trunk has an unlimited one of its own."""

    __slots__ = ("free_ns", "links", "ns_per_byte", "paused")

    def __init__(self, bps: float | None) -> None:
        self.ns_per_byte = 8e9 / bps if bps else 0.0
        self.free_ns = 0.0
        self.links: deque[LinkDirection] = deque()
        """Links with something to send. They send one chunk in turn, so that node pairs share fairly."""
        self.paused = False


class LinkDirection:
    """One direction between two nodes: what all its connections share."""

    def __init__(self, path: PathSpec, trunk: TrunkDirection, cross: tuple[float, ...] = ()) -> None:
        self.trunk = trunk
        self.cross, self.cross_since_ns = cross, time.monotonic_ns()
        # A path without `queue_bytes` has no queue.
        self.cross_late_ns = queue_delays_ns(cross, (path.queue_bytes or 0) * 8e9 / (path.pair_bps or UNLIMITED_BPS))
        self.free_ns = 0.0
        self.ready: deque[Flow] = deque()
        """Flows with bytes to read, in turn."""
        self.queued = self.paused = False
        self.num_bytes = self.num_pieces = 0
        self.shape(path)

    def shape(self, path: PathSpec) -> None:
        """Applies new figures. Bytes in transit keep the old ones."""
        self.latency_ns = round(path.latency_s * 1e9)
        self.jitter_ns = path.jitter_s * 1e9
        self.ns_per_byte = 8e9 / path.pair_bps if path.pair_bps else 0.0
        rate = path.rate_bps or UNLIMITED_BPS
        self.receive_buffer_bytes = _within(rate / 8 * RECEIVE_BUFFER_S, MIN_BUFFER_BYTES, MAX_BUFFER_BYTES)
        self.window_bytes = path.window_bytes or path.unlimited_window_bytes(2 * RECEIVE_BUFFER_S)
        self.chunk_bytes = _within(rate / 8 * CHUNK_S, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
        self.chunk_bytes = min(self.chunk_bytes, max(1, self.window_bytes // 4))

    def crossed(self, at_ns: float) -> tuple[float, float]:
        """What cross traffic does to a sender at a moment: the factor by which bytes take longer (a sender keeps at
        least 2 % of the rate), and the delay of cross traffic's own queue in ns."""
        if not self.cross:
            return 1.0, 0.0
        k = int(max(0.0, at_ns - self.cross_since_ns) // WINDOW_NS) % len(self.cross)
        return 1 / max(LEAST_SHARE, 1 - self.cross[k]), self.cross_late_ns[k]


def _within(value: float, least: int, most: int) -> int:
    return max(least, min(most, round(value)))


@dataclass(eq=False, slots=True)
class Flow:
    """One direction of one connection."""

    connection: ProxiedConnection
    link: LinkDirection
    source: socket.socket
    sink: socket.socket
    out: deque[DelayedBytes] = field(default_factory=deque)
    acks: deque[tuple[int, int]] = field(default_factory=deque)
    """When bytes leave the window, and how many."""
    in_flight_bytes: int = 0
    peak_bytes: int = 0
    last_due_ns: int = 0
    since_ns: int = 0
    readable: bool = False
    queued: bool = False
    ended: bool = False
    waiting: bool = False
    """The window is full."""
    armed: bool = False
    """The loop's heap has an entry for the head of `out`."""
    held: bool = False
    """The receiver does not accept what is due. This does not count as lateness of the emulator."""

    def window_left_bytes(self, now_ns: int) -> int:
        acks = self.acks
        while acks and acks[0][0] <= now_ns:
            self.in_flight_bytes -= acks.popleft()[1]
        return self.link.window_bytes - self.in_flight_bytes

    def accept(self, data: bytes, now_ns: int) -> DelayedBytes:
        """Puts bytes on the link and computes when they are due. A loop that is late does not slow the link down."""
        link, num_bytes = self.link, len(data)
        earliest = max(self.since_ns, now_ns - CATCH_UP_NS)
        trunk = link.trunk
        begin_ns = max(link.free_ns, earliest)
        slowdown, late_ns = link.crossed(begin_ns)
        byte_ns, trunk_byte_ns = link.ns_per_byte * slowdown, trunk.ns_per_byte * slowdown
        link.free_ns = begin_ns + num_bytes * byte_ns
        trunk.free_ns = max(trunk.free_ns, earliest) + num_bytes * trunk_byte_ns
        depart_ns = max(link.free_ns, trunk.free_ns)
        jitter_ns = random.random() * link.jitter_ns if link.jitter_ns else 0.0
        due_ns = max(self.last_due_ns, int(depart_ns + link.latency_ns + late_ns + jitter_ns))
        self.last_due_ns = due_ns
        # A chunk stands for many packets: the first was acknowledged while the last was still on the link.
        ack_ns = due_ns + link.latency_ns - int(num_bytes * max(byte_ns, trunk_byte_ns))
        self.in_flight_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.in_flight_bytes)
        link.num_bytes += num_bytes
        link.num_pieces += 1
        return DelayedBytes(due_ns, data, ack_ns, num_bytes)


class ProxiedConnection:
    """Two sockets and the flows between them."""

    def __init__(
        self, number: int, near: socket.socket, far: socket.socket, there: LinkDirection, back: LinkDirection
    ) -> None:
        self.number, self.near, self.far = number, near, far
        self.there, self.back = Flow(self, there, near, far), Flow(self, back, far, near)
        self.connected = self.dead = self.stalled = False

    @property
    def flows(self) -> tuple[Flow, Flow]:
        return self.there, self.back
