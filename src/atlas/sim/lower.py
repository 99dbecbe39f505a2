"""Program + Costs -> Tables: the flat arrays of both engines, one row per op, one row per transfer.

Everything that varies by run (jitter) or by microbatch is resolved here, so that an engine only adds, compares and
queues. The engines determine the order of events.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.cost.table import MAX_NS, PRIVATE, Circuits, Costs, Trace
from atlas.errors import ProgramError
from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints, Kind, Program
from atlas.sim.phases import Gates, build_gates

UNKNOWN = -1
"""A time that has not been settled yet."""
OP, OFFER, LINK = FUTURE = 0, 1, 2
"""The kinds of scheduled events, in the order in which those of one nanosecond happen: an op ends, a transfer reaches
its link, a link decides (something is done, its chunk is over, or it was idle and something came)."""


_EMPTY = np.zeros(0, np.int64)


class Tables(NamedTuple):
    """The input of an engine. `NONE` means absent."""

    transfer_dst: Ints
    transfer_channel: Ints
    transfer_work_ns: Ints
    transfer_before_ns: Ints
    transfer_latency_ns: Ints
    transfer_turn: Ints
    channel_link: Ints
    link_policy: Ints
    link_servers: Ints
    link_capacity: NDArray[np.float64]
    link_quantum_ns: Ints
    trace_ptr: Ints
    """Spans of link l's trace are `trace_ptr[l] : trace_ptr[l + 1]`; none: the nominal rate."""
    trace_at_ns: Ints
    trace_rate: NDArray[np.float64]
    trace_latency_ns: Ints
    worker_ptr: Ints = _EMPTY
    op_ns: Ints = _EMPTY
    op_input: Ints = _EMPTY
    """The transfer an op waits for."""
    op_output: Ints = _EMPTY
    """The transfer an op makes ready."""
    op_group: Ints = _EMPTY
    """The collective an op takes part in."""
    group_ptr: Ints = _EMPTY
    group_ops: Ints = _EMPTY
    op_worker: Ints = _EMPTY
    gates: Gates | None = None


class Events(NamedTuple):
    """What an engine returns: all in nanoseconds, by op and by transfer."""

    op_start_ns: Ints
    op_end_ns: Ints
    ready_ns: Ints
    start_ns: Ints
    sent_ns: Ints
    arrive_ns: Ints
    gate_ns: Ints
    """[gate, 2]: start and end of each reconfiguration."""


def require_all_done(next_op: Ints, tables: Tables) -> None:
    """After a run, from each worker's next op: an error if a worker has not reached the end of its list."""
    stuck = np.flatnonzero(next_op != tables.worker_ptr[1:])
    if stuck.size:
        first = int(stuck[0])
        raise ProgramError(
            f"the Program deadlocks: {stuck.size} workers never finish, the first of them worker {first} "
            f"at its op {next_op[first] - tables.worker_ptr[first]}; `atlas.ir.assemble.check` names the cycle"
        )


class Pace:
    """A link's rate over time: how long work takes, how much is done, what latency holds."""

    def __init__(self, tables: Tables, link: int) -> None:
        spans = slice(*tables.trace_ptr[link : link + 2])
        self.at_ns: list[int] = tables.trace_at_ns[spans].tolist()
        self.rate: list[float] = tables.trace_rate[spans].tolist()
        self.latency_ns: list[int] = tables.trace_latency_ns[spans].tolist()

    def _span(self, now: int) -> int:
        return max(0, bisect_right(self.at_ns, now) - 1)

    def finish(self, start_ns: int, work_ns: float, share: float) -> int:
        """When `work_ns` begun at `start_ns` is done with `share` of the link."""
        if not self.at_ns:
            return start_ns + math.ceil(work_ns / share)
        now, left = start_ns, float(work_ns)
        for k in range(self._span(start_ns), len(self.at_ns)):
            speed = self.rate[k] * share
            if k + 1 == len(self.at_ns) or left <= (self.at_ns[k + 1] - now) * speed:
                return now + math.ceil(left / speed)
            left -= (self.at_ns[k + 1] - now) * speed
            now = self.at_ns[k + 1]
        raise AssertionError("the last span of a trace has no end")

    def done(self, start_ns: int, end_ns: int, share: float) -> float:
        """How much work is done between two moments with `share` of the link."""
        if not self.at_ns:
            return (end_ns - start_ns) * share
        now, work = start_ns, 0.0
        for k in range(self._span(start_ns), len(self.at_ns)):
            until = end_ns if k + 1 == len(self.at_ns) else min(end_ns, self.at_ns[k + 1])
            work += (until - now) * self.rate[k] * share
            now = until
            if now == end_ns:
                break
        return work

    def latency(self, now: int) -> int:
        return self.latency_ns[self._span(now)] if self.at_ns else 0


@dataclass(frozen=True)
class SeededNoise:
    """Seeded log-normal noise on durations, for Monte-Carlo runs. The medians stay where they were."""

    seed: int
    compute_sigma: float = 0.0
    wan_sigma: float = 0.0


