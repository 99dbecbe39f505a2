"""A metric's value and unit, and the definitions of CCL-Bench's metrics. Plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNITS = {
    r".*_time|ttft|tpot": "s",
    r".*_ratio|straggler": "ratio",
    r".*_gb": "GB",
    r".*_per_s": "tok/s",
    r"bandwidth_utilization_(?!peertopeer).*|average_memory_bandwidth": "GB/s",
    r".*": "%",
}
"""By name of a metric; the first that matches."""


@dataclass(frozen=True)
class Metric:
    """One figure of a data point."""

    name: str
    value: float | None
    unit: str
    reason: str
    """Why there is no value; empty where there is one."""
    definition: str


Found = tuple[float | None, str]
"""A value, and the reason if there is none."""


def metrics(definitions: Mapping[str, str], found: Mapping[str, Found]) -> list[Metric]:
    """In the order of the definitions."""
    rows = []
    for name, words in definitions.items():
        value, reason = found[name]
        unit = next(unit for names, unit in UNITS.items() if re.fullmatch(names, name))
        rows.append(Metric(name, value, unit, reason if value is None else "", words))
    return rows


CCL_DEFINITIONS = {
    "avg_step_time": "Mean length of the inner steps (ProfilerStep#N without first and last); mean of the ranks.",
    "ttft": "Time to first token, from latency files of a serving benchmark.",
    "tpot": "Time per output token, from latency files of a serving benchmark.",
    "mfu": "(6(N - N_emb) + 12 L H Q S) x tokens per step / step time / (devices x peak); full attention.",
    "mean_sm_coverage": "Mean of min(blocks per SM, 1), weighted by kernel time.",
    "dominant_kernel_concentration": "Largest share of the summed kernel time that one kernel name has.",
    "moe_fraction": "Share of kernel time in kernels named after mixtures of experts.",
    "average_memory_bandwidth": "Bytes of copies divided by their summed time.",
    "memory_transfer_overhead": "Time of copies outside compute kernels, divided by the span of all kernels.",
    "communication_fraction": "Share of communication in the summed time of kernels that touch an inner step.",
    "total_communication_time": "Union of communication kernels inside the inner steps, per step.",
    "bandwidth_utilization_allgather_group_6": "Median of GiB x (n - 1)/n / time; first rank with such kernels.",
    "bandwidth_utilization_allreduce_group_6": "Median of GiB x 2(n - 1)/n / time; first rank with such kernels.",
    "bandwidth_utilization_alltoall_group_6": "Median of GiB x (n - 1)/n / time, of SendRecv kernels.",
    "bandwidth_utilization_reducescatter_group_6": "Median of GiB x (n - 1)/n / time; first rank with such kernels.",
    "bandwidth_utilization_peertopeer_group_6": "From Nsight Systems files.",
    "compute_comm_overlap": "Share of the union of communication that overlaps other kernels, in the inner steps.",
    "load_imbalance_ratio": "Largest time that a rank runs kernels (communication included) divided by the smallest.",
    "straggler": "(max - min)/max of summed time in kernels named ncclDevKernel_*; 0 without them.",
    "scale_up_bw_utility": "Time saved by twice the scale-up bandwidth, simulated with ASTRA-sim.",
    "collective_vol_allreduce_gb": "Bytes into all-reduce, rank 0, whole file.",
    "collective_vol_allgather_gb": "Bytes into all-gather, rank 0, whole file.",
    "collective_vol_reducescatter_gb": "Bytes into reduce-scatter, rank 0, whole file.",
    "collective_vol_alltoall_gb": "Bytes into all-to-all, rank 0, whole file.",
    "collective_vol_total_gb": "Bytes into the four collectives, rank 0, whole file.",
}
"""By CCL-Bench's name: its definition, in short."""
