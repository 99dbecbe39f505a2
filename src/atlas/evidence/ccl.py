"""CCL-Bench's metrics by its own definitions (the JSON tools of cclbench/CCL-Bench, May 2026), under its own names.

`rank_figures` reduces a rank's trace to a few numbers, so that only one rank is in memory at a time; `ccl_metrics`
combines the ranks. Where CCL-Bench returns -1, nan or None, the value is None and `reason` says why.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from atlas.evidence.card import Card
from atlas.evidence.intervals import Floats, clipped, intersection, union
from atlas.evidence.metric import Metric, missing
from atlas.evidence.rank_trace import BIT, COLLECTIVES, Mark, RankTrace

T = TypeVar("T")
MAX_FILES = 16
"""CCL-Bench reads at most this many rank files, chosen at random with a fixed seed."""
SAMPLE_SEED = 42
PEAK_TFLOPS = {"nvidia_a100": 312.0, "nvidia_h100": 989.0, "tpu_v6e": 918.0}
"""The hardware that CCL-Bench knows a peak of."""
PASSES = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "alltoall": 1}
"""By collective: bytes on the wire are this many times (n - 1)/n of the message, in a group of n."""


@dataclass(frozen=True)
class RankFigures:
    """One rank's part of every metric. None: the rank has no data for it."""

    name: str
    """Of the file."""
    num_kernels: int
    num_steps: int
    step_us: float | None
    engine_step_us: float | None
    comm_percent: float | None
    comm_s: float | None
    overlap_percent: float | None
    active_us: float
    """Length of the union of all kernels."""
    nccl_us: Mapping[str, float]
    volume_bytes: Mapping[str, int]
    bandwidth: Mapping[str, float]
    """By collective: median, GiB/s."""
    covered: tuple[float, float]
    by_name_us: Mapping[str, float] | None
    """None: too many names."""
    kernel_us: float
    moe_us: float
    copied: tuple[float, float]
    copy_alone: tuple[float, float] | None
    """Length of copies outside other kernels, and the span of all kernels."""


def inner(steps: Sequence[T]) -> list[T]:
    """Without the first and the last, where there are more than two."""
    return list(steps[1:-1] if len(steps) > 2 else steps)


def edges_us(marks: Sequence[Mark]) -> tuple[Floats, Floats]:
    """Start and end of each step."""
    start = np.array([mark.start_us for mark in marks])
    return start, start + np.array([mark.length_us or 0.0 for mark in marks])


def rank_figures(trace: RankTrace) -> RankFigures:
    return RankFigures(
        name=trace.path.name,
        num_kernels=len(trace.start_us),
        num_steps=len(trace.steps),
        step_us=_mean_step_us(trace.steps),
        engine_step_us=_mean_step_us(trace.engine_steps),
        comm_percent=_comm_percent(trace),
        comm_s=_comm_s(trace),
        overlap_percent=_overlap_percent(trace),
        active_us=union(trace.start_us, trace.end_us).length,
        nccl_us=dict(trace.nccl_us),
        volume_bytes={kind: sum(c.num_bytes for c in trace.collectives if c.kind == kind) for kind in COLLECTIVES},
        bandwidth=_bandwidths(trace),
        covered=trace.covered,
        by_name_us=None if trace.too_many_names else trace.by_name_us,
        kernel_us=float(trace.length_us.sum()),
        moe_us=float(trace.length_us[trace.having("moe")].sum()),
        copied=trace.copied,
        copy_alone=_copy_alone(trace),
    )


# ---- one rank ------------------------------------------------------------------------------------------------
def _mean_step_us(steps: Sequence[Mark]) -> float | None:
    kept = inner([mark.length_us for mark in steps if mark.length_us is not None])
    return statistics.fmean(kept) if kept else None


def _comm_percent(trace: RankTrace) -> float | None:
    """Share of summed kernel time in communication; mean over inner steps, counting any kernel that touches a step."""
    if not len(trace.start_us):
        return None
    comm = trace.having("comm")
    if not trace.steps:
        total = float(trace.length_us.sum())
        return 100 * float(trace.length_us[comm].sum()) / total if total > 0 else None
    low, high = edges_us(inner(trace.steps))
    sums = [_touching_us(trace.start_us[keep], trace.length_us[keep], low, high) for keep in (comm, np.ones_like(comm))]
    used = sums[1] > 0
    return float((100 * sums[0][used] / sums[1][used]).mean()) if used.any() else None


