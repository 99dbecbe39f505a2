"""How well iteration time and peak memory of Sailor's 15 measured GH200 runs (OPT-350M, 4 to 128 GPUs) are predicted.

Time: nothing is fitted. Sailor's per-layer profile and its measured network curve price a 1F1B Program whose workers
stand still while they send and receive; the event simulator says when it ends. Memory: layer sizes as Sailor measured
them, three overheads fitted without the runs of the same depth and microbatch, each such group in turn. What a run
measured is only compared with. Prints the rows and one JSON line per figure. Reads ../shared/data/sailor, or the folder
given; says so and stops where it is absent.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common.report import Report

from atlas.cost.calibration.footprint import StageSize, fit_overheads, peak_bytes
from atlas.cost.calibration.runs import StageSeconds, blocking_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate

DATA = Path(__file__).parents[2] / "shared" / "data" / "sailor"
MODEL, GPU, FLOAT_BYTES = "OPT-350", "GH-96", 4
TIME_BAR, MEMORY_BAR = 0.07, 0.06


@dataclass(frozen=True)
class Measured:
    """One run: its plan, and what came out."""

    name: str
    layers_per_stage: list[list[str]]
    microbatch: int
    num_microbatches: int
    tp: str
    dp: int
    seconds: float
    peak_bytes: float


@dataclass(frozen=True)
class Sailor:
    """The tables that a prediction reads."""

    profile: dict[str, Any]
    """Seconds by microbatch, tp and layer: forward, backward, update."""
    sizes: dict[str, Any]
    """Floats by tp and layer."""
    curve: list[float]
    """GB/s = a log2(MB)^2 + b log2(MB) + c between two GPUs of different nodes ..."""
    max_bytes_per_s: float
    """... and never more than this."""

    def transfer_s(self, size_bytes: float) -> float:
        a, b, c = self.curve
        x = max(0.0, math.log2(size_bytes / 1e6))  # below 1 MB the fit means nothing: hold its value there
        return size_bytes / min(self.max_bytes_per_s, (a * x * x + b * x + c) * 1e9)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def read_tables(data: Path) -> Sailor:
    zone = "us-central1-a"
    curve, cap = load(data / "multizone_bandwidths_het.json")[zone][GPU]["1"][zone][GPU]["1"]
    return Sailor(load(data / "profiles_tmp.json")[MODEL][GPU], load(data / "llm_info.json")[MODEL], curve, cap)


def read_runs(data: Path) -> list[Measured]:
    runs = []
    for path in sorted((data / "measured" / "gh200-opt-350").rglob("*.json")):
        raw = load(path)
        (plan,) = raw["pipeline_list"]
        dp, tp = plan["dp"][0], plan["tmp_per_stage"][0][0][1]
        runs.append(
            Measured(
                name=path.stem.removeprefix("plan_config_"),
                layers_per_stage=[[str(layer) for layer in stage] for stage in plan["layers_per_stage"]],
                microbatch=raw["mbs"],
                num_microbatches=math.ceil(raw["gbs"] / (raw["mbs"] * dp)),
                tp=str(tp),
                dp=dp,
                seconds=raw["real"],
                peak_bytes=raw["max_mem"],
            )
        )
    return sorted(runs, key=lambda run: (len(run.layers_per_stage) * run.dp, run.dp))


def predict_s(run: Measured, tables: Sailor, *, transfers: bool = True) -> float:
    """What the event simulator says of the run's plan."""
    profile, sizes = tables.profile[str(run.microbatch)][run.tp], tables.sizes[run.tp]
    stages = []
    for layers in run.layers_per_stage:
        forward_s, backward_s, update_s = (sum(profile[layer][i] for layer in layers) for i in range(3))
        gradient_bytes = FLOAT_BYTES * sum(sizes[layer]["params_floats"] for layer in layers)
        sync_s = 2 * (run.dp - 1) * tables.transfer_s(gradient_bytes / run.dp)
        stages.append(StageSeconds(forward_s, backward_s, sync_s, update_s))
    activation_bytes = FLOAT_BYTES * sizes["1"]["act_output_floats"] * run.microbatch
    transfer_s = tables.transfer_s(activation_bytes) if transfers else 0.0
    program = with_optimizer(one_f_one_b(Layout.even(1, len(stages), run.num_microbatches, 1)))
    timeline = simulate(program, blocking_costs(stages, transfer_s, receiver_waits=True))
    return float(timeline.op_end_ns.max()) / 1e9


