"""Fits a PathModel to a table of packets, and reports what the table cannot show.

    least delay       the smallest round trip
    capacity          "peak": the largest rate of acknowledgements (as iBoxNet); "pairs": from packets sent back to
                      back, whose delays differ by the time of one packet on the link, where enough of them agree;
                      "auto": pairs where it is clearly more than the peak or flows compete, otherwise the peak
    buffer            the queue that packets met just before others were lost
    cross traffic     by conservation: while the queue was busy, the bytes that arrived are those that left plus the
                      growth of the queue; "auto" also finds out whether it reacts to the sender (`elastic`)

Simulates nothing over a network and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atlas.weather.cell import Floats, packet_rtts
from atlas.weather.conservation import inflow, queue_floor_ns
from atlas.weather.elastic import competing_flows
from atlas.weather.packets import LOST, Ints, PacketTable, bad
from atlas.weather.path_model import MAX_WINDOWS, WINDOW_NS, PathModel
from atlas.weather.routes import route_pieces

Method = Literal["constant", "peak", "pairs", "auto"]
MIN_SPAN_S = 5.0
"""Of a table, at least: its last fifth must have several windows."""
HELD_OUT = 0.2
"""The last share of the rows, which the constants are not fitted on."""
BUSY_SHARE = 0.1
"""A window counts as seen if the queue was busy for this share of it."""
PEAK_NS = 100_000_000
"""Over which the peak rate is the mean."""
WHOLE = 0.8
"""Acknowledgements that span at least this share of PEAK_NS give a rate; shorter bursts would exaggerate it."""
BACK_TO_BACK = 10
"""Packets are back to back if they arrive this many times further apart than they were sent."""
MIN_PAIRS, AGREEING = 100, 0.15
"""Back-to-back packets that are needed, and how far their quartiles may be apart, relative to the median."""
CLEARLY_MORE = 1.25
"""By which factor the capacity of pairs must exceed the peak rate to replace it. Below it both predict other senders
almost equally well, and each is better than the other for some."""
GAP_NS = 2_000_000_000
"""If nothing was sent for longer than this, the windows between are left out of the recording."""
MAX_SPAN_DAYS = MAX_WINDOWS * WINDOW_NS // (86_400 * 10**9)
"""Of a table: as many windows as a `.path` file may have."""
REORDERED = 0.05
"""If a larger share of packets overtook others, the path is not first in, first out."""
FULL_PERCENTILE = 90
"""Of the queues met before losses: some packets are lost for other reasons, with a short queue."""
MOST_CROSS = 2
"""Of the capacity: cross traffic of a window, at most. More is an error of short busy times."""
BUFFER_MARGIN = 1.05
"""A packet that arrived must not be lost in the prediction because the buffer was estimated a little too small."""
LEAST_VARIATION = 0.005
"""If the standard deviation of delay is a smaller share of its mean, there is no variance to explain."""
MIN_FLIGHTS, MAX_FLIGHTS, STEADY = 20, 20_000, 1.2
"""Packets that are needed, and used, to judge what the sender had in flight. It was limited by a window if the 95th
percentile is below this multiple of the median."""


@dataclass(frozen=True)
class PathFit:
    """A fitted path, how well it fits, and warnings."""

    model: PathModel
    explained: float | None
    """Share of the variance of delay in the held-out last fifth, one window ahead. None: no delay varied there."""
    followed: float | None
    """The same with each window's own cross traffic: how well the cell describes the path."""
    warnings: list[str] = field(default_factory=list)


def learn(table: PacketTable, method: Method = "auto") -> PathFit:
    """Constants of the first four fifths, cross traffic of all, figures of the last fifth."""
    require_usable(table)
    pieces = route_pieces(table)
    warnings = _piece_warnings(table, pieces)
    table = table.part(*pieces[-1])
    cut = int(len(table.sent_ns) * (1 - HELD_OUT))
    train, test = table.part(0, cut), table.part(cut, len(table.sent_ns))
    if method == "auto":
        model = _chosen(table)
        method = "pairs" if model.method == "pairs" else "peak"
    else:
        model = _with_method(table, method)
    constants = _constants(train, method)
    explained, followed = (_explained(constants, test, ahead=ahead) for ahead in (True, False))
    warnings += _limits(table, model)
    if followed is not None and followed < 0:
        warnings.append(
            "the model predicts the held-out rows worse than their mean delay does: record more, at a higher rate"
        )
    return PathFit(model, explained, followed, warnings)