def _touching_us(start: Floats, length: Floats, low: Floats, high: Floats) -> Floats:
    """By window: the summed length of all spans that touch it: those begun before its end less those ended before it
    began."""
    by_start, end = np.argsort(start), start + length
    by_end = np.argsort(end)
    begun = np.concatenate([[0.0], np.cumsum(length[by_start])])
    ended = np.concatenate([[0.0], np.cumsum(length[by_end])])
    count_begun = np.searchsorted(start[by_start], high, side="left")
    count_ended = np.searchsorted(end[by_end], low, side="right")
    return np.asarray(np.maximum(begun[count_begun] - ended[count_ended], 0.0), np.float64)


def _comm_s(trace: RankTrace) -> float | None:
    """Union of communication from the first inner step's start to the last one's end, per step."""
    if not len(trace.start_us):
        return None
    comm = trace.having("comm_time")
    start, end = trace.start_us[comm], trace.end_us[comm]
    marks = inner(trace.steps)
    if len(trace.steps) > 2:
        start, end = clipped(start, end, marks[0].start_us, marks[-1].start_us + (marks[-1].length_us or 0.0))
    return union(start, end).length / 1e6 / max(1, len(marks))


def _overlap_percent(trace: RankTrace) -> float | None:
    marks = [mark for mark in inner(trace.steps or trace.engine_steps) if mark.length_us is not None]
    if not marks or not len(trace.start_us):
        return None
    comm = trace.having("comm_overlap")
    busy = union(trace.start_us[comm], trace.end_us[comm])
    both = intersection(busy, union(trace.start_us[~comm], trace.end_us[~comm]))
    low, high = edges_us(marks)
    total = float(busy.within(low, high).sum())
    return 100 * float(both.within(low, high).sum()) / total if total > 0 else None


def _bandwidths(trace: RankTrace) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, passes in PASSES.items():
        rates = [
            one.num_bytes / 2**30 * passes * (1 - 1 / one.group_size) / (one.length_us / 1e6)
            for one in trace.collectives
            if one.kind == kind and one.num_bytes > 0 and one.length_us > 0 and one.group_size > 0
        ]
        if rates:
            found[kind] = statistics.median(rates)
    return found


def _copy_alone(trace: RankTrace) -> tuple[float, float] | None:
    start = np.concatenate([trace.start_us, trace.other_start_us])
    length = np.concatenate([trace.length_us, trace.other_length_us])
    traits = np.concatenate([trace.traits, trace.other_traits])
    keep = length > 0
    start, end, traits = start[keep], (start + length)[keep], traits[keep]
    copies = (traits & BIT["copy"]) != 0
    if not copies.any():
        return None
    computes = ~copies & ((traits & BIT["comm_copy"]) == 0)
    moved = union(start[copies], end[copies])
    hidden = intersection(moved, union(start[computes], end[computes])).length
    return moved.length - hidden, float(end.max() - start.min())


# ---- all ranks -----------------------------------------------------------------------------------------------
def sampled(names: Sequence[str]) -> list[str]:
    """The rank files that CCL-Bench reads, of these in the order of their names."""
    names = sorted(names)
    return names if len(names) <= MAX_FILES else sorted(random.Random(SAMPLE_SEED).sample(names, MAX_FILES))


def ccl_metrics(ranks: Sequence[RankFigures], card: Card | None) -> list[Metric]:
    """All 25 metrics of CCL-Bench's table, in its order. `ranks`: of every file, in the order of their names."""
    chosen = set(sampled([rank.name for rank in ranks]))
    some = [rank for rank in ranks if rank.name in chosen]
    step_s = avg_step_time(some)
    found = [
        Metric("avg_step_time", step_s, "s", reason="no ProfilerStep#N annotations"),
        missing("ttft", "s", "of serving benchmarks; read from their latency files"),
        missing("tpot", "s", "of serving benchmarks; read from their latency files"),
        mfu(card, step_s),
        Metric("mean_sm_coverage", _ratio(some, "covered", 100), "%", reason="no kernel has `blocks per SM`"),
        _dominant(some),
        Metric("moe_fraction", _moe(some), "%", reason="no kernels"),
        Metric("average_memory_bandwidth", _ratio(some, "copied", 1e-3), "GB/s", reason="no copies with bytes"),
        _copy_overhead(some),
        Metric("communication_fraction", _mean([r.comm_percent for r in some]), "%", reason="no kernels"),
        Metric("total_communication_time", _mean([r.comm_s for r in some]), "s", reason="no kernels"),
        *(_bandwidth(ranks, kind) for kind in ("allgather", "allreduce", "alltoall", "reducescatter")),
        missing("bandwidth_utilization_peertopeer_group_6", "%", "needs Nsight Systems files"),
        Metric(
            "compute_comm_overlap",
            _mean([r.overlap_percent for r in some]),
            "%",
            reason="no steps, or no communication kernels in them",
        ),
        _imbalance(some),
        Metric("straggler", _straggler(ranks), "ratio"),
        missing("scale_up_bw_utility", "%", "a simulation with ASTRA-sim"),
        *_volumes(ranks),
    ]
    return found


