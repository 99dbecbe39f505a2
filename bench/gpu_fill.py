"""One GPU: a stage of GPT-B trains at WAN-paced times, and prefill of a Llama-3-8B fills its waits.

The stage (4 layers, width 8192, sequences of 6144, bf16, AdamW) runs the ops of the middle datacenter of a simulated
cell of four pipelines. Its inputs arrive when the simulated WAN delivers them; transfers are so long that the stage is
busy 30, 45 and 60 % of the time. Measured without prefill, then with it, using the loop, guard and engine of a real
worker.

Pacing hides slower ops, so the measured durations of both runs are also simulated through the whole cell's Program, as
paced and with a WAN ten times as fast, where compute is the bottleneck. `--explain` shows where the idle time went.

Needs an NVIDIA GPU with 100 GB; not measured without one. `--rehearse` runs the script with tiny models on the CPU, to
test it before using a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from common.idle_time import Idle, Wait, attribute
from common.report import Report, not_measured
from common.rhythm import Rhythm, replayed, rhythm_for
from common.tenants import REAL, TINY, Prefill, Trainer, measure_ops

from atlas.ir.program import Kind
from atlas.runtime.device import Span
from atlas.runtime.hardware import make_device
from atlas.runtime.waits import Position
from bubbletea.prefill.filling import WaitFilling
from bubbletea.prefill.throttle import Throttle


# ---- a run -----------------------------------------------------------------------------------------------------------
@dataclass
class Run:
    """What was measured over some periods, all of them followed by another."""

    within: Span
    iteration_ns: list[int] = field(default_factory=list)
    late_ns: list[int] = field(default_factory=list)
    """Of each op: its start after both its input and the op before it."""
    op_ns: dict[Kind, list[int]] = field(default_factory=lambda: defaultdict(list))
    training: list[Span] = field(default_factory=list)
    pieces: list[Span] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    kv_bytes: int = 0

    def medians(self) -> dict[Kind, int]:
        return {kind: int(statistics.median(took)) for kind, took in self.op_ns.items()}

    @property
    def wall_ns(self) -> int:
        return self.within.end_ns - self.within.start_ns

    @property
    def idle(self) -> Idle:
        return attribute(self.within, self.training, self.pieces, self.waits)

    @property
    def busy(self) -> float:
        """The share of the time in which an op or a piece was on the device."""
        return 1 - self.idle.total / self.wall_ns


def run(
    trainer: Trainer,
    rhythm: Rhythm,
    iterations: int,
    skip: int,
    prefill: Prefill | None = None,
    throttle: Throttle | None = None,
) -> Run:
    """The first `skip` iterations are for guard and throttle to learn. One more runs than is measured: the wait that
    ends a period is that of the next one's first op, and after the last there would be nobody to wait."""
    start_ns = time.monotonic_ns() + 50_000_000
    first_ns = start_ns + skip * rhythm.period_ns
    found = Run(Span(first_ns, first_ns + iterations * rhythm.period_ns))
    filling, kv_bytes = None, list[int]()
    if prefill is not None:
        filling = prefill.filling(rhythm, throttle)
        prefill.spans.clear()
    for number in range(skip + iterations + 1):
        if prefill is not None and number in (skip, skip + iterations):
            kv_bytes.append(prefill.mouth.kv_bytes)
        _iterate(trainer, rhythm, Turn(number, start_ns, skip <= number < skip + iterations), found, filling)
    if prefill is not None:
        found.pieces = list(prefill.spans)
        found.kv_bytes = kv_bytes[1] - kv_bytes[0]
    return found


class Turn(NamedTuple):
    """One iteration of a run."""

    number: int
    start_ns: int
    """Of the first one."""
    counts: bool


def _iterate(trainer: Trainer, rhythm: Rhythm, turn: Turn, found: Run, filling: WaitFilling | None) -> None:
    origin_ns, free_ns = turn.start_ns + turn.number * rhythm.period_ns, 0
    for index, op in enumerate(rhythm.ops):
        ready_ns = origin_ns + rhythm.arrive_ns[index]
        _wait(Position(turn.number, index), ready_ns, found, filling)
        span = trainer.op(op)
        if filling is not None and filling.throttle is not None:
            filling.throttle.ran(turn.number, index, span.end_ns - span.start_ns)
        if turn.counts:
            found.late_ns.append(span.start_ns - max(ready_ns, free_ns))
            found.op_ns[op.kind].append(span.end_ns - span.start_ns)
        found.training.append(span)
        free_ns = span.end_ns
    span = trainer.step()
    found.training.append(span)
    if turn.counts:
        found.iteration_ns.append(span.end_ns - origin_ns)
        found.op_ns[Kind.STEP].append(span.end_ns - span.start_ns)


def _wait(position: Position, ready_ns: int, found: Run, filling: WaitFilling | None) -> None:
    began_ns = time.monotonic_ns()
    if filling is not None and began_ns < ready_ns:
        filling.fill(position, lambda: time.monotonic_ns() >= ready_ns)
    while (left_ns := ready_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)
    if filling is not None:
        filling.over(position, began_ns, max(began_ns, ready_ns))
        if began_ns < ready_ns:
            found.waits.append(Wait(began_ns, ready_ns, filling.stop_ns, filling.stop_ns + filling.margin_ns))


