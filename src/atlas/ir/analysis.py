"""The figures of a Timeline: how busy workers and links are, why each worker idles (bubbles), and the critical path.
One sentence compares several Timelines.

Pure functions of the recorded times. Simulated and measured Timelines are treated alike: if clocks differ a little, a
border moves, but totals stay right. A wait is explained only by what was missing at that moment, not by costs or
policies. `difference` compares two Timelines op by op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.ir.circuit_waits import circuit_waits
from atlas.ir.program import COLLECTIVES, Ints, Kind
from atlas.ir.timeline import Timeline, computed_once


def wan_links(timeline: Timeline) -> Ints:
    """The links that carry at least one transfer between datacenters."""
    return np.unique(timeline.transfer_link[timeline.program.transfer_crosses]).astype(np.int64)


@computed_once
def link_utilization(timeline: Timeline) -> dict[str, float]:
    """By WAN link: the share of the run in which it sends."""
    links, makespan = wan_links(timeline), timeline.makespan_ns
    of = np.flatnonzero(np.isin(timeline.transfer_link, links))
    of = of[np.lexsort((timeline.transfer_start_ns[of], timeline.transfer_link[of]))]
    link, start, sent = timeline.transfer_link[of], timeline.transfer_start_ns[of], timeline.transfer_sent_ns[of]
    free = running_end(link.astype(np.int64), sent, int(start.min()) if len(start) else 0)
    served = np.zeros(len(timeline.links), np.int64)
    np.add.at(served, link, np.maximum(sent, free) - np.maximum(start, free))
    return {timeline.links[i]: float(served[i] / makespan) if makespan else 0.0 for i in links}


@computed_once
def summary(timeline: Timeline) -> dict[str, Any]:
    """The figures of a Timeline, as JSON values."""
    found, path = bubbles(timeline), path_totals_ns(critical_path(timeline))
    return {
        "schedule": timeline.program.name,
        "source": timeline.source,
        "sharing": timeline.program.sharing,
        "iteration_s": timeline.iteration_ns / 1e9,
        "utilization": timeline.utilization,
        "num_workers": timeline.program.num_workers,
        "num_events": timeline.program.num_events,
        "peak_in_flight": timeline.program.peak_in_flight,
        "bubbles_s": {cause: ns / 1e9 for cause, ns in found.total_ns.items()},
        "critical_path_s": {category: ns / 1e9 for category, ns in path.items()},
        "links": link_utilization(timeline),
    }


# ---- bubbles -------------------------------------------------------------------------------------------------------
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
    FABRIC = 5
    """The input or the all-reduce waits for circuits of a photonic rail that are being set up."""


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
        """By cause, over all workers; `fabric` only where circuits were waited for."""
        length = self.end_ns - self.start_ns
        causes = [cause for cause in Cause if cause != Cause.FABRIC or (self.cause == cause).any()]
        return {cause.name.lower(): int(length[self.cause == cause].sum()) for cause in causes}

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


@computed_once
def bubbles(timeline: Timeline) -> Bubbles:
    """Every span in which a worker's accelerator has nothing to do, and why.

    A wait for an input over the WAN counts as PEER until the sender has produced it, and as WAN from then until it has
    arrived; a wait for circuits counts as FABRIC from when they are needed until they are there.
    A slice of prefill fills a part of a bubble; the rest keeps its cause.
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
    waits = np.full_like(cause, Cause.WAN)
    if timeline.meta.get("fabric"):
        for at, needed, there in circuit_waits(timeline, laid, awaited):
            ready[at], arrive[at], waits[at] = needed, there, Cause.FABRIC
    cuts = np.stack([laid.free_ns, ready, arrive, laid.start_ns, np.where(collective, laid.end_ns, laid.start_ns)])
    causes = np.stack([cause, waits, cause, np.full_like(cause, Cause.SYNC)])
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
    transfer = timeline.program.op_input[laid.order[awaited]]
    wan = np.flatnonzero(splittable & (transfer >= 0))
    wan = wan[timeline.program.transfer_crosses[transfer[wan]]]
    ready, arrive = laid.start_ns.copy(), laid.start_ns.copy()
    free, start = laid.free_ns[wan], laid.start_ns[wan]
    ready[wan] = np.clip(timeline.transfer_ready_ns[transfer[wan]], free, start)
    arrive[wan] = np.clip(timeline.transfer_arrive_ns[transfer[wan]], ready[wan], start)
    return ready, arrive


def _tails(timeline: Timeline) -> Ints:
    """By worker: the end of its last op, or the start of the run if it has none."""
    last = np.full(timeline.program.num_workers, timeline.start_ns, np.int64)
    np.maximum.at(last, timeline.program.op_worker, timeline.op_end_ns)
    return last


# ---- the critical path ---------------------------------------------------------------------------------------------
class Segment(NamedTuple):
    """One part of the chain that determines the makespan."""

    start_ns: int
    end_ns: int
    category: str
    """compute, sync, queue (a transfer waits for its link), wire, latency, or wait (no recorded event explains it)."""
    label: str
    worker: int
    """The worker that computes, or that sends."""

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


