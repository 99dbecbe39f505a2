"""GPU types: data-sheet peaks (dense, no sparsity). The reached share of a peak is measured for the type, or the job's
`efficiency`.

Prices belong to a datacenter, measured times to a profile.
"""

from __future__ import annotations

from atlas.spec.fields import Flag, Frozen, NonNegative, Positive, Share, Text


class Calibration(Frozen):
    """What a GPU type was measured to reach, which prices jobs by default. See docs/accuracy-measured.md."""

    matrix_efficiency: Share
    """Share of the peak that large matrix products reach, their operands' memory traffic not counted."""
    memory_efficiency: Share
    """Share of the memory bandwidth that operands and the work between products reach."""
    peer_efficiency: Share
    """Share of `peer_gbps` that an all-reduce in a node reaches."""
    layer_floor_us: NonNegative
    """No layer's forward is faster than its kernels are launched, microseconds."""
    backward_floor_us: NonNegative | None = None
    """No layer's backward is faster than this, microseconds. Left out: twice `layer_floor_us`."""
    attention_efficiency: Share | None = None
    """Share of the peak that the products inside fused attention reach. Left out: as `matrix_efficiency`."""
    fused_attention: Flag | None = None
    """Whether attention is one kernel. If not, its L x L scores go through memory. Left out: as the runtime has it."""


OTHER_NET_GBPS = 12.5
"""Network of a node by GPU where nothing is known of its type: 100 Gbit/s for 8 GPUs (AWS p3dn, g5.48xlarge, Google's
g2-standard-96)."""


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
    net_gbps_per_gpu: Positive = OTHER_NET_GBPS
    """Network of a node inside its datacenter, Gbit/s by GPU, where the datacenter has no `net_gbps`."""
    server_watts: Positive | None = None
    """Of a server, divided by its GPUs: CPUs, NICs and fans counted, the fabric not. For `power_kw`."""
    server_watts_source: Text = ""
    """Where `server_watts` comes from."""
    calibration: Calibration | None = None
    """Measured constants; jobs are priced by them by default."""


A100_MEASURED = Calibration(matrix_efficiency=0.906, memory_efficiency=0.543, peer_efficiency=0.784, layer_floor_us=901)
"""Fitted by `bench/accuracy_a100.py` on Megatron runs on 2 to 512 A100, attention not fused, every layer recomputed."""

H200_MEASURED = Calibration(
    matrix_efficiency=0.859,
    memory_efficiency=0.493,
    attention_efficiency=0.407,
    peer_efficiency=0.75,
    layer_floor_us=568,
    backward_floor_us=1796,
)
"""Measured by `bench/calibrate_gpu.py` on an H200 with the runtime's own kernels (torch 2.11): 15 layers of 64 to 8,192
width, 6.6 % off on average. `peer_efficiency` is that of A100 nodes: one GPU has no peers."""


def _gpu(
    bf16: float,
    fp32: float,
    gib: float,
    gbytes_per_s: float,
    peer_gbps: float,
    net_gbps_per_gpu: float = OTHER_NET_GBPS,
    calibration: Calibration | None = None,
    server: tuple[float, str] | None = None,
) -> Gpu:
    return Gpu(
        bf16_tflops=bf16,
        fp32_tflops=fp32,
        memory_gib=gib,
        memory_gbytes_per_s=gbytes_per_s,
        peer_gbps=peer_gbps,
        net_gbps_per_gpu=net_gbps_per_gpu,
        calibration=calibration,
        server_watts=server and server[0],
        server_watts_source=server[1] if server else "",
    )


DGX_1 = (437.5, "NVIDIA DGX-1 (V100) data sheet: 3.5 kW for 8 GPUs")
DGX_A100 = (812.5, "NVIDIA DGX A100 data sheet: 6.5 kW at most for 8 GPUs")
DGX_H100 = (1275.0, "NVIDIA DGX H100 and H200 data sheets: 10.2 kW at most for 8 GPUs")
DGX_B200 = (1787.5, "NVIDIA DGX B200 data sheet: 14.3 kW at most for 8 GPUs")
NVL72 = (1667.0, "NVIDIA GB200 NVL72: about 120 kW a rack of 72 GPUs, NVLink switches counted")


GPUS: dict[str, Gpu] = {
    "A100-40": _gpu(312, 19.5, 40, 1555, 2400, 50, server=DGX_A100),  # AWS p4d.24xlarge: 400 Gbit/s, 8 GPUs
    # The A100 cluster of vTrain's validation: 800 Gbit/s, 8 GPUs (DGX A100: 1,600; p4de: 400)
    "A100-80": _gpu(312, 19.5, 80, 2039, 2400, 100, A100_MEASURED, DGX_A100),
    "H100": _gpu(
        989, 67, 80, 3350, 3600, 400, server=DGX_H100
    ),  # DGX H100, AWS p5, Azure ND H100 v5: 3,200 Gbit/s, 8 GPUs
    "H200": _gpu(989, 67, 139, 4800, 3600, 400, H200_MEASURED, DGX_H100),  # DGX H200, AWS p5e: 3,200 Gbit/s, 8 GPUs
    "GH200-96": _gpu(989, 67, 96, 4000, 3600, 200),  # CSCS Alps: one Slingshot port of 200 Gbit/s a GPU
    "B200": _gpu(2250, 80, 180, 8000, 7200, 400, server=DGX_B200),  # DGX B200: 3,200 Gbit/s, 8 GPUs
    "GB200": _gpu(2500, 80, 173, 8000, 7200, 800, server=NVL72),  # GB200 NVL72 with one 800 Gbit/s port a GPU
    "L4": _gpu(121, 30.3, 22.5, 300, 128),
    "L40S": _gpu(362, 91.6, 45, 864, 256, 50),  # AWS g6e.48xlarge: 400 Gbit/s, 8 GPUs
    "A10": _gpu(125, 31.2, 22.5, 600, 256),
    "V100-16": _gpu(125, 15.7, 16, 900, 1200, server=DGX_1),
    "RTX-3090": _gpu(71, 35.6, 24, 936, 256),
}
"""The types a file may name without defining them. After each the common node that its network is taken from."""

ALIASES = {
    "A100-40GB": "A100-40",
    "A100-80GB": "A100-80",
    "H100-80GB": "H100",
    "H200-141GB": "H200",
    "V100": "V100-16",
    "V100-16GB": "V100-16",
    "A10G": "A10",
}
"""Other names that files and flags may use, as price lists have them."""
