"""The namespace emulator's compiled loop: reads packets from TUN devices, keeps them in a ring per link until they are
due, and writes them to the device of their destination. Two system calls and one copy a packet, no allocation.

A link is one direction between two nodes, kept as a virtual clock: a packet departs when those before it have departed,
and is dropped when they fill the queue. Only payload counts on the link, so rates are goodput. Cross traffic joins the
queue as a fluid (`weather.cell` has the same rule); competing TCP flows join it packet by packet (`rivals`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from atlas.jit import kept, njit
from atlas.wan.emulator.lateness import BIN_NS, NUM_BINS
from atlas.wan.emulator.netdev import VNET_HDR_BYTES
from atlas.wan.emulator.rivals import advance_rivals
from atlas.weather.path_model import WINDOW_NS

# Columns of the links' table of floats and of their table of integers.
LATENCY_NS, JITTER_NS, NS_PER_BYTE, FREE_NS, QUEUE_BYTES, LOSS, CROSS_SINCE, CROSS_AT, NUM_FLOATS = range(9)
TRUNK, DST, BASE, SIZE, HEAD, TAIL, USED, LAST_DUE, OPEN, NUM_BYTES, NUM_PACKETS, DROPPED, LOST = range(13)
CROSS, CROSS_END, RIVALS, RIVALS_END, SEGMENT_BYTES, NUM_INTS = range(13, 19)
# Columns of the trunks' table.
TRUNK_NS_PER_BYTE, TRUNK_FREE_NS, TRUNK_QUEUE_BYTES, NUM_TRUNK_FLOATS = range(4)

RECORD_BYTES = 16
"""Precedes each packet in a ring: when it is due, and its length (-1: the ring starts over)."""
MAX_PACKET_BYTES = 65_536 + 64
"""The largest GSO packet and its headers."""
MIN_COST_BYTES = 40
"""What an acknowledgement costs on the link: its TCP/IP header."""
BATCH = 64
"""Packets read from one node, or written to one, before the others have their turn."""
PERIOD_NS, MAX_WAIT_NS = 100_000, 100_000_000
"""Shortest and longest time between two rounds. Each round interrupts a node; the lateness that results is counted."""
NET = (10, 99)
"""Addresses are 10.99.x.y, inside the namespaces only; x.y is the node's number plus one."""

_read: Any = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write: Any = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))
_copy: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_ppoll: Any = types.ExternalFunction("ppoll", types.int32(types.int64, types.int64, types.int64, types.int64))


class ForwardTables(NamedTuple):
    """What the loop works on."""

    link_of: NDArray[np.int32]
    """[source, destination]: the link, or -1."""
    floats: NDArray[np.float64]
    ints: NDArray[np.int64]
    trunks: NDArray[np.float64]
    memory: NDArray[np.uint8]
    """Of all rings."""
    words: NDArray[np.int64]
    """The same memory."""
    cross: NDArray[np.float64]
    rivals: tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]
    seen: NDArray[np.int64]
    num_seen: NDArray[np.int64]


@njit
def _now_ns(spec: Any) -> Any:
    _clock(1, spec.ctypes.data)
    return spec[0] * 1_000_000_000 + spec[1]


@njit
def _cost_bytes(packet: Any, num_bytes: int) -> Any:
    """What a packet costs on its link: its payload."""
    ip = VNET_HDR_BYTES
    header_bytes = (packet[ip] & 15) * 4
    if packet[ip + 9] == 6:
        header_bytes += (packet[ip + header_bytes + 12] >> 4) * 4
    elif packet[ip + 9] == 17:
        header_bytes += 8
    return max(num_bytes - ip - header_bytes, MIN_COST_BYTES)


@njit
def _destination(packet: Any, num_bytes: int, num_nodes: int) -> Any:
    """The node that a packet is addressed to, or -1."""
    ip = VNET_HDR_BYTES
    if num_bytes < ip + 40 or packet[ip] >> 4 != 4 or packet[ip + 16] != NET[0] or packet[ip + 17] != NET[1]:
        return -1
    node = packet[ip + 18] * 256 + packet[ip + 19] - 1
    return node if 0 <= node < num_nodes else -1