def _with_method(table: PacketTable, method: Method) -> PathModel:
    found = _constants(table, method)
    return found if method == "constant" else with_cross(found, table)


def _chosen(table: PacketTable) -> PathModel:
    """Competing flows where there are signs of them; otherwise the peak's model unless it is clearly wrong."""
    pairs, peak = _with_method(table, "pairs"), _with_method(table, "peak")
    if rivals := competing_flows(table, pairs):
        return replace(pairs, rivals=rivals)
    return pairs if pairs.capacity_bps > CLEARLY_MORE * peak.capacity_bps else peak


def require_usable(table: PacketTable) -> None:
    """The rules that need the whole table."""
    num, where = len(table.sent_ns), table.where
    if num < 2:
        raise bad(where, "rows", num, "a path needs at least two packets", "Record for longer")
    if table.span_s < MIN_SPAN_S:
        raise bad(where, "rows", f"{table.span_s:.3g} s", f"must cover at least {MIN_SPAN_S:g} s", "Record for longer")
    if table.span_s > MAX_SPAN_DAYS * 86_400:
        remedy = "Remove older parts of the table, or rows whose time is wrong"
        raise bad(
            where, "rows", f"{table.span_s / 86_400:.3g} days", f"must cover at most {MAX_SPAN_DAYS} days", remedy
        )
    arrived = ~table.lost
    if (num_arrived := int(arrived.sum())) < 2:
        rule = (
            "every packet was lost: nothing arrived" if not num_arrived else "only one packet arrived, two are needed"
        )
        raise bad(where, "rtt_ns", "lost", rule, "Check that the path is up")
    at_ns = table.sent_ns[arrived] + table.rtt_ns[arrived]
    overtook = float((np.diff(at_ns) < 0).mean()) if len(at_ns) > 1 else 0.0
    if overtook > REORDERED:
        rule = f"{100 * overtook:.0f} % of packets overtook others: the path is not first in, first out"
        raise bad(where, "rows", None, rule, "Record a single path: one node pair, no load balancing per packet")


def _piece_warnings(table: PacketTable, pieces: list[tuple[int, int]]) -> list[str]:
    said = []
    if table.num_rows > len(table.sent_ns):
        said.append(f"{table.num_rows:,} rows: only the newest {len(table.sent_ns):,} are used")
    num_rows = max(table.num_rows, len(table.sent_ns))
    for before, after in pairwise(pieces):
        old, least_ms = _with_method(table.part(*before), "peak"), _least_ns(table.part(*after)) / 1e6
        row = num_rows - len(table.sent_ns) + before[1]
        said.append(
            f"row {row:,} of {num_rows:,}: the route changed: the shortest round trip went from "
            f"{old.rtt_ns / 1e6:.1f} to {least_ms:.1f} ms and stayed. The rows before it are fitted separately ("
            f"{old.capacity_bps / 1e6:.4g} Mbit/s, cross traffic {100 * old.mean_share:.0f} %); the file has the "
            "model of the rows after it. To keep the older route, remove the rows after it"
        )
    arrived = table.rtt_ns[~table.lost] + table.sent_ns[~table.lost]
    if (overtook := int((np.diff(arrived) < 0).sum())) > 0:
        said.append(f"{overtook:,} packets overtook others; the model keeps the order of sending")
    return said


def _least_ns(table: PacketTable) -> int:
    return int(table.rtt_ns[~table.lost].min(initial=2**62))


