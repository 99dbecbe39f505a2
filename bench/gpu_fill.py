"""One GPU: a stage of GPT-B trains at WAN-paced times, and prefill of a Llama-3-8B fills its waits.

The stage (4 layers, width 8192, sequences of 6144, bf16, AdamW) runs the ops of the middle datacenter of a simulated
cell of four pipelines, whose inputs come when the simulated WAN delivers them: transfers as long as make the stage busy
30, 45 and 60 % of the time. Measured without prefill, then with: the very loop, guard and engine of a worker.

Pacing hides slower ops, so the measured durations of both runs are also replayed through the whole cell's Program, as
paced and with a WAN ten times as fast, where compute binds. Needs an NVIDIA GPU with 100 GB; skips without one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from common.report import Report
from torch import Tensor

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.ir.ops import Kind, Op
from atlas.ir.program import BACKWARD, FORWARD, Layout, Memory, Program
from atlas.runtime.cuda import Cuda
from atlas.runtime.device import Span
from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.optimizer import make_optimizer
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.stage import Stage
from atlas.runtime.waits import Position, SharedDevice
from atlas.schedules import SCHEDULES, Setting
from atlas.sim import simulate
from bubbletea.prefill.arena import Arena
from bubbletea.prefill.engine import Engine, warm_up
from bubbletea.prefill.filling import Filling
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.job import Piece, Task, even_ends
from bubbletea.prefill.pace import Pace
from bubbletea.prefill.shard import Served, Shard
from bubbletea.prefill.staging import Staged
from bubbletea.prefill.throttle import Throttle

STAGES, MICROBATCHES, PIPELINES, IN_FLIGHT = 3, 8, 4, 4
MIDDLE = 1
LATENCY_NS = 40_000_000
GPT_B = gpt(num_layers=12, width=8192, num_heads=64, vocabulary=50257, max_length=6144)
LLAMA_3_8B = DecoderConfig(
    family="llama", num_layers=32, width=4096, num_heads=32, num_kv_heads=8, head_width=128, ffn_width=14336,
    vocabulary=128256, max_length=8192, norm="rms", norm_eps=1e-5, positions="rope", qkv_bias=False, out_bias=False,
    mlp_bias=False, gated=True, activation="silu", tied=False, rope_theta=500000.0,
)  # fmt: skip
PROMPT, CHUNK, QUEUED = 4096, 2048, 8
MARGIN_NS = 300_000


# ---- training: one stage, whose inputs come when a simulated WAN says ------------------------------------------------
class Trainer:
    """The middle stage. Inputs are the same few random tensors over and over: their numbers do not matter here."""

    def __init__(self, device: Cuda) -> None:
        self.device = device
        task = DecoderTask(
            GPT_B, (4, 4, 4), 1, 6144, MICROBATCHES, _no_data, dtype=torch.bfloat16, device=device.place
        )  # fmt: skip
        self.stage = Stage(task, MIDDLE, STAGES, 0, 1.0 / MICROBATCHES)
        self.optimizer = make_optimizer(OptimizerSettings(LearningRate(1e-5), "adamw"), self.stage.named_parameters)
        shape = (1, 6144, GPT_B.width)
        self.x = torch.randn(shape, device=device.place).bfloat16()
        self.gradient = torch.randn(shape, device=device.place).bfloat16() * 1e-4
        self._slots = 0

    def op(self, op: Op) -> Span:
        slot, stage = op.microbatch + self._slots, self.stage
        work = {
            Kind.F: lambda: stage.forward(slot, self.x.clone(), keep=False),
            Kind.R: lambda: stage.recompute(slot),
            Kind.B: lambda: stage.backward(slot, self.gradient),
            Kind.I: lambda: stage.backward_input(slot, self.gradient),
            Kind.W: lambda: stage.backward_weight(slot),
        }[op.kind]
        return self.device.run(work, 0, 0)[1]

    def step(self) -> Span:
        def update() -> None:
            for parameter, gradient in zip(self.stage.parameters, self.stage.gradients.total(), strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._slots += MICROBATCHES
            self.stage.gradients.begin(self._slots)

        return self.device.run(update, 0, 0)[1]


def _no_data(slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
    raise AssertionError("a middle stage reads no data")


def measure_ops(trainer: Trainer, repeats: int = 3) -> dict[Kind, int]:
    """How long each kind of op takes, alone on the GPU."""
    took: dict[Kind, list[int]] = defaultdict(list)
    for number in range(repeats + 1):
        for m in range(MICROBATCHES):
            kinds = [Kind.F, Kind.R, Kind.B] if m % 2 else [Kind.F, Kind.R, Kind.I, Kind.W]
            for kind in kinds:
                span = trainer.op(Op(kind, MIDDLE, m))
                if number:
                    took[kind].append(span.end_ns - span.start_ns)
        span = trainer.step()
        took[Kind.STEP].append(span.end_ns - span.start_ns)
    return {kind: int(statistics.median(spans)) for kind, spans in took.items()}


# ---- the cell around it, simulated -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rhythm:
    """What the middle stage does in one iteration, and when its inputs come, from the iteration's start."""

    program: Program
    ops: list[Op]
    arrive_ns: list[int]
    period_ns: int
    busy: float
    wan_ns: int