def lower(program: Program, costs: Costs, jitter: SeededNoise | None = None) -> Tables:
    """The tables of a checked Program. A hole in it (an op without its sender) is an error that names the op."""
    _require_matching(program, costs)
    pipeline = program.op_worker // program.num_ranks
    op_ns = costs.compute_ns[pipeline, program.stage, program.kind]
    src, dst = program.transfer_src, program.transfer_dst
    if (holes := np.flatnonzero((src < 0) | (dst < 0))).size:
        raise ProgramError(
            f"program {program.name!r}: {program.transfer_name(int(holes[0]))} of pipeline "
            f"{program.transfer(int(holes[0]))[1]} has no {'sender' if src[holes[0]] < 0 else 'receiver'}: "
            "every stage needs a forward and a backward of every microbatch"
        )
    op_output = np.full(program.num_ops, NONE, np.int64)
    op_output[src] = np.arange(len(src))
    op_group, group_ptr, group_ops = _groups(program, costs.circuits)
    tables = network_tables(costs, program.num_slots, program.turn)._replace(
        worker_ptr=program.worker_ptr,
        op_ns=np.ascontiguousarray(op_ns, np.int64),
        op_input=program.op_input,
        op_output=op_output,
        op_group=op_group,
        group_ptr=group_ptr,
        group_ops=group_ops,
        op_worker=program.op_worker.astype(np.int64),
        transfer_dst=dst,
    )
    if costs.circuits is not None:
        tables = tables._replace(gates=build_gates(program, costs.circuits, tables.op_ns, op_group, len(group_ptr) - 1))
    return tables if jitter is None else noisy(tables, jitter, program)


def network_tables(costs: Costs, num_slots: int, turn: Ints) -> Tables:
    """The tables without any op: what the network alone is, `num_slots` transfers a channel."""
    channels = np.bincount(costs.channel_link.ravel(), minlength=len(costs.links))
    for link, count in zip(costs.links, channels, strict=True):
        assert link.policy != PRIVATE or count <= 1, f"link {link.name} is private but serves {count} channels"
    return Tables(
        transfer_dst=np.full(costs.channel_link.size * num_slots, NONE, np.int64),
        transfer_channel=np.repeat(np.arange(costs.channel_link.size), num_slots),
        transfer_work_ns=np.repeat(costs.work_ns.ravel(), num_slots),
        transfer_before_ns=np.repeat(costs.before_ns.ravel(), num_slots),
        transfer_latency_ns=np.repeat(costs.latency_ns.ravel(), num_slots),
        transfer_turn=turn,
        channel_link=costs.channel_link.ravel().astype(np.int64),
        link_policy=np.array([link.policy for link in costs.links], np.int64),
        link_servers=np.array([link.servers for link in costs.links], np.int64),
        link_capacity=np.array([link.capacity for link in costs.links], np.float64),
        link_quantum_ns=np.array([link.quantum_ns for link in costs.links], np.int64),
        **trace_tables([link.trace for link in costs.links]),
    )


def trace_tables(found: Sequence[Trace | None]) -> dict[str, Any]:
    """The columns of Tables that hold the traces of all links."""
    traces = [trace or Trace((), (), ()) for trace in found]
    return {
        "trace_ptr": np.concatenate([[0], np.cumsum([len(t.at_ns) for t in traces])]).astype(np.int64),
        "trace_at_ns": np.array([at for t in traces for at in t.at_ns], np.int64),
        "trace_rate": np.array([rate for t in traces for rate in t.rate], np.float64),
        "trace_latency_ns": np.array([extra for t in traces for extra in t.extra_latency_ns], np.int64),
    }


def noisy(tables: Tables, jitter: SeededNoise, program: Program) -> Tables:
    """The same tables with new random durations of every op and of every transfer between datacenters."""
    rng = np.random.default_rng(jitter.seed)
    sigma = np.where(program.transfer_crosses, jitter.wan_sigma, 0.0)
    return tables._replace(
        op_ns=_noisy(tables.op_ns, jitter.compute_sigma, rng),
        transfer_work_ns=_noisy(tables.transfer_work_ns, sigma, rng),
        transfer_latency_ns=_noisy(tables.transfer_latency_ns, sigma, rng),
    )


def _require_matching(program: Program, costs: Costs) -> None:
    if (program.num_pipelines, program.num_stages) != (costs.num_pipelines, costs.num_stages):
        raise ProgramError(
            f"program {program.name!r} has {program.num_pipelines} pipelines of {program.num_stages} stages, but the "
            f"costs are for {costs.num_pipelines} of {costs.num_stages}: price the same layout"
        )


def _noisy(nominal_ns: Ints, sigma: float | NDArray[np.float64], rng: np.random.Generator) -> Ints:
    return stretched(nominal_ns, np.exp(rng.standard_normal(nominal_ns.shape) * sigma))


def stretched(nominal_ns: Ints, factor: NDArray[np.float64]) -> Ints:
    """Durations times a factor each; none becomes longer than an op may be, or their sum would leave 64 bits."""
    return np.minimum(np.rint(nominal_ns * factor), MAX_NS).astype(np.int64)


def gates_of(program: Program, circuits: Circuits, compute_ns: Ints) -> Gates | None:
    """The gates alone, for those who carry them out; None where no circuits change. `compute_ns`: as in Costs."""
    op_ns = compute_ns[program.op_worker // program.num_ranks, program.stage, program.kind]
    op_group, group_ptr, _ = _groups(program, circuits)
    return build_gates(program, circuits, op_ns, op_group, len(group_ptr) - 1)


def _groups(program: Program, circuits: Circuits | None) -> tuple[Ints, Ints, Ints]:
    """By op its collective, and the members of each. STEP is one too where it exchanges weights over circuits."""
    exchanged = circuits is not None and circuits.until_step
    group = program.op_groups((Kind.SYNC, Kind.STEP) if exchanged else (Kind.SYNC,))
    members = np.flatnonzero(group >= 0)
    order = members[np.argsort(group[members], kind="stable")]
    num_groups = int(group.max(initial=NONE)) + 1
    return group, np.searchsorted(group[order], np.arange(num_groups + 1)).astype(np.int64), order.astype(np.int64)
