"""Why workers idle: every span of a Timeline in which an accelerator has nothing to do, and the cause. Measured and
simulated Timelines are treated alike: clocks that differ a little shift a border, but totals stay right.

Knows no costs and no policies: a wait is explained only by what was missing at that moment.
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
    """Why an accelerator has nothing to do. Arrays hold the integer values."""

    FILL = 0
    """Before the worker's first op."""
    DRAIN = 1
    """After the worker's last op."""
    WAN = 2
    """The input exists, but is queued or in transit between datacenters."""
    PEER = 3
    """The input is not produced yet, is in transit inside the datacenter, or the op waits for memory or its order."""
    SYNC = 4
    """All-reduce and global norm, and the wait for all workers that take part."""


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
    """The ops in the order in which each worker did them."""

    order: Ints
    first: NDArray[np.bool_]
    free_ns: Ints
    """When the worker had ended everything before this op; the run's start for its first op."""
    start_ns: Ints
    end_ns: Ints
    """Start and end, cut so that spans of a worker do not overlap."""


def running_end(group: Ints, end_ns: Ints, floor_ns: int) -> Ints:
    """By span: the latest end of the spans before it in its group. Spans are given group by group."""
    if not len(group):
        return np.zeros(0, np.int64)
    # One accumulate over all groups: each is shifted above all values of the groups before it.
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
    """By op: the transfer that it needs to start, or -1."""
    table = np.full(program.num_ops, -1, np.int64)
    dst = program.transfer_dst
    known = np.flatnonzero((dst >= 0) & (program.transfer_src >= 0))
    table[dst[known]] = known
    return table


@computed_once
def bubbles(timeline: Timeline) -> Bubbles:
    """Every span in which a worker's accelerator has nothing to do, and why.

    A wait for an input over the WAN counts as PEER until the sender has produced it, and as WAN from then until it has
    arrived. A slice of prefill fills a part of a bubble; the rest keeps its cause.
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
    """By op in laid-out order: the next training op of its worker, or itself (-1: none); whether one came before."""
    training = kind != Kind.P
    at = np.where(training, np.arange(len(kind)), len(kind))
    following = np.minimum.accumulate(at[::-1])[::-1]
    same = following < len(kind)
    same[same] = worker[following[same]] == worker[same]
    before = np.cumsum(training) - training
    since = before - np.maximum.accumulate(np.where(first, before, 0))
    return np.where(same, following, -1), since > 0


def _wan_wait(timeline: Timeline, laid: Laid, awaited: Ints, splittable: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """By op: start and end of its wait for the WAN; both are the op's start if there is none."""
    transfer = input_transfer(timeline.program)[laid.order[awaited]]
    wan = np.flatnonzero(splittable & (transfer >= 0))
    wan = wan[timeline.program.transfer_crosses[transfer[wan]]]
    ready, arrive = laid.start_ns.copy(), laid.start_ns.copy()
    free, start = laid.free_ns[wan], laid.start_ns[wan]
    ready[wan] = np.clip(timeline.transfer_ready_ns[transfer[wan]], free, start)
    arrive[wan] = np.clip(timeline.transfer_arrive_ns[transfer[wan]], ready[wan], start)
    return ready, arrive


def _tails(timeline: Timeline) -> Ints:
    """By worker: the end of its last op, or the start of the run if it has none."""
    last = np.full(timeline.program.num_workers, int(timeline.op_start_ns.min()), np.int64)
    np.maximum.at(last, timeline.program.op_worker, timeline.op_end_ns)
    return last
