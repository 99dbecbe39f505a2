"""Does cross traffic react to the sender? A competing TCP flow does, other traffic does not.

A TCP flow that always has data never stops: cross traffic never falls to nearly nothing. Beside that, one of two signs
is needed. Each time a full queue has dropped packets, those flows that lost some slow down and the others do not, so
the ratio of cross traffic to the sender's own rate changes. Traffic that does not react keeps its rate, and so the
ratio, as long as the queue is busy. And if both slow down, the queue drains by more than the sender alone can cause,
who gives up 0.3 (CUBIC) or 0.5 (Reno) of what it has in flight.
"""

from __future__ import annotations

import numpy as np

from atlas.weather.cell import Floats
from atlas.weather.packets import Ints, PacketTable
from atlas.weather.path_model import MAX_RIVALS, WINDOW_NS, PathModel

NEARLY_FULL = 0.9
LEAST_SHARE, SMOOTH_WINDOWS = 0.15, 5
"""Of the capacity: cross traffic that falls below it for half a second (in a twentieth of the time) has stopped."""
LEAST_CHANGE, MIN_EVENTS = 0.11, 3
"""In the logarithm of the ratio, in the median over at least so many full queues. Simulated paths: at most 0.10 beside
traffic that does not react (and never stops), 0.12 and more beside a recorded cubic flow in 11 of 12 cases."""
SMALL_SHARE, CLEAR_CHANGE = 0.25, 0.4
"""Of the capacity: a sender with less cannot tell its rate well enough, so the change must be clear."""
LEAST_FALL, DRAINED = 0.6, 0.1
"""Of the queue, in units of what the sender has in flight, in the median; falls of less than a tenth of the buffer do
not count. Simulated paths: at most 0.46 beside traffic that does not react."""
ONE_FLOW = 3.0
"""A flow that was there first has up to this many times the rate of one that joins, for half a minute."""


def competing_flows(table: PacketTable, model: PathModel) -> int:
    """How many TCP flows the cross traffic behaves like; 0: it does not react, or too little was seen."""
    if model.capacity_is_bound or len(model.recorded_bps) < 2 * SMOOTH_WINDOWS:
        return 0
    share = model.recorded_bps / model.capacity_bps
    smooth = np.convolve(share, np.ones(SMOOTH_WINDOWS) / SMOOTH_WINDOWS, "valid")
    stops = float(np.percentile(smooth, 5)) < LEAST_SHARE
    small = 1.0 - float(share.mean()) < SMALL_SHARE
    changes, falls = np.abs(_changes(table, model)), _falls(table, model)
    changed = len(changes) >= MIN_EVENTS and float(np.median(changes)) >= (CLEAR_CHANGE if small else LEAST_CHANGE)
    fell = len(falls) >= MIN_EVENTS and float(np.median(falls)) >= LEAST_FALL
    if stops or not (changed or fell):
        return 0
    later = share[len(share) // 2 :]
    middle = int(np.flatnonzero(model.recorded)[len(share) // 2])
    own = table.num_bytes[~table.lost & (table.sent_ns - model.start_ns >= middle * WINDOW_NS)].sum()
    own_share = float(own) * 8e9 / (len(later) * WINDOW_NS * model.capacity_bps)
    return int(min(MAX_RIVALS, max(1, round(float(later.mean()) / max(own_share, 1e-3) / ONE_FLOW))))


def _changes(table: PacketTable, model: PathModel) -> Floats:
    """Of each moment at which a full queue begins to drain: the change of log(cross traffic / own rate)."""
    arrived = ~table.lost
    sent, size, rtt = table.sent_ns[arrived], table.num_bytes[arrived], table.rtt_ns[arrived]
    per_ns = model.capacity_bps / 8e9
    behind = np.maximum(0.0, (rtt - model.rtt_ns) * per_ns)
    before = np.maximum(0.0, behind - size)
    gap_ns = np.diff(sent)
    busy = (before[1:] > 0.005 * model.buffer_bytes) & (gap_ns < 5 * WINDOW_NS)
    crossed = np.cumsum(np.where(busy, before[1:] - behind[:-1] + per_ns * gap_ns, 0.0))
    busy_ns, own = np.cumsum(np.where(busy, gap_ns, 0)), np.cumsum(size)[1:]
    round_ns = model.rtt_ns + model.buffer_bytes / per_ns

    def log_ratio(at_ns: Ints, first: float, end: float) -> Floats:
        """Over a span given in round trips. NaN where the queue was empty for half of it."""
        edges = (at_ns + first * round_ns, at_ns + end * round_ns)
        i, j = (np.minimum(np.searchsorted(sent[1:], edge), len(own) - 1) for edge in edges)
        span = (busy_ns[j] - busy_ns[i]).astype(np.float64)
        floor = 0.02 * per_ns * span + 1e-9
        ratio = (np.maximum(0.0, crossed[j] - crossed[i]) + floor) / (own[j] - own[i] + floor)
        return np.where(span >= 0.5 * (end - first) * round_ns, np.log(ratio), np.nan)

    at_ns = _drains(sent, behind, model)
    change = log_ratio(at_ns, 1.0, 2.5) - log_ratio(at_ns, -1.5, 0.0)
    found: Floats = change[np.isfinite(change)]
    return found


def _falls(table: PacketTable, model: PathModel) -> Floats:
    """Of each such moment: by how much the queue falls within a round trip, over what the sender had in flight."""
    arrived = ~table.lost
    sent, size, rtt = table.sent_ns[arrived], table.num_bytes[arrived], table.rtt_ns[arrived]
    per_ns = model.capacity_bps / 8e9
    behind = np.maximum(0.0, (rtt - model.rtt_ns) * per_ns)
    round_ns = model.rtt_ns + model.buffer_bytes / per_ns
    total, found = np.concatenate([[0], np.cumsum(size)]), []
    for now_ns in _drains(sent, behind, model).tolist():
        before, now, after = np.searchsorted(sent, [now_ns - round_ns, now_ns, now_ns + round_ns]).tolist()
        fall = float(behind[now - 1] - behind[now:after].min())
        if fall >= DRAINED * model.buffer_bytes:
            found.append(fall / max(1.0, float(total[now] - total[before])))
    return np.array(found)


def _drains(sent: Ints, behind: Floats, model: PathModel) -> Ints:
    """Moments at which a full queue begins to drain, at least a round trip apart."""
    full = behind[1:] >= NEARLY_FULL * model.buffer_bytes
    round_ns = model.rtt_ns + model.buffer_bytes * 8e9 / model.capacity_bps
    return _apart(sent[1:][np.flatnonzero(full[:-1] & ~full[1:])], round_ns)


def _apart(at_ns: Ints, least_ns: float) -> Ints:
    """Moments that are at least so far apart."""
    kept, last = [], -np.inf
    for now in at_ns.tolist():
        if now - last > least_ns:
            kept.append(now)
            last = now
    return np.array(kept, np.int64)
