"""Our event simulation of a Sailor plan: the same profile and bandwidths, run as a 1F1B Program.

Unlike the judge it lets transfers overlap compute and each pipeline run at its own pace until gradients are summed.
Like the judge it knows no latency (the files give none) and no contention between pipelines. Pipelines with the same
placement behave in the same way, so one of each kind is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from atlas.cost.table import PRIVATE, Costs, LinkCost, kind_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import BACKWARD, FORWARD, Ints, Layout
from atlas.sailor.inputs import Inputs
from atlas.sailor.judge import PlanJudge, activation_bytes, sending_fit
from atlas.sailor.plan_file import Replica, SailorPlan
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate

EVENTS_PER_STAGE = 4
"""Of one microbatch: forward, backward and two transfers."""
MIN_PERIODS = 4
"""At least this many microbatches are simulated for each stage."""
MAX_EVENTS = 40_000
"""Beyond it the middle of the iteration, where every microbatch takes as long as the last, is extrapolated."""


@dataclass(frozen=True)
class Simulated:
    """The figure and how it was computed."""

    iteration_s: float
    num_pipelines: int
    num_microbatches: int
    """Simulated; fewer than the plan's when the rest was extrapolated."""
    method: str


def simulated(inputs: Inputs, plan: SailorPlan) -> Simulated:
    """The iteration time by the reference engine."""
    columns = tuple(dict.fromkeys(zip(*plan.replicas, strict=True)))
    judge = PlanJudge(inputs, plan)
    num_mb, costs = judge.num_microbatches, _costs(judge, columns)
    per_microbatch = EVENTS_PER_STAGE * len(columns) * plan.num_stages
    few = max(MIN_PERIODS * plan.num_stages, MAX_EVENTS // per_microbatch)
    if num_mb <= few:
        seconds = _seconds(plan, columns, costs, num_mb)
        return Simulated(seconds, len(columns), num_mb, f"all {num_mb} microbatches simulated")
    # As many as are in flight at once make one period: the pace is measured, and carried on, over whole periods.
    few -= (few - num_mb) % plan.num_stages
    before = few - few // 2 // plan.num_stages * plan.num_stages
    more, less = _seconds(plan, columns, costs, few), _seconds(plan, columns, costs, before)
    pace = (more - less) / (few - before)
    method = (
        f"{few} of {num_mb} microbatches simulated, the rest at the mean pace of microbatches {before + 1} to {few}"
    )
    return Simulated(more + (num_mb - few) * pace, len(columns), few, method)


def _seconds(plan: SailorPlan, columns: tuple[tuple[Replica, ...], ...], costs: Costs, num_mb: int) -> float:
    zones = tuple(replica.zone for replica in columns[0])
    layout = Layout(len(columns), plan.num_stages, num_mb, zones)
    timeline = simulate(with_optimizer(one_f_one_b(layout)), costs, engine="reference")
    return timeline.makespan_ns / 1e9


def _costs(judge: PlanJudge, columns: tuple[tuple[Replica, ...], ...]) -> Costs:
    inputs, plan = judge.inputs, judge.plan
    num_stages, num_columns = plan.num_stages, len(columns)
    sync_s = [judge.sync_s(i, *span) for i, span in enumerate(pairwise([0, *plan.ends]))]
    stages = range(num_stages)
    rows = [[_kinds(inputs, plan, stage, column[stage], sync_s[stage]) for stage in stages] for column in columns]
    compute = np.array(rows, np.int64)
    shape = (2, num_columns, num_stages - 1)
    work = np.zeros(shape, np.int64)
    for c, column in enumerate(columns):
        for b in range(num_stages - 1):
            here, there = column[b], column[b + 1]
            onward = activation_bytes(inputs, plan.layers[b][-1], plan.mbs)
            back = activation_bytes(inputs, plan.layers[b + 1][0], plan.mbs)
            work[FORWARD, c, b] = _ns(sending_fit(inputs, here, there).seconds(onward))
            work[BACKWARD, c, b] = _ns(sending_fit(inputs, there, here).seconds(back))
    channel = np.arange(work.size, dtype=np.int32).reshape(shape)
    links = tuple(LinkCost(f"{'><'[d]} {b} p{c}", PRIVATE) for d, c, b in np.ndindex(*shape))
    zero = np.zeros(shape, np.int64)
    return Costs(compute, links, channel, work, zero, zero.copy())


def _kinds(inputs: Inputs, plan: SailorPlan, stage: int, replica: Replica, sync_s: float) -> Ints:
    times = inputs.times[replica.gpu, plan.mbs, replica.tp]
    layers = plan.layers[stage]
    return kind_costs(
        forward_ns=_ns(sum(times.forward_s[layer] for layer in layers)),
        backward_ns=_ns(sum(times.backward_s[layer] for layer in layers)),
        sync_ns=_ns(sync_s),
        step_ns=_ns(times.update_s[layers[0]]),
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
