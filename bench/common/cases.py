"""The cell of the schedule benchmarks: equal stages, a WAN whose transfer takes C forwards per node pair."""

from __future__ import annotations

from dataclasses import replace

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.ir.program import Layout, Memory, Program
from atlas.schedules import SCHEDULES, Setting
from atlas.sim import simulate

MS = 1_000_000
FORWARD_MS = 60
ONE_TCP_SLOWER = 17.06
"""5 Gbit/s of many connections against 293 Mbit/s of one, at 40 ms."""


def cell(
    num_stages: int,
    num_microbatches: int,
    num_pipelines: int,
    in_flight: int,
    *,
    num_dcs: int = 3,
    latency_ms: int = 40,
    wan_forwards: float | None = None,
    budget: int = 200,
    quantum_ms: int = 5,
) -> Setting:
    """Forward, recompute and each half of the backward 60 ms; a WAN transfer C forwards on one node pair's path."""
    layout = Layout.even(num_pipelines, num_stages, num_microbatches, num_dcs)
    boundaries = tuple(b for b in range(num_stages - 1) if layout.rank_dc[b] != layout.rank_dc[b + 1])
    unit = FORWARD_MS * MS
    kinds = kind_costs(forward_ns=unit, input_ns=unit, weight_ns=unit, recompute_ns=unit)
    wan_ns = round((num_pipelines if wan_forwards is None else wan_forwards) * unit)

    def price(sharing: bool) -> Costs:
        return uniform_costs(
            num_pipelines,
            num_stages,
            kinds,
            wan_boundaries=boundaries,
            wan_ns=wan_ns,
            wan_latency_ns=latency_ms * MS,
            sharing=sharing,
            quantum_ns=quantum_ms * MS,
        )

    memory = Memory(in_flight)
    return Setting(layout, price(False), price(True), memory, recompute=True, budget=budget)


def on_one_connection(setting: Setting, slower: float = ONE_TCP_SLOWER) -> Setting:
    """The same cell with every WAN transfer on a single TCP connection, without turns."""
    costs = setting.apart
    crosses = costs.latency_ns > 0
    work = costs.work_ns.copy()
    work[crosses] = (work[crosses] * slower).round()
    return replace(setting, apart=replace(costs, work_ns=work), turns=None)


def seconds(name: str, setting: Setting) -> tuple[float, Program]:
    """The simulated iteration time of a schedule, and its Program."""
    program = SCHEDULES[name].build(setting, None)
    return simulate(program, setting.costs_of(program)).makespan_ns / 1e9, program
