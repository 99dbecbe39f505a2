"""Atlas's own metrics of a data point, defined so that they mean what their names say: per step, on every rank, with
exposed communication, compute and idle time apart.

`own_figures` reduces a rank's trace; `own_metrics` combines the ranks.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atlas.evidence.card import Card
from atlas.evidence.ccl import edges_us, flops_per_token, inner
from atlas.evidence.intervals import Floats, intersection, union
from atlas.evidence.metric import Found, Metric, metrics
from atlas.evidence.rank_trace import BIT, COLLECTIVES, RankTrace
from atlas.spec.gpus import GPUS, Gpu

CAUSES = ("wan", "peer", "sync", "fill", "drain")
"""Of bubbles, as `atlas.ir.analysis` names them."""
OWN_DEFINITIONS = {
    "step_time": "Mean length of the inner steps (without first and last); without steps, the span of all kernels.",
    "compute_time": "Union of compute kernels, fills and copies inside the device, per step; without communication.",
    "exposed_communication_time": "Union of communication kernels minus its overlap with compute, per step.",
    "exposed_communication_fraction": "exposed_communication_time divided by step_time.",
    "idle_time": "Time of a step in which no kernel, fill or copy inside the device runs.",
    **{f"bubble_{cause}_time": f"Idle time per step with cause {cause}; only in traces of Atlas." for cause in CAUSES},
    "compute_imbalance_ratio": "Largest compute_time of a rank divided by the smallest; waiting is not counted.",
    **{
        f"volume_per_step_{kind}_gb": f"Gigabytes (10^9) into {kind} per step; mean over ranks." for kind in COLLECTIVES
    },
    "tokens_per_s": "Tokens per step (the card's batch size x sequence length) divided by step_time.",
    "flops_utilization": "(6(N - N_emb) + 6 L H Q S) x tokens_per_s / (devices x peak of the type); causal attention.",
}
"""By name: the definition, in short."""


@dataclass(frozen=True)
class OwnFigures:
    """One rank's part, seconds and bytes per step."""

    num_steps: int
    """Inner ones; 0: the file has no steps and counts as one."""
    num_kernels: int
    step_s: float
    compute_s: float
    exposed_s: float
    idle_s: float
    bubbles_s: Mapping[str, float] | None
    """By cause; None where another tool wrote the trace."""
    volume_bytes: Mapping[str, float]


def own_figures(trace: RankTrace) -> OwnFigures:
    marks = [mark for mark in inner(trace.steps) if mark.length_us]
    start, end = trace.start_us, trace.end_us
    if marks:
        low, high = edges_us(marks)
    else:
        low, high = np.array([start.min(initial=np.inf)]), np.array([end.max(initial=-np.inf)])
        if not len(start):
            low = high = np.zeros(1)
    comm = (trace.traits & (BIT["comm"] | BIT["comm_overlap"])) != 0
    memory_start, memory_end = trace.memory_start_us, trace.memory_start_us + trace.memory_length_us
    talking = union(start[comm], end[comm])
    computing = union(np.concatenate([start[~comm], memory_start]), np.concatenate([end[~comm], memory_end]))
    working = union(np.concatenate([start, memory_start]), np.concatenate([end, memory_end]))
    hidden = intersection(talking, computing)
    count = len(low)

    def per_step(lengths: Floats) -> float:
        return float(lengths.sum()) / 1e6 / count

    def inside(moment: float) -> bool:
        return bool(((low <= moment) & (moment < high)).any())

    volume = {
        kind: sum(c.num_bytes for c in trace.collectives if c.kind == kind and inside(c.start_us)) / count
        for kind in COLLECTIVES
    }
    return OwnFigures(
        num_steps=len(marks),
        num_kernels=len(start),
        step_s=per_step(high - low),
        compute_s=per_step(computing.within(low, high)),
        exposed_s=per_step(talking.within(low, high) - hidden.within(low, high)),
        idle_s=per_step(high - low - working.within(low, high)),
        bubbles_s=_bubbles(trace, low, high) if trace.bubbles_us else None,
        volume_bytes=volume,
    )


