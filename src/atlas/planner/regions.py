"""Candidates with data parallelism over regions: several groups of pipelines, which sum their gradients once an
iteration.

A tour is an order of the datacenters. Along a tour, each datacenter with room for a whole pipeline gets a group of
pipelines; smaller ones share a group with their neighbours. The first two groups of a tour are one candidate, the first
three another, and so on. On few datacenters all combinations of groups are candidates too. Microbatches are distributed
so that all groups finish together. Uses estimates only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, islice, pairwise, permutations, product

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, all_nodes_bps
from atlas.planner.candidate import Candidate
from atlas.planner.estimate import Batch, Estimate, estimate
from atlas.planner.judge import wan_traffic
from atlas.planner.meet import meeting_s, ring
from atlas.planner.objective import Objective
from atlas.planner.pool import SLACK, EstimatedCandidate, Frame, Tick, Variant, depths, floor_score, group_of
from atlas.planner.shapes import FEW_DCS, compositions
from atlas.planner.space import Space

MAX_TOURS = 6
MAX_PARTS = 8
"""A group of up to this many datacenters is always tried; memory and distance may need more."""
FEW_REGIONS = 3
FEW_REPLICAS = 8
MOST_LINES = 3_000
"""Limits of the complete search on few datacenters: datacenters, replicas, combinations."""
KEEP = 40
"""Candidates that are priced in full; ten times as many where only this kind of plan is asked for."""

Lanes = list[list[tuple[float, float]]]
"""[i][j]: bits a second that all nodes of two datacenters get together, 0 without a path; and the latency."""


def _lanes(space: Space, cluster: ClusterArrays) -> Lanes:
    """Plain numbers: they are read one by one."""
    i, j = np.indices((cluster.num_dcs, cluster.num_dcs))
    nodes = np.minimum(cluster.nodes[i], cluster.nodes[j])
    bps = np.where(cluster.joined, all_nodes_bps(cluster, i, j, nodes, space.tcp), 0.0)
    return [list(zip(*pair, strict=True)) for pair in zip(bps.tolist(), cluster.latency_s.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class _EstimatedGroups:
    """The estimates of every group of one frame and depth."""

    frame: Frame
    batch: Batch
    found: Estimate
    at: dict[Variant, int]
    lanes: Lanes
    by_floor: bool
    """Whether plans are compared under searched orders, which come close to their floors."""

    @cached_property
    def figures(self) -> list[tuple[float, ...]]:
        """[v]: period, fill, rent, closing, as plain numbers."""
        found = self.found
        period_s, fill_s = found.period_s, found.fill_s
        if self.by_floor:
            v, count = np.arange(len(period_s)), found.num_microbatches
            one_s, two_s = (found.floors.done_s(v, k * count).max(axis=1) for k in (1, 2))
            period_s = (two_s - one_s) / count
            fill_s = one_s - (count - 1) * period_s
        columns = (period_s, fill_s, found.usd_per_s, found.closing_s)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def several_groups(
    space: Space,
    cluster: ClusterArrays,
    objective: Objective,
    worth: Sequence[Frame],
    tick: Tick | None = None,
    *,
    by_floor: bool = False,
) -> tuple[list[EstimatedCandidate], int]:
    """The best candidates of two groups or more, best first, and how many were estimated. `by_floor`: microbatches are
    distributed for searched orders."""
    if cluster.num_dcs == 1 or space.num_cells is not None:
        return [], 0
    quick: list[tuple[float, int, _EstimatedGroups, tuple[Variant, ...]]] = []
    lanes = _lanes(space, cluster)
    for k, frame in enumerate(worth):
        if tick is not None:
            tick("estimating regions", k, len(worth))
        for depth in depths(space, cluster, frame):
            estimated, lines = _estimate_groups(space, cluster, frame, depth, lanes, by_floor)
            if estimated is None:
                continue
            unique: dict[frozenset[Variant], tuple[float, tuple[Variant, ...]]] = {}
            for score, line in sorted(_rough(space, cluster, objective, estimated, lines), key=lambda q: -q[0]):
                # The same groups in another order are the same candidate: the ring goes by distance.
                unique[frozenset(line)] = (score, line)
            quick += [(score, len(quick) + n, estimated, line) for n, (score, line) in enumerate(unique.values())]
    best = sorted(quick, key=lambda q: (q[0], q[1]))[: 10 * KEEP if space.kind == "data" else KEEP]
    entries = [entry_of(space, cluster, objective, estimated, line) for _, _, estimated, line in best]
    return sorted((e for e in entries if e is not None), key=lambda entry: entry.score), len(quick)


def _estimate_groups(
    space: Space, cluster: ClusterArrays, frame: Frame, depth: int, lanes: Lanes, by_floor: bool
) -> tuple[_EstimatedGroups | None, list[tuple[Variant, ...]]]:
    workers = tuple(n if space.can_use(name) else 0 for n, name in zip(_room(frame), cluster.names, strict=True))
    lines = dict.fromkeys(
        consecutive_groups(cluster, workers, tour, depth, replicas)
        for tour in tours(cluster, frame)
        for replicas in _levels(space, frame, depth)
    )
    kept = [line for line in lines if len(line) > 1]
    if cluster.num_dcs <= FEW_REGIONS:
        kept = list(dict.fromkeys([*kept, *_every_line(space, cluster, workers, depth)]))
    every = list(dict.fromkeys(group for line in kept for group in line))
    if not every:
        return None, []
    shapes = {shape: k for k, shape in enumerate(dict.fromkeys(shape for shape, _, _ in every))}
    rows = np.array([(shapes[shape], replicas, cell) for shape, replicas, cell in every], np.int64)
    batch = Batch(frame.tp, frame.microbatch, depth, list(shapes), rows[:, 0], rows[:, 1], rows[:, 2])
    found = estimate(space, cluster, frame.model, batch)
    return _EstimatedGroups(frame, batch, found, {group: v for v, group in enumerate(every)}, lanes, by_floor), kept


def _every_line(
    space: Space, cluster: ClusterArrays, workers: Sequence[int], depth: int
) -> Iterator[tuple[Variant, ...]]:
    """On few datacenters: groups of all sizes, also smaller than there is room for, in all combinations, up to
    `MOST_LINES`."""
    by_dcs: dict[frozenset[int], list[Variant]] = {}
    usable = [i for i, n in enumerate(workers) if n]
    for size in range(1, min(len(usable), depth) + 1):
        for order in permutations(usable, size):
            if all(cluster.joined[a, b] for a, b in pairwise(order)):
                by_dcs.setdefault(frozenset(order), []).extend(_groups_of(space, workers, order, depth))
    lines = (
        line
        for size in range(2, len(usable) + 1)
        for sets in combinations(by_dcs, size)
        if sum(map(len, sets)) == len(frozenset().union(*sets))
        for line in product(*(by_dcs[one] for one in sets))
    )
    yield from islice(lines, MOST_LINES)


def _groups_of(space: Space, workers: Sequence[int], order: tuple[int, ...], depth: int) -> Iterator[Variant]:
    most = max(workers[i] for i in order)
    counts = range(1, most + 1) if most <= FEW_REPLICAS else sorted({most >> k for k in range(4)})
    for replicas in counts:
        cells = {1} if len(order) == 1 else {c for c in space.cell_sizes if replicas % c == 0}
        for stages in compositions(depth, [workers[i] // replicas for i in order], MOST_LINES):
            for cell in sorted(cells):
                yield tuple(zip(order, stages, strict=True)), replicas, cell


def _levels(space: Space, frame: Frame, depth: int) -> list[int]:
    """Replicas of a group: as many as fit when the largest datacenter holds a whole pipeline, half of one, a third ...,
    one stage; 0 means as many as each group has room for."""
    largest = int(frame.shapes.workers.max())
    counts = {-(-depth // parts) for parts in range(1, min(depth, MAX_PARTS) + 1)}
    found = {largest // stages for stages in counts}
    return [0, *sorted(r for r in found if 0 < r <= space.slots(frame.microbatch) // 2)]


def tours(cluster: ClusterArrays, frame: Frame) -> list[tuple[int, ...]]:
    if cluster.num_dcs <= FEW_DCS:
        return list(permutations(range(cluster.num_dcs)))
    every = frame.shapes.tours()
    return list(dict.fromkeys([*every[: 1 + MAX_TOURS], *every[-MAX_TOURS:]]))


def _room(frame: Frame) -> list[int]:
    """Workers by datacenter; 0 where a datacenter is not used."""
    return list(np.where(frame.usable, frame.shapes.workers, 0).tolist())


@lru_cache(maxsize=20_000)  # microbatch sizes have the same groups
def consecutive_groups(
    cluster: ClusterArrays, workers: tuple[int, ...], tour: tuple[int, ...], depth: int, replicas: int
) -> tuple[Variant, ...]:
    """Groups along a tour: consecutive datacenters, as few as have room for `replicas` pipelines (0: for one pipeline;
    then the group has as many as fit)."""
    found: list[Variant] = []
    waiting: list[int] = []
    held = 0
    for i in tour:
        room = workers[i] // max(1, replicas)
        if not room:
            continue
        if waiting and not cluster.joined[waiting[-1], i]:
            waiting, held = [], 0
        waiting.append(i)
        held += room
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
def _dealt(room: tuple[int, ...], depth: int, replicas: int) -> tuple[tuple[int, ...], int, int]:
    """(stages by datacenter, replicas, pipelines per cell), the first datacenters filled first, none left out."""
    replicas = replicas or max(r for r in range(1, max(room) + 1) if sum(n // r for n in room) >= depth)
    stages, left = [], depth
    for k, n in enumerate(room):
        take = min(n // replicas, left - sum(1 for m in room[k + 1 :] if m // replicas > 0))
        stages.append(max(0, take))
        left -= max(0, take)
    for k, n in enumerate(room):  # stages that were reserved for later datacenters and not used
        more = min(left, n // replicas - stages[k])
        stages[k] += more
        left -= more
    return tuple(stages), replicas, max(c for c in range(1, min(8, replicas) + 1) if replicas % c == 0)


def _rough(
    space: Space,
    cluster: ClusterArrays,
    objective: Objective,
    estimated: _EstimatedGroups,
    lines: Sequence[tuple[Variant, ...]],
) -> list[tuple[float, tuple[Variant, ...]]]:
    """A rough score of the first 2, 3, ... groups of each line."""
    lines = [tuple(group for group in line if estimated.found.fits[estimated.at[group]]) for line in lines]
    rough = [(line[:count], s, usd) for line in lines for count, s, usd in _prefixes(space, estimated, line)]
    rough = [one for one in rough if space.uses_kept(cluster.names[i] for shape, _, _ in one[0] for i, _ in shape)]
    if not rough:
        return []
    iteration_s, usd = np.array([figures for _, *figures in rough]).T
    scores = objective.score(iteration_s, usd, space.tokens, SLACK)
    return [(score, line) for score, (line, _, _) in zip(scores.tolist(), rough, strict=True)]


def _prefixes(space: Space, estimated: _EstimatedGroups, line: Sequence[Variant]) -> Iterator[tuple[int, float, float]]:
    """(number of groups, seconds, dollars). The groups finish together; then their gradients pass the slowest lane."""
    slots, depth = space.slots(estimated.frame.microbatch), estimated.batch.depth
    total = float(estimated.frame.model.gradient_bytes.sum()) * 8 / depth
    rate, busy, rent, closing, lane_s, worst_s = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k, group in enumerate(line):
        period_s, fill_s, usd_per_s, closing_s = estimated.figures[estimated.at[group]]
        rate += group[1] / period_s
        busy += group[1] * (fill_s / period_s - 1)
        rent += usd_per_s
        closing = max(closing, closing_s)
        if k == 0:
            continue
        i, j = line[k - 1][0][0][0], group[0][0][0]
        lane_bps, latency_s = estimated.lanes[i][j]
        if not lane_bps:
            return
        lane_s = max(lane_s, total * max(stages for _, stages in group[0]) / lane_bps)
        worst_s = max(worst_s, latency_s)
        iteration_s = (slots + busy) / rate + closing + 2 * k / (k + 1) * lane_s + 2 * k * worst_s
        yield k + 1, iteration_s, iteration_s * rent


def deal(slots: int, replicas: Sequence[int], fill_s: Sequence[float], period_s: Sequence[float]) -> list[int] | None:
    """Microbatches per pipeline of each group such that the last group finishes as early as possible; None where a
    group would have none."""
    low, high = 0.0, max(f + p * slots for f, p in zip(fill_s, period_s, strict=True))
    counts = [slots] * len(replicas)
    for _ in range(60):
        middle = (low + high) / 2
        tried = [int((middle - f) / p) + 1 if middle >= f else 0 for f, p in zip(fill_s, period_s, strict=True)]
        if sum(r * n for r, n in zip(replicas, tried, strict=True)) >= slots:
            high, counts = middle, tried
        else:
            low = middle
    for k in sorted(range(len(counts)), key=lambda k: -replicas[k]):
        while counts[k] > 1 and sum(r * n for r, n in zip(replicas, counts, strict=True)) - replicas[k] >= slots:
            counts[k] -= 1
    return counts if all(counts) else None


def entry_of(
    space: Space, cluster: ClusterArrays, objective: Objective, estimated: _EstimatedGroups, line: Sequence[Variant]
) -> EstimatedCandidate | None:
    """The candidate with these groups. The sum between groups is priced as in `judge`."""
    frame, found = estimated.frame, estimated.found
    members = [estimated.at[group] for group in line]
    period, fill = ([estimated.figures[v][k] for v in members] for k in (0, 1))
    counts = deal(space.slots(frame.microbatch), [replicas for _, replicas, _ in line], fill, period)
    if counts is None:
        return None
    parts = zip(line, members, counts, strict=True)
    groups = ring(cluster, tuple(group_of(cluster, group, found.layers_of(v), count) for group, v, count in parts))
    sharing = any(group.pipelines_per_cell > 1 for group in groups)
    candidate = Candidate(frame.tp, frame.microbatch, groups, sharing, space.tcp)
    between = meeting_s(cluster, frame.model.gradient_bytes, candidate)
    if between is None:
        return None
    ends = [f + (n - 1) * p for f, p, n in zip(fill, period, counts, strict=True)]
    iteration_s = max(ends) + max(float(found.closing_s[v]) for v in members) + max(float(one.max()) for one in between)
    floor_s = max(
        float(found.floors.iteration_s(np.array([v]), np.array([n]), own)[0])
        for v, n, own in zip(members, counts, between, strict=True)
    )
    rent = sum(float(found.usd_per_s[v]) for v in members)
    egress = wan_traffic(space, cluster, frame.model.gradient_bytes, candidate)[0]
    usd = iteration_s * rent + egress
    floor = floor_score(space, objective, floor_s, floor_s * rent + egress, iteration_s, usd)
    score = objective.score(iteration_s, usd, space.tokens, SLACK)
    return EstimatedCandidate(candidate, float(score), iteration_s, usd, float(floor))
