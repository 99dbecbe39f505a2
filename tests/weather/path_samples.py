"""Packets of a sender over a path whose cross traffic is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from atlas.wan.emulator.rivals import RING, SEGMENT_BYTES, TAIL, Tables, advance_rivals, rival_tables, start_rivals
from atlas.weather.cell import packet_rtts
from atlas.weather.packets import LOST, PacketTable

CAPACITY_BPS, RTT_NS, BUFFER = 40e6, 40_000_000, 200_000


def cross_of(num_windows: int, share: float = 0.5) -> np.ndarray:
    """On and off by turns of a second."""
    return np.where(np.arange(num_windows) // 10 % 2 == 0, 0.0, share * CAPACITY_BPS)


def sampled(seconds: float = 20.0, rate_bps: float = 36e6, *, burst: int = 8, share: float = 0.5) -> PacketTable:
    """Bursts at a steady rate: the queue fills while cross traffic is on."""
    size = 1448
    gap_ns = burst * size * 8e9 / rate_bps
    starts = (np.arange(int(seconds * 1e9 / gap_ns)) * gap_ns).astype(np.int64)
    sent = 10**18 + np.repeat(starts, burst)
    sizes = np.full(len(sent), size)
    cross = cross_of(int(seconds * 10) + 1, share)[(sent - sent[0]) // 100_000_000]
    rtt = packet_rtts(sent, sizes, cross, capacity_bps=CAPACITY_BPS, rtt_ns=RTT_NS, buffer_bytes=BUFFER)
    return PacketTable("sample", sent, sizes, rtt, len(sent))


def part(flows: Tables, which: slice) -> Tables:
    floats, ints, ring = flows
    return floats[which], ints[which], ring[which]


def tcp_table(
    seconds: float, *, rivals: int = 0, share: float = 0.0, shares: np.ndarray | None = None, lead_s: float = 3.0
) -> PacketTable:
    """A simulated cubic sender beside flows that are `lead_s` ahead of it, or beside cross traffic that does not react:
    constant, or `shares` of the capacity by tenths of a second."""
    step_ns, byte_ns = 1_000_000, 8e9 / CAPACITY_BPS
    figures = (byte_ns, BUFFER, float(RTT_NS), SEGMENT_BYTES)
    flows, rows, free_ns, tail = rival_tables(rivals + 1), [], 0.0, 1
    start_rivals(flows, 0, RTT_NS)
    start_rivals(part(flows, slice(1)), round(lead_s * 1e9), RTT_NS)
    for now_ns in range(step_ns, round((lead_s + seconds) * 1e9), step_ns):
        share = share if shares is None else float(shares[now_ns // 100_000_000 % len(shares)])
        free_ns = min(max(free_ns, now_ns - step_ns) + share * step_ns, now_ns - step_ns + BUFFER * byte_ns)
        free_ns = advance_rivals(*flows, free_ns, now_ns, *figures)
        for k in range(tail, end := int(flows[1][0, TAIL])):
            sent_ns, back_ns = flows[2][0, k % RING].tolist()
            rows.append((10**18 + sent_ns, SEGMENT_BYTES, LOST if back_ns < 0 else back_ns - sent_ns))
        tail = end
    sent, size, rtt = np.array(rows, np.int64).T
    return PacketTable("tcp", sent, size, rtt, len(sent))


def written(table: PacketTable, path: Path) -> Path:
    rows = zip(table.sent_ns.tolist(), table.num_bytes.tolist(), table.rtt_ns.tolist(), strict=True)
    lines = [f"{a},{b},{'lost' if c == LOST else c}" for a, b, c in rows]
    path.write_text("\n".join(["sent_ns,bytes,rtt_ns", *lines]) + "\n")
    return path
