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
from atlas.planner.estimate import Batch, estimate
from atlas.planner.groups import deal
from atlas.planner.judge import rent_usd_per_s
from atlas.planner.meet import ring
from atlas.planner.objective import MISSED, Objective
from atlas.planner.pool import Frame, Variant, cell_sizes, depths, frames, group_of
from atlas.planner.shapes import compositions
from atlas.planner.space import Space
from atlas.planner.split import busy_seconds

MAX_CANDIDATES = 100_000

Floor = Callable[[Objective], float]


def every_candidate(space: Space, cluster: ClusterArrays) -> list[tuple[Candidate, Floor]]:
    """All of them, with their floors; raises where they are too many."""
    found: list[tuple[Candidate, Floor]] = []
    for frame in frames(space, cluster):
        for depth in depths(space, cluster, frame):
            found += _of_depth(space, cluster, frame, depth, MAX_CANDIDATES - len(found))
    return found


def _of_depth(
    space: Space, cluster: ClusterArrays, frame: Frame, depth: int, limit: int
) -> Iterator[tuple[Candidate, Floor]]:
    single = list(_variants(space, cluster, frame, depth, limit))
    if not single:
        return
    shapes = list(dict.fromkeys(shape for shape, _, _ in single))
    number = {shape: k for k, shape in enumerate(shapes)}
    rows = np.array([(number[shape], replicas, cell) for shape, replicas, cell in single], np.int64)
    batch = Batch(frame.tp, frame.microbatch, depth, shapes, rows[:, 0], rows[:, 1], rows[:, 2])
    known = estimate(space, cluster, frame.model, batch)
    fitting = [v for v in range(len(single)) if known.fits[v]]
    slots = space.slots(frame.microbatch)
    for _, same_size in groupby(_sets(space, cluster, single, fitting, limit), key=len):
        sets = np.array(list(same_size), np.int64)
        counts = deal(np.full(len(sets), slots), batch.replicas[sets], known.fill_s[sets], known.period_s[sets])
        for members, own in zip(sets.tolist(), counts.tolist(), strict=True):
            if not all(own):
                continue
            parts = zip(members, own, strict=True)
            groups = tuple(group_of(cluster, single[v], known.layers_of(v), count) for v, count in parts)
            sharing = space.takes_turns(groups)
            candidate = Candidate(frame.tp, frame.microbatch, ring(cluster, groups), sharing, space.tcp)
            yield candidate, _floor(cluster, frame, candidate)


def _variants(space: Space, cluster: ClusterArrays, frame: Frame, depth: int, limit: int) -> Iterator[Variant]:
    count = 0
    workers = np.where(frame.usable, frame.shapes.workers, 0)
    for replicas in range(1, min(int(workers.max()), space.slots(frame.microbatch)) + 1):
        room = workers // replicas
        cells = cell_sizes(space, replicas)
        for size in range(1, min(cluster.num_dcs, depth) + 1):
            for order in permutations([i for i in range(cluster.num_dcs) if room[i]], size):
                if not all(cluster.joined[a, b] for a, b in pairwise(order)):
                    continue
                for stages in compositions(depth, [int(room[i]) for i in order], limit):
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


def _floor(cluster: ClusterArrays, frame: Frame, candidate: Candidate) -> Floor:
    """No order is faster than the slowest stage without a pause, and none is cheaper than the rent for this time."""
    floor_s = 0.0
    for group in candidate.groups:
        dc = np.array([[cluster.index[name] for name in group.stage_dc]])
        work_s = frame.model.microbatch_s(busy_seconds(frame.model, dc, np.array([group.layers_per_stage])))
        floor_s = max(floor_s, group.num_microbatches * float(work_s.max()))
    rent = rent_usd_per_s(cluster, candidate)

    def floor(objective: Objective) -> float:
        value = floor_s if objective.minimise == "throughput" else floor_s * rent
        return min(value * 0.999, MISSED)

    return floor
