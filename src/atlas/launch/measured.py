"""Step records of all workers, combined: one Timeline on one clock, and the losses.

A Program that ran several times becomes the same Program repeated; work that fillers ran in waits becomes P ops. Knows
records and Programs, not where the workers ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from atlas.cost.table import Costs
from atlas.ir.assemble import assemble, repeated
from atlas.ir.program import Ints, Kind, Op, Program
from atlas.ir.timeline import Timeline
from atlas.wan.transport.stream_slot import Faults

T = TypeVar("T")
Step = dict[str, Any]
"""A worker's record of one pass through its Program (runtime.record)."""


@dataclass(frozen=True)
class RunClock:
    """One clock for the records of all workers, and the names of a Timeline."""

    names: Sequence[str]
    """The workers of one cell, in the Program's order."""
    costs: Costs
    """They name the links."""
    zero_ns: int
    """The start of the run, on the launcher's clock."""
    offsets_ns: Mapping[str, int]
    """By worker: its clock minus the launcher's."""
    meta: dict[str, Any] = field(default_factory=dict)
    source: Literal["emulated", "measured"] = "emulated"


@dataclass
class WorkerRecords:
    """The records of all workers of a run."""

    program: Program
    by_worker: dict[str, list[Step]] = field(default_factory=dict)
    num_forgotten: int = 0
    """Passes of which only losses and norms are kept."""
    faults: Faults = field(default_factory=Faults)
    """Of the transport, summed over all workers."""
    _losses: list[float] = field(default_factory=list)
    _norms: list[float] = field(default_factory=list)

    def add(self, name: str, step: Step) -> None:
        self.by_worker.setdefault(name, []).append(step)
        self.faults = Faults.sum((self.faults, Faults(*step.get("wan_faults", ()))))

    def forget_pass(self) -> None:
        """Drop the oldest pass except its losses and norms; every worker must have reported it."""
        first = WorkerRecords(self.program, {name: [steps.pop(0)] for name, steps in self.by_worker.items()})
        self._losses += first.losses()
        self._norms += first.norms()
        self.num_forgotten += 1

    def norms(self) -> list[float]:
        """Global norms of the gradients, if the Program computes them; the same on all workers."""
        some = next(iter(self.by_worker.values()))
        return [*self._norms, *(norm for step in some for norm in step["norms"])]

    def losses(self) -> list[float]:
        """Mean over all microbatches of all pipelines, by step. The sum is exact, so the order does not matter."""
        num_iterations, gathered = self.program.num_iterations, dict[int, list[float]]()
        for steps in self.by_worker.values():
            for step in steps:
                num_mb = len(step["losses"]) // num_iterations  # groups of pipelines differ
                for number, loss in enumerate(step["losses"]):
                    gathered.setdefault(step["step"] + number // num_mb, []).append(loss)
        return [*self._losses, *(math.fsum(found) / len(found) for _, found in sorted(gathered.items()))]

    def timeline(self, clock: RunClock, first: int = 0, last: int | None = None) -> Timeline:
        """Of passes `first` up to `last` of those that are kept; by default of all that every worker has reported."""
        names, costs = clock.names, clock.costs
        last = min(len(self.by_worker.get(name, ())) for name in names) if last is None else last
        steps = [self.by_worker[name][first:last] for name in names]
        num_passes = last - first
        program = repeated(self.program, num_passes) if num_passes > 1 else self.program
        shifts = [clock.zero_ns + clock.offsets_ns[name] for name in names]

        def by_transfer(key: str) -> Ints:
            moments = np.zeros(program.num_transfers, np.int64)
            for found, shift in zip(steps, shifts, strict=True):
                for number, step in enumerate(found):
                    for transfer, at_ns in step[key]:
                        moments[self._renumbered(transfer, number, program)] = at_ns - shift
            return moments

        arrive_ns, start_ns = by_transfer("arrive_ns"), by_transfer("start_ns")
        latency_ns = np.repeat(costs.latency_ns.ravel(), program.num_slots)
        spans = [_spans(self.program, found, shift) for found, shift in zip(steps, shifts, strict=True)]
        filled = _with_fills(program, [ops for ops, _ in spans])
        times = np.array([span for _, found in spans for span in found], np.int64).reshape(-1, 2)
        return Timeline(
            program=filled,
            source=clock.source,
            op_start_ns=times[:, 0].copy(),
            op_end_ns=times[:, 1].copy(),
            transfer_ready_ns=by_transfer("ready_ns"),
            transfer_start_ns=start_ns,
            # The sender only knows when the kernel took the bytes; the emulated path's latency is known.
            transfer_sent_ns=np.maximum(start_ns, arrive_ns - latency_ns),
            transfer_arrive_ns=arrive_ns,
            transfer_link=np.repeat(costs.channel_link.ravel(), program.num_slots).astype(np.int32),
            links=tuple(link.name for link in costs.links),
            meta=clock.meta,
        )

    def _renumbered(self, transfer: int, number: int, whole: Program) -> int:
        """The number in the repeated Program of a transfer of pass `number`."""
        direction, pipeline, boundary, slot = self.program.transfer(transfer)
        shape = (2, whole.num_pipelines, whole.num_stages - 1, whole.num_slots)
        index = (direction, pipeline, boundary, number * self.program.num_slots + slot)
        return int(np.ravel_multi_index(index, shape))


def _spans(program: Program, steps: Sequence[Step], shift_ns: int) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """One worker's fills (iteration, ops before it), and all its spans including the fills, in order."""
    fills: list[tuple[int, int]] = []
    spans: list[list[int]] = []
    done = 0
    for number, step in enumerate(steps):
        ops = list(zip(step["op_start_ns"], step["op_end_ns"], strict=True))
        filled = [(index, (start_ns, end_ns)) for index, start_ns, end_ns in step["fills"]]
        spans += [[start_ns - shift_ns, end_ns - shift_ns] for start_ns, end_ns in _between(ops, filled)]
        fills += [(number * program.num_iterations, done + index) for index, _ in filled]
        done += len(ops)
    return fills, spans


def _between(ops: Sequence[T], fills: Sequence[tuple[int, T]]) -> list[T]:
    """The ops with each fill before the op of its index."""
    if not fills:
        return list(ops)
    found = [*((index, 0, fill) for index, fill in fills), *((index, 1, op) for index, op in enumerate(ops))]
    return [one for *_, one in sorted(found, key=lambda row: row[:2])]


def with_norm(program: Program) -> Program:
    """The Program with a NORM before each STEP, for clipping by the global norm."""
    return _reordered(program, [_normed(program.ops(w)) for w in range(program.num_workers)])


def _normed(ops: Sequence[Op]) -> list[Op]:
    return [new for op in ops for new in ([Op(Kind.NORM, *op[1:]), op] if op.kind == Kind.STEP else [op])]


def _with_fills(program: Program, fills: Sequence[Sequence[tuple[int, int]]]) -> Program:
    """The Program with a P op for each fill."""
    if not any(fills):
        return program
    orders = []
    for worker, mine in enumerate(fills):
        ops = program.ops(worker)
        stage = min(op.stage for op in ops)
        orders.append(_between(ops, [(index, Op(Kind.P, stage, iteration)) for iteration, index in mine]))
    return _reordered(program, orders)


def _reordered(program: Program, orders: Sequence[Sequence[Op]]) -> Program:
    return assemble(
        program.name,
        program.layout,
        orders,
        sharing=program.sharing,
        turn=program.turn,
        memory=program.memory,
        num_iterations=program.num_iterations,
    )
