"""Reference settings: the same cell with its slow boundaries at latencies and loads from a fixed grid.

A search at the job's own latency and bandwidth finds orders that a search at a neighbouring value misses, and then
less latency or more bandwidth can look worse. So orders are searched at grid points only, and then priced at the
job's own values. A setting uses its own grid cell and worse ones. What a worse setting uses is therefore nearly always
among what a better one uses, and one order takes no longer on better links. Grid steps are in units of the slowest
stage's work, which no link changes. Knows no order and no search.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.cost.table import FAIR, PRIVATE, TURNS, Costs, LinkCost
from atlas.ir.program import Ints, Kind, Layout
from atlas.schedules.setting import Setting

Flags = NDArray[np.bool_]


class Move(NamedTuple):
    """From a setting to a grid point that it uses: this many steps worse."""

    latency: int = 0
    load: int = 0


LATENCY_STEP, LOAD_STEP = 1.35, 1.25
SMALLEST = 1 / 16
"""Of the slowest stage's work: below the first step from here a grid point has no latency, or no load."""
WIDE = (
    *(Move(i, j) for i in range(4) for j in range(4)),
    *(Move(*axis) for far in (4, 6, 9, 13) for axis in ((far, 0), (0, far))),
)
"""For a search with many tries: all that the next worse settings use, and some far away."""
NEAR = (Move(), Move(0, 1), Move(1, 0))
"""For a search with few tries: a setting's own grid point and one step worse."""
MIN_TRIES = 12
"""A grid point with fewer tries is not worth having."""


def references(setting: Setting, budget: int) -> list[Setting]:
    """The grid points that a setting uses, each with its share of the budget. How many tries a point gets does not
    depend on how many of the points coincide: a point has the same orders wherever it is used."""
    moves = next((m for m in (WIDE, NEAR) if budget >= MIN_TRIES * len(m)), NEAR[:1])
    tries = max(1, budget // len(moves))
    found: dict[tuple[bytes, ...], Setting] = {}
    for move in moves:
        apart = _at_grid(setting, False, move)
        turns = None if setting.turns is None else _at_grid(setting, True, move)
        point = replace(setting, apart=apart, turns=turns, budget=tries)
        found.setdefault(prices(point), point)
    return list(found.values())


def prices(setting: Setting) -> tuple[bytes, ...]:
    """The prices in which the grid points of one cell differ."""
    both = [setting.apart, *([] if setting.turns is None else [setting.turns])]
    return tuple(
        array.tobytes()
        for costs in both
        for array in (costs.compute_ns, costs.work_ns, costs.before_ns, costs.latency_ns)
    )


def slow_boundaries(layout: Layout) -> Ints:
    """[b]: whether a boundary crosses between datacenters; where none does, all of them."""
    dcs = [layout.rank_dc[rank] for rank in layout.stage_rank]
    crosses = np.array([a != b for a, b in pairwise(dcs)], np.int64)
    return crosses if crosses.any() else np.ones_like(crosses)


def _at_grid(setting: Setting, sharing: bool, move: Move) -> Costs:
    """The costs with their slowest boundary at a grid point, reached from the one at or below it, and the other
    boundaries in proportion. One scale serves with turns and without: two would cross a grid line one after the other,
    and a slightly worse link would use a point that no better one uses."""
    costs, layout = setting.costs_of_sharing(sharing), setting.layout
    slow = slow_boundaries(layout).astype(bool)
    stage_ns = costs.compute_ns[0]
    again = stage_ns[:, Kind.R] * setting.recompute
    unit = max(1.0, float((stage_ns[:, Kind.F] + again + stage_ns[:, Kind.B]).max()))
    most_load = int(_alone_ns(setting.apart)[:, :, slow].max(initial=0))
    most_latency = int(setting.apart.latency_ns[:, :, slow].max(initial=0))
    load = _scaled(_alone_ns(costs), most_load, _snapped(most_load, unit, LOAD_STEP, move.load))
    latency = _scaled(costs.latency_ns, most_latency, _snapped(most_latency, unit, LATENCY_STEP, move.latency))
    quantum_ns = max((link.quantum_ns for link in costs.links if link.policy == TURNS), default=0)
    links, channel = _links(layout, slow, sharing, quantum_ns)
    return replace(
        costs,
        links=links,
        channel_link=channel,
        work_ns=np.where(slow, load, costs.work_ns),
        latency_ns=np.where(slow, latency, costs.latency_ns),
    )


def _scaled(ns: Ints, most_ns: int, wanted_ns: int) -> Ints:
    """With `most_ns` at `wanted_ns`. Proportions are rounded, so that neighbouring settings have the same."""
    share = np.round(ns / most_ns, 3) if most_ns else np.ones(ns.shape)
    return np.rint(share * wanted_ns).astype(np.int64)


def _alone_ns(costs: Costs) -> Ints:
    """[d, c, b]: what a transfer takes where every channel of its link sends at once."""
    work = costs.work_ns.astype(np.float64)
    for index, link in enumerate(costs.links):
        if link.policy == FAIR:
            members = costs.channel_link == index
            work[members] *= max(1.0, members.sum() / link.capacity)
    return np.rint(work).astype(np.int64)


def _snapped(ns: int, unit: float, step: float, worse: int) -> int:
    """The place at or below, then this many steps up; 0 below the first step."""
    place = max(0, math.floor(math.log(max(ns, 1) / (SMALLEST * unit)) / math.log(step) + 1e-9)) + worse
    return round(SMALLEST * unit * step**place) if place else 0


def _links(
    layout: Layout, slow: Flags, sharing: bool, quantum_ns: int
) -> tuple[tuple[LinkCost, ...], NDArray[np.int32]]:
    """Slow boundaries are shared in turns where pipelines share; every other channel has a link of its own."""
    channel = np.zeros((2, layout.num_pipelines, layout.num_stages - 1), np.int32)
    links: list[LinkCost] = []
    for direction, c, b in np.ndindex(channel.shape):
        if sharing and slow[b]:
            channel[direction, c, b] = channel[direction, 0, b] if c else len(links)
            if not c:
                links.append(LinkCost(f"{direction} {b}", TURNS, quantum_ns=quantum_ns))
        else:
            channel[direction, c, b] = len(links)
            links.append(LinkCost(f"{direction} {b} p{c}", PRIVATE))
    return tuple(links), channel
