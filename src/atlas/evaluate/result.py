"""The result of simulating a job, and its figures. `evaluate.job` makes it; prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from atlas.cost import flops
from atlas.cost.arrange import Arrangement
from atlas.cost.cluster_arrays import GIB
from atlas.cost.compute import pricing
from atlas.cost.memory import peak_memory
from atlas.cost.price import Tcp
from atlas.cost.table import Costs
from atlas.ir.analysis import summary
from atlas.ir.program import Layout, Memory, Program
from atlas.ir.timeline import Timeline
from atlas.schedules import Bound
from atlas.spec import Job


@dataclass(frozen=True, eq=False)
class Case:
    """A job with its open choices made and its prices known."""

    job: Job
    arrangement: Arrangement
    layout: Layout
    apart: Costs
    turns: Costs | None
    """None where nothing can be shared: one connection, one pipeline, or one datacenter."""
    memory: Memory


@dataclass(frozen=True)
class Spread:
    """Iteration time over runs with jitter, seconds."""

    runs: int
    p5_s: float
    p50_s: float
    p95_s: float
    worst_s: float


@dataclass(frozen=True, eq=False)
class Result:
    """A simulated job, with its figures."""

    schedule: str
    tcp: Tcp
    case: Case
    timeline: Timeline
    """Of as many iterations as were asked for."""
    single: Timeline
    """Of one iteration: what every figure but `steady_s` is read from."""
    bound: Bound
    engine_s: float
    """CPU seconds of the engine alone, for one iteration."""
    spread: Spread | None = None

    @property
    def costs(self) -> Costs:
        """What the Program was priced at: with turns on the WAN if it takes them."""
        turns = self.case.turns
        return turns if self.single.program.sharing and turns is not None else self.case.apart

    def row(self) -> dict[str, Any]:
        """The figures, JSON-able. Seconds are simulated; `engine_s` alone was measured."""
        return dict(self._row)

    @cached_property
    def _row(self) -> dict[str, Any]:
        figures, job = summary(self.single), self.case.job
        peak, cap = _tightest(self.case, self.single.program)
        tokens = job.microbatch * job.model.seq_len * job.num_microbatches * self.case.layout.num_pipelines * job.cells
        iteration_s = figures["iteration_s"]
        return {
            "job": job.name,
            "schedule": self.schedule,
            "tcp": self.tcp,
            "runtime": job.runtime,
            "pricing": pricing(job),
            **{k: figures[k] for k in ("source", "sharing", "iteration_s", "utilization")},
            "lower_bound_s": self.bound.ns / 1e9,
            "lower_bound_reason": self.bound.reason,
            "gap": iteration_s / (self.bound.ns / 1e9) if self.bound.ns else None,
            "steady_s": self.timeline.iteration_ns / 1e9 if self.timeline is not self.single else None,
            "tokens_per_s": tokens / iteration_s if iteration_s else None,
            "mfu": _model_flops(job) * tokens / iteration_s / _peak_flops(self.case) if iteration_s else None,
            "fits": peak <= cap,
            "peak_gib": peak / GIB,
            "memory_gib": cap / GIB,
            **{k: figures[k] for k in ("peak_in_flight", "bubbles_s", "critical_path_s", "links", "num_workers")},
            "num_gpus": _num_gpus(self.case),
            "num_events": figures["num_events"],
            "engine_s": self.engine_s,
            "spread": None if self.spread is None else vars(self.spread),
        }


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Every result's row, with its speedup over the slowest of them."""
    found = [result.row() for result in results]
    slowest = max((row["iteration_s"] for row in found), default=0.0)
    return [{**row, "speedup": slowest / row["iteration_s"] if row["iteration_s"] else None} for row in found]


def _tightest(case: Case, program: Program) -> tuple[int, int]:
    """(need, cap) in bytes of the GPU that has least to spare."""
    workers = peak_memory(case.job, program, arrangement=case.arrangement)
    worker, need = min(workers, key=lambda found: found[0].cap - found[1])
    return need, worker.cap


def _num_gpus(case: Case) -> int:
    return case.job.tp * case.job.pp * case.layout.num_pipelines * case.job.cells


def _model_flops(job: Job) -> float:
    """FLOPs per token of forward and backward, recompute not counted: what MFU counts as useful."""
    model = job.model
    layer = flops.layer_matrix_flops(model, 1) + flops.layer_attention_flops(model, 1)
    return 3 * (model.layers * layer + flops.head_flops(model, 1)) / model.seq_len


def _peak_flops(case: Case) -> float:
    """FLOP/s that all GPUs of the job could do."""
    job = case.job
    kind: Literal["fp32_tflops", "bf16_tflops"] = "fp32_tflops" if job.precision == "fp32" else "bf16_tflops"
    one_pipeline = sum(float(getattr(job.cluster.gpu(dc), kind)) for dc in case.layout.rank_dc)
    return one_pipeline * 1e12 * job.tp * case.layout.num_pipelines * job.cells