# ---- constants -----------------------------------------------------------------------------------------------------
def _constants(table: PacketTable, method: Method) -> PathModel:
    """Capacity, least round trip and buffer; no cross traffic yet."""
    arrived = ~table.lost
    sent, size, rtt = table.sent_ns[arrived], table.num_bytes[arrived], table.rtt_ns[arrived]
    peak_bps = peak_rate_bps(sent + rtt, size)
    pairs_bps = pair_rate_bps(sent, size, rtt) if method == "pairs" else None
    mean_bps = float(size.sum()) * 8e9 / max(1, int((sent + rtt).max() - (sent + rtt).min()))
    capacity = mean_bps if method == "constant" else max(pairs_bps or 0.0, peak_bps)
    idle = bool(np.percentile(rtt - rtt.min(), 99) < queue_floor_ns(float(rtt.min())))
    # The least round trip excludes a packet's own time on the link. Without a queue that time is not known.
    least_ns = max(1.0, float((rtt if idle else rtt - size * (8e9 / capacity)).min()))
    queue_bytes = np.maximum(0.0, (rtt - least_ns) * (capacity / 8e9))
    full = _before_losses(table, queue_bytes)
    buffer_bytes = full if full is not None else float(queue_bytes.max())
    none = np.zeros(1)
    return PathModel(
        capacity_bps=capacity,
        rtt_ns=least_ns,
        buffer_bytes=max(buffer_bytes, float(size.max())),
        cross_bps=none,
        known=none > 0,
        start_ns=int(table.sent_ns[0]),
        capacity_is_bound=idle,
        buffer_is_bound=full is None,
        method=method,
    )


def peak_rate_bps(at_ns: Ints, num_bytes: Ints) -> float:
    """The largest rate of acknowledgements in any tenth of a second."""
    order = np.argsort(at_ns, kind="stable")
    at, total = at_ns[order], np.concatenate([[0], np.cumsum(num_bytes[order])])
    behind = np.searchsorted(at, at + PEAK_NS, side="right")
    # The packet that opens the interval left the link before it.
    span_ns = np.maximum(at[behind - 1] - at, 1)
    carried = total[behind] - total[np.arange(len(at)) + 1]
    whole = span_ns >= PEAK_NS * WHOLE
    if not whole.any():
        return float(total[-1]) * 8e9 / max(1, int(at[-1] - at[0]))
    return float((carried[whole] * 8e9 / span_ns[whole]).max())


def pair_rate_bps(sent: Ints, size: Ints, rtt: Ints) -> float | None:
    """Of packets sent back to back: the second one's bytes over the spacing of arrivals. None where they disagree."""
    if len(sent) < 2:
        return None
    apart_ns, spaced_ns, later = np.diff(sent), np.diff(sent + rtt), size[1:]
    close = (spaced_ns > 0) & (apart_ns * BACK_TO_BACK < spaced_ns)
    rates = later[close] * 8e9 / spaced_ns[close]
    if len(rates) < MIN_PAIRS:
        return None
    low, middle, high = np.percentile(rates, [25, 50, 75])
    return float(middle) if high - low <= AGREEING * middle else None


def _before_losses(table: PacketTable, queue_bytes: Floats) -> float | None:
    """The queue that the last packet before each loss met, at FULL_PERCENTILE; None without losses."""
    lost = np.flatnonzero(table.lost)
    index = np.cumsum(~table.lost) - 1
    before = index[lost]
    before = before[before >= 0]
    return float(np.percentile(queue_bytes[before], FULL_PERCENTILE)) if len(before) else None


# ---- cross traffic -------------------------------------------------------------------------------------------------
def window_of(table: PacketTable, start_ns: int) -> Ints:
    """When a packet reached the queue is taken as when it was sent: the way there is part of the least round trip."""
    return (table.sent_ns - start_ns) // WINDOW_NS


