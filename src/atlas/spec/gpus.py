"""GPU types: data-sheet peaks (dense, no sparsity). How much of a peak a job reaches is the job's `efficiency`, or
where it says `calibrated` what the type was measured to reach.

Knows no prices (they belong to a datacenter) and no measured times (they belong to a profile).
"""

from __future__ import annotations

from atlas.spec.fields import Flag, Frozen, NonNegative, Positive, Share


class Calibration(Frozen):
    """What a GPU type was measured to reach, for jobs that say `calibrated: true`. See docs/accuracy-measured.md."""

    matrix_efficiency: Share
    """Share of the peak that large matrix products reach, their operands' memory traffic not counted."""
    memory_efficiency: Share
    """Share of the memory bandwidth that operands and the work between products reach."""
    peer_efficiency: Share
    """Share of `peer_gbps` that an all-reduce in a node reaches."""
    layer_floor_us: NonNegative
    """No layer's forward is faster than its kernels are launched, microseconds; a backward takes twice that."""
    attention_efficiency: Share | None = None
    """Share of the peak that the products inside fused attention reach. Left out: as `matrix_efficiency`."""
    fused_attention: Flag = True
    """Whether attention is one kernel. If not, its L x L scores go through memory."""


class Gpu(Frozen):
    """One type of accelerator."""

    bf16_tflops: Positive
    """Dense peak in bf16 or fp16, TFLOP/s."""
    fp32_tflops: Positive
    """Peak in fp32, TFLOP/s."""
    memory_gib: Positive
    """Memory of one GPU, GiB."""
    memory_gbytes_per_s: Positive
    """Memory bandwidth, 10^9 bytes per second."""
    peer_gbps: Positive = 256.0
    """What one GPU sends to the others of its node (NVLink, PCIe), Gbit/s in one direction; tensor parallelism
    uses it."""
    calibration: Calibration | None = None
    """Measured constants; a job that says `calibrated: true` is priced by them."""


A100_MEASURED = Calibration(
    matrix_efficiency=0.907, memory_efficiency=0.543, peer_efficiency=0.87, layer_floor_us=910, fused_attention=False
)
"""Fitted by `bench/accuracy_a100.py` on Megatron runs on 2 to 512 A100, attention not fused, every layer recomputed."""


def _gpu(
    bf16: float,
    fp32: float,
    gib: float,
    gbytes_per_s: float,
    peer_gbps: float,
    calibration: Calibration | None = None,
) -> Gpu:
    return Gpu(
        bf16_tflops=bf16,
        fp32_tflops=fp32,
        memory_gib=gib,
        memory_gbytes_per_s=gbytes_per_s,
        peer_gbps=peer_gbps,
        calibration=calibration,
    )


GPUS: dict[str, Gpu] = {
    "A100-40": _gpu(312, 19.5, 40, 1555, 2400),
    "A100-80": _gpu(312, 19.5, 80, 2039, 2400, A100_MEASURED),
    "H100": _gpu(989, 67, 80, 3350, 3600),
    "H200": _gpu(989, 67, 139, 4800, 3600),
    "GH200-96": _gpu(989, 67, 96, 4000, 3600),
    "B200": _gpu(2250, 80, 180, 8000, 7200),
    "L4": _gpu(121, 30.3, 22.5, 300, 128),
    "L40S": _gpu(362, 91.6, 45, 864, 256),
    "A10": _gpu(125, 31.2, 22.5, 600, 256),
    "V100-16": _gpu(125, 15.7, 16, 900, 1200),
    "RTX-3090": _gpu(71, 35.6, 24, 936, 256),
}
"""The types a file may name without defining them."""
