"""Route changes in a table of packets: moments at which the least round trip jumps and stays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from atlas.weather.cell import Floats
from atlas.weather.packets import PacketTable

STAYS_S = 5
"""Seconds before and after a jump in which the least round trip must be steady."""
JUMP, JUMP_NS = 0.1, 2_000_000
"""A jump is at least this share of the round trip, and this long."""


def route_pieces(table: PacketTable) -> list[tuple[int, int]]:
    """(first row, end) of the pieces between route changes."""
    second = (table.sent_ns - table.sent_ns[0]) // 1_000_000_000
    num = int(second[-1]) + 1
    least = np.full(num, np.inf)
    arrived = ~table.lost
    np.minimum.at(least, second[arrived], table.rtt_ns[arrived].astype(np.float64))
    cuts, last = [], 0
    for k in range(STAYS_S, num - STAYS_S + 1):
        before, after = least[max(last, k - STAYS_S) : k], least[k : k + STAYS_S]
        if len(before) < STAYS_S or not (np.isfinite(before).all() and np.isfinite(after).all()):
            continue
        jump = abs(float(np.median(after) - np.median(before)))
        steady = max(np.ptp(before), np.ptp(after)) < jump / 3
        # A queue that stands for seconds looks like a longer route until it drains: the old level must not return.
        level = np.median(before), np.median(after)
        if not steady or jump <= max(JUMP * float(before.min()), JUMP_NS):
            continue
        if _apart(least[last:k], level[1], jump) and _apart(least[k:], level[0], jump):
            cuts.append(int(np.searchsorted(second, k)))
            last = k
    edges = [0, *cuts, len(table.sent_ns)]
    return list(pairwise(edges))


def _apart(least: Floats, level: float, jump: float) -> bool:
    """Whether no second came near a level."""
    return bool((np.abs(least[np.isfinite(least)] - level) > jump / 2).all())
