"""One GPU: a stage of ours, in a real worker process, against tuned plain torch (`common/plain_llama.py`).

Two Llama shapes with sequences of 4,096 in bf16: 1.1 billion parameters, and 8 layers of an 8B model with its embedding
and head. AdamW with float32 masters, clipping. Ours and the baseline run in turn, A B A B A; medians count. Also the
split backward, recompute, the optimizer alone, peak memory against the planner's, the GPU's idle time between ops, and
the time to the first step: cold, with kept kernels, and after a kill.

Needs an NVIDIA GPU with 100 GB; not measured without one. `--rehearse` runs the script with tiny shapes on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from common.plain_llama import PlainLlama, PlainShape
from common.report import Report, not_measured
from common.stack_samples import newest, sample_workers, table

from atlas.cost.arrange import arrange
from atlas.cost.memory import peak_memory, worker_memory
from atlas.cost.table import kind_costs, uniform_costs
from atlas.errors import WorkerError
from atlas.ir.assemble import assemble, with_optimizer
from atlas.ir.program import Kind, Layout, Op, Program
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.runtime.assignment import DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.compiling import CACHE
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.spec import parse_job

PEAK_FLOPS = 989e12
"""Of an H200 in dense bf16 (NVIDIA's data sheet)."""
GIB = 2**30
SHAPES = {
    "1.1B": PlainShape(16, 2048, 32, 8, 64, 8192, 32_000, 4096, 4),
    "8 layers of 8B": PlainShape(8, 4096, 32, 8, 128, 14_336, 128_256, 4096, 2),
}
MFU = {"1.1B": 0.50, "8 layers of 8B": 0.53}
SMALL = PlainShape(1, 4096, 32, 8, 128, 14_336, 8192, 3072, 1)
"""Ops of about 2 ms."""
TINY = PlainShape(2, 64, 4, 2, 16, 128, 128, 32, 2)
WARM = 2
"""Steps before the measured ones."""


@dataclass
class Measured:
    """Steps of one side."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


# ---- the baseline ----------------------------------------------------------------------------------------------------
class Baseline:
    def __init__(self, shape: PlainShape, device: str, *, recompute: bool = False) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        backend = "aot_eager" if device == "cpu" else "inductor"
        self.device, self.found = device, Measured()
        self._model = PlainLlama(shape, device, dtype, backend=backend, recompute=recompute)

    def run(self, num_steps: int, num_microbatches: int) -> None:
        for number in range(WARM + num_steps):
            _finish(self.device)
            if number == WARM and self.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            self._model.step(num_microbatches)
            _finish(self.device)
            if number >= WARM:
                self.found.seconds.append(time.perf_counter() - began)
        if self.device != "cpu":
            self.found.peak_bytes = torch.cuda.max_memory_allocated()

    def optimizer_s(self, repeats: int = 10) -> float:
        took = []
        for _ in range(repeats + 2):
            for parameter in self._model.parameters:
                parameter.grad = torch.full_like(parameter, 1e-3, dtype=torch.float32)
            _finish(self.device)
            began = time.perf_counter()
            self._model.update()
            _finish(self.device)
            took.append(time.perf_counter() - began)
        return statistics.median(took[2:])


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# ---- ours ------------------------------------------------------------------------------------------------------------
def program_of(kind: str, num_microbatches: int) -> Program:
    layout = Layout(1, 1, num_microbatches, ("here",))
    orders = {
        "whole": (Kind.F, Kind.B),
        "split": (Kind.F, Kind.I, Kind.W),
        "recompute": (Kind.F, Kind.R, Kind.B),
    }
    ops = [Op(k, 0, m) for m in range(num_microbatches) for k in orders[kind]]
    return with_optimizer(assemble(kind, layout, [ops]), norm=True)


def training_of(shape: PlainShape, device: str) -> TrainingSetup:
    config = DecoderConfig(
        "llama", shape.layers, shape.width, shape.heads, shape.kv_heads, shape.head_width, shape.ffn, shape.vocabulary,
        shape.length, rope_theta=500_000.0,
    )  # fmt: skip
    return TrainingSetup(
        ModelChoice(config, "fp32" if device == "cpu" else "bf16"),
        DataChoice(shape.length, shape.microbatch),
        OptimizerSettings(LearningRate(1e-4)),
        max_norm=1.0,
        compile="aot_eager" if device == "cpu" else "inductor",
    )


@dataclass
class Ours:
    shape: PlainShape
    device: str
    first_step_s: list[float] = field(default_factory=list)

    def run(self, kind: str, num_steps: int, num_microbatches: int, into: Measured) -> Emulation:
        program = program_of(kind, num_microbatches)
        settings = EmulationSettings(
            WARM + num_steps, device=self.device, paths={}, patience_s=300.0, keep_weights=False
        )
        began, first = time.perf_counter(), []
        run = emulate(
            program,
            uniform_costs(1, 1, kind_costs(forward_ns=0)),
            training_of(self.shape, self.device),
            settings,
            on_step=lambda step, timeline: first.append(time.perf_counter() - began),
        )
        self.first_step_s.append(first[0])
        ends = run.timeline.op_end_ns[run.timeline.program.kind == Kind.STEP]
        into.seconds += (np.diff(ends)[WARM - 1 :] / 1e9).tolist()
        into.peak_bytes = max(into.peak_bytes, *run.timeline.meta["peak_bytes"].values())
        return run

    def first_step(self, num_microbatches: int) -> dict[str, float]:
        """Seconds to the end of the first step (`all`), and of each phase of the worker's start."""
        began, first = time.perf_counter(), []
        run = emulate(
            program_of("whole", num_microbatches),
            uniform_costs(1, 1, kind_costs(forward_ns=0)),
            training_of(self.shape, self.device),
            EmulationSettings(1, device=self.device, paths={}, patience_s=300.0, keep_weights=False),
            on_step=lambda *_: first.append(time.perf_counter() - began),
        )
        (phases,) = run.timeline.meta["start_s"].values()
        return {"all": first[0], **phases}

    def after_kill_s(self, num_microbatches: int) -> float:
        """From the kill of the worker to the end of the first step of its next attempt, which begins without a
        checkpoint: reading one takes as long as the disk needs."""
        settings = EmulationSettings(100, device=self.device, paths={}, patience_s=300.0, keep_weights=False)
        task = program_of("whole", num_microbatches), uniform_costs(1, 1, kind_costs(forward_ns=0))
        setup, pids, killed, first = (
            training_of(self.shape, self.device),
            dict[str, int](),
            list[float](),
            list[float](),
        )

        def kill(*_: object) -> None:
            if not killed:
                killed.append(time.perf_counter())
                os.kill(next(iter(pids.values())), signal.SIGKILL)

        with contextlib.suppress(WorkerError):
            emulate(*task, setup, settings, on_start=pids.update, on_step=kill)
        emulate(*task, setup, replace(settings, num_steps=1), on_step=lambda *_: first.append(time.perf_counter()))
        return first[0] - killed[0]


def idle_share(run: Emulation) -> float:
    """Of the time from the first measured op to the last: between neighbouring ops."""
    timeline = run.timeline
    start, end = timeline.op_start_ns, timeline.op_end_ns
    per_step = len(start) // int((timeline.program.kind == Kind.STEP).sum())
    start, end = start[WARM * per_step :], end[WARM * per_step :]
    return float(np.maximum(start[1:] - end[:-1], 0).sum() / (end[-1] - start[0]))


def optimizer_s(run: Emulation) -> float:
    timeline, found = run.timeline, 0.0
    for kind in (Kind.SYNC, Kind.NORM, Kind.STEP):
        mine = timeline.program.kind == kind
        found += float(np.median((timeline.op_end_ns - timeline.op_start_ns)[mine][WARM:])) / 1e9
    # SYNC computes the norms; the host waits for them before NORM.
    mine = np.flatnonzero(timeline.program.kind == Kind.NORM)[WARM:]
    return found + float(np.median(timeline.op_start_ns[mine] - timeline.op_end_ns[mine - 1])) / 1e9


def planned_bytes(shape: PlainShape, kind: str, num_microbatches: int) -> int:
    model = {
        "family": "llama", "layers": shape.layers, "hidden": shape.width, "heads": shape.heads,
        "kv_heads": shape.kv_heads, "ffn": shape.ffn, "vocab": shape.vocabulary, "seq_len": shape.length,
    }  # fmt: skip
    job = parse_job(
        {
            "model": model,
            "cluster": {"datacenters": [{"name": "here", "nodes": 1, "gpus_per_node": 1, "gpu": "H200"}]},
            "pp": 1,
            "num_microbatches": num_microbatches,
            "microbatch": shape.microbatch,
        }
    )
    return peak_memory(job, program_of(kind, num_microbatches), worker_memory(job, arrange(job)))[0][1]


# ---- the figures -----------------------------------------------------------------------------------------------------
def compare(report: Report, name: str, shape: PlainShape, args: argparse.Namespace) -> None:
    device, tokens = args.device, args.microbatches * shape.microbatch * shape.length
    baseline, ours = Baseline(shape, device), Ours(shape, device)
    whole, split, again = Measured(), Measured(), Measured()
    baseline.run(args.steps, args.microbatches)
    run = ours.run("whole", args.steps, args.microbatches, whole)
    baseline.run(args.steps, args.microbatches)
    ours.run("whole", args.steps, args.microbatches, whole)
    baseline.run(args.steps, args.microbatches)
    ours.run("split", args.steps, args.microbatches, split)
    alone_s = baseline.optimizer_s()
    theirs = baseline.found
    del baseline
    _forget(device)
    checked = Baseline(shape, device, recompute=True)
    checked.run(args.steps, args.microbatches)
    ours.run("recompute", args.steps, args.microbatches, again)
    theirs_again = checked.found
    del checked
    _forget(device)

    def rate(found: Measured) -> float:
        return tokens / found.median

    report.figure(f"{name}: plain torch", rate(theirs), "tokens/s")
    report.figure(f"{name}: plain torch, MFU", rate(theirs) * shape.flops_per_token / PEAK_FLOPS, "")
    report.figure(f"{name}: ours", rate(whole), "tokens/s")
    report.figure(f"{name}: ours, MFU", rate(whole) * shape.flops_per_token / PEAK_FLOPS, "", at_least=MFU.get(name))
    report.figure(f"{name}: ours over plain torch", rate(whole) / rate(theirs), "x", at_least=0.97)
    report.figure(f"{name}: split over plain torch", rate(split) / rate(theirs), "x", at_least=0.95)
    report.figure(f"{name}: recompute over checkpointing", rate(again) / rate(theirs_again), "x", at_least=0.97)
    report.figure(f"{name}: plain torch, optimizer and clipping", alone_s * 1e3, "ms")
    report.figure(f"{name}: ours, optimizer and clipping", optimizer_s(run) * 1e3, "ms")
    report.figure(f"{name}: optimizer over plain torch's", optimizer_s(run) / alone_s, "x", at_most=1.15)
    report.figure(f"{name}: idle between ops", 100 * idle_share(run), "%", at_most=0.5)
    report.figure(f"{name}: first step, cold", ours.first_step_s[0], "s", at_most=90.0)
    report.figure(f"{name}: first step, kernels kept", ours.first_step_s[1], "s", at_most=12.0)
    report.figure(f"{name}: first step, after a kill", ours.after_kill_s(args.microbatches), "s", at_most=15.0)
    if device != "cpu":
        memory(report, name, shape, args, theirs, {"whole": whole, "split": split})
        report.figure(f"{name}: recompute, peak memory", again.peak_bytes / GIB, "GiB")
        report.figure(f"{name}: checkpointing, peak memory", theirs_again.peak_bytes / GIB, "GiB")


def memory(
    report: Report,
    name: str,
    shape: PlainShape,
    args: argparse.Namespace,
    theirs: Measured,
    ours: dict[str, Measured],
) -> None:
    """One microbatch in flight; the split backward has one W pending. Both sides sum gradients in float32."""
    report.figure(f"{name}: plain torch, peak memory", theirs.peak_bytes / GIB, "GiB")
    for kind, found in ours.items():
        planned = planned_bytes(shape, kind, args.microbatches)
        report.figure(f"{name}: {kind}, peak memory", found.peak_bytes / GIB, "GiB")
        report.figure(f"{name}: {kind}, planned memory off by", 100 * (planned / found.peak_bytes - 1), "%")
        off = abs(planned / found.peak_bytes - 1)
        report.figure(f"{name}: {kind}, planned memory, error", 100 * off, "%", at_most=5.0)
    whole = ours["whole"].peak_bytes
    report.figure(f"{name}: whole over plain torch, memory", whole / theirs.peak_bytes, "x", at_most=1.05)
    report.figure(f"{name}: split over whole, memory", ours["split"].peak_bytes / whole, "x", at_most=1.15)


def _forget(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    torch._dynamo.reset()


def first_steps(report: Report, name: str, shape: PlainShape, args: argparse.Namespace) -> None:
    """Three starts and a kill, with the phases of each start, and with `--stacks` what its threads did."""
    ours = Ours(shape, args.device)

    def show(what: str, bar_s: float) -> None:
        found = ours.first_step(args.microbatches)
        report.figure(f"{name}: first step, {what}", found.pop("all"), "s", at_most=bar_s)
        print(f"  start: {', '.join(f'{phase} {took_s:.2f} s' for phase, took_s in found.items())}", flush=True)
        if args.stacks is not None:
            (args.stacks / f"{name}, {what}.txt".replace(" ", "-")).write_text("\n".join(table(newest(args.stacks))))

    show("cold", 90.0)
    show("kernels kept", 12.0)
    show("kernels kept, again", 12.0)
    report.figure(f"{name}: first step, after a kill", ours.after_kill_s(args.microbatches), "s", at_most=15.0)


def small_ops(report: Report, device: str, shape: PlainShape, num_steps: int) -> None:
    ours, found = Ours(shape, device), Measured()
    run = ours.run("split", num_steps, 8, found)
    took = run.timeline.op_end_ns - run.timeline.op_start_ns
    is_compute = run.timeline.program.kind <= Kind.W
    report.figure("small ops: median op", float(np.median(took[is_compute])) / 1e6, "ms")
    report.figure("small ops: idle between ops", 100 * idle_share(run), "%", at_most=3.0)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each run")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--only", choices=["first-step"], help="only the time to the first step, by phases")
    parser.add_argument("--stacks", type=Path, help="with --only: a folder for samples of the workers' stacks")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU; exit status 0 whatever comes")
    args = parser.parse_args(argv)
    args.device = "cpu" if args.rehearse else "cuda:0"
    if not args.rehearse and not torch.cuda.is_available():
        return not_measured("plain_torch", "needs an NVIDIA GPU with 100 GB")
    report = Report("One stage against plain torch (measured)", "torch.compile of each layer and the loss, fused AdamW")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = str(Path(folder) / "kernels")  # empty: the first start is cold
        if args.stacks is not None:
            sample_workers(args.stacks)
        for name in args.shapes:
            part = first_steps if args.only else compare
            part(report, name, TINY if args.rehearse else SHAPES[name], args)
        if not args.only:
            small_ops(report, args.device, TINY if args.rehearse else SMALL, args.steps)
    status = report.finish()
    return 0 if args.rehearse else status


if __name__ == "__main__":
    sys.exit(main())