COMPUTE_BINDS = 5.0
"""Per cent. Prefill draws power, so the GPU's clock drops and training's own ops take up to 6 % longer. Where compute
binds that is what an operator pays; `--slowdown` bounds it (the throttled lines below)."""


# ---- the figures -----------------------------------------------------------------------------------------------------
def judge(report: Report, rhythm: Rhythm, alone: Run, filled: Run, base_ns: dict[Kind, int], tokens: float) -> None:
    name = f"busy {rhythm.busy:.0%}"
    report.figure(f"{name}: GPU busy without prefill", 100 * alone.busy, "%")
    report.figure(f"{name}: GPU busy with prefill", 100 * filled.busy, "%", at_least=97.0)
    slower = statistics.mean(filled.iteration_ns) / statistics.mean(alone.iteration_ns) - 1
    report.figure(f"{name}: iteration longer by", 100 * slower, "%", at_most=0.5)
    report.figure(f"{name}: latest start of a training op", max(filled.late_ns) / 1e6, "ms")
    report.figure(
        f"{name}: start of one op in a hundred, later than", statistics.quantiles(filled.late_ns, n=100)[98] / 1e6, "ms"
    )
    report.figure(f"{name}: the same without prefill", max(alone.late_ns) / 1e6, "ms")
    report.figure(f"{name}: prefill", tokens / filled.wall_ns * 1e9, "tokens/s")
    report.figure(f"{name}: KV to host memory", filled.kv_bytes / filled.wall_ns * 8, "Gbit/s")
    both = [{**base_ns, **run.medians()} for run in (alone, filled)]
    for label, wan_ns, bar in (
        ("WAN binds", rhythm.wan_ns, 1.0),
        ("compute binds", rhythm.wan_ns // 10, COMPUTE_BINDS),
    ):
        before, after = (replayed(rhythm.program, op_ns, wan_ns) for op_ns in both)
        report.figure(f"{name}: replayed, {label}, longer by", 100 * (after / before - 1), "%", at_most=bar)
    for kind in (Kind.F, Kind.R, Kind.I, Kind.W, Kind.B):
        if kind in filled.op_ns:
            ratio = both[1][kind] / both[0][kind]
            report.figure(f"{name}: {kind.name} longer by", 100 * (ratio - 1), "%")


def explain(report: Report, rhythm: Rhythm, filled: Run) -> None:
    """Idle time of an iteration, by cause."""
    iterations = filled.wall_ns / rhythm.period_ns
    for cause, idle_ns in filled.idle.rows().items():
        report.figure(f"busy {rhythm.busy:.0%}: idle, {cause}", idle_ns / iterations / 1e6, "ms")


def judge_throttle(report: Report, rhythm: Rhythm, alone: Run, filled: Run, throttle: Throttle) -> None:
    """As if compute bound all of training: every op's slow-down counts in full."""
    name = f"busy {rhythm.busy:.0%}, throttled"
    ratio = sum(filled.medians().values()) / sum(alone.medians().values())
    report.figure(f"{name}: ops longer by", 100 * (ratio - 1), "%", at_most=100 * throttle.budget)
    report.figure(f"{name}: GPU busy with prefill", 100 * filled.busy, "%")
    report.figure(f"{name}: share of waits used", 100 * throttle.share, "%")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=float, nargs="+", default=[0.3, 0.45, 0.6])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--throttle", type=float, default=0.005, help="budget of the throttled run; 0: none")
    parser.add_argument("--learn", type=int, default=4, help="iterations before the measured ones")
    parser.add_argument("--explain", action="store_true", help="idle time by cause")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU; exit status 0 whatever comes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    options = parse(argv)
    if not options.rehearse and not torch.cuda.is_available():
        return not_measured("gpu_fill", "needs an NVIDIA GPU")
    scene = TINY if options.rehearse else REAL
    device = make_device(scene.device)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: a rehearsal"
    trainer = Trainer(scene, device)
    base_ns = measure_ops(trainer)
    print(json.dumps({"gpu": name, "op_ms": {k.name: v / 1e6 for k, v in base_ns.items()}}))
    prefill = Prefill(scene, device)
    kind = "a rehearsal: no figure counts" if options.rehearse else "measured"
    report = Report(f"Prefill in the waits of one stage of GPT-B ({kind})", "the same stage without prefill")
    for busy in options.busy:
        rhythm = rhythm_for(base_ns, busy)
        gc.collect()
        gc.freeze()  # as in a worker's process: what is there now stays
        print(
            f"period {rhythm.period_ns / 1e9:.2f} s, busy {rhythm.busy:.1%}, WAN {rhythm.wan_ns / 1e6:.0f} ms",
            flush=True,
        )
        alone = run(trainer, rhythm, options.iterations, 1)
        filled = run(trainer, rhythm, options.iterations, options.learn, prefill)
        judge(report, rhythm, alone, filled, base_ns, filled.kv_bytes / prefill.kv_bytes_per_token)
        if options.explain:
            explain(report, rhythm, filled)
        if options.throttle:
            throttle = Throttle(options.throttle)
            gently = run(trainer, rhythm, options.iterations, 5 * options.learn, prefill, throttle)
            judge_throttle(report, rhythm, alone, gently, throttle)
    if torch.cuda.is_available():
        report.figure("memory at the peak", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    missed = report.finish()
    return 0 if options.rehearse else missed


if __name__ == "__main__":
    sys.exit(main())
