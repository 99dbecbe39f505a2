"""A training job prepared for admission: windows, networks, costs and lanes, from a job or plan file.

One DP-cell is simulated and repeated: all cells run the same timeline at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from atlas.cost.cluster_arrays import share_of_node
from atlas.cost.memory import peak_memory
from atlas.evaluate import Progress, Result, evaluate
from atlas.ir.program import USEFUL
from atlas.spec.job import Job
from atlas.spec.plan import load_job_or_plan
from bubbletea.admit.aims import Aims
from bubbletea.admit.lanes import build_lanes
from bubbletea.admit.records import PrefillLane
from bubbletea.admit.state import AdmissionState
from bubbletea.constants import GIB
from bubbletea.costs import LLAMA_3_8B, PrefillCosts, price_prefill
from bubbletea.sim.traces import RequestTrace
from bubbletea.windows.bubbles import Forecast, Pattern, pattern_of
from bubbletea.windows.free_network import Residual, free_network, residual_of

TOOL_WAITS = "tool waits"
"""Instead of a schedule's name: the windows are those of `waits`, not of training."""
WITHOUT_TRAINING_BYTES = 64 * GIB
"""How much more memory an accelerator has that only prefills: enough for any prompt of a trace."""
ITERATIONS = 3
"""Simulated iterations; the last one is the steady state."""


@dataclass(frozen=True, eq=False)
class SimulatedCluster:
    """Accelerators with their windows, networks and prices: the input of a replay. Policies do not change it."""

    name: str
    schedule: str
    pattern: Pattern
    residual: Residual
    costs: dict[str, PrefillCosts]
    """By datacenter."""
    num_ranks: int
    longest_op_ns: int
    """Of training's computing ops."""
    result: Result | None = None
    """The simulated training; None without training."""
    num_groups: int = 1
    """Groups of pipelines of the plan; only the one in its `job` is simulated."""

    @property
    def idle_share(self) -> float:
        """Share of all accelerators' time."""
        return float(self.pattern.idle_ns.sum()) / (self.pattern.period_ns * self.pattern.num_workers)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "job": self.name,
            "schedule": self.schedule,
            "num_workers": self.pattern.num_workers,
            "iteration_s": self.pattern.period_ns / 1e9,
            "training_utilization": 1 - self.idle_share,
            "network_left": self.residual.share(self.some_costs.nic_bytes_per_s),
            "longest_op_s": self.longest_op_ns / 1e9,
            "num_groups": self.num_groups,
        }

    @property
    def some_costs(self) -> PrefillCosts:
        return next(iter(self.costs.values()))

    def lanes(self, split: int | Sequence[int] | None, chunk: int) -> list[PrefillLane]:
        return build_lanes(self.pattern, self.some_costs, split=split, num_ranks=self.num_ranks, chunk=chunk)

    def state(
        self,
        forecast: Forecast,
        lanes: Sequence[PrefillLane],
        chunks: Sequence[int],
        *,
        kept: float = 0.0,
        aims: Aims | None = None,
    ) -> AdmissionState:
        return AdmissionState(forecast, self.costs, lanes, residual=self.residual, chunks=chunks, kept=kept, aims=aims)

    def capacity_tokens_per_s(self, trace: RequestTrace) -> float:
        """Prefill rate of the trace's prompts if all windows were filled without gaps: an upper bound."""
        idle_s_per_s = float(self.pattern.idle_ns.sum()) / self.pattern.period_ns
        return idle_s_per_s * 1e9 / self.ns_per_token(trace)

    def ns_per_token(self, trace: RequestTrace) -> float:
        """Accelerator time of the trace's prompts at the most efficient chunk."""
        lengths, counts = np.unique(trace.tokens, return_counts=True)
        times = np.array([self.some_costs.prompt_ns(int(n)) for n in lengths])
        return float((times * counts).sum() / (lengths * counts).sum())


def simulated_cluster(
    path: Path,
    *,
    schedule: str | None = None,
    changes: Sequence[str] = (),
    cells: int = 1,
    steady: bool = True,
    progress: Progress | None = None,
) -> SimulatedCluster:
    """From a job or plan file, with `cells` DP-cells: its last simulated iteration, or a single one if not `steady`."""
    job, plan = load_job_or_plan(path, changes)
    if plan is not None and schedule is None:
        schedule = plan.schedule.name
    found = evaluate(job, schedule or "atlas", tcp="many", iterations=ITERATIONS, progress=progress)
    timeline, count = found.timeline if steady else found.single, min(cells, job.cells)
    per_rank = peak_memory(job, found.single.program, found.case.workers)
    # The memory model counts the memory reserved for prefill as training's.
    room = np.array([worker.cap - need + worker.reserved for worker, need in per_rank], np.int64)
    pattern = pattern_of(timeline, np.tile(room, timeline.program.num_pipelines))
    useful = np.isin(timeline.program.kind, np.array(USEFUL, np.int8))
    return SimulatedCluster(
        name=job.name,
        schedule=found.schedule,
        pattern=pattern.replicated(count),
        residual=residual_of(timeline, job, found.case.arrangement).replicated(count),
        costs={dc.name: _costs(job, dc.name) for dc in job.cluster.datacenters},
        num_ranks=timeline.program.num_ranks,
        longest_op_ns=int((timeline.op_end_ns - timeline.op_start_ns)[useful].max()),
        result=found,
        num_groups=len(job.parts),
    )


def _costs(job: Job, dc: str) -> PrefillCosts:
    place = job.cluster.dc(dc)
    return price_prefill(
        job.cluster.gpu(dc),
        LLAMA_3_8B,
        tp=job.tp,
        net_gbps=float(share_of_node(job.tp, place.gpus_per_node, job.cluster.node_gbps(place))),
        net_latency_us=place.net_latency_us,
    )


def dedicated(cluster: SimulatedCluster) -> SimulatedCluster:
    """Accelerators that only prefill, as many as the windows amount to, with free networks."""
    count = max(1, round(cluster.idle_share * cluster.pattern.num_workers))
    period_ns, costs = cluster.pattern.period_ns, cluster.some_costs
    memory_bytes = int(cluster.pattern.memory_bytes.max()) + WITHOUT_TRAINING_BYTES
    pattern = Pattern.of_windows([[(0, period_ns)]] * count, period_ns, ["dedicated"] * count, memory_bytes)
    network = free_network(count, period_ns, costs.nic_bytes_per_s)
    return replace(
        cluster,
        pattern=pattern,
        residual=network,
        costs={"dedicated": costs},
        num_ranks=1,
        longest_op_ns=0,
        result=None,
    )
