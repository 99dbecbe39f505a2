"""Small clusters to plan on, drawn from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.spec import Job, parse_job


def job_of(**changes: Any) -> Job:
    """Two datacenters of four GPUs, as in examples/tiny.yaml, with prices."""
    data: dict[str, Any] = {
        "name": "small",
        "model": {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32_000, "seq_len": 2048},
        "cluster": {
            "wan": {"latency_ms": 20.0, "pair_gbps": 5.0, "egress_usd_per_gb": 0.02},
            "datacenters": [
                {"name": name, "nodes": 4, "gpus_per_node": 1, "gpu": "A100-40", "usd_per_gpu_hour": usd}
                for name, usd in (("east", 2.0), ("west", 3.0))
            ],
        },
        "num_microbatches": 8,
        "pp": 4,
        "pipelines_per_cell": 2,
    }
    return parse_job({**data, **changes})


def random_job(seed: int) -> Job:
    """One to three datacenters of up to eight GPUs of up to three types."""
    rng = np.random.default_rng(seed)
    dcs = [
        {
            "name": f"d{i}",
            "nodes": int(rng.integers(1, 4)),
            "gpus_per_node": int(rng.choice([1, 1, 2])),
            "gpu": str(rng.choice(["A100-40", "A100-40", "H100", "L4"])),
            "net_gbps": float(rng.choice([50, 100, 400])),
            "usd_per_gpu_hour": float(rng.choice([1.0, 2.0, 3.0])),
        }
        for i in range(int(rng.integers(1, 4)))
    ]
    wan = {
        "latency_ms": float(rng.choice([1, 10, 40])),
        "pair_gbps": float(rng.choice([1, 5, 20, 100])),
        "egress_usd_per_gb": 0.02,
        "trunk_gbps": float(rng.choice([2, 10, 50])) if rng.random() < 0.4 else None,
    }
    model = {
        "layers": int(rng.integers(4, 11)),
        "hidden": int(rng.choice([1024, 2048, 4096])),
        "heads": 16,
        "vocab": 32_000,
        "seq_len": int(rng.choice([1024, 2048])),
    }
    return parse_job(
        {
            "name": f"random-{seed}",
            "model": model,
            "cluster": {"datacenters": dcs, "wan": {k: v for k, v in wan.items() if v is not None}},
            "pp": 2,
            "num_microbatches": int(rng.choice([4, 6, 8])),
            "pipelines_per_cell": int(rng.choice([1, 2])),
        }
    )


def two_regions(seed: int) -> Job:
    """East and west with up to 24 GPUs each, over a WAN that is slow in some and fast in others."""
    rng = np.random.default_rng(seed)
    dcs = [
        {
            "name": name,
            "nodes": int(rng.integers(1, 7)),
            "gpus_per_node": int(rng.choice([1, 2, 4])),
            "gpu": str(rng.choice(["A100-80", "A100-80", "H100", "L4"])),
            "net_gbps": float(rng.choice([50, 100, 400])),
        }
        for name in ("east", "west")
    ]
    layers, hidden = int(rng.integers(6, 25)), int(rng.choice([1024, 2048, 4096]))
    wan = {"latency_ms": float(rng.choice([1, 10, 40])), "pair_gbps": float(rng.choice([0.5, 2, 5, 20]))}
    return parse_job(
        {
            "name": f"two-regions-{seed}",
            "model": {"layers": layers, "hidden": hidden, "heads": 16, "vocab": 32_000, "seq_len": 2048},
            "cluster": {"datacenters": dcs, "wan": wan},
            "pp": 4,
            "num_microbatches": int(rng.choice([8, 16, 32])),
            "pipelines_per_cell": int(rng.choice([1, 2])),
        }
    )
