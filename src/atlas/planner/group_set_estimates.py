"""Sets of groups that train together, priced in full: microbatches are distributed so that all groups finish
together, and the sum between groups is priced as in `judge`.

Many sets at once: one at a time takes most of the time of a plan with few datacenters. Uses estimates only.

Index legend: n set of groups, g group of a set, v variant of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Floats, Ints
from atlas.planner.candidate import Candidate
from atlas.planner.estimate import Estimate, PipelineBatch
from atlas.planner.estimated_candidates import SLACK, EstimatedCandidate, Variant, WorkerSetup, floor_score, group_of
from atlas.planner.group_sums import group_sum_s, ring
from atlas.planner.judge import wan_traffic
from atlas.planner.objective import Objective
from atlas.planner.space import Space

HALVINGS = 60
"""Steps that find the time at which all groups of a set can be finished."""


@dataclass(frozen=True, eq=False)
class EstimatedGroups:
    """The estimates of every group of one worker setup and depth."""

    setup: WorkerSetup
    batch: PipelineBatch
    found: Estimate
    groups: list[Variant]
    used: Ints
    """[v, i]: workers."""
    by_floor: bool
    """Whether plans are compared under searched orders, which come close to their floors."""

    @cached_property
    def period_and_fill_s(self) -> tuple[Floats, Floats]:
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


class GroupSet(NamedTuple):
    """Groups that train together."""

    estimated: EstimatedGroups
    members: tuple[int, ...]
    """Numbers of groups."""


class _DealtGroups(NamedTuple):
    """A set of groups whose microbatches are distributed."""

    group_set: GroupSet
    counts: tuple[int, ...]
    """Microbatches per pipeline, by group."""
    candidate: Candidate
    between_s: list[Floats]
    """By group of the set and stage: the sum between groups. The candidate has the groups in the order of the ring."""


def deal(total: Ints, replicas: Ints, fill_s: Floats, period_s: Floats) -> Ints:
    """[n, g]: microbatches per pipeline of each group such that the last group of a set finishes as early as possible;
    0 where a group would have none. `total` [n]: microbatches of all pipelines of a set; the others are [n, g]."""
    low, high = np.zeros(len(total)), (fill_s + period_s * total[:, None]).max(axis=1)
    counts = np.repeat(total[:, None], replicas.shape[1], axis=1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        left_s = middle[:, None] - fill_s
        tried = np.where(left_s >= 0, (left_s / period_s).astype(np.int64) + 1, 0)
        enough = (replicas * tried).sum(axis=1) >= total
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        counts[enough] = tried[enough]
    every = np.arange(len(total))
    for g in np.argsort(-replicas, axis=1, kind="stable").T:
        spare = ((replicas * counts).sum(axis=1) - total) // replicas[every, g]
        counts[every, g] -= np.clip(spare, 0, np.maximum(counts[every, g] - 1, 0))
    return counts


def priced_group_sets(
    space: Space, cluster: ClusterArrays, objective: Objective, group_sets: Sequence[GroupSet]
) -> list[EstimatedCandidate]:
    """The candidates of the sets, in this order; sets in which a group has no microbatch, or no path to the next group,
    are left out."""
    dealt = _dealt(space, cluster, group_sets)
    if not dealt:
        return []
    iteration_s, rent_usd_per_s, egress_usd = np.zeros((3, len(dealt)))
    for n, (group_set, counts, candidate, between_s) in enumerate(dealt):
        found, members = group_set.estimated.found, list(group_set.members)
        period_s, fill_s = (one[members] for one in group_set.estimated.period_and_fill_s)
        ends_s = fill_s + (np.array(counts) - 1) * period_s
        iteration_s[n] = ends_s.max() + found.closing_s[members].max() + max(float(one.max()) for one in between_s)
        rent_usd_per_s[n] = sum(found.usd_per_s[members].tolist())
        egress_usd[n] = wan_traffic(space, cluster, group_set.estimated.setup.model.gradient_bytes, candidate)[0]
    floor_s = _floors_s(dealt)
    usd = iteration_s * rent_usd_per_s + egress_usd
    floor = floor_score(space, objective, floor_s, floor_s * rent_usd_per_s + egress_usd, iteration_s, usd)
    score = objective.score(iteration_s, usd, space.tokens, SLACK)
    figures = np.stack([score, iteration_s, usd, floor], axis=1).tolist()
    return [EstimatedCandidate(one.candidate, *own) for one, own in zip(dealt, figures, strict=True)]


def _dealt(space: Space, cluster: ClusterArrays, group_sets: Sequence[GroupSet]) -> list[_DealtGroups]:
    counts: dict[int, list[int]] = {}
    for size in {len(group_set.members) for group_set in group_sets}:
        at = [n for n, group_set in enumerate(group_sets) if len(group_set.members) == size]
        total = np.array([space.total_microbatches(group_sets[n].estimated.setup.microbatch) for n in at], np.int64)
        replicas = np.stack([group_sets[n].estimated.batch.replicas[list(group_sets[n].members)] for n in at])
        both = [[one[list(group_sets[n].members)] for one in group_sets[n].estimated.period_and_fill_s] for n in at]
        period_s, fill_s = np.moveaxis(np.array(both), 1, 0)
        counts |= dict(zip(at, deal(total, replicas, fill_s, period_s).tolist(), strict=True))
    found = []
    for n, group_set in enumerate(group_sets):
        if all(counts[n]) and (one := _one_dealt(space, cluster, group_set, tuple(counts[n]))) is not None:
            found.append(one)
    return found


def _one_dealt(
    space: Space, cluster: ClusterArrays, group_set: GroupSet, counts: tuple[int, ...]
) -> _DealtGroups | None:
    """None where the groups have no path to each other."""
    estimated = group_set.estimated
    parts = zip(group_set.members, counts, strict=True)
    groups = tuple(group_of(cluster, estimated.groups[v], estimated.found.layers_of(v), count) for v, count in parts)
    sharing = space.takes_turns(groups)
    setup = estimated.setup
    candidate = Candidate(setup.tp, setup.microbatch, ring(cluster, groups), sharing, space.tcp)
    between_s = group_sum_s(cluster, setup.model.gradient_bytes, candidate)
    if between_s is None:
        return None
    return _DealtGroups(group_set, counts, candidate, [between_s[candidate.groups.index(group)] for group in groups])


def _floors_s(dealt: Sequence[_DealtGroups]) -> Floats:
    """[n]: the latest floor of the groups of a set."""
    floor_s = np.zeros(len(dealt))
    by_batch: dict[int, list[int]] = {}
    for n, one in enumerate(dealt):
        by_batch.setdefault(id(one.group_set.estimated), []).append(n)
    for numbers in by_batch.values():
        rows = [(n, v, k) for n in numbers for v, k in zip(dealt[n].group_set.members, dealt[n].counts, strict=True)]
        n, v, count = np.array(rows, np.int64).T
        between_s = np.array([own for m in numbers for own in dealt[m].between_s])
        floors = dealt[numbers[0]].group_set.estimated.found.floors
        np.maximum.at(floor_s, n, floors.iteration_s(v, count, between_s))
    return floor_s
