"""Data parallelism over regions: several groups of pipelines sum their gradients over the WAN, as planned in
`runtime.group_sum_plan`.

Inside a group each pipeline has the sum of its slice of every stage. The groups form a ring, in the order of the
candidate; each slice goes to the workers of the next group that have the same values: all of it once between two
groups, and 2 (G - 1) / G of it, in 2 (G - 1) rounds, among G. All workers of a group send at once. A lane is all
traffic from one datacenter to another. It takes as long as its most loaded pair of nodes, or as the trunk. In a run,
stages that finish earlier send earlier; here all stages of a lane share it from the start, which never underestimates
the time. Knows bytes and rates; `judge` knows when stages finish.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Floats, Ints, cluster_arrays, path_bps
from atlas.cost.model_arrays import model_arrays
from atlas.planner.candidate import Candidate, Group, stage_of_pieces
from atlas.spec import Job


def ring(cluster: ClusterArrays, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups in the order in which they pass sums on: from each to the nearest that is left, by stage 0."""
    at = cluster.index
    left, tour = list(groups[1:]), [groups[0]]
    while left:
        here = at[tour[-1].places[0][0]]
        follow = min(left, key=lambda group: float(_away_s(cluster, here, at[group.places[0][0]])))
        tour.append(follow)
        left.remove(follow)
    return tuple(tour)


def _away_s(cluster: ClusterArrays, i: int, j: int) -> float:
    return float(cluster.latency_s[i, j]) if cluster.joined[i, j] else np.inf


def num_rounds(count: int) -> int:
    """Exchanges one after the other."""
    return 1 if count == 2 else 2 * (count - 1)


def _share(count: int) -> float:
    """Of its gradients, what a group sends to the next one."""
    return 2 * (count - 1) / count


