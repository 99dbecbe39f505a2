"""Training on one GPU shared by four stage processes: a Llama shape of 1.1 billion parameters in bf16.

AdamW, clipped gradients, the transport between the processes on loopback. `one_gpu.py cuda:0`; needs 40 GB of GPU
memory. Measures the losses against one process that trains the same batches on the same GPU; the share of the
transfers' time in which some stage computed; and, from CUDA events, the share of each process's copies during which it
computed. Then examples/tiny.yaml with its own model in bf16: eight workers in two emulated datacenters that take turns
on the WAN.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from common.report import Report, not_measured

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import USEFUL, Layout
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import EmulationSettings, emulate
from atlas.launch.prepared_job import prepare_job
from atlas.launch.rehearse import rehearse
from atlas.launch.train_options import OWN, TrainOptions
from atlas.runtime.assignment import SHIPPED, DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.device import CopyTimes
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.reference import train_alone
from atlas.schedules.classic import one_f_one_b
from atlas.spec import load_job

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny.yaml"
NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 4, 8, 5
LLAMA = DecoderConfig(
    "llama", num_layers=16, width=2048, num_heads=32, num_kv_heads=8, head_width=64, ffn_width=8192, vocabulary=32_000,
    max_length=1024, rope_theta=500_000.0,
)  # fmt: skip
TRAINING = TrainingSetup(
    ModelChoice(LLAMA, "bf16", layers_per_stage=(4, 4, 4, 4)),
    DataChoice(1024, 2, SHIPPED),
    OptimizerSettings(LearningRate(3e-5, "cosine", 2, 50)),
    max_norm=1.0,
    compile="inductor",
)


def overlapped(timeline: Timeline) -> float:
    """Share of the transfers' time in which some stage computed."""
    useful = np.isin(timeline.program.kind, USEFUL)
    spans = np.stack([timeline.op_start_ns[useful], timeline.op_end_ns[useful]], axis=1)
    total = busy = 0
    for begin, end in zip(timeline.transfer_ready_ns, timeline.transfer_arrive_ns, strict=True):
        inside = np.clip(spans, begin, end)
        marks = sorted((int(a), int(b)) for a, b in inside if b > a)
        at = int(begin)
        for a, b in marks:
            busy += max(0, b - max(a, at))
            at = max(at, b)
        total += int(end - begin)
    return busy / total


def copies(timeline: Timeline) -> CopyTimes:
    """Copies of all stages."""
    each = [CopyTimes(*found) for found in timeline.meta["copied"].values()]
    return CopyTimes(*(sum(column) for column in zip(*each, strict=True)))


def difference(losses: Sequence[float], alone: Sequence[float]) -> float:
    """Largest relative difference of a step."""
    print("losses", [round(loss, 4) for loss in losses], "one process", [round(loss, 4) for loss in alone])
    return max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))


def in_turns(place: str) -> float:
    """Difference in the losses of four steps: workers with turns on an emulated WAN, and one process."""
    job = load_job(EXAMPLE)
    options = TrainOptions("atlas", steps=4, device=place, model=OWN, data=SHIPPED, clip=1.0)
    prepared = prepare_job(job, options)
    program = prepared.program
    alone, _ = train_alone(prepared.training, program.num_pipelines, program.num_microbatches, options.steps, place)
    return difference(rehearse(job, options).run.losses, alone)


def main() -> int:
    place = sys.argv[1] if len(sys.argv) > 1 else "cuda:0"
    if not torch.cuda.is_available():
        return not_measured("one_gpu", "needs an NVIDIA GPU")
    report = Report(f"One {torch.cuda.get_device_name()}, {NUM_STAGES} stage processes (measured)", "one process")
    program = with_optimizer(one_f_one_b(Layout(1, NUM_STAGES, NUM_MICROBATCHES, ("a", "a", "b", "b"))), norm=True)
    free = uniform_costs(1, NUM_STAGES, kind_costs(forward_ns=0))
    setup = EmulationSettings(NUM_STEPS, device=place, streams=4, paths={}, patience_s=120.0, keep_weights=False)
    run = emulate(program, free, TRAINING, setup)
    losses, weights = train_alone(TRAINING, 1, NUM_MICROBATCHES, NUM_STEPS, place)
    report.figure("parameters", sum(w.size for w in weights.values()) / 1e9, "10^9", at_least=1.0)
    report.figure("losses against one process, relative", difference(run.losses, losses), "", at_most=1e-3)
    report.figure("iteration", run.timeline.iteration_ns / 1e9, "s")
    tokens = NUM_MICROBATCHES * 2 * 1024
    report.figure("tokens", tokens / (run.timeline.iteration_ns / 1e9), "1/s")
    transfers_ms = (run.timeline.transfer_arrive_ns - run.timeline.transfer_ready_ns) / 1e6
    report.figure("transfer of 8 MB, GPU to GPU, median", float(np.median(transfers_ms)), "ms")
    report.figure("of transfers' time, computed meanwhile", overlapped(run.timeline), "", at_least=0.5)
    copied = copies(run.timeline)
    report.figure("copies between host and GPU", copied.num, "")
    report.figure("one copy, mean", copied.total_ns / copied.num / 1e6, "ms")
    report.figure("of copies' time, the same process computed", copied.under_compute_ns / copied.total_ns, "")
    report.figure("turns on the WAN: losses against one process, relative", in_turns(place), "", at_most=1e-3)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
