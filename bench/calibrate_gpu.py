"""Measure this machine's GPU with the kernels that the runtime uses, and print the constants of its GPU type.

    python bench/calibrate_gpu.py [--gpu H200] [--out calibration.json]

Times whole layers of several widths, lengths and microbatch sizes with the runtime's own stage code (including fused
attention), and bare products, attention and copies. Five constants are fitted on the layers; the bare kernels show
whether they are plausible. The file has all measurements, so that another form of the model can be fitted without the
GPU. `peer_efficiency` needs several GPUs to measure: it is set by hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.fit import Floats, least_squares, soften
from common.report import Report, not_measured
from torch import Tensor
from torch.nn import functional

from atlas.cost.compute import layer_pass, rates
from atlas.runtime.profile import profile
from atlas.spec import parse_job
from atlas.spec.gpus import GPUS, Calibration
from atlas.spec.job import Model

PEER_EFFICIENCY = 0.75
"""Share of NVLink that NCCL's ring all-reduce reaches. Not measurable on one GPU; 0.67 to 0.78 fitted on A100 nodes."""
SHAPES = [
    ("gpt", 64, 1, 64, 1),
    ("gpt", 1024, 16, 1024, 1),
    ("gpt", 1024, 16, 2048, 8),
    ("gpt", 2048, 16, 2048, 1),
    ("gpt", 2048, 16, 2048, 4),
    ("gpt", 2048, 16, 8192, 1),
    ("gpt", 2560, 20, 2048, 8),
    ("gpt", 4096, 32, 1024, 1),
    ("gpt", 4096, 32, 2048, 2),
    ("gpt", 4096, 32, 4096, 1),
    ("llama", 4096, 32, 4096, 1),
    ("llama", 4096, 32, 8192, 1),
    ("gpt", 6144, 48, 2048, 2),
    ("gpt", 8192, 64, 2048, 1),
    ("gpt", 8192, 64, 6144, 1),
]
"""Family, hidden, heads, tokens, microbatch. The first one measures the launch time of a layer's kernels."""
GRADIENT_BYTES = 4
"""The runtime sums gradients in fp32."""
LLAMA = {"kv_heads": 8, "ffn": 14_336}
PRODUCTS = [(512, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 16384), (8192, 8192, 8192), (2048, 1024, 4096)]
ATTENTION = [(1, 16, 2048, 64), (1, 32, 4096, 128), (1, 64, 6144, 128), (8, 16, 2048, 128)]
"""Sequences, heads, tokens, width of a head."""
BARS = {"mean error": 8.0, "bias (absolute)": 3.0, "worst error": 25.0}
"""Percent."""
COPIES = [2**20, 2**24, 2**27, 2**29]
"""Elements of bf16."""


@dataclass(frozen=True)
class Row:
    """One layer, seconds of one microbatch."""

    family: str
    hidden: int
    heads: int
    seq_len: int
    microbatch: int
    forward_s: float
    recompute_s: float
    backward_s: float
    weight_s: float

    @property
    def model(self) -> Model:
        return Model.model_validate(_model(self.family, self.hidden, self.heads, self.seq_len))


def _model(family: str, hidden: int, heads: int, seq_len: int) -> dict[str, Any]:
    shape = {"family": family, "layers": 9, "hidden": hidden, "heads": heads, "seq_len": seq_len, "vocab": 1024}
    return {**shape, **(LLAMA if family == "llama" else {})}