def _neighbours(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Each group and the next one of the ring; two groups send the same both ways."""
    yield from pairwise(groups)
    if len(groups) > 2:
        yield groups[-1], groups[0]


# ---- who sends what ------------------------------------------------------------------------------------------------
class LaneBytes(NamedTuple):
    """What the workers of one group send to the next from one datacenter to another; of the values themselves, once."""

    most_of_src: float
    """Of the node that sends most."""
    most_of_dst: float
    """Of the node that receives most."""
    most_of_pair: float
    """Of the pair of nodes with most."""
    total: float


_Cut = tuple[tuple[tuple[int, int], ...], tuple[int, ...], int]
"""All of a group that its share of the values depends on: places by number, layers per stage, replicas."""


class _Owners(NamedTuple):
    """Workers of a group in the order of what they own of the model."""

    first_byte: Floats
    dc: Ints
    node: Ints


@lru_cache(maxsize=4096)
def _owners(pieces: tuple[float, ...], per_node: tuple[int, ...], cut: _Cut) -> _Owners:
    """Each pipeline owns an equal slice of each stage. Nodes are filled one after the other, pipeline by pipeline."""
    places, layers_per_stage, num_replicas = cut
    replicas, num_stages = np.arange(num_replicas), len(layers_per_stage)
    stage_bytes = np.bincount(np.array(stage_of_pieces(layers_per_stage)), weights=pieces, minlength=num_stages)
    begin = np.concatenate([[0.0], np.cumsum(stage_bytes)[:-1]])
    first = begin[:, None] + stage_bytes[:, None] * replicas / num_replicas
    dc = np.array([i for i, stages in places for _ in range(stages)], np.int64)
    here = np.array([np.count_nonzero(dc[:s] == dc[s]) for s in range(num_stages)], np.int64)
    number = replicas * np.bincount(dc)[dc][:, None] + here[:, None]
    node = number // np.array(per_node)[dc][:, None]
    return _Owners(first.ravel(), np.repeat(dc, num_replicas), node.ravel())


@lru_cache(maxsize=16_384)  # the same sets of groups are priced for several links and microbatch sizes
def _lane_bytes(
    pieces: tuple[float, ...], per_node: tuple[int, ...], one: _Cut, other: _Cut
) -> dict[tuple[int, int], LaneBytes]:
    src, dst = (_owners(pieces, per_node, cut) for cut in (one, other))
    edges = np.union1d(src.first_byte, dst.first_byte)
    num_bytes = np.diff(np.append(edges, np.sum(pieces)))
    a, b = (np.searchsorted(owners.first_byte, edges, "right") - 1 for owners in (src, dst))
    src_dc, dst_dc, src_node, dst_node = src.dc[a], dst.dc[b], src.node[a], dst.node[b]
    found = {}
    for i, j in sorted({*zip(src_dc.tolist(), dst_dc.tolist(), strict=True)}):
        mine = (src_dc == i) & (dst_dc == j)
        own, at_src, at_dst = num_bytes[mine], src_node[mine], dst_node[mine]
        pairs = np.unique(at_src * (int(at_dst.max()) + 1) + at_dst, return_inverse=True)[1]
        found[i, j] = LaneBytes(_most(own, at_src), _most(own, at_dst), _most(own, pairs), float(own.sum()))
    return found


def _most(num_bytes: Floats, at: Ints) -> float:
    """The largest sum of what has the same number."""
    return float(np.bincount(at, weights=num_bytes).max())


def sent_bytes(
    cluster: ClusterArrays, piece_bytes: Floats, one: Group, other: Group, tp: int
) -> dict[tuple[int, int], LaneBytes]:
    """By datacenters, from one to another: what the workers of one group send to those of the next that have the same
    values."""
    per_node = tuple(np.maximum(1, cluster.gpus_per_node // tp).tolist())
    return _lane_bytes(tuple(piece_bytes.tolist()), per_node, _cut(cluster, one), _cut(cluster, other))


def _cut(cluster: ClusterArrays, group: Group) -> _Cut:
    places = tuple([(cluster.index[name], stages) for name, stages in group.places])
    return places, group.layers_per_stage, group.replicas


# ---- how long it takes ---------------------------------------------------------------------------------------------
def lanes_s(cluster: ClusterArrays, piece_bytes: Floats, candidate: Candidate) -> dict[tuple[int, int], float]:
    """By datacenters, from one to another: seconds of transmission of all rounds, without latency. Infinite where there
    is no path."""
    found: dict[tuple[int, int], float] = {}
    share = _share(len(candidate.groups))
    for one, other in _neighbours(candidate.groups):
        for pair, sent in sent_bytes(cluster, piece_bytes, one, other, candidate.tp).items():
            seconds = share * _lane_s(cluster, candidate, pair, sent)
            found[pair] = max(found.get(pair, 0.0), seconds)
    return found


def _lane_s(cluster: ClusterArrays, candidate: Candidate, pair: tuple[int, int], sent: LaneBytes) -> float:
    ends = [8 * most / float(cluster.net_bps[dc]) for most, dc in zip(sent[:2], pair, strict=True)]
    if pair[0] == pair[1]:
        return max(ends)
    if not cluster.joined[pair]:
        return np.inf
    path = 8 * sent.most_of_pair / float(path_bps(cluster, *pair, candidate.tcp))
    return max(*ends, path, 8 * sent.total / float(cluster.trunk_bps[pair]))


def group_sum_s(cluster: ClusterArrays, piece_bytes: Floats, candidate: Candidate) -> list[Floats] | None:
    """By group and stage: seconds that the ring takes; None where two neighbours of it have no path. `piece_bytes`: the
    gradient of each piece of the model (`ModelArrays.gradient_bytes`)."""
    count = len(candidate.groups)
    found = [np.zeros(group.pp) for group in candidate.groups]
    if count == 1:
        return found
    lanes = lanes_s(cluster, piece_bytes, candidate)
    if not all(np.isfinite(seconds) for seconds in lanes.values()):
        return None
    lane_s, piece_s, latency_s = np.zeros_like(cluster.latency_s), *np.zeros((2, len(piece_bytes)))
    for pair, seconds in lanes.items():
        lane_s[pair] = seconds
    for one, other in _neighbours(candidate.groups):
        at = _piece_dc(cluster, one), _piece_dc(cluster, other)
        # A piece may be divided between lanes: it ends with that of its stage.
        piece_s, latency_s = np.maximum(piece_s, lane_s[at]), np.maximum(latency_s, cluster.latency_s[at])
    piece_s += num_rounds(count) * latency_s
    for group, stage_s in zip(candidate.groups, found, strict=True):
        np.maximum.at(stage_s, np.array(group.stage_of), piece_s)
    return found


def _piece_dc(cluster: ClusterArrays, group: Group) -> Ints:
    dc = np.array([cluster.index[name] for name in group.stage_dc], np.int64)
    return np.asarray(dc[np.array(group.stage_of)])


def started_s(candidate: Candidate, done_s: list[Floats]) -> list[Floats]:
    """By group and stage: when every group has finished with each of the stage's layers."""
    pieces = [done[list(group.stage_of)] for group, done in zip(candidate.groups, done_s, strict=True)]
    last = np.max(pieces, axis=0)
    found = []
    for group in candidate.groups:
        start = np.zeros(group.pp)
        np.maximum.at(start, np.array(group.stage_of), last)
        found.append(start)
    return found


class GroupWaits(NamedTuple):
    """What a group's SYNC and NORM wait for other groups."""

    sync_s: Floats
    """By stage: from its last backward to the end of the sum between groups."""
    norm_s: float


def group_waits(jobs: Sequence[Job], done_s: list[Floats], tcp: str) -> list[GroupWaits]:
    """Of each group of a job that is to be executed. `done_s`: by group and stage, its last backward."""
    candidate, cluster = candidate_of_jobs(jobs, tcp), cluster_arrays(jobs[0])
    between = group_sum_s(cluster, model_arrays(jobs[0], cluster).gradient_bytes, candidate)
    assert between is not None, "the planner has refused groups without a path"
    ends = [cluster.index[group.stage_dc[-1]] for group in candidate.groups]
    return [
        GroupWaits(np.asarray(start - done + sum_s), float(cluster.latency_s[ends[0], end]))
        for start, done, sum_s, end in zip(started_s(candidate, done_s), done_s, between, ends, strict=True)
    ]


class GroupLanes(NamedTuple):
    """Between datacenters of different groups, for an emulation."""

    transmit_s: dict[tuple[str, str], float]
    """Of all rounds, without latency."""
    latencies_s: dict[tuple[str, str], float]

    def latency_s(self, src: str, dst: str) -> float:
        return self.latencies_s[src, dst]


def group_lanes(jobs: Sequence[Job], tcp: str, slower: int = 1) -> GroupLanes:
    """Of a job that is to be executed, every duration `slower` times as long."""
    candidate, cluster = candidate_of_jobs(jobs, tcp), cluster_arrays(jobs[0])
    names, lanes = cluster.names, lanes_s(cluster, model_arrays(jobs[0], cluster).gradient_bytes, candidate)
    transmit_s = {(names[i], names[j]): slower * s for (i, j), s in lanes.items()}
    if len(jobs) == 2:  # both ways
        transmit_s |= {(b, a): s for (a, b), s in transmit_s.items()}
    latency_s = slower * cluster.latency_s
    return GroupLanes(transmit_s, {(a, b): latency_s[i, j] for i, a in enumerate(names) for j, b in enumerate(names)})


def candidate_of_jobs(jobs: Sequence[Job], tcp: str) -> Candidate:
    """The candidate that the groups of a plan are."""
    groups = tuple(map(Group.placed, jobs))
    return Candidate(jobs[0].tp, jobs[0].microbatch, groups, tcp="one" if tcp == "one" else "many")


def group_sum_usd(
    cluster: ClusterArrays, piece_bytes: Floats, candidate: Candidate
) -> tuple[float, dict[tuple[str, str], float]]:
    """(dollars, bytes by link) that the ring sends over the WAN in one iteration."""
    count, sent = len(candidate.groups), dict[tuple[str, str], float]()
    if count == 1:
        return 0.0, sent
    for one, other in [*pairwise(candidate.groups), (candidate.groups[-1], candidate.groups[0])]:
        for (i, j), lane in sent_bytes(cluster, piece_bytes, one, other, candidate.tp).items():
            pair = (cluster.names[i], cluster.names[j])
            sent[pair] = sent.get(pair, 0.0) + _share(count) * lane.total
    usd = sum(n * float(cluster.usd_per_byte[cluster.index[a], cluster.index[b]]) for (a, b), n in sent.items())
    return usd, sent
