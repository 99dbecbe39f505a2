"""Where the replicas of each stage may stand, cluster by cluster: the placements that the search tries.

Columns are pipelines (replica j of every stage). Columns are dealt to teams; a team is a chain of clusters that its
columns fill stage after stage, so one team of two clusters is pipeline parallelism across them, two teams of one are
data parallelism across them, and teams that overlap share what is left. Knows room and tp, no times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

from atlas.plan.sailor.tables import Cluster

Row = tuple[tuple[int, int], ...]
"""One stage: (cluster, number of columns), in column order."""
Teams = tuple[tuple[int, ...], ...]

FEW = 3
"""Up to so many clusters every order of every subset is tried; beyond it, chains of nearest neighbours."""


def team_structures(num_clusters: int, chains: Sequence[tuple[int, ...]]) -> list[Teams]:
    """Ways to group clusters into teams, each team in order. `chains` are good orders of all clusters."""
    if num_clusters <= FEW:
        orders = [order for k in range(1, num_clusters + 1) for order in permutations(range(num_clusters), k)]
    else:
        orders = list(chains)
    found: dict[Teams, None] = {}
    for order in orders:
        for size in range(1, len(order) + 1):
            teams = tuple(tuple(order[i : i + size]) for i in range(0, len(order), size))
            found[teams] = None
            if size == 1 < len(order):
                found[(*teams, order)] = None  # whole pipelines everywhere, and more from what is left over
        if 1 < len(order) <= FEW:
            found[((order[0],), order)] = None
            found[((order[-1],), order)] = None
    return list(found)


def placements(
    clusters: Sequence[Cluster], structures: Sequence[Teams], num_columns: int, tps: dict[str, tuple[int, ...]]
) -> Iterator[tuple[Row, ...]]:
    """Every distinct placement of `num_columns` pipelines; `tps` is by GPU type and stage."""
    seen = set()
    for teams in _promising(clusters, structures, num_columns, min(sum(stages) for stages in tps.values())):
        for early in _early_ends(teams, tps):
            rows = _deal(clusters, teams, num_columns, tps, early)
            if rows is not None and rows not in seen:
                seen.add(rows)
                yield rows


def _promising(
    clusters: Sequence[Cluster], structures: Sequence[Teams], num_columns: int, gpus_per_column: int
) -> Iterator[Teams]:
    """Structures with room. Of many clusters in one order, only teams as small as a column allows, the next larger
    ones, and a single team: in between both the transfers and the rings would go across for nothing.
    """
    smallest: dict[int, int] = {}
    for teams in structures:
        used = {cluster for team in teams for cluster in team}
        if sum(clusters[cluster].num_gpus for cluster in used) < num_columns * gpus_per_column:
            continue
        if len(clusters) > FEW:
            size, room = len(teams[0]), sum(clusters[cluster].num_gpus for cluster in teams[0])
            if room < gpus_per_column:
                continue
            least = smallest.setdefault(teams[0][0], size)
            alone = room >= num_columns * gpus_per_column and (
                size == least or room < 2 * num_columns * gpus_per_column
            )
            if size > least + 1 and not alone:
                continue
        yield teams


def _early_ends(teams: Teams, tps: dict[str, tuple[int, ...]]) -> Sequence[int | None]:
    """Ways to fill a chain: None lets stages straddle clusters; n keeps them whole, at most n in the first cluster."""
    if max(map(len, teams)) == 1:
        return (None,)
    most = len(next(iter(tps.values())))
    if len(teams) > 1 or len(teams[0]) > FEW:
        return (None, most)
    # Leaving the first cluster when full, at either end or midway: what the judge charges differs only there.
    return (None, *sorted({n for n in (most, most - 1, most // 2, 2, 1) if n > 0}, reverse=True))


def _deal(
    clusters: Sequence[Cluster], teams: Teams, num_columns: int, tps: dict[str, tuple[int, ...]], early: int | None
) -> tuple[Row, ...] | None:
    """Columns to teams in order, as many as each can take; None where they do not all find room."""
    free = [cluster.num_gpus for cluster in clusters]
    stages: list[list[tuple[int, int]]] = [[] for _ in next(iter(tps.values()))]
    left = num_columns
    for team in teams:
        if not left:
            break
        columns = min(left, _most(clusters, team, free, tps))
        filled = _fill(clusters, team, columns, free, tps, early)
        while columns and filled is None:
            columns -= 1
            filled = _fill(clusters, team, columns, free, tps, early)
        if not columns or filled is None:
            continue
        rows, free = filled
        for stage, row in zip(stages, rows, strict=True):
            stage += row
        left -= columns
    return None if left else tuple(tuple(_merged(stage)) for stage in stages)


def _most(
    clusters: Sequence[Cluster], team: tuple[int, ...], free: Sequence[int], tps: dict[str, tuple[int, ...]]
) -> int:
    """No more columns than this fit the team."""
    cheapest = min(sum(tps[clusters[c].gpu]) for c in team)
    return sum(free[c] for c in team) // cheapest


def _fill(
    clusters: Sequence[Cluster],
    team: tuple[int, ...],
    columns: int,
    free: Sequence[int],
    tps: dict[str, tuple[int, ...]],
    early: int | None,
) -> tuple[list[list[tuple[int, int]]], list[int]] | None:
    """Stage after stage along the chain."""
    room, at = list(free), 0
    rows: list[list[tuple[int, int]]] = []
    for stage in range(len(tps[clusters[team[0]].gpu])):
        need, row = columns, []
        if early is not None and stage == early and at == 0:
            at = 1
        while need:
            if at == len(team):
                return None
            cluster = team[at]
            tp = tps[clusters[cluster].gpu][stage]
            take = min(need, room[cluster] // tp)
            if take < need and early is not None:
                take = 0
            if take:
                row.append((cluster, take))
                room[cluster] -= take * tp
                need -= take
            at += 1 if need else 0
        rows.append(row)
    return rows, room


def _merged(row: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for cluster, count in row:
        if merged and merged[-1][0] == cluster:
            merged[-1] = (cluster, merged[-1][1] + count)
        else:
            merged.append((cluster, count))
    return merged


def facing(here: Row, there: Row) -> dict[tuple[int, int], int]:
    """The pairs of clusters between replicas of the same column in two stages, and how many columns have each."""
    if len(here) == 1 and len(there) == 1:
        return {(here[0][0], there[0][0]): here[0][1]}
    pairs: dict[tuple[int, int], int] = {}
    i = j = 0
    left_here, left_there = here[0][1], there[0][1]
    while True:
        pair, step = (here[i][0], there[j][0]), min(left_here, left_there)
        pairs[pair] = pairs.get(pair, 0) + step
        left_here, left_there = left_here - step, left_there - step
        if not left_here:
            i += 1
            if i == len(here):
                return pairs
            left_here = here[i][1]
        if not left_there:
            j += 1
            left_there = there[j][1]


def neighbours(row: Row) -> set[tuple[int, int]]:
    """The pairs of clusters between neighbouring replicas of one stage."""
    pairs = {(cluster, cluster) for cluster, count in row if count > 1}
    return pairs | {(a, b) for (a, _), (b, _) in pairwise(row)}


def ring_crossings(row: Row) -> list[tuple[int, int]]:
    """The places where a stage's ring of replicas, closed from the last to the first, leaves a cluster."""
    return [(a, b) for (a, _), (b, _) in pairwise([*row, row[0]]) if a != b]
