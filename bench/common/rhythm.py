"""The simulated cell around one stage: the ops of the middle stage of three in an iteration, and when the WAN delivers
its inputs, for a WAN so slow that the stage is busy a given share of the time.

It takes op durations; it does not measure them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.ir.program import BACKWARD, FORWARD, Kind, Layout, Memory, Op, Program
from atlas.schedules import SCHEDULES, Setting
from atlas.sim import simulate

STAGES, MICROBATCHES, PIPELINES, IN_FLIGHT = 3, 8, 4, 4
MIDDLE = 1
LATENCY_NS = 40_000_000


@dataclass(frozen=True)
class Rhythm:
    """The ops of the middle stage in one iteration, and when its inputs arrive, from the iteration's start."""

    program: Program
    ops: list[Op]
    arrive_ns: list[int]
    period_ns: int
    busy: float
    wan_ns: int
    num_waits: int


def costs_for(op_ns: dict[Kind, int], wan_ns: int, sharing: bool) -> Costs:
    kinds = kind_costs(
        forward_ns=op_ns[Kind.F], input_ns=op_ns[Kind.I], weight_ns=op_ns[Kind.W], backward_ns=op_ns[Kind.B],
        recompute_ns=op_ns[Kind.R],
    )  # fmt: skip
    return uniform_costs(
        PIPELINES, STAGES, kinds, wan_boundaries=(0, 1), wan_ns=wan_ns, wan_latency_ns=LATENCY_NS, sharing=sharing
    )


def rhythm_for(op_ns: dict[Kind, int], busy: float) -> Rhythm:
    """The WAN that makes the stage this busy, by bisection."""
    low, high = 0, 200 * op_ns[Kind.F]
    for _ in range(12):
        middle = (low + high) // 2
        found = rhythm(op_ns, middle)
        low, high = (middle, high) if found.busy > busy else (low, middle)
    return rhythm(op_ns, (low + high) // 2)


def rhythm(op_ns: dict[Kind, int], wan_ns: int) -> Rhythm:
    layout = Layout.even(PIPELINES, STAGES, MICROBATCHES, 3)
    apart, turns = (costs_for(op_ns, wan_ns, sharing) for sharing in (False, True))
    program = SCHEDULES["atlas"].build(
        Setting(layout, apart, turns, Memory(IN_FLIGHT), recompute=True, budget=20), None
    )
    timeline = simulate(program, turns if program.sharing else apart)
    worker = program.worker(0, MIDDLE)
    ops = program.ops(worker)
    arrivals = [_arrival(program, timeline.transfer_arrive_ns, op) for op in ops]
    period_ns = timeline.makespan_ns + op_ns[Kind.STEP]
    busy_ns = sum(op_ns[op.kind] for op in ops) + op_ns[Kind.STEP]
    num_waits = _num_waits(ops, arrivals, op_ns)
    return Rhythm(program, ops, arrivals, period_ns, busy_ns / period_ns, wan_ns, num_waits)


def _num_waits(ops: list[Op], arrive_ns: list[int], op_ns: dict[Kind, int]) -> int:
    """Ops whose input has not arrived yet."""
    found = free_ns = 0
    for op, ready_ns in zip(ops, arrive_ns, strict=True):
        found += ready_ns > free_ns
        free_ns = max(free_ns, ready_ns) + op_ns[op.kind]
    return found


def _arrival(program: Program, arrive_ns: Any, op: Op) -> int:
    """When the input of one of pipeline 0's ops arrives; 0 if it needs none."""
    shape = (2, program.num_pipelines, program.num_stages - 1, program.num_slots)
    if op.kind == Kind.F:
        return int(arrive_ns[np.ravel_multi_index((FORWARD, 0, MIDDLE - 1, op.microbatch), shape)])
    if op.kind in (Kind.B, Kind.I):
        return int(arrive_ns[np.ravel_multi_index((BACKWARD, 0, MIDDLE, op.microbatch), shape)])
    return 0


def replayed(program: Program, op_ns: dict[Kind, int], wan_ns: int) -> int:
    """The whole cell's iteration with these durations."""
    return simulate(program, costs_for(op_ns, wan_ns, program.sharing)).makespan_ns
