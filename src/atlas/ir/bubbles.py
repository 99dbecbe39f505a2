"""Why each worker idles: every span of a Timeline in which its accelerator has nothing to do, and the cause. A measured
Timeline is read like a simulated one, so clocks that disagree a little only shift a border, they never break a sum.

Knows no costs and no policies: a wait is explained by what was still missing at that moment, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.ir.ops import COLLECTIVES, Kind
from atlas.ir.program import Ints, Program
from atlas.ir.timeline import Timeline, computed_once


class Cause(IntEnum):
    """Why an accelerator has nothing to do. The integer values are what the arrays hold."""

    FILL = 0
    """The run has begun, the worker's first op has not."""
    DRAIN = 1
    """The worker has done its last op, the run goes on."""
    WAN = 2
    """The input exists, but is queued for or travelling between datacenters."""
    PEER = 3
    """The input is not produced yet, travels inside the datacenter, or the op waits for memory or for its order."""
    SYNC = 4
    """All-reduce and global norm, and the wait until everybody has come to them."""


class Bubble(NamedTuple):
    worker: int
    start_ns: int
    end_ns: int
    cause: Cause
    op: int
    """The op that the worker waits for (for SYNC possibly the collective itself), or -1 when none follows."""


@dataclass(frozen=True, eq=False)
class Bubbles:
    """Every bubble of a Timeline as arrays, by worker and then by time; busy + bubbles = workers * makespan."""

    worker: Ints
    start_ns: Ints
    end_ns: Ints
    cause: NDArray[np.int8]
    op: Ints
    busy_ns: Ints
    """By worker. Equals `Timeline.busy_ns` unless measured ops of one worker overlap."""

    @cached_property
    def total_ns(self) -> dict[str, int]:
        """By cause, over all workers."""
        length = self.end_ns - self.start_ns
        return {cause.name.lower(): int(length[self.cause == cause].sum()) for cause in Cause}

    def of(self, worker: int) -> list[Bubble]:
        lo, hi = np.searchsorted(self.worker, [worker, worker + 1])
        return [self[i] for i in range(int(lo), int(hi))]

    def __len__(self) -> int:
        return len(self.worker)

    def __getitem__(self, i: int) -> Bubble:
        return Bubble(
            int(self.worker[i]), int(self.start_ns[i]), int(self.end_ns[i]), Cause(int(self.cause[i])), int(self.op[i])
        )


class Laid(NamedTuple):
    """The ops in the order in which each worker really did them."""

    order: Ints
    first: NDArray[np.bool_]
    free_ns: Ints
    """When the worker had ended everything before this op; the run's start for its first op."""
    start_ns: Ints
    end_ns: Ints
    """Start and end, cut so that the spans of a worker never overlap."""


def running_end(group: Ints, end_ns: Ints, floor_ns: int) -> Ints:
    """The latest end before each span among the spans of its group, which are given group by group."""
    if not len(group):
        return np.zeros(0, np.int64)
    # One accumulate over all groups: each is lifted above everything that its predecessors can reach.
    lift = group.astype(np.int64) * (int(end_ns.max()) - floor_ns + 1)
    reached = np.maximum.accumulate(end_ns - floor_ns + lift)
    before = np.concatenate([np.zeros(1, np.int64), reached[:-1]])
    return np.asarray(np.maximum(before - lift, 0) + floor_ns, np.int64)


def lay_out(timeline: Timeline) -> Laid:
    """Every op, worker by worker and then by its start."""
    worker = timeline.program.op_worker
    order = np.lexsort((timeline.op_start_ns, worker))
    worker, start, end = worker[order], timeline.op_start_ns[order], timeline.op_end_ns[order]
    free = running_end(worker, end, int(start.min()))
    first = np.diff(worker, prepend=-1) != 0
    return Laid(order, first, free, np.maximum(start, free), np.maximum(end, free))


def input_transfer(program: Program) -> Ints:
    """By op: the transfer it cannot start without, or -1."""
    table = np.full(program.num_ops, -1, np.int64)
    dst = program.transfer_dst
    known = np.flatnonzero((dst >= 0) & (program.transfer_src >= 0))
    table[dst[known]] = known
    return table