@njit
def _add_cross(row: Any, first: int, end: int, cross: Any, now_ns: int) -> None:
    """Lets cross traffic join the link's queue, and the queue drain, up to now. `cross`: shares of the rate."""
    at = row[CROSS_AT]
    most = row[QUEUE_BYTES] * row[NS_PER_BYTE]
    backlog = max(row[FREE_NS] - at, 0.0)
    while at < now_ns:
        window = int((at - row[CROSS_SINCE]) // WINDOW_NS)
        until = min(float(now_ns), row[CROSS_SINCE] + (window + 1) * WINDOW_NS)
        backlog += (cross[first + window % (end - first)] - 1.0) * (until - at)
        backlog = min(max(backlog, 0.0), most)
        at = until
    row[FREE_NS], row[CROSS_AT] = now_ns + backlog, now_ns


@njit
def _add_rivals(link: int, floats: Any, ints: Any, rivals: Any, now_ns: int) -> None:
    """Lets the competing flows of a link, if it has some, send and react up to now."""
    row, first, end = floats[link], ints[link, RIVALS], ints[link, RIVALS_END]
    if end > first and row[NS_PER_BYTE] > 0:
        state, count, ring = rivals[0][first:end], rivals[1][first:end], rivals[2][first:end]
        figures = row[NS_PER_BYTE], row[QUEUE_BYTES], 2 * row[LATENCY_NS], ints[link, SEGMENT_BYTES]
        row[FREE_NS] = advance_rivals(state, count, ring, row[FREE_NS], now_ns, *figures)


@njit
def _due_ns(
    link: int, floats: Any, ints: Any, trunks: Any, cross: Any, rivals: Any, cost_bytes: int, now_ns: int
) -> Any:
    """Occupies the link and returns when the packet is due, or -1 if the queue is full."""
    row = floats[link]
    if ints[link, CROSS_END] > ints[link, CROSS] and row[NS_PER_BYTE] > 0:
        _add_cross(row, ints[link, CROSS], ints[link, CROSS_END], cross, now_ns)
    _add_rivals(link, floats, ints, rivals, now_ns)
    start_ns = max(row[FREE_NS], now_ns)
    depart_ns = start_ns + cost_bytes * row[NS_PER_BYTE]
    if row[NS_PER_BYTE] > 0 and (start_ns - now_ns) / row[NS_PER_BYTE] + cost_bytes > row[QUEUE_BYTES]:
        return -1
    trunk = ints[link, TRUNK]
    if trunk >= 0:
        shared = trunks[trunk]
        trunk_start_ns = max(shared[TRUNK_FREE_NS], now_ns)
        if (trunk_start_ns - now_ns) / shared[TRUNK_NS_PER_BYTE] + cost_bytes > shared[TRUNK_QUEUE_BYTES]:
            return -1
        shared[TRUNK_FREE_NS] = trunk_start_ns + cost_bytes * shared[TRUNK_NS_PER_BYTE]
        row[FREE_NS] = depart_ns
        depart_ns = max(depart_ns, shared[TRUNK_FREE_NS])
    else:
        row[FREE_NS] = depart_ns
    due_ns = depart_ns + row[LATENCY_NS]
    if row[JITTER_NS] > 0:
        due_ns += np.random.random() * row[JITTER_NS]
    due = max(np.int64(due_ns), ints[link, LAST_DUE])
    ints[link, LAST_DUE] = due
    return due


@njit
def _store(link: int, ints: Any, memory: Any, words: Any, packet: Any, num_bytes: int, due_ns: int) -> bool:
    """Appends a packet to the ring. False if the ring is full."""
    row = ints[link]
    need = RECORD_BYTES + (num_bytes + 15) // 16 * 16
    if row[USED] == 0:
        row[HEAD] = row[TAIL] = 0  # use memory that is in the cache
    skip = row[SIZE] - row[TAIL] if row[TAIL] + need > row[SIZE] else 0
    if row[USED] + skip + need > row[SIZE]:
        return False
    if skip:
        words[(row[BASE] + row[TAIL]) // 8 + 1] = -1
        row[USED] += skip
        row[TAIL] = 0
    at = row[BASE] + row[TAIL]
    words[at // 8] = due_ns
    words[at // 8 + 1] = num_bytes
    _copy(memory.ctypes.data + at + RECORD_BYTES, packet.ctypes.data, num_bytes)
    row[TAIL] = (row[TAIL] + need) % row[SIZE]
    row[USED] += need
    return True


@njit
def _read_packets(node: int, fd: int, tables: ForwardTables, packet: Any, spec: Any) -> int:
    """Reads what a node sends, at most a batch, and returns the number of packets."""
    link_of, floats, ints, trunks, memory, words, cross, rivals, seen, num_seen = tables
    for count in range(BATCH):
        num_bytes = _read(fd, packet.ctypes.data, MAX_PACKET_BYTES)
        if num_bytes <= 0:
            return count
        dst = _destination(packet, num_bytes, link_of.shape[0])
        link = link_of[node, dst] if dst >= 0 else -1
        if link < 0:
            continue
        row = ints[link]
        if not row[OPEN] or (floats[link, LOSS] > 0 and np.random.random() < floats[link, LOSS]):
            row[LOST] += 1
            continue
        cost_bytes = _cost_bytes(packet, num_bytes)
        now_ns = _now_ns(spec)
        due_ns = _due_ns(link, floats, ints, trunks, cross, rivals, cost_bytes, now_ns)
        if num_seen[0] < seen.shape[0]:
            seen[num_seen[0]] = now_ns, link, cost_bytes, due_ns
            num_seen[0] += 1
        if due_ns < 0 or not _store(link, ints, memory, words, packet, num_bytes, due_ns):
            row[DROPPED] += 1
            continue
        row[NUM_BYTES] += cost_bytes
        row[NUM_PACKETS] += 1
    return BATCH


@njit
def _write_packets(fds: Any, ints: Any, memory: Any, words: Any, bins: Any, worst: Any, spec: Any) -> Any:
    """Writes what is due and returns when the next packet is due."""
    next_ns = np.int64(1) << 62
    for link in range(ints.shape[0]):
        row = ints[link]
        count = 0
        while row[USED] > 0:
            at = row[BASE] + row[HEAD]
            num_bytes = words[at // 8 + 1]
            if num_bytes < 0:
                row[USED] -= row[SIZE] - row[HEAD]
                row[HEAD] = 0
                continue
            due_ns = words[at // 8]
            now_ns = _now_ns(spec)
            if due_ns > now_ns or count == BATCH:
                next_ns = min(next_ns, due_ns)
                break
            _write(fds[row[DST]], memory.ctypes.data + at + RECORD_BYTES, num_bytes)
            late_ns = now_ns - due_ns
            bins[min(late_ns // BIN_NS, NUM_BINS - 1)] += 1
            worst[0] = max(worst[0], late_ns)
            need = RECORD_BYTES + (num_bytes + 15) // 16 * 16
            row[HEAD] = (row[HEAD] + need) % row[SIZE]
            row[USED] -= need
            count += 1
    return next_ns


@kept
def forward(
    fds: NDArray[np.int32],
    tables: ForwardTables,
    bins: NDArray[np.int64],
    worst: NDArray[np.int64],
    polls: NDArray[np.int32],
) -> None:
    """Forwards until the last of `polls`, the command socket, is readable. `polls` has rows of fd, events/revents."""
    num_nodes = fds.shape[0]
    _, floats, ints, _, memory, words, _, rivals, _, _ = tables
    packet = np.empty(MAX_PACKET_BYTES + 64, np.uint8)
    spec = np.zeros(2, np.int64)
    while True:
        begin_ns = _now_ns(spec)
        next_ns = _write_packets(fds, ints, memory, words, bins, worst, spec)
        rest_ns = begin_ns + PERIOD_NS - _now_ns(spec)
        if rest_ns > 0:
            spec[0], spec[1] = 0, rest_ns
            _ppoll(polls.ctypes.data, 0, spec.ctypes.data, 0)
        wait_ns = min(max(next_ns - _now_ns(spec), 0), MAX_WAIT_NS)
        spec[0], spec[1] = 0, wait_ns
        for i in range(num_nodes + 1):
            polls[i, 1] = 1
        _ppoll(polls.ctypes.data, num_nodes + 1, spec.ctypes.data, 0)
        for node in range(num_nodes):
            if polls[node, 1] >> 16:
                _read_packets(node, fds[node], tables, packet, spec)
        if rivals[0].shape[0]:  # bounds the work that is left for the next packet of an idle link
            for link in range(ints.shape[0]):
                _add_rivals(link, floats, ints, rivals, _now_ns(spec))
        if polls[num_nodes, 1] >> 16:
            return
