"""Candidates with data parallelism over regions: several groups of pipelines, which sum their gradients once an
iteration.

`group_sets` finds groups that train together. Here each set gets a rough score, and `group_set_estimates` prices the
best in full. Uses estimates only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Floats, Ints, all_nodes_bps
from atlas.evaluate import Progress
from atlas.planner.estimate import estimate
from atlas.planner.estimated_candidates import SLACK, EstimatedCandidate, WorkerSetup, batch_of_variants, depths
from atlas.planner.group_set_estimates import EstimatedGroups, GroupSet, priced_group_sets
from atlas.planner.group_sets import combined, every_group, tour_group_sets, usable_workers
from atlas.planner.group_sums import num_rounds
from atlas.planner.objective import Objective
from atlas.planner.pruning import undominated, workers_used
from atlas.planner.shapes import FEW_DCS, FEW_WORKERS, alike
from atlas.planner.space import Space

KEEP = 8
"""A set of groups is priced in full if fewer sets than this are better and need no more workers in any datacenter."""
KEEP_OF_MANY = 40
"""With many datacenters: sets of groups that are priced in full."""
KEEP_IF_ONLY_KIND = 10
"""Times as many are priced where only this kind of plan is asked for."""
WIDER = 40
"""At most this many times as many are priced."""
GROUPS, MOST_GROUPS = 3, 1_000
"""The same for groups in the same datacenters, before they are combined."""
MAX_COMPARED = 10_000
"""Sets that are compared, the best by rough score. The sum between groups may take several times as long as it has."""

SCORE_DIGITS = 10
"""Decimal digits of the ratio to the best score in which equal sets agree."""


@dataclass(frozen=True, eq=False)
class _ScoredGroupSets:
    """Sets of groups with their rough scores."""

    estimated: EstimatedGroups
    members: Ints
    """[n, g]: numbers of groups."""
    score: Floats
    used: Ints
    """[n, i]: GPUs."""

    @property
    def look(self) -> Ints:
        """[n, .]: differs where sets differ in more than their datacenters, in nearly all cases."""
        batch, count = self.estimated.batch, len(self.score)
        replicas, cell = ((one[self.members] ** 2).sum(axis=1) for one in (batch.replicas, batch.cell))
        same = np.tile([batch.tp, batch.microbatch, batch.depth, self.members.shape[1]], (count, 1))
        return np.column_stack([same, replicas, cell])


def several_groups(
    space: Space,
    cluster: ClusterArrays,
    objective: Objective,
    worth: Sequence[WorkerSetup],
    progress: Progress | None = None,
    *,
    by_floor: bool = False,
) -> tuple[list[EstimatedCandidate], int]:
    """The best candidates of two groups or more, best first, and how many were estimated. `by_floor`: microbatches are
    distributed for searched orders."""
    if cluster.num_dcs == 1 or space.num_cells is not None:
        return [], 0
    scored: list[_ScoredGroupSets] = []
    for k, setup in enumerate(worth):
        if progress is not None:
            progress("estimating regions", k, len(worth))
        for depth in depths(space, cluster, setup):
            scored += _scored(space, cluster, objective, setup, depth, by_floor)
    keep = (KEEP if cluster.num_dcs <= FEW_DCS else KEEP_OF_MANY) * (KEEP_IF_ONLY_KIND if space.kind == "data" else 1)
    group_sets = [
        GroupSet(scored[k].estimated, tuple(scored[k].members[n].tolist())) for k, n in _best(cluster, scored, keep)
    ]
    best = sorted(priced_group_sets(space, cluster, objective, group_sets), key=lambda entry: entry.score)
    return best, sum(len(one.score) for one in scored)


def _best(cluster: ClusterArrays, scored: Sequence[_ScoredGroupSets], count: int) -> list[tuple[int, int]]:
    """(which of the scored, which set of it), best first. Of sets that differ in equal datacenters one is taken."""
    if not scored:
        return []
    which = np.concatenate(
        [np.stack([np.full(len(one.score), k), np.arange(len(one.score))]) for k, one in enumerate(scored)], axis=1
    )
    score, used, look = (np.concatenate([getattr(one, name) for one in scored]) for name in ("score", "used", "look"))
    near = np.argsort(score, kind="stable")[:MAX_COMPARED]
    which, score, used, look = which[:, near], score[near], used[near], look[near]
    if cluster.num_dcs > FEW_DCS:
        return list(zip(*which[:, :count].tolist(), strict=True))
    classes = np.array(alike(cluster))
    shares = [np.sort(used[:, classes == one], axis=1) for one in dict.fromkeys(classes.tolist())]
    _, first = np.unique(
        np.column_stack([np.round(score / score[0], SCORE_DIGITS), look, *shares]), axis=0, return_index=True
    )
    first.sort()
    kept = first[undominated(score[first], used[first], count, WIDER * count)]
    return list(zip(*which[:, kept].tolist(), strict=True))


def _scored(
    space: Space, cluster: ClusterArrays, objective: Objective, setup: WorkerSetup, depth: int, by_floor: bool
) -> Iterator[_ScoredGroupSets]:
    """The sets of groups of one worker setup and depth that fit."""
    workers = usable_workers(space, cluster, setup)
    by_dcs = every_group(space, cluster, setup, workers, depth)
    is_complete = bool(by_dcs) and max(workers) <= FEW_WORKERS
    along = [] if is_complete else tour_group_sets(space, cluster, setup, workers, depth)
    groups = dict.fromkeys(group for found in [*by_dcs.values(), *along] for group in found)
    if not groups:
        return
    at = {group: v for v, group in enumerate(groups)}
    batch = batch_of_variants(setup, depth, list(groups))
    found = estimate(space, cluster, setup.model, batch)
    used = workers_used(cluster, batch.shapes, batch.shape, batch.replicas)
    estimated = EstimatedGroups(setup, batch, found, list(groups), used, by_floor)
    group_sets = [*combined(_best_groups(space, estimated, {dcs: [at[g] for g in one] for dcs, one in by_dcs.items()}))]
    group_sets += _prefixes([[at[group] for group in one if found.fits[at[group]]] for one in along])
    for members in group_sets:
        one = _rough(space, cluster, objective, estimated, members)
        if len(one.score):
            yield one


def _best_groups(
    space: Space, estimated: EstimatedGroups, by_dcs: dict[frozenset[int], list[int]]
) -> dict[frozenset[int], Ints]:
    """Of the groups in the same datacenters those that would be the first to finish half of an iteration."""
    period_s, fill_s = estimated.period_and_fill_s
    half_s = fill_s + period_s * space.total_microbatches(estimated.setup.microbatch) / 2 / estimated.batch.replicas
    half_s = np.where(estimated.found.fits, half_s, np.inf)
    best: dict[frozenset[int], Ints] = {}
    for dcs, numbers in by_dcs.items():
        v = np.array(numbers, np.int64)
        kept = v[undominated(half_s[v], estimated.used[v], GROUPS, MOST_GROUPS)]
        if len(kept):
            best[dcs] = kept
    return best


def _prefixes(group_sets: Sequence[list[int]]) -> Iterator[Ints]:
    """[n, g]: the first 2, 3, ... groups of the sets. The same groups in another order are the same candidate: the
    ring goes by distance."""
    for count in range(2, max(map(len, group_sets), default=0) + 1):
        unique = {frozenset(one[:count]): one[:count] for one in reversed(group_sets) if len(one) >= count}
        yield np.array(list(unique.values()), np.int64)


def _rough(
    space: Space, cluster: ClusterArrays, objective: Objective, estimated: EstimatedGroups, members: Ints
) -> _ScoredGroupSets:
    """The groups finish together; then their gradients pass the slowest lane."""
    setup, found = estimated.setup, estimated.found
    used = estimated.used[members].sum(axis=1)
    if space.datacenters is not None:
        is_kept = np.array([name in space.datacenters for name in cluster.names])
        members = members[((used > 0) == is_kept).all(axis=1)]
        used = estimated.used[members].sum(axis=1)
    if space.below < math.inf and objective.minimise == "throughput":
        most = estimated.batch.replicas * found.floors.most_microbatches(space.below)
        members = members[most[members].sum(axis=1) >= space.total_microbatches(setup.microbatch)]
        used = estimated.used[members].sum(axis=1)
    replicas = estimated.batch.replicas[members]
    period_s, fill_s = (one[members] for one in estimated.period_and_fill_s)
    rate = (replicas / period_s).sum(axis=1)
    busy = (replicas * (fill_s / period_s - 1)).sum(axis=1)
    count = members.shape[1]
    a, b = estimated.first_dc[members[:, :-1]], estimated.first_dc[members[:, 1:]]
    per_node = np.maximum(1, cluster.gpus_per_node // setup.tp)
    nodes = [
        -(-np.take_along_axis(estimated.used[one], dc[..., None], axis=2)[..., 0] // per_node[dc])
        for one, dc in ((members[:, :-1], a), (members[:, 1:], b))
    ]
    lane_bps = np.where(cluster.joined[a, b], all_nodes_bps(cluster, a, b, np.minimum(*nodes), space.tcp), 0.0)
    bits = float(setup.model.gradient_bytes.sum()) * 8 / estimated.batch.depth * estimated.most_stages[members[:, 1:]]
    with np.errstate(divide="ignore"):
        lane_s = (bits / lane_bps).max(axis=1)
    wan_s = 2 * (count - 1) / count * lane_s + num_rounds(count) * cluster.latency_s[a, b].max(axis=1)
    iteration_s = (
        (space.total_microbatches(setup.microbatch) + busy) / rate + found.closing_s[members].max(axis=1) + wan_s
    )
    ok = np.isfinite(iteration_s)
    members, iteration_s, used = members[ok], iteration_s[ok], used[ok]
    usd = iteration_s * found.usd_per_s[members].sum(axis=1)
    score = np.asarray(objective.score(iteration_s, usd, space.tokens, SLACK))
    return _ScoredGroupSets(estimated, members, score, used * setup.tp)
