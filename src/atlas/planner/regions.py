"""Candidates with data parallelism over regions: several groups of pipelines, which sum their gradients once an
iteration.

`lines` finds groups that go together. Here each line gets a rough score, the best are priced in full, and microbatches
are distributed so that all groups finish together. Uses estimates only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Floats, Ints, all_nodes_bps
from atlas.planner.candidate import Candidate
from atlas.planner.estimate import Batch, Estimate, estimate
from atlas.planner.judge import wan_traffic
from atlas.planner.lines import combined, every_group, room_of, tour_lines
from atlas.planner.meet import meeting_s, num_rounds, ring
from atlas.planner.nested import nested_best, workers_used
from atlas.planner.objective import Objective
from atlas.planner.pool import SLACK, EstimatedCandidate, Frame, Tick, Variant, depths, floor_score, group_of
from atlas.planner.shapes import FEW_DCS, FEW_WORKERS, alike
from atlas.planner.space import Space

KEEP = 8
"""A line is priced in full if fewer lines than this are better and need no more workers in any datacenter."""
KEEP_OF_MANY = 40
"""With many datacenters: lines that are priced in full. Ten times as many where only this kind of plan is asked for."""
WIDER = 40
"""At most this many times as many lines are priced."""
GROUPS, MOST_GROUPS = 3, 1_000
"""The same for groups in the same datacenters, before they are combined."""
MOST_LINES = 10_000
"""Lines that are compared, the best by rough score. The sum between groups may take several times as long as it has."""


@dataclass(frozen=True, eq=False)
class _EstimatedGroups:
    """The estimates of every group of one frame and depth."""

    frame: Frame
    batch: Batch
    found: Estimate
    groups: list[Variant]
    used: Ints
    """[v, i]: workers."""
    by_floor: bool
    """Whether plans are compared under searched orders, which come close to their floors."""

    @cached_property
    def line(self) -> tuple[Floats, Floats]:
        """[v]: period and fill, such that n microbatches take about fill + (n - 1) periods. Of floors where these
        count: several groups have about half of the microbatches each that a group alone has."""
        found = self.found
        if not self.by_floor:
            return found.period_s, found.fill_s
        every, half = np.arange(len(found.period_s)), (found.num_microbatches + 1) // 2
        more = np.maximum(found.num_microbatches, half + 1)
        half_s, more_s = (found.floors.done_s(every, count).max(axis=1) for count in (half, more))
        period_s = (more_s - half_s) / (more - half)
        return period_s, half_s - (half - 1) * period_s

    @cached_property
    def first_dc(self) -> Ints:
        """[v]: where stage 0 is."""
        return np.array([shape[0][0] for shape, _, _ in self.groups], np.int64)

    @cached_property
    def most_stages(self) -> Ints:
        """[v]: in one datacenter."""
        return np.array([max(stages for _, stages in shape) for shape, _, _ in self.groups], np.int64)


@dataclass(frozen=True, eq=False)
class _Scored:
    """Lines of groups with their rough scores."""

    estimated: _EstimatedGroups
    members: Ints
    """[n, g]: numbers of groups."""
    score: Floats
    used: Ints
    """[n, i]: GPUs."""

    @property
    def look(self) -> Ints:
        """[n, .]: differs where lines differ in more than their datacenters, in nearly all cases."""
        batch, count = self.estimated.batch, len(self.score)
        replicas, cell = ((one[self.members] ** 2).sum(axis=1) for one in (batch.replicas, batch.cell))
        same = np.tile([batch.tp, batch.microbatch, batch.depth, self.members.shape[1]], (count, 1))
        return np.column_stack([same, replicas, cell])


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
    scored: list[_Scored] = []
    for k, frame in enumerate(worth):
        if tick is not None:
            tick("estimating regions", k, len(worth))
        for depth in depths(space, cluster, frame):
            scored += _scored(space, cluster, objective, frame, depth, by_floor)
    keep = (KEEP if cluster.num_dcs <= FEW_DCS else KEEP_OF_MANY) * (10 if space.kind == "data" else 1)
    entries = [
        entry_of(space, cluster, objective, scored[k].estimated, scored[k].members[n].tolist())
        for k, n in _best(cluster, scored, keep)
    ]
    best = sorted((e for e in entries if e is not None), key=lambda entry: entry.score)
    return best, sum(len(one.score) for one in scored)


def _best(cluster: ClusterArrays, scored: Sequence[_Scored], count: int) -> list[tuple[int, int]]:
    """(which of the scored, which line of it), best first. Of lines that differ in equal datacenters one is taken."""
    if not scored:
        return []
    which = np.concatenate(
        [np.stack([np.full(len(one.score), k), np.arange(len(one.score))]) for k, one in enumerate(scored)], axis=1
    )
    score, used, look = (np.concatenate([getattr(one, name) for one in scored]) for name in ("score", "used", "look"))
    near = np.argsort(score, kind="stable")[:MOST_LINES]
    which, score, used, look = which[:, near], score[near], used[near], look[near]
    if cluster.num_dcs > FEW_DCS:
        return list(zip(*which[:, :count].tolist(), strict=True))
    classes = np.array(alike(cluster))
    shares = [np.sort(used[:, classes == one], axis=1) for one in dict.fromkeys(classes.tolist())]
    _, first = np.unique(np.column_stack([np.round(score / score[0], 10), look, *shares]), axis=0, return_index=True)
    first.sort()
    kept = first[nested_best(score[first], used[first], count, WIDER * count)]
    return list(zip(*which[:, kept].tolist(), strict=True))


def _scored(
    space: Space, cluster: ClusterArrays, objective: Objective, frame: Frame, depth: int, by_floor: bool
) -> Iterator[_Scored]:
    """The lines of one frame and depth that fit."""
    room = room_of(space, cluster, frame)
    by_dcs = every_group(space, cluster, frame, room, depth)
    is_complete = bool(by_dcs) and max(room) <= FEW_WORKERS
    along = [] if is_complete else tour_lines(space, cluster, frame, room, depth)
    groups = dict.fromkeys(group for found in [*by_dcs.values(), *along] for group in found)
    if not groups:
        return
    at = {group: v for v, group in enumerate(groups)}
    shapes = {shape: k for k, shape in enumerate(dict.fromkeys(shape for shape, _, _ in groups))}
    rows = np.array([(shapes[shape], replicas, cell) for shape, replicas, cell in groups], np.int64)
    batch = Batch(frame.tp, frame.microbatch, depth, list(shapes), rows[:, 0], rows[:, 1], rows[:, 2])
    found = estimate(space, cluster, frame.model, batch)
    used = workers_used(cluster, batch.shapes, batch.shape, batch.replicas)
    estimated = _EstimatedGroups(frame, batch, found, list(groups), used, by_floor)
    lines = [*combined(_best_groups(space, estimated, {dcs: [at[g] for g in one] for dcs, one in by_dcs.items()}))]
    lines += _prefixes([[at[group] for group in line if found.fits[at[group]]] for line in along])
    for members in lines:
        one = _rough(space, cluster, objective, estimated, members)
        if len(one.score):
            yield one


def _best_groups(
    space: Space, estimated: _EstimatedGroups, by_dcs: dict[frozenset[int], list[int]]
) -> dict[frozenset[int], Ints]:
    """Of the groups in the same datacenters those that would be the first to finish half of an iteration."""
    period_s, fill_s = estimated.line
    half_s = fill_s + period_s * space.slots(estimated.frame.microbatch) / 2 / estimated.batch.replicas
    half_s = np.where(estimated.found.fits, half_s, np.inf)
    best: dict[frozenset[int], Ints] = {}
    for dcs, numbers in by_dcs.items():
        v = np.array(numbers, np.int64)
        kept = v[nested_best(half_s[v], estimated.used[v], GROUPS, MOST_GROUPS)]
        if len(kept):
            best[dcs] = kept
    return best


def _prefixes(lines: Sequence[list[int]]) -> Iterator[Ints]:
    """[n, g]: the first 2, 3, ... groups of the lines. The same groups in another order are the same candidate: the
    ring goes by distance."""
    for count in range(2, max(map(len, lines), default=0) + 1):
        unique = {frozenset(line[:count]): line[:count] for line in reversed(lines) if len(line) >= count}
        yield np.array(list(unique.values()), np.int64)


def _rough(
    space: Space, cluster: ClusterArrays, objective: Objective, estimated: _EstimatedGroups, members: Ints
) -> _Scored:
    """The groups finish together; then their gradients pass the slowest lane."""
    frame, found = estimated.frame, estimated.found
    used = estimated.used[members].sum(axis=1)
    if space.datacenters is not None:
        is_kept = np.array([name in space.datacenters for name in cluster.names])
        members = members[((used > 0) == is_kept).all(axis=1)]
        used = estimated.used[members].sum(axis=1)
    replicas = estimated.batch.replicas[members]
    period_s, fill_s = (one[members] for one in estimated.line)
    rate = (replicas / period_s).sum(axis=1)
    busy = (replicas * (fill_s / period_s - 1)).sum(axis=1)
    count = members.shape[1]
    a, b = estimated.first_dc[members[:, :-1]], estimated.first_dc[members[:, 1:]]
    per_node = np.maximum(1, cluster.gpus_per_node // frame.tp)
    nodes = [
        -(-np.take_along_axis(estimated.used[one], dc[..., None], axis=2)[..., 0] // per_node[dc])
        for one, dc in ((members[:, :-1], a), (members[:, 1:], b))
    ]
    lane_bps = np.where(cluster.joined[a, b], all_nodes_bps(cluster, a, b, np.minimum(*nodes), space.tcp), 0.0)
    bits = float(frame.model.gradient_bytes.sum()) * 8 / estimated.batch.depth * estimated.most_stages[members[:, 1:]]
    with np.errstate(divide="ignore"):
        lane_s = (bits / lane_bps).max(axis=1)
    wan_s = 2 * (count - 1) / count * lane_s + num_rounds(count) * cluster.latency_s[a, b].max(axis=1)
    iteration_s = (space.slots(frame.microbatch) + busy) / rate + found.closing_s[members].max(axis=1) + wan_s
    ok = np.isfinite(iteration_s)
    members, iteration_s, used = members[ok], iteration_s[ok], used[ok]
    usd = iteration_s * found.usd_per_s[members].sum(axis=1)
    score = np.asarray(objective.score(iteration_s, usd, space.tokens, SLACK))
    return _Scored(estimated, members, score, used * frame.tp)


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
    space: Space, cluster: ClusterArrays, objective: Objective, estimated: _EstimatedGroups, members: list[int]
) -> EstimatedCandidate | None:
    """The candidate with these groups. The sum between groups is priced as in `judge`."""
    frame, found = estimated.frame, estimated.found
    line = [estimated.groups[v] for v in members]
    period, fill = (one[members].tolist() for one in estimated.line)
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