@computed_once
def bubbles(timeline: Timeline) -> Bubbles:
    """Every span in which a worker's accelerator has nothing to do, and why.

    A wait for an input over the WAN counts as PEER until the sender has produced it and as WAN from then until
    it has arrived. A slice of prefill fills a part of a bubble and leaves the cause of the rest as it was.
    """
    program = timeline.program
    if not program.num_ops:
        nothing = np.zeros(0, np.int64)
        return Bubbles(
            nothing, nothing, nothing, nothing.astype(np.int8), nothing, np.zeros(program.num_workers, np.int64)
        )
    laid = lay_out(timeline)
    worker, kind = program.op_worker[laid.order], program.kind[laid.order]
    collective = np.isin(kind, np.array(COLLECTIVES, np.int8))
    awaited, begun = _awaited(worker, kind, laid.first)
    after_collective = np.concatenate([[False], collective[:-1]]) & ~laid.first
    cause = np.where(collective[awaited] | after_collective, Cause.SYNC, Cause.PEER)
    cause = np.where(begun, cause, Cause.FILL)
    cause = np.where(awaited >= 0, cause, Cause.DRAIN)

    ready, arrive = _wan_wait(timeline, laid, awaited, splittable=cause == Cause.PEER)
    cuts = np.stack([laid.free_ns, ready, arrive, laid.start_ns, np.where(collective, laid.end_ns, laid.start_ns)])
    causes = np.stack([cause, np.full_like(cause, Cause.WAN), cause, np.full_like(cause, Cause.SYNC)])
    tail = _tails(timeline)
    idle = len(tail)
    parts = (
        np.concatenate([np.repeat(worker, 4), np.arange(program.num_workers)]),
        np.concatenate([cuts[:-1].T.ravel(), tail]),
        np.concatenate([cuts[1:].T.ravel(), np.full(idle, int(timeline.op_end_ns.max()))]),
        np.concatenate([causes.T.ravel(), np.full(idle, Cause.DRAIN)]),
        np.concatenate([np.repeat(np.where(awaited >= 0, laid.order[awaited], -1), 4), np.full(idle, -1)]),
    )
    keep = np.flatnonzero(parts[2] > parts[1])
    keep = keep[np.argsort(parts[0][keep], kind="stable")]
    busy = np.where(collective, 0, laid.end_ns - laid.start_ns)
    per_worker = np.zeros(program.num_workers, np.int64)
    np.add.at(per_worker, worker, busy)
    return Bubbles(
        parts[0][keep], parts[1][keep], parts[2][keep], parts[3][keep].astype(np.int8), parts[4][keep], per_worker
    )


def _awaited(worker: Ints, kind: NDArray[np.int8], first: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """By op in laid-out order: itself or the next training op of its worker (-1: none); whether one came before."""
    training = kind != Kind.P
    at = np.where(training, np.arange(len(kind)), len(kind))
    following = np.minimum.accumulate(at[::-1])[::-1]
    same = following < len(kind)
    same[same] = worker[following[same]] == worker[same]
    before = np.cumsum(training) - training
    since = before - np.maximum.accumulate(np.where(first, before, 0))
    return np.where(same, following, -1), since > 0


def _wan_wait(timeline: Timeline, laid: Laid, awaited: Ints, splittable: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """By op: the borders between which its wait is for the WAN; both at the op's start when it is not."""
    transfer = input_transfer(timeline.program)[laid.order[awaited]]
    wan = np.flatnonzero(splittable & (transfer >= 0))
    wan = wan[timeline.program.transfer_crosses[transfer[wan]]]
    ready, arrive = laid.start_ns.copy(), laid.start_ns.copy()
    free, start = laid.free_ns[wan], laid.start_ns[wan]
    ready[wan] = np.clip(timeline.transfer_ready_ns[transfer[wan]], free, start)
    arrive[wan] = np.clip(timeline.transfer_arrive_ns[transfer[wan]], ready[wan], start)
    return ready, arrive


def _tails(timeline: Timeline) -> Ints:
    """By worker: the end of its last op; the run's start for a worker that does nothing."""
    last = np.full(timeline.program.num_workers, int(timeline.op_start_ns.min()), np.int64)
    np.maximum.at(last, timeline.program.op_worker, timeline.op_end_ns)
    return last