def costs_for(op_ns: dict[Kind, int], wan_ns: int, sharing: bool) -> Costs:
    kinds = kind_costs(
        forward_ns=op_ns[Kind.F], input_ns=op_ns[Kind.I], weight_ns=op_ns[Kind.W], backward_ns=op_ns[Kind.B],
        recompute_ns=op_ns[Kind.R],
    )  # fmt: skip
    return uniform_costs(
        PIPELINES, STAGES, kinds, wan_boundaries=(0, 1), wan_ns=wan_ns, wan_latency_ns=LATENCY_NS, sharing=sharing
    )


def rhythm_for(op_ns: dict[Kind, int], busy: float) -> Rhythm:
    """The WAN that makes the stage as busy as this, by bisection."""
    low, high = 0, 200 * op_ns[Kind.F]
    for _ in range(12):
        middle = (low + high) // 2
        found = rhythm(op_ns, middle)
        low, high = (middle, high) if found.busy > busy else (low, middle)
    return rhythm(op_ns, (low + high) // 2)


def rhythm(op_ns: dict[Kind, int], wan_ns: int) -> Rhythm:
    layout = Layout.even(PIPELINES, STAGES, MICROBATCHES, 3)
    apart, turns = (costs_for(op_ns, wan_ns, sharing) for sharing in (False, True))
    program = SCHEDULES["atlas"].build(
        Setting(layout, apart, turns, Memory(IN_FLIGHT), recompute=True, budget=20), None
    )
    timeline = simulate(program, turns if program.sharing else apart)
    worker = program.worker(0, MIDDLE)
    ops = program.ops(worker)
    arrivals = [_arrival(program, timeline.transfer_arrive_ns, op) for op in ops]
    period_ns = timeline.makespan_ns + op_ns[Kind.STEP]
    busy_ns = sum(op_ns[op.kind] for op in ops) + op_ns[Kind.STEP]
    return Rhythm(program, ops, arrivals, period_ns, busy_ns / period_ns, wan_ns)


def _arrival(program: Program, arrive_ns: Any, op: Op) -> int:
    """When the input of one of pipeline 0's ops comes; 0 where it needs none."""
    shape = (2, program.num_pipelines, program.num_stages - 1, program.num_slots)
    if op.kind == Kind.F:
        return int(arrive_ns[np.ravel_multi_index((FORWARD, 0, MIDDLE - 1, op.microbatch), shape)])
    if op.kind in (Kind.B, Kind.I):
        return int(arrive_ns[np.ravel_multi_index((BACKWARD, 0, MIDDLE, op.microbatch), shape)])
    return 0


# ---- prefill ---------------------------------------------------------------------------------------------------------
class Mouth:
    """Takes the results: waits for every copy of keys and values, as the thread that sends them would, and counts."""

    def __init__(self) -> None:
        self.kv_bytes = self.prompts = 0
        self._lock = threading.Condition()
        self._staged: list[Staged] = []
        threading.Thread(target=self._swallow, daemon=True).start()

    def kv(self, task: Task, piece: Piece, kv: Staged) -> None:
        with self._lock:
            self._staged.append(kv)
            self._lock.notify()

    def _swallow(self) -> None:
        while True:
            with self._lock:
                while not self._staged:
                    self._lock.wait()
                batch, self._staged = self._staged, []
            for staged in batch:
                self.kv_bytes += staged().nbytes

    def logits(self, task: Task, logits: Staged) -> None: ...

    def ran(self, task: Task, piece: Piece, predicted_ns: int, took_ns: int) -> None: ...

    def done(self, task: Task) -> None:
        self.prompts += 1

    def failed(self, task: Task, why: str) -> None:
        raise AssertionError(why)


class Prefill:
    """Prompts without end."""

    def __init__(self, device: Cuda) -> None:
        served = Served(LLAMA_3_8B, dtype="bfloat16")
        arena = Arena(24 << 30, 4 << 30, device.place)
        shard = Shard(served, served.cuts((32,))[0], arena)
        pace = Pace(LLAMA_3_8B)
        warm_up(shard, pace, CHUNK)
        self.mouth = Mouth()
        self.engine = Engine(shard, self.mouth, pace=pace)
        self.spans: list[Span] = []
        self._shared = SharedDevice(device, self.spans.append)
        threading.Thread(target=self._offer, daemon=True).start()

    def filling(self, throttle: Throttle | None) -> Filling:
        """A guard that knows nothing yet."""
        return Filling(self.engine, Guard(0.05), self._shared, MARGIN_NS, throttle=throttle)

    def _offer(self) -> None:
        """As the service would, from another thread."""
        prompts = np.random.default_rng(0).integers(0, LLAMA_3_8B.vocabulary, (16, PROMPT)).tolist()
        for number in count():
            while self.engine.num_tasks >= QUEUED:
                time.sleep(0.01)
            task = Task(number, 0, PROMPT, 0, even_ends(0, PROMPT, CHUNK), 0, number)
            self.engine.offer(task, prompts[number % len(prompts)])


# ---- a run -----------------------------------------------------------------------------------------------------------
@dataclass
class Run:
    """What was measured over some iterations."""

    iteration_ns: list[int] = field(default_factory=list)
    late_ns: list[int] = field(default_factory=list)
    """Of each op: its start after both its input and the op before it."""
    op_ns: dict[Kind, list[int]] = field(default_factory=lambda: defaultdict(list))
    training_ns: int = 0
    filled_ns: int = 0
    wall_ns: int = 0
    tokens: float = 0.0
    kv_bytes: int = 0

    def medians(self) -> dict[Kind, int]:
        return {kind: int(statistics.median(took)) for kind, took in self.op_ns.items()}


def run(
    trainer: Trainer,
    rhythm: Rhythm,
    iterations: int,
    skip: int,
    prefill: Prefill | None = None,
    throttle: Throttle | None = None,
) -> Run:
    """The first `skip` iterations are for guard and throttle to learn."""
    found, filling = Run(), prefill.filling(throttle) if prefill else None
    start_ns = time.monotonic_ns() + 50_000_000
    for number in range(iterations + skip):
        if number == skip and prefill is not None:
            prefill.spans.clear()
            kv_before = prefill.mouth.kv_bytes
        counts = number >= skip
        origin_ns = start_ns + number * rhythm.period_ns
        free_ns = 0
        for index, op in enumerate(rhythm.ops):
            ready_ns = origin_ns + (rhythm.arrive_ns[index] or 0)
            _wait(Position(number, index), ready_ns, filling)
            span = trainer.op(op)
            if throttle is not None:
                throttle.ran(number, index, span.end_ns - span.start_ns)
            if counts:
                found.late_ns.append(span.start_ns - max(ready_ns, free_ns))
                found.op_ns[op.kind].append(span.end_ns - span.start_ns)
                found.training_ns += span.end_ns - span.start_ns
            free_ns = span.end_ns
        span = trainer.step()
        if counts:
            found.iteration_ns.append(span.end_ns - origin_ns)
            found.op_ns[Kind.STEP].append(span.end_ns - span.start_ns)
            found.training_ns += span.end_ns - span.start_ns
    # The tail of the last period is nobody's op, but time like any other.
    _wait(Position(0, len(rhythm.ops)), start_ns + (iterations + skip) * rhythm.period_ns, filling)
    found.wall_ns = iterations * rhythm.period_ns
    if prefill is not None:
        first_ns, last_ns = start_ns + skip * rhythm.period_ns, start_ns + (iterations + skip) * rhythm.period_ns
        found.filled_ns = sum(
            min(s.end_ns, last_ns) - max(s.start_ns, first_ns)
            for s in prefill.spans
            if s.end_ns > first_ns and s.start_ns < last_ns
        )
        found.kv_bytes = prefill.mouth.kv_bytes - kv_before
        found.tokens = found.kv_bytes / (32 * prefill.engine.shard.served.kv_bytes_per_layer_token)
    return found


def _wait(position: Position, ready_ns: int, filling: Filling | None) -> None:
    began_ns = time.monotonic_ns()
    if filling is not None and began_ns < ready_ns:
        filling.fill(position, lambda: time.monotonic_ns() >= ready_ns)
    while (left_ns := ready_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)
    if filling is not None:
        filling.over(position, max(0, ready_ns - began_ns))


# ---- the figures -----------------------------------------------------------------------------------------------------
def replayed(program: Program, op_ns: dict[Kind, int], wan_ns: int) -> int:
    """The whole cell's iteration with these durations."""
    return simulate(program, costs_for(op_ns, wan_ns, program.sharing)).makespan_ns


def judge(report: Report, rhythm: Rhythm, alone: Run, filled: Run, base_ns: dict[Kind, int]) -> None:
    name = f"busy {rhythm.busy:.0%}"
    total = (filled.training_ns + filled.filled_ns) / filled.wall_ns
    report.figure(f"{name}: GPU busy without prefill", 100 * alone.training_ns / alone.wall_ns, "%")
    report.figure(f"{name}: GPU busy with prefill", 100 * total, "%", at_least=97.0)
    slower = statistics.mean(filled.iteration_ns) / statistics.mean(alone.iteration_ns) - 1
    report.figure(f"{name}: iteration longer by", 100 * slower, "%", at_most=0.5)
    report.figure(f"{name}: latest start of a training op", max(filled.late_ns) / 1e6, "ms")
    report.figure(f"{name}: the same without prefill", max(alone.late_ns) / 1e6, "ms")
    report.figure(f"{name}: prefill", filled.tokens / filled.wall_ns * 1e9, "tokens/s")
    report.figure(f"{name}: KV to host memory", filled.kv_bytes / filled.wall_ns * 8, "Gbit/s")
    both = [{**base_ns, **run.medians()} for run in (alone, filled)]
    for label, wan_ns, bar in (("WAN binds", rhythm.wan_ns, 1.0), ("compute binds", rhythm.wan_ns // 10, None)):
        before, after = (replayed(rhythm.program, op_ns, wan_ns) for op_ns in both)
        report.figure(f"{name}: replayed, {label}, longer by", 100 * (after / before - 1), "%", at_most=bar)
    for kind in (Kind.F, Kind.R, Kind.I, Kind.W, Kind.B):
        if kind in filled.op_ns:
            ratio = both[1][kind] / both[0][kind]
            report.figure(f"{name}: {kind.name} longer by", 100 * (ratio - 1), "%")


def judge_throttle(report: Report, rhythm: Rhythm, alone: Run, filled: Run, throttle: Throttle) -> None:
    """As if compute bound all of training: every op's slow-down counts in full."""
    name = f"busy {rhythm.busy:.0%}, throttled"
    total = (filled.training_ns + filled.filled_ns) / filled.wall_ns
    ratio = sum(filled.medians().values()) / sum(alone.medians().values())
    report.figure(f"{name}: ops longer by", 100 * (ratio - 1), "%", at_most=100 * throttle.budget)
    report.figure(f"{name}: GPU busy with prefill", 100 * total, "%")
    report.figure(f"{name}: share of waits used", 100 * throttle.share, "%")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=float, nargs="+", default=[0.3, 0.45, 0.6])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--throttle", type=float, default=0.005, help="budget of the throttled run; 0: none")
    parser.add_argument("--learn", type=int, default=4, help="iterations before the measured ones")
    return parser.parse_args(argv)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        print("bench/gpu_fill.py needs an NVIDIA GPU: skipped")
        return 0
    device = Cuda()
    trainer = Trainer(device)
    base_ns = measure_ops(trainer)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "op_ms": {k.name: v / 1e6 for k, v in base_ns.items()}}))
    prefill = Prefill(device)
    report = Report("Prefill in the waits of one stage of GPT-B (measured)", "the same stage without prefill")
    for busy in options.busy:
        rhythm = rhythm_for(base_ns, busy)
        print(
            f"period {rhythm.period_ns / 1e9:.2f} s, busy {rhythm.busy:.1%}, WAN {rhythm.wan_ns / 1e6:.0f} ms",
            flush=True,
        )
        alone = run(trainer, rhythm, options.iterations, 1)
        filled = run(trainer, rhythm, options.iterations, options.learn, prefill)
        judge(report, rhythm, alone, filled, base_ns)
        if options.throttle:
            throttle = Throttle(options.throttle)
            gently = run(trainer, rhythm, options.iterations, 5 * options.learn, prefill, throttle)
            judge_throttle(report, rhythm, alone, gently, throttle)
    report.figure("memory at the peak", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