def _bubbles(trace: RankTrace, low: Floats, high: Floats) -> dict[str, float]:
    found = {}
    for cause in CAUSES:
        spans = [(start, start + length) for name, start, length in trace.bubbles_us if name == cause]
        start, end = np.array(spans, np.float64).reshape(-1, 2).T
        found[cause] = float(union(start, end).within(low, high).sum()) / 1e6 / len(low)
    return found


def own_metrics(ranks: Sequence[OwnFigures], card: Card | None) -> list[Metric]:
    some = [rank for rank in ranks if rank.num_kernels]
    if not some:
        return metrics(OWN_DEFINITIONS, dict.fromkeys(OWN_DEFINITIONS, (None, "no kernels: a trace of CPUs alone")))

    def mean(name: str) -> float:
        return statistics.fmean(getattr(rank, name) for rank in some)

    step_s, exposed_s = mean("step_s"), mean("exposed_s")
    computed = [rank.compute_s for rank in some]
    imbalance = max(computed) / min(computed) if len(some) > 1 and min(computed) > 0 else None
    with_cause = [rank.bubbles_s for rank in some if rank.bubbles_s is not None]
    found: dict[str, Found] = {
        "step_time": (step_s, ""),
        "compute_time": (mean("compute_s"), ""),
        "exposed_communication_time": (exposed_s, ""),
        "exposed_communication_fraction": (100 * exposed_s / step_s if step_s > 0 else None, "no step time"),
        "idle_time": (mean("idle_s"), ""),
        "compute_imbalance_ratio": (imbalance, "fewer than two ranks with compute kernels"),
        **_by_card(card, step_s, stepped=any(rank.num_steps for rank in some)),
    }
    for cause in CAUSES:
        wait_s = statistics.fmean(waits[cause] for waits in with_cause) if with_cause else None
        found[f"bubble_{cause}_time"] = (wait_s, "the trace does not say why a rank waits; see idle_time")
    for kind in COLLECTIVES:
        volume = statistics.fmean(rank.volume_bytes[kind] for rank in some)
        found[f"volume_per_step_{kind}_gb"] = (volume / 1e9, "")
    return metrics(OWN_DEFINITIONS, found)


def _by_card(card: Card | None, step_s: float, *, stepped: bool) -> dict[str, Found]:
    reason = "no workload card" if card is None else "" if stepped and step_s > 0 else "no steps"
    if (
        card is not None
        and not reason
        and not all(map(card.number, ("workload.data.batch_size", "workload.data.seq_len")))
    ):
        reason = "the card lacks batch_size or seq_len"
    if card is None or reason:
        return dict.fromkeys(("tokens_per_s", "flops_utilization"), (None, reason))
    rate, gpu, flops = card.tokens / step_s, gpu_of(card), flops_per_token(card, attention=6.0)
    used: Found = None, "unknown device type"
    if flops is None:
        used = None, "the card lacks " + ", ".join(card.lacking())
    elif gpu is not None:
        is_fp32 = (card.text("workload.model.precision") or "").lower() == "fp32"
        peak_tflops = gpu.fp32_tflops if is_fp32 else gpu.bf16_tflops
        used = 100 * flops * rate / (peak_tflops * 1e12 * card.num_devices), ""
    return {"tokens_per_s": (rate, ""), "flops_utilization": used}


# ---- device types ----------------------------------------------------------------------------------------------
def gpu_name(model: str) -> str | None:
    """Our name of the device type that a card (`nvidia_h200`) or a trace (`NVIDIA A100-SXM4-80GB`) names."""
    words = re.sub(r"[^a-z0-9]+", " ", model.lower()).split()
    joined = "".join(words)
    found = []
    for name in GPUS:
        kind, *size = name.lower().split("-")
        wanted = "".join((kind, *size)) if kind == "rtx" else kind
        if wanted in words or (kind == "rtx" and wanted in joined):
            stated = bool(size) and f"{size[0]}gb" in joined
            found.append((stated, name))
    if not found:
        return None
    return max(found, key=lambda one: (one[0], GPUS[one[1]].calibration is not None))[1]


def gpu_of(card: Card) -> Gpu | None:
    name = gpu_name(card.text("workload.hardware.xpu_spec.model") or "")
    return None if name is None else GPUS[name]
