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
from atlas.evidence.metric import Metric, missing
from atlas.evidence.rank_trace import BIT, COLLECTIVES, RankTrace
from atlas.spec.gpus import GPUS, Gpu

CAUSES = ("wan", "peer", "sync", "fill", "drain")
"""Of bubbles, as `atlas.ir.analysis` names them."""
OWN_DEFINITIONS = {
    "step_time": "Mean length of the inner steps, over all ranks; without steps, the span of all kernels.",
    "compute_time": "Union of kernels but communication, and of fills and copies inside the device, per step.",
    "exposed_communication_time": "Union of communication kernels less what lies under compute, per step.",
    "exposed_communication_fraction": "exposed_communication_time over step_time.",
    "idle_time": "Of a step: no kernel, fill or copy inside the device runs.",
    **{f"bubble_{cause}_time": f"Idle, per step, cause {cause}; of traces that Atlas wrote." for cause in CAUSES},
    "compute_imbalance_ratio": "Largest over smallest compute_time of a rank; waiting does not hide it.",
    **{f"volume_per_step_{kind}_gb": f"10^9 bytes into {kind} per step; mean over ranks." for kind in COLLECTIVES},
    "tokens_per_s": "Tokens per step (the card's batch size x sequence length) over step_time.",
    "flops_utilization": "(6(N - N_emb) + 6 L H Q S) x tokens_per_s / (devices x peak of the type); causal attention.",
}
"""By name: the definition, in short."""


@dataclass(frozen=True)
class OwnFigures:
    """One rank's part, seconds and bytes per step."""

    name: str
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
        name=trace.path.name,
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
    """In the order of `OWN_DEFINITIONS`."""
    some = [rank for rank in ranks if rank.num_kernels]
    if not some:
        return [missing(name, unit_of(name), "no kernels: a trace of CPUs alone") for name in OWN_DEFINITIONS]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(rank, name) for rank in some)

    step_s = mean("step_s")
    exposed = mean("exposed_s")
    found = {
        "step_time": step_s,
        "compute_time": mean("compute_s"),
        "exposed_communication_time": exposed,
        "exposed_communication_fraction": 100 * exposed / step_s if step_s > 0 else None,
        "idle_time": mean("idle_s"),
    }
    computed = [rank.compute_s for rank in some]
    metrics = [Metric(name, value, unit_of(name), reason="no step time") for name, value in found.items()]
    with_cause = [rank.bubbles_s for rank in some if rank.bubbles_s is not None]
    for cause in CAUSES:
        name = f"bubble_{cause}_time"
        if not with_cause:
            metrics.append(missing(name, "s", "the trace does not say why a rank waits; see idle_time"))
        else:
            metrics.append(Metric(name, statistics.fmean(found[cause] for found in with_cause), "s"))
    if len(some) > 1 and min(computed) > 0:
        metrics.append(Metric("compute_imbalance_ratio", max(computed) / min(computed), "ratio"))
    else:
        metrics.append(missing("compute_imbalance_ratio", "ratio", "fewer than two ranks with compute kernels"))
    for kind in COLLECTIVES:
        volume = statistics.fmean(rank.volume_bytes[kind] for rank in some)
        metrics.append(Metric(f"volume_per_step_{kind}_gb", volume / 1e9, "GB"))
    return [*metrics, *_by_card(card, step_s, stepped=any(rank.num_steps for rank in some))]


def _by_card(card: Card | None, step_s: float, *, stepped: bool) -> list[Metric]:
    names = ("tokens_per_s", "flops_utilization")
    reason = "no workload card" if card is None else "" if stepped and step_s > 0 else "no steps"
    if card is None or reason:
        return [missing(name, unit_of(name), reason) for name in names]
    if not card.number("workload.data.batch_size") or not card.number("workload.data.seq_len"):
        return [missing(name, unit_of(name), "the card lacks batch_size or seq_len") for name in names]
    rate = card.tokens / step_s
    gpu, flops = gpu_of(card), flops_per_token(card, attention=6.0)
    if gpu is None or flops is None:
        what = "the card lacks " + ", ".join(card.lacking()) if flops is None else "unknown device type"
        return [Metric(names[0], rate, "tok/s"), missing(names[1], "%", what)]
    peak = gpu.fp32_tflops if (card.text("workload.model.precision") or "").lower() == "fp32" else gpu.bf16_tflops
    return [
        Metric(names[0], rate, "tok/s"),
        Metric(names[1], 100 * flops * rate / (peak * 1e12 * card.num_devices), "%"),
    ]


def unit_of(name: str) -> str:
    """The unit of one of our metrics."""
    for ending, unit in (("_time", "s"), ("_fraction", "%"), ("_ratio", "ratio"), ("_gb", "GB"), ("_per_s", "tok/s")):
        if name.endswith(ending):
            return unit
    return "%"


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
            stated = any(size and f"{size[0]}gb" in joined for _ in size)
            found.append((stated, name))
    if not found:
        return None
    return max(found, key=lambda one: (one[0], GPUS[one[1]].calibration is not None))[1]


def gpu_of(card: Card) -> Gpu | None:
    name = gpu_name(card.text("workload.hardware.xpu_spec.model") or "")
    return None if name is None else GPUS[name]