def measure_layers(device: str, repeats: int, until: float, shapes: list[tuple[str, int, int, int, int]]) -> list[Row]:
    """As many shapes as the time allows; prints each one."""
    rows = []
    for family, hidden, heads, seq_len, microbatch in shapes:
        if time.monotonic() > until:
            print(f"time limit reached: {family} {hidden} x {seq_len} is left out", flush=True)
            continue
        cluster = {"datacenters": [{"name": "here", "nodes": 3, "gpus_per_node": 1}]}
        job = parse_job(
            {
                "model": _model(family, hidden, heads, seq_len),
                "cluster": cluster,
                "pp": 3,
                "num_microbatches": 1,
                "microbatch": microbatch,
            }
        )
        times = profile(job, device, repeats)["layer"]
        rows.append(Row(family, hidden, heads, seq_len, microbatch, **times))
        print(json.dumps(asdict(rows[-1])), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def seconds(device: str, work: Callable[[], object], repeats: int = 20) -> float:
    """Median of single runs after a warm-up."""
    found = []
    for k in range(repeats + 5):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if k >= 5:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def measure_kernels(device: str) -> list[dict[str, Any]]:
    """Bare products, attention and copies."""
    rows: list[dict[str, Any]] = []

    def random(*shape: int, grad: bool = False) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device, requires_grad=grad)

    many = slice(None) if device == "cuda" else slice(1)  # on a CPU the script only runs through
    for m, k, n in PRODUCTS[many]:
        a, b = random(m, k), random(k, n)
        rows.append({"kind": "product", "shape": [m, k, n], "s": seconds(device, lambda a=a, b=b: a @ b)})  # type: ignore[misc]
    for batch, heads, length, width in ATTENTION[many]:
        q, k_, v = (random(batch, heads, length, width, grad=True) for _ in range(3))

        def attend(q: Tensor = q, k: Tensor = k_, v: Tensor = v) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = attend()
        gradient = torch.randn_like(out)
        backward_s = seconds(device, lambda o=out, g=gradient: o.backward(g, retain_graph=True))  # type: ignore[misc]
        shape = [batch, heads, length, width]
        rows.append({"kind": "attention", "shape": shape, "s": seconds(device, attend), "backward_s": backward_s})
    for count in COPIES[many]:
        x, y = random(count), random(count)
        rows.append({"kind": "add", "shape": [count], "s": seconds(device, lambda x=x, y=y: x.add_(y))})  # type: ignore[misc]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def fit(rows: list[Row], gpu: str) -> tuple[Calibration, Floats]:
    """The constants with the least error, and the remaining errors of each forward and backward."""

    def calibration(point: Floats) -> Calibration:
        matrix, memory, attention = (1 / (1 + np.exp(-point[:3]))).tolist()
        return Calibration(
            matrix_efficiency=matrix,
            memory_efficiency=memory,
            attention_efficiency=attention,
            peer_efficiency=PEER_EFFICIENCY,
            layer_floor_us=float(np.exp(point[3])),
            backward_floor_us=float(np.exp(point[4])),
            fused_attention=True,
        )

    def errors(point: Floats) -> Floats:
        at = rates(GPUS[gpu], calibration(point), fused_attention=True)
        found = []
        for row in rows:
            one = layer_pass(row.model, row.microbatch, 1, 2, at, GRADIENT_BYTES)
            found += [one.forward_s / row.forward_s, one.backward_s / row.backward_s]
        return np.log(np.array(found))

    start = np.array([1.0, 0.5, 0.5, np.log(500.0), np.log(1700.0)])
    point = least_squares(lambda at: soften(errors(at)), start)
    return calibration(point), np.exp(errors(point)) - 1


def type_here() -> str | None:
    """The built-in type of this machine's GPU: by its name, and by memory where several types share it."""
    device = torch.cuda.get_device_properties(0)
    words = device.name.replace("-", " ").split()
    named = [name for name in GPUS if name.split("-")[0] in words]
    return min(named, key=lambda name: abs(GPUS[name].memory_gib - device.total_memory / 2**30), default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gpu", choices=sorted(GPUS), help="GPU type whose peaks are used (default: by the GPU's name)"
    )
    parser.add_argument("--out", type=Path, help="write constants and measurements to this JSON file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=270.0, help="start no new shape after this many seconds")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="measure the first N shapes only")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        return not_measured("calibrate_gpu", "no CUDA device")
    gpu = args.gpu or (type_here() if args.device == "cuda" else None)
    if gpu is None:
        return not_measured("calibrate_gpu", "no built-in type has this GPU's name: give --gpu")
    until = time.monotonic() + args.seconds
    kernels = measure_kernels(args.device)
    rows = measure_layers(args.device, args.repeats, until, SHAPES[: args.shapes])
    calibration, errors = fit(rows, gpu)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result = {
        "gpu": gpu,
        "device": name,
        "torch": torch.__version__,
        "mean_error": float(np.abs(errors).mean()),
        "calibration": calibration.model_dump(),
        "layers": [asdict(row) for row in rows],
        "kernels": kernels,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key not in ("layers", "kernels")}))
    report = Report(f"Constants of {gpu}, fitted on {len(rows)} layers", "the same layers as measured")
    figures = {
        "mean error": np.abs(errors).mean(),
        "bias (absolute)": abs(errors.mean()),
        "worst error": np.abs(errors).max(),
    }
    for line, value in figures.items():
        bar = BARS[line] if args.device == "cuda" else None
        report.figure(f"fitted constants, {line}", 100 * float(value), "%", at_most=bar)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
