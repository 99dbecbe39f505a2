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
from atlas.evidence.metric import CCL_DEFINITIONS, Found, Metric, metrics
from atlas.evidence.rank_trace import BIT, COLLECTIVES, RankTrace, StepMark, rank_of

T = TypeVar("T")
MAX_FILES = 16
"""CCL-Bench reads at most this many rank files, chosen at random with a fixed seed."""
SAMPLE_SEED = 42
"""Of the ranks that are read where a data point has more than `MAX_FILES`: the same ones every time."""
PEAK_TFLOPS = {"nvidia_a100": 312.0, "nvidia_h100": 989.0, "tpu_v6e": 918.0}
"""The hardware that CCL-Bench knows a peak of."""
PASSES = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "alltoall": 1}
"""By collective: bytes on the wire are this many times (n - 1)/n of the message, in a group of n."""


@dataclass(frozen=True)
class RankFigures:
    """One rank's part of every metric, and what its trace says of itself. None: the rank has no data for it."""

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
    kernels_us: float
    moe_us: float
    copied: tuple[float, float]
    copy_alone: tuple[float, float]
    """Length of copies outside other kernels, and the span of all kernels; zeros without copies."""
    rank: int | None
    stated_rank: int | None
    """In the trace, where `rank` is that in the file's name, if it has one."""
    world_size: int | None
    repeated_steps: int
    num_unusable: int
    num_capital: int
    damage: str
    has_collectives: bool


def inner(steps: Sequence[T]) -> list[T]:
    """Without the first and the last, where there are more than two."""
    return list(steps[1:-1] if len(steps) > 2 else steps)


def edges_us(marks: Sequence[StepMark]) -> tuple[Floats, Floats]:
    """Start and end of each step."""
    start = np.array([mark.start_us for mark in marks])
    return start, start + np.array([mark.length_us or 0.0 for mark in marks])


def rank_figures(trace: RankTrace) -> RankFigures:
    stated, named = trace.stated_rank, rank_of(trace.path)
    return RankFigures(
        name=trace.path.name,
        num_kernels=len(trace.start_us),
        num_steps=len(trace.steps),
        step_us=_mean_step_us(trace.steps),
        engine_step_us=_mean_step_us(trace.engine_steps),
        comm_percent=_comm_ratio(trace),
        comm_s=_comm_s(trace),
        overlap_percent=_overlap_ratio(trace),
        active_us=union(trace.start_us, trace.end_us).length,
        nccl_us=dict(trace.nccl_us),
        volume_bytes={kind: sum(c.num_bytes for c in trace.collectives if c.kind == kind) for kind in COLLECTIVES},
        bandwidth=_bandwidths(trace),
        covered=trace.covered,
        by_name_us=None if trace.too_many_names else trace.by_name_us,
        kernels_us=float(trace.length_us.sum()),
        moe_us=float(trace.length_us[trace.having("moe")].sum()),
        copied=trace.copied,
        copy_alone=_copy_alone(trace),
        rank=stated if named is None else named,
        stated_rank=stated,
        world_size=trace.world_size,
        repeated_steps=len(trace.steps) - len({mark.number for mark in trace.steps}),
        num_unusable=trace.num_unusable,
        num_capital=trace.num_capital,
        damage=trace.damage,
        has_collectives=bool(trace.collectives),
    )


# ---- one rank ------------------------------------------------------------------------------------------------
def _mean_step_us(steps: Sequence[StepMark]) -> float | None:
    kept = inner([mark.length_us for mark in steps if mark.length_us is not None])
    return statistics.fmean(kept) if kept else None


def _comm_ratio(trace: RankTrace) -> float | None:
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


def _overlap_ratio(trace: RankTrace) -> float | None:
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