@computed_once
def critical_path(timeline: Timeline) -> list[Segment]:
    """From the start of the run to the op that ends last, without gaps."""
    program, end = timeline.program, timeline.op_end_ns
    if not program.num_ops:
        return []
    previous, transfers = _previous(timeline), program.op_input
    path: list[Segment] = []
    run_start = timeline.start_ns
    now, op, seen = int(end.max()), int(end.argmax()), set[int]()

    def spend(until_ns: int, category: str, label: str, worker: int) -> None:
        nonlocal now
        until_ns = max(until_ns, run_start)
        if until_ns < now:
            path.append(Segment(until_ns, now, category, label, worker))
            now = until_ns

    while op >= 0 and op not in seen:
        seen.add(op)  # clocks that disagree can make the chain circular
        worker, name = int(program.op_worker[op]), str(program.op(op))
        before, transfer = int(previous[op]), int(transfers[op])
        if program.kind[op] in COLLECTIVES:
            before = _last_to_join(timeline, op, previous)
            spend(int(end[before]) if before >= 0 else int(timeline.op_start_ns[op]), "sync", name, worker)
        else:
            spend(int(timeline.op_start_ns[op]), "compute", name, worker)
        if transfer >= 0 and (before < 0 or timeline.transfer_arrive_ns[transfer] > end[before]):
            before = int(program.transfer_src[transfer])
            sender, sent = int(program.op_worker[before]), program.transfer_name(transfer)
            spend(int(timeline.transfer_arrive_ns[transfer]), "wait", name, worker)
            spend(int(timeline.transfer_sent_ns[transfer]), "latency", sent, sender)
            spend(int(timeline.transfer_start_ns[transfer]), "wire", sent, sender)
            spend(int(timeline.transfer_ready_ns[transfer]), "queue", sent, sender)
        if before >= 0:
            spend(int(end[before]), "wait", name, worker)
        op = before
    spend(run_start, "wait", "start", path[-1].worker if path else 0)
    return path[::-1]


def path_totals_ns(path: Iterable[Segment]) -> dict[str, int]:
    """Nanoseconds of a critical path by category."""
    totals = dict.fromkeys(("compute", "queue", "wire", "latency", "sync", "wait"), 0)
    for segment in path:
        totals[segment.category] += segment.length_ns
    return totals


def _previous(timeline: Timeline) -> Ints:
    """By op: the op that its worker did before, or -1."""
    laid = lay_out(timeline)
    previous = np.full(timeline.program.num_ops, -1, np.int64)
    previous[laid.order[1:]] = np.where(laid.first[1:], -1, laid.order[:-1])
    return previous


def _last_to_join(timeline: Timeline, op: int, previous: Ints) -> int:
    """The op before a collective on the worker that joined it last: the others waited for it."""
    program = timeline.program
    together = (program.kind == program.kind[op]) & (program.microbatch == program.microbatch[op])
    if program.kind[op] == Kind.SYNC:
        together &= program.stage == program.stage[op]
    before = previous[together]
    before = before[before >= 0]
    before = before[timeline.op_end_ns[before] <= timeline.op_end_ns[op]]
    return int(before[timeline.op_end_ns[before].argmax()]) if len(before) else -1


# ---- several Timelines in one sentence -----------------------------------------------------------------------------
WAITS = {
    "wan": "waiting for the WAN",
    "peer": "waiting for a peer",
    "sync": "gradient sync",
    "fabric": "waiting for circuits",
    "fill": "fill",
    "drain": "drain",
}
MAX_OTHERS = 4
"""Schedules that the sentence compares the fastest with."""


def best_first(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Fastest first. Timelines of different sources keep their order: a prediction lies above its measurement."""
    if len({timeline.source for timeline in timelines}) > 1:
        return list(timelines)
    return sorted(timelines, key=lambda timeline: timeline.iteration_ns)


def verdict(timelines: Sequence[Timeline]) -> str:
    """Of timelines in the order of `best_first`."""
    first = timelines[0]
    if len({timeline.source for timeline in timelines}) > 1:
        parts = [f"{_name(one)} {one.source} {_seconds(one)}" for one in timelines]
        last = timelines[-1]
        off = first.iteration_ns / last.iteration_ns - 1 if last.iteration_ns else 0.0
        tail = f": the first differs from the second by {off:+.1%}" if len(timelines) == 2 else ""
        return f"{', '.join(parts)}{tail}."
    if len(timelines) == 1 or not first.iteration_ns:
        return f"{_name(first)}: {_seconds(first)} an iteration ({first.source}){_varies(first)}; {_spent(first)}."
    others = [
        f"{one.iteration_ns / first.iteration_ns:.2f}x over {_name(one)}" for one in timelines[1 : 1 + MAX_OTHERS]
    ]
    more = f" and {len(timelines) - 1 - MAX_OTHERS} more" if len(timelines) > 1 + MAX_OTHERS else ""
    fastest = f"{_name(first)} is the fastest: {_seconds(first)} an iteration ({first.source}){_varies(first)}"
    return f"{fastest}, {', '.join(others)}{more}; {_spent(first)}."


def _name(timeline: Timeline) -> str:
    tcp = timeline.meta.get("tcp")
    return f"{timeline.program.name} on one connection" if tcp == "one" else timeline.program.name


def _seconds(timeline: Timeline) -> str:
    return _time(timeline.iteration_ns / 1e9)


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _varies(timeline: Timeline) -> str:
    """The range of runs with jitter or weather, where they were simulated: the Timeline is one without them."""
    spread = timeline.meta.get("spread")
    if not isinstance(spread, dict):
        return ""
    varied = "jitter" if spread["tail_path"] is None else "cross traffic"
    low, middle, high = (_time(spread[key]) for key in ("p5_s", "p50_s", "p95_s"))
    return f" without {varied}, {middle} with it (90 % of {spread['runs']} runs: {low} to {high})"


def _spent(timeline: Timeline) -> str:
    """What accelerators do, and what they wait for most."""
    found = summary(timeline)
    total_s = timeline.makespan_ns / 1e9 * timeline.program.num_workers
    cause, seconds = max(found["bubbles_s"].items(), key=lambda pair: float(pair[1]))
    busy = f"accelerators compute {100 * found['utilization']:.0f} % of the time"
    return f"{busy}, the largest loss is {WAITS[cause]} ({100 * seconds / total_s:.0f} %)" if seconds else busy
