"""The placements that the search tries: which cluster holds which replicas of each stage.

Columns are pipelines (replica j of every stage). Columns are assigned to teams; a team is a chain of clusters that its
columns fill stage after stage, so one team of two clusters is pipeline parallelism across them, two teams of one are
data parallelism across them, and teams that overlap share what is left. Many outlines at once. Knows GPUs and tp, no
times.

Within a team, cell i x columns + j is the replica of stage i in column j. Clusters of a chain hold runs of cells, so a
placement is where each of them ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from typing import NamedTuple

import numpy as np

from atlas.sailor.lower_bounds import FEW, ONE_WAY, OVERLAP, RINGS, TEAMS, Outlines
from atlas.sailor.tables import Bools, Ints, SailorTables

Row = tuple[tuple[int, int], ...]
"""One stage: (cluster, number of columns), in column order."""
TeamStructure = tuple[tuple[int, ...], ...]
"""The clusters of each team, in the order in which its columns fill them."""

REFERENCE_BYTES = 1e8
"""Links are compared by a gradient ring of this size."""
NUM_EARLY = 5
"""Places at which a single chain of whole stages leaves its first cluster."""


def team_structures(tables: SailorTables) -> list[TeamStructure]:
    """Ways to group clusters into teams, each team in order."""
    found: dict[TeamStructure, None] = {}
    for order in _orders(tables):
        for size in range(1, len(order) + 1):
            teams = tuple(tuple(order[i : i + size]) for i in range(0, len(order), size))
            found[teams] = None
            if size == 1 < len(order):
                found[(*teams, order)] = None  # whole pipelines everywhere, and more from what is left over
        if len(order) > 1 and len(tables.clusters) <= FEW:
            found[((order[0],), order)] = None
            found[((order[-1],), order)] = None
    return list(found)


def _orders(tables: SailorTables) -> list[tuple[int, ...]]:
    """Good orders of some clusters: every one where there are few. Where there are many, the beginnings of orders by
    nearest neighbour, by size, and with the slowest link as fast as can be; and the last kind for well connected parts.
    """
    ids = range(len(tables.clusters))
    if len(ids) <= FEW:
        return [order for k in range(1, len(ids) + 1) for order in permutations(ids, k)]
    largest = sorted(ids, key=lambda c: -tables.cluster_gpus[c])
    chain, left = largest[:1], set(largest[1:])
    while left:
        here = chain[-1]
        chain.append(
            min(sorted(left), key=lambda c: (tables.sync_s(here, c, REFERENCE_BYTES, 2), -tables.cluster_gpus[c]))
        )
        left.remove(chain[-1])
    *parts, whole = _paths(tables)
    beginnings = [
        order[:k] for order in (tuple(chain), tuple(largest), whole, whole[::-1]) for k in range(1, len(ids) + 1)
    ]
    return list(dict.fromkeys([*beginnings, *parts]))


def _paths(tables: SailorTables) -> list[tuple[int, ...]]:
    """Two paths become one at their ends where the link is best, until there is one of all clusters."""

    def link_s(a: int, b: int) -> float:
        return max(tables.sync_s(a, b, REFERENCE_BYTES, 2), tables.sync_s(b, a, REFERENCE_BYTES, 2))

    paths: list[tuple[int, ...]] = [(cluster,) for cluster in range(len(tables.clusters))]
    found = []
    while len(paths) > 1:
        ways = [
            (link_s(p[-1], q[0]), p + q, a, b)
            for a, b in combinations(paths, 2)
            for p in (a, a[::-1])
            for q in (b, b[::-1])
        ]
        _, path, *old = min(ways)
        paths = [*(other for other in paths if other not in old), path]
        found.append(path)
    return found


@dataclass(frozen=True)
class ClusterCells:
    """The cells that a cluster holds in a team, for many outlines."""

    cluster: int
    team: int
    columns: Ints
    """Of the team."""
    start: Ints
    end: Ints
    """Its cells."""


@dataclass(frozen=True)
class FilledStructure:
    """A team structure filled with many outlines, one at a time."""

    index: Ints
    """Which of the outlines could be placed."""
    outlines: Outlines
    parts: tuple[ClusterCells, ...]
    used: tuple[tuple[int, Ints], ...]
    """(cluster, GPUs in use)."""

    def take(self, which: Ints) -> FilledStructure:
        parts = tuple(
            ClusterCells(s.cluster, s.team, s.columns[which], s.start[which], s.end[which]) for s in self.parts
        )
        used = tuple((cluster, gpus[which]) for cluster, gpus in self.used)
        return FilledStructure(self.index[which], self.outlines.take(which), parts, used)

    def rows(self, case: int) -> tuple[Row, ...]:
        """One of them, stage by stage."""
        found = []
        for stage in range(int(self.outlines.num_stages[case])):
            row: list[tuple[int, int]] = []
            for part in self.parts:
                columns = int(part.columns[case])
                start, end = (
                    max(int(part.start[case]), stage * columns),
                    min(int(part.end[case]), (stage + 1) * columns),
                )
                if end <= start:
                    continue
                if row and row[-1][0] == part.cluster:
                    row[-1] = (part.cluster, row[-1][1] + end - start)
                else:
                    row.append((part.cluster, end - start))
            found.append(tuple(row))
        return tuple(found)


def fillings(teams: TeamStructure) -> list[tuple[int | None, int]]:
    """Ways to fill a structure, and how each of them connects clusters.

    None lets stages straddle clusters; a number keeps them whole. (A straddling fill that happens to straddle nothing
    is one of whole stages, which is tried as such.)
    """
    if max(map(len, teams)) == 1:
        return [(None, RINGS)]
    if len(teams) > 1:
        way = TEAMS if len({c for team in teams for c in team}) == sum(map(len, teams)) else OVERLAP
        return [(None, way), (0, way)]
    return [(early, ONE_WAY) for early in (None, *range(NUM_EARLY if len(teams[0]) <= FEW else 1))]


def _early_stages(early: int, num_stages: Ints) -> Ints:
    """How many stages at most the first cluster gets: as many as fit, or up to either end or midway, because what the
    judge charges differs only there. 0 where an earlier choice is the same.
    """
    choices = (num_stages, num_stages - 1, num_stages // 2, np.full_like(num_stages, 2), np.ones_like(num_stages))
    chosen = choices[early]
    known = np.logical_or.reduce([chosen == other for other in choices[:early]]) | (chosen > num_stages)
    return np.where(known, 0, chosen)


def fill_structure(
    tables: SailorTables, outlines: Outlines, teams: TeamStructure, early: int | None
) -> FilledStructure | None:
    """The outlines in one structure, but for those that leave its last cluster or all but one team empty: smaller
    structures have them.
    """
    kinds = [tables.type_of[cluster] for team in teams for cluster in team]
    tps = {kind: (tables.run_tp[outlines.first, kind], tables.run_tp[outlines.second, kind]) for kind in set(kinds)}
    sums = {kind: a * outlines.num_first + b * outlines.num_second for kind, (a, b) in tps.items()}
    least = np.minimum.reduce(list(sums.values()))
    ok = least * outlines.columns <= tables.cluster_gpus[sorted({cluster for team in teams for cluster in team})].sum()
    if all(len(team) == 1 for team in teams[:-1]):
        held = [tables.usable[cluster].min() // sums[tables.type_of[cluster]] for (cluster,) in teams[:-1]]
        ok &= np.add.reduce(held, axis=0, initial=0) < outlines.columns  # else the last team gets nothing
    if len(teams) > 1 and len(teams[0]) > 2:
        # Teams as small as a column allows, or one larger: beyond that transfers and rings go across for nothing.
        ok &= tables.cluster_gpus[list(teams[0][:-2])].sum() < least
    stages = None if early is None else _early_stages(early, outlines.num_stages)
    if stages is not None:
        ok &= stages > 0
    index = np.flatnonzero(ok)
    if not index.size:
        return None
    chosen = outlines.take(index)
    by_type = {kind: (a[index], b[index]) for kind, (a, b) in tps.items()}
    sums = {kind: gpus[index] for kind, gpus in sums.items()}
    filling = _ChainFilling(
        chosen,
        {c: by_type[tables.type_of[c]] for team in teams for c in team},
        None if stages is None else stages[index],
    )
    free = {cluster: _free_gpus(tables.usable[cluster], chosen) for team in teams for cluster in team}
    before = {cluster: free[cluster].all for cluster in free}
    parts: list[ClusterCells] = []
    left, busy = chosen.columns, np.zeros(len(index), dtype=np.int64)
    for number, team in enumerate(teams):
        columns = left
        if number < len(teams) - 1:
            cheapest = np.minimum.reduce([sums[tables.type_of[cluster]] for cluster in team])
            most = np.minimum(left, np.add.reduce([free[cluster].all for cluster in team]) // cheapest)
            columns = filling.columns(team, most, free)
        cells, rest, fits = filling.fill(team, columns, free, slice(None))
        start = np.zeros_like(columns)
        for cluster, num, still in zip(team, cells, rest, strict=True):
            parts.append(ClusterCells(cluster, number, columns, start, start + num))
            start, free[cluster] = start + num, still
        left, busy = left - columns, busy + (columns > 0)
    done = np.flatnonzero(fits & (parts[-1].end > parts[-1].start) & (busy >= min(2, len(teams))))
    if not done.size:
        return None
    used = tuple((cluster, before[cluster] - free[cluster].all) for cluster in sorted(free))
    return FilledStructure(index, chosen, tuple(parts), used).take(done)


class _FreeGpus(NamedTuple):
    """GPUs that are left in a cluster, for many outlines."""

    all: Ints
    """For the smaller of an outline's two tps, or its only one."""
    large: Ints
    """Of these, in places for the larger tp. What is left over of a node may hold the smaller one only."""


