"""The chain of events that determines the iteration time of a Timeline, from its start to the op that ends last.

A pure function of the recorded times, simulated or measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from atlas.ir.bubbles import input_transfer, lay_out
from atlas.ir.ops import COLLECTIVES, Kind
from atlas.ir.program import Ints
from atlas.ir.timeline import Timeline, computed_once


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
    previous, transfers = _previous(timeline), input_transfer(program)
    path: list[Segment] = []
    run_start = int(timeline.op_start_ns.min())
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
