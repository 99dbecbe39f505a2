"""Does cross traffic react to the sender? A competing TCP flow does, other traffic does not.

A TCP flow that always has data never stops: cross traffic never falls to nearly nothing. And it sends when its
acknowledgements arrive. So its packets have the same pattern in each round trip, and cross traffic is an echo of
itself, one round trip later. Slow changes of any traffic look like an echo too; they are removed first.
"""

from __future__ import annotations

import numpy as np

from atlas.weather.cell import Floats
from atlas.weather.conservation import inflow
from atlas.weather.packets import PacketTable
from atlas.weather.path_model import MAX_RIVALS, WINDOW_NS, PathModel

LEAST_SHARE, SMOOTH_WINDOWS, STOPPED_PERCENTILE = 0.15, 5, 5
"""Of the capacity: cross traffic that falls below it for half a second (in a twentieth of the time) has stopped."""
LEAST_OWN = 1e-3
"""Of the capacity: the sender's own share, at least, where flows are counted by it."""
PARTS = 8
"""Of a round trip: the steps in which the pattern is seen."""
LEAST_ECHO, LEAST_PATTERN, MIN_STEPS = 0.7, 0.08, 200
"""The correlation of the pattern with itself one round trip later, its size (root mean square, of the capacity), and
the steps with a busy queue. Simulated and recorded paths: 0.78 to 0.99 and 0.12 to 0.44 beside a cubic flow; at most
0.4 and 0.07 beside traffic that does not react, 0.58 where the table has blocks of 8 packets."""
BUSY_STEP = 0.9
"""Of a step: its pattern is known if the queue was busy for this share of it."""
ONE_FLOW = 3.0
"""A flow that was there first has up to this many times the rate of one that joins, for half a minute."""


def competing_flows(table: PacketTable, model: PathModel) -> int:
    """How many TCP flows the cross traffic behaves like; 0: it does not react, or too little was seen."""
    if model.capacity_is_bound or len(model.recorded_bps) < 2 * SMOOTH_WINDOWS:
        return 0
    share = model.recorded_bps / model.capacity_bps
    smooth = np.convolve(share, np.ones(SMOOTH_WINDOWS) / SMOOTH_WINDOWS, "valid")
    if float(np.percentile(smooth, STOPPED_PERCENTILE)) < LEAST_SHARE or not has_echo(table, model):
        return 0
    later = share[len(share) // 2 :]
    middle = int(np.flatnonzero(model.recorded)[len(share) // 2])
    own = table.num_bytes[~table.lost & (table.sent_ns - model.start_ns >= middle * WINDOW_NS)].sum()
    own_share = float(own) * 8e9 / (len(later) * WINDOW_NS * model.capacity_bps)
    return int(min(MAX_RIVALS, max(1, round(float(later.mean()) / max(own_share, LEAST_OWN) / ONE_FLOW))))


def has_echo(table: PacketTable, model: PathModel) -> bool:
    """Whether the pattern of cross traffic within a round trip comes again one round trip later."""
    arrived = ~table.lost
    rtt_ns, cross = table.rtt_ns[arrived].astype(np.float64), inflow(table, model)
    step_ns = float(np.median(rtt_ns)) / PARTS
    start_ns = float(cross.end_ns[0])
    ends_ns = cross.end_ns - start_ns
    at_ns = np.arange(0.0, float(ends_ns[-1]) - 2 * PARTS * step_ns, step_ns)
    if len(at_ns) < MIN_STEPS:
        return False
    crossed, busy_ns = np.cumsum(cross.num_bytes), np.cumsum(np.where(cross.busy, cross.length_ns, 0.0))
    trip_ns = np.interp(at_ns, ends_ns, rtt_ns[1:])

    def rise(total: Floats, from_ns: Floats) -> Floats:
        return np.asarray(np.interp(from_ns + step_ns, ends_ns, total) - np.interp(from_ns, ends_ns, total), np.float64)

    def pattern(from_ns: Floats) -> Floats:
        """Cross traffic of each step, over the capacity, less its mean over the round trip around it."""
        level = rise(crossed, from_ns) * 8e9 / (step_ns * model.capacity_bps)
        return np.asarray(level - np.convolve(level, np.ones(PARTS) / PARTS, "same"), np.float64)

    busy = np.minimum(rise(busy_ns, at_ns), rise(busy_ns, at_ns + trip_ns)) > BUSY_STEP * step_ns
    kept = np.convolve(busy, np.ones(PARTS), "same") > PARTS - 0.5  # no step of the round trip is unknown
    if kept.sum() < MIN_STEPS:
        return False
    now, later = pattern(at_ns)[kept], pattern(at_ns + trip_ns)[kept]
    size, size_later = (float(np.sqrt((one**2).mean())) for one in (now, later))
    return min(size, size_later) >= LEAST_PATTERN and float((now * later).mean()) >= LEAST_ECHO * size * size_later