def _free_gpus(usable: Ints, outlines: Outlines) -> _FreeGpus:
    first, second = usable[outlines.first], usable[outlines.second]
    return _FreeGpus(np.maximum(first, second), np.minimum(first, second))


class _ChainFilling:
    """How cells go into a chain of clusters: tp by cluster for the first and the second run."""

    def __init__(self, outlines: Outlines, tps: Mapping[int, tuple[Ints, Ints]], early: Ints | None) -> None:
        self.outlines, self.tps, self.early = outlines, tps, early

    def columns(self, team: tuple[int, ...], most: Ints, free: dict[int, _FreeGpus]) -> Ints:
        """As many columns as the team has GPUs for: fewer never need more."""
        fits = self.fill(team, most, free, slice(None))[2]
        least, most = np.where(fits, most, 0), most
        while (open_ := np.flatnonzero(most - least > 1)).size:
            middle = (least[open_] + most[open_]) // 2
            fits = self.fill(team, middle, free, open_)[2]
            least[open_] = np.where(fits, middle, least[open_])
            most = most.copy()
            most[open_] = np.where(fits, most[open_], middle)
        return least

    def fill(
        self, team: tuple[int, ...], columns: Ints, free: dict[int, _FreeGpus], which: Ints | slice
    ) -> tuple[list[Ints], list[_FreeGpus], Bools]:
        """Stage after stage along the chain: cells and what is left by cluster, and whether all found a place."""
        first, second = self.outlines.num_first[which] * columns, self.outlines.num_second[which] * columns
        unit = np.maximum(columns, 1) if self.early is not None else np.ones_like(columns)
        limit = None if self.early is None else self.early[which] * columns
        cells, rest = [], []
        for cluster in team:
            left, (a, b) = free[cluster], self.tps[cluster]
            left, a, b = _FreeGpus(left.all[which], left.large[which]), a[which], b[which]
            of_first = np.minimum(first, _groups(left, a, a >= b) // unit * unit)
            if limit is not None:
                of_first = np.minimum(of_first, limit)
            first, left = first - of_first, _without(left, of_first * a, a >= b)
            of_second = np.minimum(second, _groups(left, b, b >= a) // unit * unit)
            of_second = np.where(first == 0, of_second, 0)
            if limit is not None:
                of_second, limit = np.minimum(of_second, limit - of_first), None
            second, left = second - of_second, _without(left, of_second * b, b >= a)
            cells.append(of_first + of_second)
            rest.append(left)
        return cells, rest, (first == 0) & (second == 0)


def _groups(left: _FreeGpus, tp: Ints, is_large: Bools) -> Ints:
    """Tensor-parallel groups of this size for which there are GPUs."""
    return np.where(is_large, np.minimum(left.all, left.large), left.all) // tp


def _without(left: _FreeGpus, gpus: Ints, is_large: Bools) -> _FreeGpus:
    return _FreeGpus(left.all - gpus, left.large - np.where(is_large, gpus, 0))


def neighbours(row: Row) -> set[tuple[int, int]]:
    """The pairs of clusters between neighbouring replicas of one stage."""
    pairs = {(cluster, cluster) for cluster, count in row if count > 1}
    return pairs | {(a, b) for (a, _), (b, _) in pairwise(row)}


def ring_crossings(row: Row) -> list[tuple[int, int]]:
    """The places where a stage's ring of replicas, closed from the last to the first, leaves a cluster."""
    return [(a, b) for (a, _), (b, _) in pairwise([*row, row[0]]) if a != b]
