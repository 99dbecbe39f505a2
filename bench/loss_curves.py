"""A thousand steps on real text: two emulated datacenters against plain torch, with the same data and recipe.

A small Llama in float32 learns the shipped text, byte by byte. Ours: two pipelines of two stages, one stage in each
datacenter, turns on the WAN between them, split backwards, sums by Gloo, ZeRO-1. Plain torch: one process, torch's own
modules and AdamW (`common/plain_llama.py`), from the same initial weights. A second plain run starts from other initial
weights. The losses of ours and of plain torch must not be further apart than those of the two plain runs, in means of
50 steps.

    python bench/loss_curves.py [--steps 1000] [--figure docs/img/loss-curves.svg]
    python bench/loss_curves.py --quick     # 60 steps
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from common.plain_llama import PlainLlama, PlainShape
from common.report import Report
from numpy.typing import NDArray

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout, Memory, Program
from atlas.launch.emulate import EmulationSettings, emulate
from atlas.runtime.assignment import SHIPPED, DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.topology import BatchShare
from atlas.runtime.training import make_task
from atlas.schedules import SCHEDULES, Setting

Curve = NDArray[np.float64]
PIPELINES, STAGES, MICROBATCHES = 2, 2, 2
MS = 1_000_000
LATENCY_MS = 5
SHAPE = PlainShape(4, 64, 4, 2, 16, 176, 256, 64, 4)
WINDOW = 50
"""Steps of a mean."""


def recipe(steps: int, seed: int) -> TrainingSetup:
    config = DecoderConfig(
        "llama", SHAPE.layers, SHAPE.width, SHAPE.heads, SHAPE.kv_heads, SHAPE.head_width, SHAPE.ffn, SHAPE.vocabulary,
        SHAPE.length, rope_theta=500_000.0,
    )  # fmt: skip
    rate = LearningRate(3e-3, "cosine", steps // 20, steps, floor=3e-4)
    return TrainingSetup(
        ModelChoice(config, seed=seed),
        DataChoice(SHAPE.length, SHAPE.microbatch, SHIPPED),
        OptimizerSettings(rate),
        max_norm=1.0,
        zero=1,
    )


# ---- the two sides ---------------------------------------------------------------------------------------------------
def program_and_costs() -> tuple[Program, Costs]:
    layout = Layout.even(PIPELINES, STAGES, MICROBATCHES, num_dcs=2)
    kinds = kind_costs(forward_ns=MS, input_ns=MS, weight_ns=MS)

    def price(sharing: bool) -> Costs:
        return uniform_costs(
            PIPELINES, STAGES, kinds, wan_boundaries=(0,), wan_ns=MS, wan_latency_ns=LATENCY_MS * MS, sharing=sharing
        )

    setting = Setting(layout, price(False), price(True), Memory(MICROBATCHES), recompute=False, budget=20)
    program = SCHEDULES["atlas"].build(setting, None)
    return with_optimizer(program, norm=True), price(program.sharing)


def ours(steps: int) -> Curve:
    program, costs = program_and_costs()
    settings = EmulationSettings(steps, device="cpu", keep_weights=False, keep_timeline=False, patience_s=120.0)
    return np.array(emulate(program, costs, recipe(steps, 0), settings).losses)


def plain(steps: int, seed: int) -> Curve:
    """Plain torch, on the same microbatches in the same order."""
    setup = recipe(steps, seed)
    share = BatchShare(0, 0, PIPELINES * MICROBATCHES)
    task = make_task(setup, num_stages=1, share=share, num_microbatches=MICROBATCHES)
    model = PlainLlama(SHAPE, "cpu", torch.float32, backend="eager", recompute=False)
    model.start_from(dict(task.build_stage(0, 1).named_parameters()))
    losses = []
    for step in range(steps):
        for group in model.optimizer.param_groups:
            group["lr"] = setup.optimizer.learning_rate.at(step)
        slots = [(step * MICROBATCHES + m, p) for p in range(PIPELINES) for m in range(MICROBATCHES)]
        losses.append(model.train([task.microbatch(*slot) for slot in slots]).item())
    return np.array(losses)


def means(losses: Curve, window: int) -> Curve:
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


# ---- the figure ------------------------------------------------------------------------------------------------------
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 380, 56, 44, 16
COLOURS = {"plain torch, another seed": "#b8b8b8", "plain torch": "#1f77b4", "Atlas, two datacenters": "#d62728"}


def drawn(curves: dict[str, Curve]) -> str:
    """An SVG of the curves, by name."""
    steps = len(next(iter(curves.values())))
    low, high = min(c.min() for c in curves.values()), max(c.max() for c in curves.values())
    low, high = np.floor(low * 2) / 2, np.ceil(high * 2) / 2

    def at(step: float, loss: float) -> tuple[float, float]:
        across, down = step / steps, (high - loss) / (high - low)
        return LEFT + across * (WIDTH - LEFT - 12), TOP + down * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']  # fmt: skip
    for loss in np.arange(low, high + 0.01, 0.5):
        (x1, y), (x2, _) = at(0, loss), at(steps, loss)
        parts.append(f'<path d="M{x1:.1f} {y:.1f}H{x2:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x1 - 8:.1f}" y="{y + 4:.1f}" font-size="12" text-anchor="end">{loss:g}</text>')
    for step in range(0, steps + 1, 200 if steps > 500 else max(1, steps // 5)):
        x, y = at(step, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" font-size="12" text-anchor="middle">{step}</text>')
    middle = (LEFT + WIDTH) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" font-size="13" text-anchor="middle">step</text>')
    parts.append(f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" font-size="13" text-anchor="middle">'
                 "loss (nats per byte)</text>")  # fmt: skip
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join("{:.1f},{:.2f}".format(*at(step, loss)) for step, loss in enumerate(curve))
        dash = ' stroke-dasharray="5 4"' if number == len(curves) - 1 else ""
        line = f'fill="none" stroke="{COLOURS[name]}" stroke-width="{1.4 if dash else 2}"{dash}'
        parts.append(f'<polyline points="{points}" {line}/>')
        y = TOP + 20 + 20 * number
        parts.append(f'<path d="M{WIDTH - 236} {y - 4}h28" {line}/>')
        parts.append(f'<text x="{WIDTH - 200}" y="{y}" font-size="13">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def measure(report: Report, steps: int, window: int, figure: Path | None) -> None:
    curves: list[Curve] = []
    runs = (("ours", lambda: ours(steps)), ("plain", lambda: plain(steps, 0)), ("plain", lambda: plain(steps, 1)))
    for name, run in runs:
        began = time.monotonic()
        curves.append(run())
        print(f"  {name}: {(time.monotonic() - began) / steps * 1e3:.1f} ms a step", flush=True)
    atlas, torch_, other = curves
    report.figure("first loss apart from plain torch", abs(atlas[0] - torch_[0]) / torch_[0], "", at_most=1e-5)
    smooth = [means(curve, window) for curve in (atlas, torch_, other)]
    apart, spread = (np.abs(curve - smooth[1]) for curve in (smooth[0], smooth[2]))
    report.figure("loss fell from", float(smooth[1][0]), "nats")
    report.figure("loss fell to, plain torch", float(smooth[1][-1]), "nats")
    report.figure("loss fell to, ours", float(smooth[0][-1]), "nats")
    report.figure("largest distance of two plain runs", float(spread.max()), "nats")
    over = "distance from plain torch / distance of two plain runs"
    report.figure(f"largest {over}", float(apart.max() / spread.max()), "", at_most=1.0)
    report.figure(f"mean {over}", float(apart.mean() / spread.mean()), "", at_most=1.0)
    if figure is not None:
        named = zip(COLOURS, (other, torch_, atlas), strict=True)
        figure.write_text(drawn({name: means(curve, 10) for name, curve in named}))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--figure", type=Path, help="write the curves to this SVG file")
    parser.add_argument("--quick", action="store_true", help="60 steps")
    args = parser.parse_args(arguments)
    steps = 60 if args.quick else args.steps
    torch.set_num_threads(1)
    report = Report(f"Loss curves, {steps} steps of a small Llama on text (measured)", "plain torch, two seeds")
    measure(report, steps, min(WINDOW, steps // 6), args.figure)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