def avg_step_time(ranks: Sequence[RankFigures]) -> float | None:
    """Mean over inner steps, then over ranks, seconds."""
    step_us = _mean([r.step_us for r in ranks]) or _mean([r.engine_step_us for r in ranks])
    return None if step_us is None else step_us / 1e6


def mfu(card: Card | None, step_s: float | None) -> Metric:
    if card is None:
        return missing("mfu", "%", "no workload card")
    if step_s is None or step_s <= 0:
        return missing("mfu", "%", "no step time")
    model = str(card.text("workload.hardware.xpu_spec.model") or "").lower()
    peak = PEAK_TFLOPS.get(model)
    if peak is None:
        return missing("mfu", "%", f"CCL-Bench knows no peak of {model or 'the hardware'}; see flops_utilization")
    flops = flops_per_token(card, attention=12.0)
    if flops is None:
        return missing("mfu", "%", f"the card lacks {', '.join(card.lacking())}")
    return Metric("mfu", round(100 * flops * card.tokens / step_s / (peak * 1e12 * card.num_devices), 4), "%")


def flops_per_token(card: Card, attention: float) -> float | None:
    """6(N - N_emb) + `attention` x L H Q S in training; a third of it in inference."""
    shape = card.shape
    if shape is None:
        return None
    training = 6.0 * (shape.num_params - shape.num_params_embedding) + attention * (
        shape.num_layers * shape.head_dim * shape.num_heads * card.seq_len
    )
    return training / 3 if str(card.text("workload.model.phase")).lower() == "inference" else training


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _ratio(ranks: Sequence[RankFigures], name: str, scale: float) -> float | None:
    above = math.fsum(getattr(rank, name)[0] for rank in ranks)
    below = math.fsum(getattr(rank, name)[1] for rank in ranks)
    return scale * above / below if below > 0 else None


def _dominant(ranks: Sequence[RankFigures]) -> Metric:
    name, total = "dominant_kernel_concentration", math.fsum(rank.kernel_us for rank in ranks)
    if total <= 0:
        return missing(name, "%", "no kernels")
    sums: dict[str, float] = {}
    for rank in ranks:
        if rank.by_name_us is None:
            return missing(name, "%", "too many different kernel names")
        for kernel, length in rank.by_name_us.items():
            sums[kernel] = sums.get(kernel, 0.0) + length
    return Metric(name, 100 * max(sums.values()) / total, "%")


def _moe(ranks: Sequence[RankFigures]) -> float | None:
    total = math.fsum(rank.kernel_us for rank in ranks)
    return 100 * math.fsum(rank.moe_us for rank in ranks) / total if total > 0 else None


def _copy_overhead(ranks: Sequence[RankFigures]) -> Metric:
    parts = [rank.copy_alone for rank in ranks if rank.copy_alone is not None and rank.copy_alone[1] > 0]
    if not parts:
        return missing("memory_transfer_overhead", "%", "no copies among the kernels")
    value = 100 * math.fsum(alone for alone, _ in parts) / math.fsum(span for _, span in parts)
    return Metric("memory_transfer_overhead", round(value, 4), "%")


def _bandwidth(ranks: Sequence[RankFigures], kind: str) -> Metric:
    value = next((rank.bandwidth[kind] for rank in ranks if kind in rank.bandwidth), None)
    return Metric(f"bandwidth_utilization_{kind}_group_6", value, "GB/s", reason=f"no {kind} kernels with sizes")


def _imbalance(ranks: Sequence[RankFigures]) -> Metric:
    active = [rank.active_us for rank in ranks if rank.num_kernels]
    if len(active) < 2 or min(active) <= 0:
        return missing("load_imbalance_ratio", "ratio", "fewer than two ranks with kernels")
    return Metric("load_imbalance_ratio", max(active) / min(active), "ratio")


def _straggler(ranks: Sequence[RankFigures]) -> float:
    sums = [length for rank in ranks if rank.name.startswith("rank") for length in rank.nccl_us.values()]
    return (max(sums) - min(sums)) / max(sums) if len(sums) > 1 and max(sums) > 0 else 0.0


def _volumes(ranks: Sequence[RankFigures]) -> list[Metric]:
    first = next((r for r in ranks if r.name.startswith("rank0_trace")), ranks[0] if ranks else None)
    if first is None:
        return [missing(f"collective_vol_{kind}_gb", "GB", "no traces") for kind in (*COLLECTIVES, "total")]
    found = [Metric(f"collective_vol_{kind}_gb", first.volume_bytes[kind] / 1e9, "GB") for kind in COLLECTIVES]
    return [*found, Metric("collective_vol_total_gb", sum(first.volume_bytes.values()) / 1e9, "GB")]
