"""What every picture of a Timeline shares: which rows it has and in which order (workers by datacenter and, between two
datacenters, the WAN links that join them), and what an op, a wait or a transfer looks like and is called.

Hues follow Okabe and Ito, so that they stay apart for every common kind of colour blindness; waits are pale and
hatched, work is solid, so that the two differ without any hue. Knows no pixels and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atlas.ir.analysis import Cause, running_end, wan_links
from atlas.ir.program import Ints, Kind
from atlas.ir.timeline import Timeline, computed_once


# ---- rows ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class LinkRow:
    """Transfers of one link that do not overlap, by start. A link that serves several at once has several rows."""

    link: int
    number: int
    """Among the rows of this link."""
    transfers: Ints


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows under one heading: the workers of a datacenter, or the links between two."""

    name: str
    workers: tuple[int, ...] = ()
    link_rows: tuple[LinkRow, ...] = ()


@computed_once
def groups(timeline: Timeline) -> list[RowGroup]:
    """Datacenters in the order of the pipeline, each followed by the WAN links to those before it."""
    program = timeline.program
    dcs = list(dict.fromkeys(program.rank_dc))
    joined: dict[tuple[str, str], list[int]] = {}
    for link in wan_links(timeline).tolist():
        joined.setdefault(_ends(timeline, link, dcs), []).append(link)
    by_link = _link_rows(timeline)
    found: list[RowGroup] = []
    for dc in dcs:
        for ends, links in joined.items():
            if ends[1] == dc:
                rows = tuple(row for link in links for row in by_link[link])
                found.append(RowGroup(f"WAN {ends[0]} ↔ {ends[1]}", link_rows=rows))
        workers = tuple(w for w in range(program.num_workers) if program.worker_dc(w) == dc)
        found.append(RowGroup(dc, workers=workers))
    return found


def _ends(timeline: Timeline, link: int, dcs: list[str]) -> tuple[str, str]:
    """The two datacenters that a WAN link joins, in the order of the pipeline."""
    program = timeline.program
    crossing = np.flatnonzero((timeline.transfer_link == link) & program.transfer_crosses)
    boundary = program.transfer(int(crossing[0]))[2]
    pair = {program.rank_dc[program.stage_rank[boundary]], program.rank_dc[program.stage_rank[boundary + 1]]}
    first, second = sorted(pair, key=dcs.index)
    return first, second


def _link_rows(timeline: Timeline) -> dict[int, list[LinkRow]]:
    """By WAN link: its transfers, on as few rows as keep them from overlapping."""
    start, sent = timeline.transfer_start_ns, timeline.transfer_sent_ns
    wanted = np.isin(timeline.transfer_link, wan_links(timeline))
    known = np.flatnonzero(wanted & (timeline.program.transfer_src >= 0))
    order = known[np.lexsort((start[known], timeline.transfer_link[known]))]
    link = timeline.transfer_link[order].astype(np.int64)
    overlaps = np.zeros(len(order), np.bool_)
    if len(order):
        overlaps = start[order] < running_end(link, sent[order], int(start[order].min()))
    found: dict[int, list[LinkRow]] = {}
    bounds = np.flatnonzero(np.diff(link, prepend=-1, append=-1))
    for lo, hi in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        of, number = order[lo:hi], int(link[lo])
        row = _first_free(start[of], sent[of]) if overlaps[lo:hi].any() else np.zeros(hi - lo, np.int64)
        found[number] = [LinkRow(number, k, of[row == k]) for k in range(int(row.max()) + 1)]
    return found


def _first_free(start: Ints, end: Ints) -> Ints:
    """By span, sorted by start: the first row that is free."""
    free: list[int] = []
    rows = np.zeros(len(start), np.int64)
    for i, (begin, until) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        row = next((k for k, busy_until in enumerate(free) if busy_until <= begin), len(free))
        if row == len(free):
            free.append(until)
        else:
            free[row] = until
        rows[i] = row
    return rows


# ---- colours and words ---------------------------------------------------------------------------------------
class SpanStyle(NamedTuple):
    light: str
    dark: str
    label: str
    meaning: str


OPS: dict[Kind, SpanStyle] = {
    Kind.F: SpanStyle("#0072b2", "#3d9bd6", "F forward", "forward of one microbatch through one stage"),
    Kind.R: SpanStyle("#7fc4ea", "#8fd0f2", "R recompute", "recompute of activations that the forward did not keep"),
    Kind.B: SpanStyle("#e08a00", "#f0a53a", "B backward", "backward: gradients of the input and of the weights"),
    Kind.I: SpanStyle(
        "#f2b23a", "#f5c46b", "I input gradient", "the half of the backward that the previous stage waits for"
    ),
    Kind.W: SpanStyle(
        "#8c6d1f", "#b8963f", "W weight gradient", "the half of the backward that no other stage waits for"
    ),
    Kind.SYNC: SpanStyle("#9a86c4", "#8d78ba", "SYNC all-reduce", "gradients are summed over all pipelines"),
    Kind.NORM: SpanStyle("#b7a8d6", "#75639f", "NORM", "the global gradient norm, over all workers"),
    Kind.STEP: SpanStyle("#3a3f44", "#d5dade", "STEP optimizer", "the weights are updated"),
    Kind.P: SpanStyle("#009e73", "#2bbd93", "P prefill", "a slice of prefill, run inside a bubble"),
}

CAUSES: dict[Cause, SpanStyle] = {
    Cause.FILL: SpanStyle("#e3e6e9", "#343a41", "fill", "the run has begun, this worker's first op has not"),
    Cause.DRAIN: SpanStyle("#d3d8dc", "#424a53", "drain", "this worker is done, the run is not"),
    Cause.WAN: SpanStyle("#f7b8a4", "#8a3d26", "WAN", "its input is queued for, or on, a link between datacenters"),
    Cause.PEER: SpanStyle(
        "#f4edcb", "#4b4629", "peer", "its input is not computed yet, or moves inside the datacenter"
    ),
    Cause.SYNC: SpanStyle(
        "#d9cff0", "#453a66", "sync", "all-reduce, and the wait until all its workers have reached it"
    ),
}

WIRE: tuple[SpanStyle, SpanStyle] = (
    SpanStyle("#4f9bc9", "#5fa9d6", "activation on the WAN", "output of a forward, on its way to the next stage"),
    SpanStyle("#c48a3a", "#c9923f", "gradient on the WAN", "gradient, on its way back to the previous stage"),
)
"""By direction of traffic."""

STYLES: tuple[SpanStyle, ...] = (*OPS.values(), *CAUSES.values(), *WIRE)
"""By the code of a span."""
WAIT, SEND = len(OPS), len(OPS) + len(CAUSES)
"""Codes of spans: a Kind, WAIT + cause, or SEND + direction."""
