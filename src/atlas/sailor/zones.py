"""From clusters to zones: the zone of each replica, chosen by the judge's score.

Zones of a cluster are nearly alike, so a few orders of filling them are tried and judged; where every cluster is one
zone there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations, product

from atlas.sailor.candidates import SailorCandidate
from atlas.sailor.check import fits_nodes
from atlas.sailor.inputs import Inputs, Pool
from atlas.sailor.plan_file import Replica, SailorPlan
from atlas.sailor.tables import ZoneCluster

MAX_ORDERS, MAX_FILLINGS = 24, 96
"""Orders of a cluster's zones, and combinations of all clusters' fillings, that are tried at most."""
Cell = tuple[int, int, int]
"""(stage, column, tp)."""


def plans(inputs: Inputs, clusters: Sequence[ZoneCluster], candidate: SailorCandidate) -> Iterator[SailorPlan]:
    """The candidate on zones, in several orders of zones; nothing where node borders forbid it."""
    cells = _cells(clusters, candidate)
    choices = [list(_fillings(inputs, clusters[c], found)) for c, found in cells.items()]
    starts = (0, *candidate.ends[:-1])
    layers = tuple(tuple(range(a, b)) for a, b in zip(starts, candidate.ends, strict=True))
    for chosen in islice(product(*choices), MAX_FILLINGS):
        grid: dict[tuple[int, int], Replica] = {}
        for filling in chosen:
            grid.update(filling)
        columns = range(candidate.outline.num_columns)
        replicas = tuple(tuple(grid[i, j] for j in columns) for i in range(len(layers)))
        yield SailorPlan(candidate.outline.mbs, layers, replicas)


def _cells(clusters: Sequence[ZoneCluster], candidate: SailorCandidate) -> dict[int, list[Cell]]:
    cells: dict[int, list[Cell]] = {}
    for stage, row in enumerate(candidate.rows):
        column = 0
        for cluster, count in row:
            tp = candidate.outline.tps[clusters[cluster].gpu][stage]
            cells.setdefault(cluster, []).extend((stage, column + k, tp) for k in range(count))
            column += count
    return cells


def _fillings(inputs: Inputs, cluster: ZoneCluster, cells: list[Cell]) -> Iterator[dict[tuple[int, int], Replica]]:
    """Distinct ways to fill the cluster's zones with its cells."""
    node = inputs.gpus[cluster.gpu].gpus_per_node
    if len(cluster.pools) == 1:
        (pool,) = cluster.pools
        if fits_nodes(pool.num_gpus, node, _with({}, cells)):
            yield {(i, j): Replica(pool.zone, cluster.gpu, tp, tp) for i, j, tp in cells}
        return
    by_column = sorted(cells, key=lambda cell: (cell[1], cell[0]))
    seen = set()
    for order in islice(permutations(cluster.pools), MAX_ORDERS):
        for sequence, whole in ((cells, None), (cells, 0), (by_column, None), (by_column, 1)):
            zones = _zones(order, node, sequence, whole)
            if zones is None or (key := tuple(zones[i, j] for i, j, _ in cells)) in seen:
                continue
            seen.add(key)
            yield {(i, j): Replica(zones[i, j], cluster.gpu, tp, tp) for i, j, tp in cells}


def _zones(
    order: Sequence[Pool], node: int, sequence: list[Cell], whole: int | None
) -> dict[tuple[int, int], str] | None:
    """Fill zone after zone. With `whole`, the cells of a stage (0) or of a column (1) stay in one zone."""
    groups: list[list[Cell]] = []
    for cell in sequence:
        if whole is None or not groups or groups[-1][-1][whole] != cell[whole]:
            groups.append([cell])
        else:
            groups[-1].append(cell)
    found: dict[tuple[int, int], str] = {}
    pools = iter(order)
    pool, used = next(pools), dict[int, int]()
    for group in groups:
        while not fits_nodes(pool.num_gpus, node, trial := _with(used, group)):
            following = next(pools, None)
            if following is None:
                return None
            pool, used = following, {}
        used = trial
        for stage, column, _ in group:
            found[stage, column] = pool.zone
    return found


def _with(used: dict[int, int], group: list[Cell]) -> dict[int, int]:
    total = dict(used)
    for _, _, tp in group:
        total[tp] = total.get(tp, 0) + 1
    return total