def with_cross(model: PathModel, table: PacketTable) -> PathModel:
    """The model with the cross traffic of every window, by conservation."""
    start_ns, arrived, seen = int(table.sent_ns[0]), ~table.lost, inflow(table, model)
    num = int((table.sent_ns[-1] - start_ns) // WINDOW_NS) + 1
    window = (seen.end_ns - start_ns) // WINDOW_NS
    busy_ns = np.bincount(window, np.where(seen.busy, seen.length_ns, 0), minlength=num)
    crossed = np.bincount(window, np.maximum(0.0, seen.num_bytes), minlength=num)
    own = np.bincount(window_of(table, start_ns)[arrived], table.num_bytes[arrived], minlength=num)
    own_bps = own * (8e9 / WINDOW_NS)
    known = busy_ns >= BUSY_SHARE * WINDOW_NS
    cross = np.zeros(num)
    cross[known] = crossed[known] * 8e9 / busy_ns[known]
    cross = np.where(known, np.minimum(cross, MOST_CROSS * model.capacity_bps), 0.0)
    filled = _held(cross, known)
    left = np.maximum(0.0, model.capacity_bps - own_bps)  # an idle queue bounds it from above
    cross = np.where(known, cross, np.minimum(filled, left))
    return replace(model, cross_bps=cross, known=known, start_ns=start_ns, gap=_gaps(table, start_ns, num))


def _gaps(table: PacketTable, start_ns: int, num: int) -> NDArray[np.bool_] | None:
    """Windows in which nothing was sent, between packets that are far apart."""
    window, found = window_of(table, start_ns), np.zeros(num, np.bool_)
    for k in np.flatnonzero(np.diff(table.sent_ns) > GAP_NS).tolist():
        found[int(window[k]) + 1 : int(window[k + 1])] = True
    return found if found.any() else None


def _held(values: Floats, known: NDArray[np.bool_]) -> Floats:
    """Windows that were not seen repeat the last one that was."""
    last = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return np.where(last >= 0, values[np.maximum(last, 0)], 0.0)


# ---- judging -------------------------------------------------------------------------------------------------------
def predicted_rtts(model: PathModel, table: PacketTable, *, ahead: bool = False) -> Ints:
    """The cell's round trips of a table's packets under the cross traffic of its own windows, or (`ahead`) of the
    window before. The queue at the start of every window is what was seen."""
    found = with_cross(model, table)
    cross = np.concatenate([[0.0], found.cross_bps[:-1]]) if ahead else found.cross_bps
    window = window_of(table, found.start_ns)
    rtts = np.empty(len(window), np.int64)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(window)) + 1, [len(window)]])
    seen = np.where(table.lost, 0, table.rtt_ns)
    per_ns = model.capacity_bps / 8e9
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        queue = max(0.0, (float(seen[first]) - model.rtt_ns) * per_ns - float(table.num_bytes[first]))
        rtts[first:end] = packet_rtts(
            table.sent_ns[first:end],
            table.num_bytes[first:end],
            np.full(end - first, cross[window[first]]),
            capacity_bps=model.capacity_bps,
            rtt_ns=model.rtt_ns,
            buffer_bytes=model.buffer_bytes * BUFFER_MARGIN,
            first_queue_bytes=queue,
        )
    return rtts


def _explained(model: PathModel, table: PacketTable, *, ahead: bool) -> float | None:
    if len(table.sent_ns) < 2 or table.lost.all():
        return None
    if model.method == "constant":
        return 0.0
    rtts = predicted_rtts(model, table, ahead=ahead)
    both = ~table.lost & (rtts != LOST)
    true = table.rtt_ns[both].astype(np.float64)
    if len(true) < 2 or true.std() < LEAST_VARIATION * true.mean():
        return None
    return 1.0 - float(((rtts[both] - true) ** 2).mean() / true.var())


def _limits(table: PacketTable, model: PathModel) -> list[str]:
    """Warnings: what these packets cannot show."""
    said = []
    if model.capacity_is_bound:
        flight = _in_flight(table)
        steady = len(flight) > MIN_FLIGHTS and np.percentile(flight, 95) < STEADY * np.median(flight)
        held = f"its TCP window or its own rate limited it to {np.median(flight) / 1e3:.0f} KB in flight"
        why = held if steady else "no queue was ever seen"
        said.append(
            f"the sender never filled the path ({why}): the capacity and the buffer are only known to be at least "
            "this, and cross traffic was not visible, so the model has none. To see more, fill the path with "
            "`atlas wan probe --record`, or send more at once"
        )
    elif not model.known.any() and model.method != "constant":
        said.append("the queue was never busy for long enough: the model has no cross traffic. Record at a higher rate")
    if model.buffer_is_bound and not model.capacity_is_bound:
        said.append("no packet was lost: the buffer is only known to be at least this. A faster sender would fill it")
    return said


def _in_flight(table: PacketTable) -> Floats:
    """Bytes in flight when each packet was sent, of up to MAX_FLIGHTS packets."""
    arrived = ~table.lost
    sent, size, rtt = (
        table.sent_ns[arrived][-MAX_FLIGHTS:],
        table.num_bytes[arrived][-MAX_FLIGHTS:],
        table.rtt_ns[arrived][-MAX_FLIGHTS:],
    )
    total = np.cumsum(size)
    done = np.searchsorted(np.maximum.accumulate(sent + rtt), sent, side="right")
    acked = np.concatenate([[0], total])[done]
    flight: Floats = (total - acked).astype(np.float64)
    return flight[len(sent) // 10 :]