def stage_sizes(run: Measured, tables: Sailor) -> list[StageSize]:
    sizes = tables.sizes[run.tp]
    head, depth = str(len(sizes) - 1), len(run.layers_per_stage)

    def activation_bytes(layer: str) -> float:
        return float(FLOAT_BYTES * sizes[layer]["act_mem_floats"] * run.microbatch)

    return [
        StageSize(
            params=sum(sizes[layer]["params_floats"] for layer in layers),
            activation_bytes=sum(activation_bytes(layer) for layer in layers if layer != head),
            layer_bytes=activation_bytes("2"),
            head_bytes=activation_bytes(head) if head in layers else 0.0,
            in_flight=min(run.num_microbatches, depth - s),
        )
        for s, layers in enumerate(run.layers_per_stage)
    ]


def predict_peaks(runs: list[Measured], tables: Sailor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Each run by what runs of another depth or microbatch teach."""
    sizes, measured = [stage_sizes(run, tables) for run in runs], np.array([run.peak_bytes for run in runs])
    peaks = []
    shapes = [(len(run.layers_per_stage), run.microbatch) for run in runs]
    for i in range(len(runs)):
        others = [k for k in range(len(runs)) if shapes[k] != shapes[i]]
        peaks.append(peak_bytes(sizes[i], fit_overheads([sizes[k] for k in others], measured[others])))
    return np.array(peaks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    args = parser.parse_args()
    if not (args.data / "measured" / "gh200-opt-350").exists():
        print(f"skipped: no measurements in {args.data}")
        return 0
    began = time.perf_counter()
    tables, runs = read_tables(args.data), read_runs(args.data)
    seconds, peaks = np.array([predict_s(run, tables) for run in runs]), predict_peaks(runs, tables)
    time_error = seconds / [run.seconds for run in runs] - 1
    peak_error = peaks / [run.peak_bytes for run in runs] - 1
    print(f"{'run':14} pp dp  b  M {'s':>6} {'predicted':>9} {'error':>6} {'GB':>5} {'predicted':>9} {'error':>6}")
    for i, run in enumerate(runs):
        print(
            f"{run.name:14} {len(run.layers_per_stage):2} {run.dp:2} {run.microbatch:2} {run.num_microbatches:2} "
            f"{run.seconds:6.3f} {seconds[i]:9.3f} {time_error[i]:+6.1%} "
            f"{run.peak_bytes / 1e9:5.1f} {peaks[i] / 1e9:9.1f} {peak_error[i]:+6.1%}"
        )
    fitted = fit_overheads([stage_sizes(run, tables) for run in runs], np.array([run.peak_bytes for run in runs]))
    print(
        f"overheads fitted on all: {fitted.fixed_bytes / 1e9:.2f} GB, {fitted.layer_copies:.2f} layers, "
        f"{fitted.head_copies:.2f} heads"
    )
    free = np.array([predict_s(run, tables, transfers=False) for run in runs]) / [run.seconds for run in runs] - 1
    report = Report("GH200 iteration times and peak memory", "Sailor on the same runs: 8.9 % in time")
    mean_error, like_left_out = float(np.abs(time_error).mean()), float(np.abs(peak_error).mean())
    report.figure("gh200 iteration time, mean error", mean_error, "share", at_most=TIME_BAR)
    report.figure("gh200 iteration time, bias", float(time_error.mean()), "share")
    report.figure("gh200 iteration time, mean error if transfers took no time", float(np.abs(free).mean()), "share")
    report.figure("gh200 peak memory, mean error, its like left out", like_left_out, "share", at_most=MEMORY_BAR)
    report.figure("gh200 peak memory, bias", float(peak_error.mean()), "share")
    report.figure("gh200 accuracy bench, wall time", time.perf_counter() - began, "s", at_most=60)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
