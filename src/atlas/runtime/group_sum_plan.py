"""Which worker sends which gradients to which, when groups of pipelines in different regions sum their gradients.
Computed from shapes alone, so that all workers and the launcher agree. Loads no torch.

Inside a group each pipeline has the sum of its slice of every stage. The groups then form a ring. Each part of a slice
goes to the worker of the next group that has the same values: groups may cut the model into other stages and slices,
so a part is a run of one parameter, and all workers of a group send at once. Two groups exchange all of it in one
round. More groups divide every parameter into as many chunks as there are groups; a chunk goes around once as sums and
once as results, 2 (G - 1) rounds. Each value is added in one fixed order, and all groups get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from atlas.runtime.flat_layout import FlatLayout
from atlas.runtime.models.config import DecoderConfig, layer_of, model_layers
from atlas.runtime.models.sizes import layer_sizes, stage_layout
from atlas.runtime.topology import GROUP_SUMS, MAIN, GroupShape, PeerLink, WorkerRole


class RingRound(NamedTuple):
    """One exchange with the neighbours in the ring."""

    sent: int
    """The chunk that goes to the next group."""
    received: int
    """The chunk that comes from the group before."""
    adds: bool
    """Whether what is received is added to this group's, or replaces it."""


def num_chunks(num_groups: int) -> int:
    return 1 if num_groups == 2 else num_groups


def rounds(group: int, num_groups: int) -> list[RingRound]:
    """Of one group."""
    if num_groups == 2:
        return [RingRound(0, 0, True)]
    turns = range(num_groups - 1)
    sums = [RingRound((group - t) % num_groups, (group - t - 1) % num_groups, True) for t in turns]
    return sums + [RingRound((group + 1 - t) % num_groups, (group - t) % num_groups, False) for t in turns]


class GroupPeer(NamedTuple):
    """A worker of a neighbouring group."""

    pipeline: int
    """Within its group."""
    rank: int


Parts = dict[GroupPeer, list[slice]]
"""By peer: the parts of this worker's slice that it has too, in the same order on both sides."""


class GroupParts(NamedTuple):
    """What one worker exchanges of its stage, by chunk."""

    sent: list[Parts]
    received: list[Parts]


def group_parts(role: WorkerRole, config: DecoderConfig, tp: int = 1) -> GroupParts:
    count = len(role.groups)
    after, before = (role.groups[(role.group + step) % count] for step in (1, -1))
    sent = _shared(role, after, config, tp)
    return GroupParts(sent, sent if before is after else _shared(role, before, config, tp))


def _shared(role: WorkerRole, other: GroupShape, config: DecoderConfig, tp: int) -> list[Parts]:
    chunks = num_chunks(len(role.groups))
    found: list[dict[GroupPeer, list[tuple[str, int, slice]]]] = [{} for _ in range(chunks)]
    for run in _owned(role, config, tp):
        edges = [run.num_values * k // chunks for k in range(chunks + 1)]
        for peer, first, last in _owners(run, other, config, tp):
            for chunk in range(chunks):
                a, b = max(first, edges[chunk]), min(last, edges[chunk + 1])
                if a < b:
                    at = slice(run.at + a - run.first, run.at + b - run.first)
                    found[chunk].setdefault(peer, []).append((run.name, a, at))
    return [{peer: [at for _, _, at in sorted(runs)] for peer, runs in parts.items()} for parts in found]


class OwnedRun(NamedTuple):
    """A part of a parameter in a worker's slice."""

    name: str
    num_values: int
    """Of the whole parameter."""
    first: int
    last: int
    """Of the parameter."""
    at: int
    """Where `first` is in the slice."""


def _owned(role: WorkerRole, config: DecoderConfig, tp: int) -> Iterator[OwnedRun]:
    group = role.groups[role.group]
    layers = _stage_layers(group, role.rank, config)
    layout = _layout(group, role.rank, config, tp)
    length = layout.num_gradients // group.num_pipelines
    begin, end = role.pipeline * length, (role.pipeline + 1) * length
    for layer in layers:
        for name, size in layer_sizes(config, layer, tp).items():
            offset = layout.offsets[name]
            first, last = max(begin, offset), min(end, offset + size.num_values)
            if first < last:
                yield OwnedRun(name, size.num_values, first - offset, last - offset, first - begin)


def _owners(run: OwnedRun, other: GroupShape, config: DecoderConfig, tp: int) -> Iterator[tuple[GroupPeer, int, int]]:
    """The workers of another group that have a part of it, with that part of the parameter."""
    rank = _rank_of(other, config)[layer_of(run.name)]
    layout = _layout(other, rank, config, tp)
    length, offset = layout.num_gradients // other.num_pipelines, layout.offsets[run.name]
    for pipeline in range((offset + run.first) // length, (offset + run.last - 1) // length + 1):
        first = max(run.first, pipeline * length - offset)
        yield GroupPeer(pipeline, rank), first, min(run.last, (pipeline + 1) * length - offset)


def _stage_layers(group: GroupShape, rank: int, config: DecoderConfig) -> list[str]:
    return [layer for layer, at in _rank_of(group, config).items() if at == rank]


@lru_cache(maxsize=64)
def _rank_of(group: GroupShape, config: DecoderConfig) -> dict[str, int]:
    """By layer; each rank has one stage."""
    counts = group.layers_per_stage
    ranks = [0, *(rank for rank, count in enumerate(counts) for _ in range(count)), len(counts) - 1]
    return dict(zip(model_layers(config), ranks, strict=True))


@lru_cache(maxsize=4096)
def _layout(group: GroupShape, rank: int, config: DecoderConfig, tp: int) -> FlatLayout:
    return stage_layout(config, _stage_layers(group, rank, config), group.num_pipelines, tp)


# ---- links ---------------------------------------------------------------------------------------------------------
def group_links(role: WorkerRole, config: DecoderConfig, tp: int = 1) -> list[PeerLink]:
    """All that a worker opens to workers of other groups: to those it sends gradients to, and, at the end of the first
    pipeline, to those that need the global norm."""
    if not role.groups:
        return []
    after = role.groups[(role.group + 1) % len(role.groups)]
    peers = [peer for parts in group_parts(role, config, tp).sent for peer in parts]
    nodes = [after.node_of(*peer) for peer in sorted(peers)]
    nodes += [other.node_of(*peer) for other, peer in norm_receivers(role)]
    return [PeerLink(MAIN, node, MAIN, GROUP_SUMS) for node in dict.fromkeys(nodes)]


def norm_receivers(role: WorkerRole) -> list[tuple[GroupShape, GroupPeer]]:
    """The last workers of all pipelines of the other groups, if this worker sends them the norm."""
    if not role.groups or (role.group, role.pipeline, role.rank) != (0, 0, role.program.num_ranks - 1):
        return []
    return [
        (other, GroupPeer(pipeline, len(other.rank_dc) - 1))
        for other in role.groups[1:]
        for pipeline in range(other.num_pipelines)
    ]
