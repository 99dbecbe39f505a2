"""Losses and weights of every schedule on every kind of network: equal to the bit, and within 1e-5 of one process.

50 steps of a small Qwen3 shape (tied embeddings, clipped gradients, AdamW) on the included text, worker processes on
plain CPUs over loopback, one torch thread each. The reference is one process that trains the same batches in plain
torch.

    python bench/bits.py [--steps 50]
    python bench/bits.py --quick        # 5 steps, without `many TCP`
    python bench/bits.py --compile      # layers traced by torch's compiler (aot_eager), one network
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import numpy as np
import torch
from common.cases import cell
from common.report import Report

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import with_optimizer
from atlas.launch.emulate import Emulation, EmulationSettings, Weights, emulate
from atlas.runtime.assignment import SHIPPED, DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.reference import train_alone
from atlas.schedules import SCHEDULES

SCHEDULE_NAMES = ("gpipe", "1f1b", "varuna", "zero-bubble", "atlas")
NETWORKS = {"one TCP": 1, "many TCP": 4, "turns": 4, "one host": 1}
QWEN = DecoderConfig(
    "qwen3", num_layers=4, width=64, num_heads=4, num_kv_heads=2, head_width=16, ffn_width=128, vocabulary=256,
    max_length=32, qk_norm=True, tied=True,
)  # fmt: skip
TRAINING = TrainingSetup(
    ModelChoice(QWEN, layers_per_stage=(1, 2, 1)),
    DataChoice(32, 2, SHIPPED),
    OptimizerSettings(LearningRate(1e-3, "cosine", 5, 50)),
    max_norm=1.0,
)


def apart(a: Weights, b: Weights) -> float:
    """Largest difference over the tensors, relative to the tensor's norm."""
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: 50")
    parser.add_argument("--quick", action="store_true", help="5 steps, without `many TCP`: about a minute")
    parser.add_argument("--compile", action="store_true", help="layers as torch's compiler traces them")
    args = parser.parse_args()
    num_steps = args.steps or (5 if args.quick else 50)
    networks = {name: streams for name, streams in NETWORKS.items() if not (args.quick and name == "many TCP")}
    training, most = TRAINING, 1e-5
    if args.compile:
        training, most, networks = replace(TRAINING, compile="aot_eager"), 2e-3, {"one host": 1}
    torch.set_num_threads(1)
    report = Report(f"Bits after {num_steps} steps (measured)", "one process, plain torch")
    setting = cell(3, 4, 2, 4, budget=50)
    free = uniform_costs(2, 3, kind_costs(forward_ns=0))
    losses, weights = train_alone(TRAINING, 2, 4, num_steps)
    first: Emulation | None = None
    for name in SCHEDULE_NAMES:
        program = with_optimizer(SCHEDULES[name].build(setting, None), norm=True)
        for network, streams in networks.items():
            played = replace(program, sharing=network == "turns")
            if network == "one host":
                played = replace(played, rank_dc=played.rank_dc[:1] * played.num_ranks)
            began = time.monotonic()
            run = emulate(played, free, training, EmulationSettings(num_steps, device="cpu", streams=streams, paths={}))
            first = first or run
            differing = sum(a != b for a, b in zip(run.losses, first.losses, strict=True))
            differing += sum(not np.array_equal(run.weights[n], first.weights[n]) for n in first.weights)
            report.figure(f"{name}, {network}: losses and tensors that differ", differing, "", at_most=0)
            print(f"  took {time.monotonic() - began:.1f} s", flush=True)
    assert first is not None
    worst = max(abs(a / b - 1) for a, b in zip(first.losses, losses, strict=True))
    report.figure("losses against one process, relative", worst, "", at_most=most)
    report.figure("weights against one process, relative", apart(first.weights, weights), "", at_most=most)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
