"""Sets of groups of pipelines that train together, each group in datacenters of its own.

On few datacenters with few workers these are all combinations of groups. On others they follow tours: a tour is an
order of the datacenters; each datacenter along it that holds a whole pipeline gets a group of pipelines, smaller ones
share a group with their neighbours, and the first two groups are one set, the first three another, and so on. Knows
workers and paths, no times; `regions` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, permutations

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Ints
from atlas.planner.estimated_candidates import Variant, WorkerSetup
from atlas.planner.shapes import FEW_DCS, FEW_WORKERS
from atlas.planner.space import Space

MAX_TOURS = 6
"""Tours of the first ones, and of the last, that sets follow on many datacenters; besides these the first of all."""
MAX_PARTS = 8
"""A group of up to this many datacenters is always tried; memory and distance may need more."""
FEW_REGIONS, WORKER_SHARES = 3, (1, 2, 4, 8)
"""Up to this many datacenters, groups of all, a half, a quarter and an eighth of many workers are combined too."""
MAX_TOUR_CELL = 8
"""Pipelines of one cell along a tour."""
MAX_COMBINATIONS = 20_000
"""Combinations of groups of one set of datacenters each, the best groups first."""


def usable_workers(space: Space, cluster: ClusterArrays, setup: WorkerSetup) -> tuple[int, ...]:
    """Workers by datacenter; 0 where a datacenter is not used."""
    workers = np.where(setup.usable, setup.shapes.workers, 0).tolist()
    return tuple(n if space.can_use(name) else 0 for n, name in zip(workers, cluster.names, strict=True))


# ---- all combinations ------------------------------------------------------------------------------------------
def every_group(
    space: Space, cluster: ClusterArrays, setup: WorkerSetup, workers: Sequence[int], depth: int
) -> dict[frozenset[int], list[Variant]]:
    """On few datacenters: groups of all sizes by the datacenters that they are in, at least one of which is left to
    another group. Empty where there are many."""
    found: dict[frozenset[int], list[Variant]] = {}
    if cluster.num_dcs > FEW_DCS:
        return found
    few = [min(n, FEW_WORKERS) for n in workers]  # however many there are: more nodes have all the sets of fewer
    usable = [i for i, n in enumerate(workers) if n]
    for size in range(1, min(len(usable) - 1, depth) + 1):
        for order in permutations(usable, size):
            if not all(cluster.joined[a, b] for a, b in pairwise(order)):
                continue
            groups = dict.fromkeys(_groups(space, setup, few, order, depth, range(1, FEW_WORKERS + 1)))
            most = max(workers[i] for i in order)
            if most > FEW_WORKERS and cluster.num_dcs <= FEW_REGIONS:
                groups |= dict.fromkeys(
                    _groups(space, setup, workers, order, depth, {most // share for share in WORKER_SHARES})
                )
            if groups:
                found.setdefault(frozenset(order), []).extend(groups)
    return found


def _groups(
    space: Space, setup: WorkerSetup, workers: Sequence[int], order: tuple[int, ...], depth: int, counts: Iterable[int]
) -> Iterator[Variant]:
    for replicas in counts:
        most = [min(n // replicas, depth) for n in workers]
        if sum(most[i] for i in order) < depth or not all(most[i] for i in order):
            continue
        cells = [c for c in space.cell_sizes if replicas % c == 0]
        cells = cells[:1] if len(order) == 1 else cells
        few = [min(n, FEW_WORKERS // replicas) for n in most]
        for stages in setup.shapes.deals(order, depth, most, few):
            for cell in cells:
                yield tuple(zip(order, stages, strict=True)), replicas, cell


def combined(by_dcs: dict[frozenset[int], Ints]) -> Iterator[Ints]:
    """[n, g]: the groups of n sets, by number; two or more groups, no two in one datacenter. `by_dcs`: the numbers of
    groups, best first."""
    for size in range(2, len(frozenset().union(*by_dcs)) + 1):
        for sets in combinations(by_dcs, size):
            if sum(map(len, sets)) == len(frozenset().union(*sets)):
                most = max(2, round(MAX_COMBINATIONS ** (1 / size)))
                is_many = np.prod([float(len(by_dcs[one])) for one in sets]) > MAX_COMBINATIONS
                parts = [by_dcs[one][:most] if is_many else by_dcs[one] for one in sets]
                yield np.stack(np.meshgrid(*parts, indexing="ij"), axis=-1).reshape(-1, size)


# ---- tours -----------------------------------------------------------------------------------------------------
def tour_group_sets(
    space: Space, cluster: ClusterArrays, setup: WorkerSetup, workers: tuple[int, ...], depth: int
) -> list[tuple[Variant, ...]]:
    """Sets along tours, as large as they get."""
    group_sets = dict.fromkeys(
        tuple(in_cells for group in found if (in_cells := _in_cells(space, group)) is not None)
        for tour in tours(cluster, setup)
        for replicas in _levels(space, setup, depth)
        if (found := consecutive_groups(cluster, workers, tour, depth, replicas))
    )
    return [one for one in group_sets if len(one) > 1]


def _in_cells(space: Space, group: Variant) -> Variant | None:
    """The group in cells of a size that the space allows; None if none of them divides its pipelines."""
    shape, replicas, cell = group
    sizes = [size for size in space.cell_sizes if replicas % size == 0]
    return (shape, replicas, cell if cell in sizes else sizes[-1]) if sizes else None


def _levels(space: Space, setup: WorkerSetup, depth: int) -> list[int]:
    """Replicas of a group: as many as fit when the largest datacenter holds a whole pipeline, half of one, a third ...,
    one stage; 0 means as many as each group has workers for."""
    largest = int(setup.shapes.workers.max())
    counts = {-(-depth // parts) for parts in range(1, min(depth, MAX_PARTS) + 1)}
    found = {largest // stages for stages in counts}
    return [0, *sorted(r for r in found if 0 < r <= space.total_microbatches(setup.microbatch) // 2)]


def tours(cluster: ClusterArrays, setup: WorkerSetup) -> list[tuple[int, ...]]:
    if cluster.num_dcs <= FEW_DCS:
        return list(permutations(range(cluster.num_dcs)))
    every = setup.shapes.tours()
    return list(dict.fromkeys([*every[: 1 + MAX_TOURS], *every[-MAX_TOURS:]]))


@lru_cache(maxsize=20_000)  # microbatch sizes have the same groups
def consecutive_groups(
    cluster: ClusterArrays, workers: tuple[int, ...], tour: tuple[int, ...], depth: int, replicas: int
) -> tuple[Variant, ...]:
    """Groups along a tour: consecutive datacenters, as few as hold `replicas` pipelines (0: one pipeline;
    then the group has as many as fit)."""
    found: list[Variant] = []
    waiting: list[int] = []
    held = 0
    for i in tour:
        max_stages = workers[i] // max(1, replicas)
        if not max_stages:
            continue
        if waiting and not cluster.joined[waiting[-1], i]:
            waiting, held = [], 0
        waiting.append(i)
        held += max_stages
        if held >= depth:
            found.append(_joined(workers, waiting, depth, replicas))
            waiting, held = [], 0
    return tuple(found)


def _joined(workers: Sequence[int], chain: list[int], depth: int, replicas: int) -> Variant:
    """A group in these datacenters, with as many replicas as fit, and the largest cell that divides the replicas."""
    if len(chain) == 1:
        return ((chain[0], depth),), workers[chain[0]] // depth, 1
    stages, replicas, cell = _dealt(tuple([workers[i] for i in chain]), depth, replicas)
    shape = tuple([(i, s) for i, s in zip(chain, stages, strict=True) if s])
    return shape, replicas, cell if len(shape) > 1 else 1


@lru_cache(maxsize=10_000)
def _dealt(workers: tuple[int, ...], depth: int, replicas: int) -> tuple[tuple[int, ...], int, int]:
    """(stages by datacenter, replicas, pipelines per cell), the first datacenters filled first, none left out."""
    replicas = replicas or max(r for r in range(1, max(workers) + 1) if sum(n // r for n in workers) >= depth)
    stages, left = [], depth
    for k, n in enumerate(workers):
        take = min(n // replicas, left - sum(1 for m in workers[k + 1 :] if m // replicas > 0))
        stages.append(max(0, take))
        left -= max(0, take)
    for k, n in enumerate(workers):  # stages that were reserved for later datacenters and not used
        more = min(left, n // replicas - stages[k])
        stages[k] += more
        left -= more
    return tuple(stages), replicas, max(c for c in range(1, min(MAX_TOUR_CELL, replicas) + 1) if replicas % c == 0)
