"""The Timeline: when every op and every transfer of a Program began and ended. Simulated and measured Timelines are the
same class, so they can be compared op by op. `analysis` reads it; `view` draws it.

Times are integer nanoseconds from the start of the run. Knows no reasons for durations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import FORWARD, USEFUL, Ints, Kind, Program


@dataclass(frozen=True, eq=False)
class Timeline:
    """Arrays by op (`op_*`, in the Program's op order) and by transfer (`transfer_*`, in its transfer order)."""

    program: Program
    source: str
    """"simulated", "emulated" or "measured": shown wherever a figure of this Timeline is shown."""
    op_start_ns: Ints
    op_end_ns: Ints
    transfer_ready_ns: Ints
    """When the sender had produced the bytes."""
    transfer_start_ns: Ints
    """When the link began to send them: later than ready if it was busy."""
    transfer_sent_ns: Ints
    """When the link had sent them."""
    transfer_arrive_ns: Ints
    """When the receiver had all of them."""
    transfer_link: NDArray[np.int32]
    """Index into `links`."""
    links: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)
    """Other facts: tcp, costs, engine seconds, host. Any JSON values."""
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """What `computed_once` has computed from these arrays."""

    @property
    def start_ns(self) -> int:
        """When the first op began; 0 without ops."""
        return int(self.op_start_ns.min()) if len(self.op_start_ns) else 0

    @property
    def makespan_ns(self) -> int:
        """From the first op's start to the last op's end."""
        return int(self.op_end_ns.max()) - self.start_ns if len(self.op_end_ns) else 0

    @property
    def iteration_ns(self) -> int:
        """Time of one iteration: the makespan, or with several iterations the steady period."""
        n = self.program.num_iterations
        if n == 1:
            return self.makespan_ns
        ends = self.iteration_ends_ns
        return int(ends[-1] - ends[n // 2 - 1]) // (n - n // 2)

    @property
    def iteration_ends_ns(self) -> Ints:
        """The end of the last op of each iteration."""
        ends = np.zeros(self.program.num_iterations, np.int64)
        np.maximum.at(ends, self.program.op_iteration, self.op_end_ns)
        return ends

    @property
    def busy_ns(self) -> Ints:
        """By worker: time in which its accelerator computes."""
        useful = np.isin(self.program.kind, np.array(USEFUL, np.int8))
        length = np.where(useful, self.op_end_ns - self.op_start_ns, 0)
        return np.bincount(self.program.op_worker, weights=length, minlength=self.program.num_workers).astype(np.int64)

    @property
    def utilization(self) -> float:
        """Share of all workers' time in which an accelerator computes."""
        total = self.makespan_ns * self.program.num_workers
        return float(self.busy_ns.sum()) / total if total else 0.0

    def table(self) -> list[dict[str, Any]]:
        """One dict for each op, worker by worker: `pandas.DataFrame(timeline.table())`."""
        program, workers = self.program, range(self.program.num_workers)
        columns = {
            "worker": np.array([program.worker_name(w) for w in workers])[program.op_worker],
            "datacenter": np.array([program.worker_dc(w) for w in workers])[program.op_worker],
            "kind": np.array([kind.name for kind in Kind])[program.kind],
            "stage": program.stage,
            "microbatch": program.microbatch,
            "start_s": self.op_start_ns / 1e9,
            "end_s": self.op_end_ns / 1e9,
        }
        return _rows(columns)

    def transfer_table(self) -> list[dict[str, Any]]:
        """One dict for each transfer between two stages: ready to send, first and last byte sent, arrived."""
        program = self.program
        direction, pipeline, boundary, slot = np.unravel_index(np.arange(program.num_transfers), program.transfer_shape)
        columns = {
            "sends": np.array(["activation", "gradient"])[direction],
            "pipeline": pipeline,
            "from_stage": boundary + (direction != FORWARD),
            "to_stage": boundary + (direction == FORWARD),
            "microbatch": slot,
            "link": np.array(self.links)[self.transfer_link],
            "crosses_wan": program.transfer_crosses,
            "ready_s": self.transfer_ready_ns / 1e9,
            "start_s": self.transfer_start_ns / 1e9,
            "sent_s": self.transfer_sent_ns / 1e9,
            "arrive_s": self.transfer_arrive_ns / 1e9,
        }
        return _rows(columns)


def _rows(columns: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


_Found = TypeVar("_Found")


def computed_once(function: Callable[[Timeline], _Found]) -> Callable[[Timeline], _Found]:
    """A function of a Timeline alone: its result is kept with the Timeline, so tables and pages share one analysis."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def found(timeline: Timeline) -> _Found:
        if name not in timeline._known:
            timeline._known[name] = function(timeline)
        return cast("_Found", timeline._known[name])

    return found
