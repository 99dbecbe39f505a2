"""Every candidate of a small cluster: all depths, all ordered subsets of datacenters, all ways to assign the stages,
all numbers of replicas and cells, and all sets of groups that share no datacenter. `ours` is measured against it.

No candidate is dropped because of an estimate. One is skipped only if its floor is too high: the time of its slowest
stage without a pause, which no order can beat. Refuses clusters on which this would take hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, groupby, pairwise, permutations, product

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays
from atlas.errors import SpecError
from atlas.planner.candidate import Candidate
from atlas.planner.estimate import estimate
from atlas.planner.estimated_candidates import (
    Variant,
    WorkerSetup,
    batch_of_variants,
    cell_sizes,
    depths,
    group_of,
    worker_setups,
)
from atlas.planner.group_set_estimates import deal
from atlas.planner.group_sums import ring
from atlas.planner.judge import rent_usd_per_s
from atlas.planner.objective import MISSED, Objective
from atlas.planner.shapes import compositions
from atlas.planner.space import Space
from atlas.planner.split import busy_seconds

MAX_CANDIDATES = 100_000
"""More candidates are refused: simulating them would take hours."""
FLOOR_SHARE = 0.999
"""A floor is lowered to this share of itself, so that rounded times of the simulator are never below it."""

Floor = Callable[[Objective], float]
"""The score that no order of a candidate is below."""


def every_candidate(space: Space, cluster: ClusterArrays) -> list[tuple[Candidate, Floor]]:
    """All of them, with their floors; raises where they are too many."""
    found: list[tuple[Candidate, Floor]] = []
    for setup in worker_setups(space, cluster):
        for depth in depths(space, cluster, setup):
            found += _of_depth(space, cluster, setup, depth, MAX_CANDIDATES - len(found))
    return found


def _of_depth(
    space: Space, cluster: ClusterArrays, setup: WorkerSetup, depth: int, limit: int
) -> Iterator[tuple[Candidate, Floor]]:
    single = list(_variants(space, cluster, setup, depth, limit))
    if not single:
        return
    batch = batch_of_variants(setup, depth, single)
    known = estimate(space, cluster, setup.model, batch)
    fitting = [v for v in range(len(single)) if known.fits[v]]
    total = space.total_microbatches(setup.microbatch)
    for _, same_size in groupby(_sets(space, cluster, single, fitting, limit), key=len):
        sets = np.array(list(same_size), np.int64)
        counts = deal(np.full(len(sets), total), batch.replicas[sets], known.fill_s[sets], known.period_s[sets])
        for members, own in zip(sets.tolist(), counts.tolist(), strict=True):
            if not all(own):
                continue
            parts = zip(members, own, strict=True)
            groups = tuple(group_of(cluster, single[v], known.layers_of(v), count) for v, count in parts)
            sharing = space.takes_turns(groups)
            candidate = Candidate(setup.tp, setup.microbatch, ring(cluster, groups), sharing, space.tcp)
            yield candidate, _floor(cluster, setup, candidate)


def _variants(space: Space, cluster: ClusterArrays, setup: WorkerSetup, depth: int, limit: int) -> Iterator[Variant]:
    count = 0
    workers = np.where(setup.usable, setup.shapes.workers, 0)
    for replicas in range(1, min(int(workers.max()), space.total_microbatches(setup.microbatch)) + 1):
        max_stages = workers // replicas
        cells = cell_sizes(space, replicas)
        for size in range(1, min(cluster.num_dcs, depth) + 1):
            for order in permutations([i for i in range(cluster.num_dcs) if max_stages[i]], size):
                if not all(cluster.joined[a, b] for a, b in pairwise(order)):
                    continue
                for stages in compositions(depth, [int(max_stages[i]) for i in order], limit):
                    shape = tuple(zip(order, stages, strict=True))
                    for cell in cells if size > 1 else cells[:1]:
                        count += 1
                        _require_few(count, limit)
                        yield shape, replicas, cell


def _sets(
    space: Space, cluster: ClusterArrays, single: list[Variant], fitting: list[int], limit: int
) -> Iterator[tuple[int, ...]]:
    """Each variant alone, and all sets of variants that share no datacenter."""
    count = 0
    for v in fitting:
        if space.uses_kept(cluster.names[i] for i, _ in single[v][0]):
            yield (v,)
    if space.num_cells is not None:
        return
    by_dcs: dict[frozenset[int], list[int]] = {}
    for v in fitting:
        by_dcs.setdefault(frozenset(i for i, _ in single[v][0]), []).append(v)
    for size in range(2, cluster.num_dcs + 1):
        for sets in combinations(by_dcs, size):
            together = frozenset().union(*sets)
            if sum(map(len, sets)) != len(together) or not space.uses_kept(cluster.names[i] for i in together):
                continue
            for members in product(*(by_dcs[dcs] for dcs in sets)):
                count += 1
                _require_few(count, limit)
                yield members


def _require_few(count: int, limit: int) -> None:
    if count > limit:
        raise SpecError(
            where="--strategy",
            key="strategy",
            value="exhaustive",
            rule=f"this cluster has more than {MAX_CANDIDATES:,} candidates",
            remedy="Use --strategy ours, or fix some choices with --keep tp --keep microbatch --keep pp",
        )


def _floor(cluster: ClusterArrays, setup: WorkerSetup, candidate: Candidate) -> Floor:
    """No order is faster than the slowest stage without a pause, and none is cheaper than the rent for this time."""
    floor_s = 0.0
    for group in candidate.groups:
        dc = np.array([[cluster.index[name] for name in group.stage_dc]])
        work_s = setup.model.microbatch_s(busy_seconds(setup.model, dc, np.array([group.layers_per_stage])))
        floor_s = max(floor_s, group.num_microbatches * float(work_s.max()))
    rent = rent_usd_per_s(cluster, candidate)

    def floor(objective: Objective) -> float:
        value = floor_s if objective.minimise == "throughput" else floor_s * rent
        return min(value * FLOOR_SHARE, MISSED)

    return floor
