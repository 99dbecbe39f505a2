"""Which rows a picture of a Timeline has, in which order: workers by datacenter and, between two datacenters, the
WAN links that join them. The trace, the page and the figure share it, so that they look alike.

Knows no pixels, no colours and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas.ir.analysis import wan_links
from atlas.ir.bubbles import running_end
from atlas.ir.program import Ints
from atlas.ir.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Lane:
    """Transfers of one link that do not overlap, by start. A link needs several when it serves several at once."""

    link: int
    lane: int
    transfers: Ints


@dataclass(frozen=True, eq=False)
class Group:
    """Rows under one heading: the workers of a datacenter, or the links between two."""

    name: str
    workers: tuple[int, ...] = ()
    lanes: tuple[Lane, ...] = ()


def groups(timeline: Timeline) -> list[Group]:
    """Datacenters in the order of the pipeline, each followed by the WAN links to those before it."""
    program = timeline.program
    dcs = list(dict.fromkeys(program.rank_dc))
    joined: dict[tuple[str, str], list[int]] = {}
    for link in wan_links(timeline).tolist():
        joined.setdefault(_ends(timeline, link, dcs), []).append(link)
    lanes = _lanes(timeline)
    found: list[Group] = []
    for dc in dcs:
        for ends, links in joined.items():
            if ends[1] == dc:
                rows = tuple(lane for link in links for lane in lanes[link])
                found.append(Group(f"WAN {ends[0]} ↔ {ends[1]}", lanes=rows))
        workers = tuple(w for w in range(program.num_workers) if program.worker_dc(w) == dc)
        found.append(Group(dc, workers=workers))
    return found


def _ends(timeline: Timeline, link: int, dcs: list[str]) -> tuple[str, str]:
    """The two datacenters that a WAN link joins, in the order of the pipeline."""
    program = timeline.program
    crossing = np.flatnonzero((timeline.transfer_link == link) & program.transfer_crosses)
    boundary = program.transfer(int(crossing[0]))[2]
    pair = {program.rank_dc[program.stage_rank[boundary]], program.rank_dc[program.stage_rank[boundary + 1]]}
    first, second = sorted(pair, key=dcs.index)
    return first, second


def _lanes(timeline: Timeline) -> dict[int, list[Lane]]:
    """By WAN link: its transfers dealt to as few lanes as keep them from overlapping."""
    start, sent = timeline.transfer_start_ns, timeline.transfer_sent_ns
    wanted = np.isin(timeline.transfer_link, wan_links(timeline))
    known = np.flatnonzero(wanted & (timeline.program.transfer_src >= 0))
    order = known[np.lexsort((start[known], timeline.transfer_link[known]))]
    link = timeline.transfer_link[order].astype(np.int64)
    overlaps = np.zeros(len(order), np.bool_)
    if len(order):
        overlaps = start[order] < running_end(link, sent[order], int(start[order].min()))
    found: dict[int, list[Lane]] = {}
    bounds = np.flatnonzero(np.diff(link, prepend=-1, append=-1))
    for lo, hi in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        of, number = order[lo:hi], int(link[lo])
        lane = _deal(start[of], sent[of]) if overlaps[lo:hi].any() else np.zeros(hi - lo, np.int64)
        found[number] = [Lane(number, k, of[lane == k]) for k in range(int(lane.max()) + 1)]
    return found


def _deal(start: Ints, end: Ints) -> Ints:
    """The first lane that is free, for spans by start."""
    free: list[int] = []
    dealt = np.zeros(len(start), np.int64)
    for i, (begin, until) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        lane = next((k for k, busy_until in enumerate(free) if busy_until <= begin), len(free))
        if lane == len(free):
            free.append(until)
        else:
            free[lane] = until
        dealt[i] = lane
    return dealt
