"""Reference settings: the same cell with its slow boundaries at latencies and loads from a fixed grid.

A search at the job's own latency and bandwidth finds orders that a search at a neighbouring value misses, and then
less latency or more bandwidth can look worse. So orders are searched at grid points only, and then priced at the
job's own values. A setting uses the points of its own grid cell and of every worse cell that has a lower bound below
the best order so far. The result of a worse link is rarely below the bound of the cell in which its order was found.
So if it could be faster, those points are among those used here, and one order takes no longer on better links: a
better link hardly ever gives a slower result. Grid steps are in units of the slowest stage's work, which no link
changes.

Memory is the third direction: `tighter_limits` are fixed limits below the setting's own. An order that fits one of them
fits the setting too. Knows no order and no search.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.cost.table import FAIR, PRIVATE, TURNS, Costs, LinkCost, lower_bound
from atlas.ir.program import Ints, Kind, Layout, Memory
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
    *sorted((Move(i, j) for i in range(4) for j in range(4)), key=sum),
    *(Move(*axis) for far in (4, 6, 9, 13) for axis in ((far, 0), (0, far))),
)
"""From a grid cell to its points, for a search with many tries."""
NEAR = (Move(), Move(0, 1), Move(1, 0))
"""The same for a search with few tries."""
REACHES = ((288, WIDE, 120), (72, NEAR, 6), (36, NEAR, 3), (0, NEAR[:1], 1))
"""Tries of a search, the points of a cell, and how many points are used at most, the nearest. A point with fewer than
12 tries is not worth having. Few settings have more than 120 points that are worth a look."""
RUNGS = 16
"""Of the ladder of memory limits, evenly from none to all microbatches."""
SLACK = 5e-4
"""A cell or a limit whose bound is within this share of the best order so far is not worth a look."""


class Grid:
    """The grid around one setting. Cells are counted in steps from the setting's own, worse ones up."""

    def __init__(
        self, setting: Setting, budget: int, sharings: Sequence[bool], best_ns: float, most: int | None = None
    ) -> None:
        """`most`: use only the nearest points, this many."""
        self.setting = setting
        self.best_ns = best_ns
        """Of the fastest order so far, closed; whoever searches the points lowers it."""
        self._moves, reach = next((moves, reach) for least, moves, reach in REACHES if budget >= least)
        self._most = min(reach, most or reach)
        self._tries = max(1, budget // len(self._moves))
        self._sharings = [sharing for sharing in sharings if not sharing or setting.turns is not None]

    def points(self) -> Iterator[Setting]:
        """The points that are used, each once, each with the same number of tries wherever it is used."""
        seen: set[tuple[bytes, ...]] = set()
        for cell, bound_ns in self._cells():
            for move in self._moves:
                point = self._point(Move(cell.latency + move.latency, cell.load + move.load))
                if (key := prices(point)) in seen:
                    continue
                if len(seen) >= self._most or not is_worthwhile(bound_ns, self.best_ns):
                    break
                seen.add(key)
                yield point
            if len(seen) >= self._most:
                return

    def _cells(self) -> Iterator[tuple[Move, int]]:
        """The setting's own cell and worse ones, nearest first, each with its bound, as long as it is worthwhile."""
        ended: list[Move] = []
        for far in count():
            found = False
            for load in range(far + 1):
                cell = Move(far - load, load)
                if any(cell.latency >= end.latency and cell.load >= end.load for end in ended):
                    continue  # a bound only grows with latency and load
                if is_worthwhile(bound_ns := self._bound_ns(cell), self.best_ns):
                    found = True
                    yield cell, bound_ns
                else:
                    ended.append(cell)
            if not found:
                return

    def _point(self, move: Move) -> Setting:
        apart = _at_grid(self.setting, False, move)
        turns = None if self.setting.turns is None else _at_grid(self.setting, True, move)
        return replace(self.setting, apart=apart, turns=turns, budget=self._tries)

    def _bound_ns(self, cell: Move) -> int:
        """No order is faster on any link of a cell that is not better than the setting's own."""
        setting, scale = self.setting, _scale(self.setting)
        latency = max(1.0, scale.latency_ns(cell) / max(1, scale.most_latency_ns))
        load = max(1.0, scale.load_ns(cell) / max(1, scale.most_load_ns))
        worse = [
            replace(
                costs,
                work_ns=np.where(scale.slow, costs.work_ns * load, costs.work_ns).astype(np.int64),
                latency_ns=np.where(scale.slow, costs.latency_ns * latency, costs.latency_ns).astype(np.int64),
            )
            for costs in map(setting.costs_of_sharing, self._sharings)
        ]
        return _bound_ns(setting, worse)


def _bound_ns(setting: Setting, either: Sequence[Costs]) -> int:
    """No order within the setting's memory is faster at any of these costs."""
    num_mb, memory, again = setting.layout.num_microbatches, setting.memory, setting.recompute
    return min(lower_bound(costs, num_mb, memory, recompute=again, closing=True).ns for costs in either)


def tighter_limits(setting: Setting, best_ns: float, most: int) -> list[Setting]:
    """The setting with less memory, tightest first: the tightest `most` limits at which an order may be faster than
    `best_ns`. The limits are in microbatches, on a ladder that does not depend on the setting's own limit."""
    forward, again = setting.memory.acquire[Kind.F], setting.memory.acquire[Kind.R]
    num_mb = setting.layout.num_microbatches
    if not forward or setting.memory.release[Kind.I]:
        return []
    again = -(-again // forward) * forward  # in whole forwards: the exact ratio depends a little on the own limit
    acquire, release = list(setting.memory.acquire), list(setting.memory.release)
    acquire[Kind.R], release[Kind.B], release[Kind.W] = again, forward + again, forward + again
    either = [setting.apart, *([] if setting.turns is None else [setting.turns])]

    def limited(held: int) -> Setting:
        return replace(setting, memory=Memory(held * forward + again, tuple(acquire), tuple(release)))

    step = -(-num_mb // RUNGS)
    own = min(num_mb, (setting.memory.cap - again) // forward)
    ladder = range(step, own + 1, step)
    first = bisect_left(ladder, True, key=lambda held: is_worthwhile(_bound_ns(limited(held), either), best_ns))
    return [limited(held) for held in ladder[first : first + most]]


def is_worthwhile(bound_ns: int, best_ns: float) -> bool:
    return bound_ns < best_ns * (1 - SLACK)


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


@dataclass(frozen=True, eq=False)
class Scale:
    """Where a setting is on the grid."""

    slow: Flags
    """[b]"""
    unit_ns: float
    """The slowest stage's work."""
    most_latency_ns: int
    most_load_ns: int
    """Of the slowest boundary, without turns."""

    def latency_ns(self, move: Move) -> int:
        return _snapped(self.most_latency_ns, self.unit_ns, LATENCY_STEP, move.latency)

    def load_ns(self, move: Move) -> int:
        return _snapped(self.most_load_ns, self.unit_ns, LOAD_STEP, move.load)


def _scale(setting: Setting) -> Scale:
    slow, costs = slow_boundaries(setting.layout).astype(bool), setting.apart
    stage_ns = costs.compute_ns[0]
    again = stage_ns[:, Kind.R] * setting.recompute
    return Scale(
        slow=slow,
        unit_ns=max(1.0, float((stage_ns[:, Kind.F] + again + stage_ns[:, Kind.B]).max())),
        most_latency_ns=int(costs.latency_ns[:, :, slow].max(initial=0)),
        most_load_ns=int(_alone_ns(costs)[:, :, slow].max(initial=0)),
    )


def _at_grid(setting: Setting, sharing: bool, move: Move) -> Costs:
    """The costs with their slowest boundary at a grid point, reached from the one at or below it, and the other
    boundaries in proportion. One scale serves with turns and without: two would cross a grid line one after the other,
    and a slightly worse link would use a point that no better one uses."""
    costs, scale = setting.costs_of_sharing(sharing), _scale(setting)
    load = _scaled(_alone_ns(costs), scale.most_load_ns, scale.load_ns(move))
    # What turns add to the latency is time inside the datacenters, which the latency of a path does not change.
    relay_ns = np.round((costs.latency_ns - setting.apart.latency_ns) / scale.unit_ns, 3) * scale.unit_ns
    latency = _scaled(setting.apart.latency_ns, scale.most_latency_ns, scale.latency_ns(move))
    latency += np.rint(relay_ns).astype(np.int64)
    quantum_ns = max((link.quantum_ns for link in costs.links if link.policy == TURNS), default=0)
    links, channel = _links(setting.layout, scale.slow, sharing, quantum_ns)
    return replace(
        costs,
        links=links,
        channel_link=channel,
        work_ns=np.where(scale.slow, load, costs.work_ns),
        latency_ns=np.where(scale.slow, latency, costs.latency_ns),
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