def _copy_alone(trace: RankTrace) -> tuple[float, float]:
    start = np.concatenate([trace.start_us, trace.other_start_us])
    length = np.concatenate([trace.length_us, trace.other_length_us])
    traits = np.concatenate([trace.traits, trace.other_traits])
    keep = length > 0
    start, end, traits = start[keep], (start + length)[keep], traits[keep]
    copies = (traits & BIT["copy"]) != 0
    if not copies.any():
        return 0.0, 0.0
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
    # Mean over inner steps, then over ranks.
    step_us = _mean([r.step_us for r in some]) or _mean([r.engine_step_us for r in some])
    step_s = None if step_us is None else step_us / 1e6
    kernels_us, moe_us = (math.fsum(values) for values in ((r.kernels_us for r in some), (r.moe_us for r in some)))
    copies = _ratio(some, "copy_alone")
    active = [rank.active_us for rank in some if rank.num_kernels]
    imbalance = max(active) / min(active) if len(active) > 1 and min(active) > 0 else None
    found: dict[str, Found] = {
        "avg_step_time": (step_s, "no ProfilerStep#N annotations"),
        **dict.fromkeys(("ttft", "tpot"), (None, "only serving benchmarks have it, in their latency files")),
        "mfu": _mfu(card, step_s),
        "mean_sm_coverage": (_ratio(some, "covered"), "no kernel has `blocks per SM`"),
        "dominant_kernel_concentration": _dominant(some, kernels_us),
        "moe_fraction": (100 * moe_us / kernels_us if kernels_us > 0 else None, "no kernels"),
        "average_memory_bandwidth": (_ratio(some, "copied", 1e-3), "no copy has a size"),
        "memory_transfer_overhead": (None if copies is None else round(copies, 4), "no copies among the kernels"),
        "communication_fraction": (_mean([r.comm_percent for r in some]), "no kernels"),
        "total_communication_time": (_mean([r.comm_s for r in some]), "no kernels"),
        "bandwidth_utilization_peertopeer_group_6": (None, "needs Nsight Systems files"),
        "compute_comm_overlap": (
            _mean([r.overlap_percent for r in some]),
            "no steps, or no communication kernels in them",
        ),
        "load_imbalance_ratio": (imbalance, "fewer than two ranks with kernels"),
        "straggler": (_straggler(ranks), ""),
        "scale_up_bw_utility": (None, "needs a simulation with ASTRA-sim"),
    }
    first = next((r for r in ranks if r.name.startswith("rank0_trace")), ranks[0])
    for kind, volume in (*first.volume_bytes.items(), ("total", sum(first.volume_bytes.values()))):
        found[f"collective_vol_{kind}_gb"] = (volume / 1e9, "")
    for kind in COLLECTIVES:
        bandwidth = next((rank.bandwidth[kind] for rank in ranks if kind in rank.bandwidth), None)
        found[f"bandwidth_utilization_{kind}_group_6"] = (bandwidth, f"no {kind} kernels with sizes")
    return metrics(CCL_DEFINITIONS, found)


def _mfu(card: Card | None, step_s: float | None) -> Found:
    if card is None:
        return None, "no workload card"
    if step_s is None or step_s <= 0:
        return None, "no step time"
    model = str(card.text("workload.hardware.xpu_spec.model") or "").lower()
    peak = PEAK_TFLOPS.get(model)
    if peak is None:
        return None, f"CCL-Bench has no peak for {model or 'the hardware'}; see flops_utilization"
    flops = flops_per_token(card, attention=12.0)
    if flops is None:
        return None, f"the card lacks {', '.join(card.lacking())}"
    return round(100 * flops * card.tokens / step_s / (peak * 1e12 * card.num_devices), 4), ""


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


def _ratio(ranks: Sequence[RankFigures], name: str, scale: float = 100) -> float | None:
    """The ratio of two sums over the ranks."""
    above = math.fsum(getattr(rank, name)[0] for rank in ranks)
    below = math.fsum(getattr(rank, name)[1] for rank in ranks)
    return scale * above / below if below > 0 else None


def _dominant(ranks: Sequence[RankFigures], kernels_us: float) -> Found:
    if kernels_us <= 0:
        return None, "no kernels"
    sums: dict[str, float] = {}
    for rank in ranks:
        if rank.by_name_us is None:
            return None, "too many different kernel names"
        for kernel, length in rank.by_name_us.items():
            sums[kernel] = sums.get(kernel, 0.0) + length
    return 100 * max(sums.values()) / kernels_us, ""


def _straggler(ranks: Sequence[RankFigures]) -> float:
    sums = [length for rank in ranks if rank.name.startswith("rank") for length in rank.nccl_us.values()]
    return (max(sums) - min(sums)) / max(sums) if len(sums) > 1 and max(sums) > 0 else 0.0
