"""Small synthetic traces, in the form that torch.profiler writes."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def kernel(name: str, start_us: float, length_us: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": start_us,
        "dur": length_us,
        "args": args,
    }


def memory(category: str, name: str, start_us: float, length_us: float) -> Event:
    """A fill or a copy of the device: `gpu_memset` or `gpu_memcpy`."""
    return {**kernel(name, start_us, length_us), "cat": category}


def step(number: int, start_us: float, length_us: float) -> Event:
    return {
        **{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": 9, "tid": 9},
        **{"ts": start_us, "dur": length_us},
    }


def allreduce(start_us: float, length_us: float, elements: int = 1 << 20, size: int = 4) -> Event:
    args = {"Collective name": "allreduce", "In msg nelems": elements, "dtype": "Float", "Group size": size}
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", start_us, length_us, **args)


def random_events(seed: int, num_kernels: int = 60, num_steps: int = 5) -> list[Event]:
    """Kernels of many kinds, also across the borders of steps, in a random order."""
    draw = random.Random(seed)
    names = ["gemm", "elementwise_add", "direct_copy_kernel_cuda", "Memcpy DtoD", "moe_topk", "reduce_kernel"]
    comm = ["ncclDevKernel_SendRecv(x)", "ncclKernel_Broadcast", "p2p_copy", "all_to_all_v", "cross_device_reduce"]
    events = [step(k, 1000.0 * k, 950.0) for k in range(num_steps)]
    for _ in range(num_kernels):
        start, length = draw.uniform(-100, 1000 * num_steps), draw.choice([0, draw.uniform(1, 300)])
        kind = draw.random()
        if kind < 0.3:
            events.append(allreduce(start, length, draw.randrange(1, 10**7)))
        else:
            name = draw.choice(comm if kind < 0.5 else names)
            events.append(kernel(name, start, length, **{"blocks per SM": draw.uniform(0, 3), "bytes": 4096}))
    events.append(
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 5, "dur": 2.5, "args": {"bytes": 10**6}}
    )
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 4000})
    events.append({"ph": "i", "name": "Iteration Start", "ts": 0})
    draw.shuffle(events)
    return events


def write(path: Path, events: list[Event], **info: Any) -> Path:
    """A trace file; gzip where the name ends in .gz."""
    data = json.dumps({"schemaVersion": 1, **info, "traceEvents": events, "traceName": "x"}, indent=1).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


CARD: dict[str, Any] = {
    "version": 1,
    "description": "a small model",
    "workload": {
        "model": {
            "phase": "training",
            "precision": "bf16",
            "model_family": "llama-1b",
            "model_arch": {
                **{"num_params": 1_200_000_000, "num_params_embedding": 65_536_000, "num_layers": 16},
                **{"num_heads": 16, "head_dim": 128},
            },
        },
        "data": {"batch_size": 8, "seq_len": 2048},
        "hardware": {"xpu_spec": {"model": "nvidia_a100", "total_count": 2, "count_per_node": 2}},
    },
    "Model-executor": {
        "model_plan_parallelization": {"dp_replicate": 2, "dp_shard": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "pp_mb": 1}
    },
    "metric_source": {"traces": ["json"]},
}
