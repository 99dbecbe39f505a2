"""A metric's value, and the definitions of all of them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One figure of a data point."""

    name: str
    value: float | None
    unit: str
    reason: str = ""
    """Why there is no value; empty where there is one."""

    def __post_init__(self) -> None:
        if self.value is not None and self.reason:
            object.__setattr__(self, "reason", "")


def missing(name: str, unit: str, reason: str) -> Metric:
    return Metric(name, None, unit, reason)


CCL_DEFINITIONS = {
    "avg_step_time": "Mean length of ProfilerStep#N without the first and the last, then mean over ranks.",
    "ttft": "Time to first token, from latency files of a serving benchmark.",
    "tpot": "Time per output token, from latency files of a serving benchmark.",
    "mfu": "(6(N - N_emb) + 12 L H Q S) x tokens per step / step time / (devices x peak); full attention.",
    "mean_sm_coverage": "min(blocks per SM, 1), weighted by kernel time.",
    "dominant_kernel_concentration": "Share of the kernel name with the largest summed time.",
    "moe_fraction": "Share of kernel time in names of mixture-of-experts kernels.",
    "average_memory_bandwidth": "Bytes of copies over their summed time.",
    "memory_transfer_overhead": "Copies outside compute kernels over the span of all kernels.",
    "communication_fraction": "Share of summed kernel time in communication, over kernels that touch an inner step.",
    "total_communication_time": "Union of communication kernels inside the inner steps, per step.",
    "bandwidth_utilization_allgather_group_6": "Median of GiB x (n - 1)/n / time, first rank that has any.",
    "bandwidth_utilization_allreduce_group_6": "Median of GiB x 2(n - 1)/n / time, first rank that has any.",
    "bandwidth_utilization_alltoall_group_6": "Median of GiB x (n - 1)/n / time, SendRecv kernels only.",
    "bandwidth_utilization_reducescatter_group_6": "Median of GiB x (n - 1)/n / time, first rank that has any.",
    "bandwidth_utilization_peertopeer_group_6": "From Nsight Systems files.",
    "compute_comm_overlap": "Share of the union of communication that lies under other kernels, inner steps.",
    "load_imbalance_ratio": "Largest over smallest union of kernels of a rank, communication included.",
    "straggler": "(max - min)/max of summed time in kernels named ncclDevKernel_*; 0 without them.",
    "scale_up_bw_utility": "What twice the scale-up bandwidth saves, simulated with ASTRA-sim.",
    "collective_vol_allreduce_gb": "Bytes into all-reduce, rank 0, whole file.",
    "collective_vol_allgather_gb": "Bytes into all-gather, rank 0, whole file.",
    "collective_vol_reducescatter_gb": "Bytes into reduce-scatter, rank 0, whole file.",
    "collective_vol_alltoall_gb": "Bytes into all-to-all, rank 0, whole file.",
    "collective_vol_total_gb": "Bytes into the four collectives, rank 0, whole file.",
}
"""By CCL-Bench's name: its definition, in short."""
