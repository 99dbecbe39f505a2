"""How well the calibrated cost model predicts the iteration times of vTrain's A100 runs: 55 on 64 to 512 GPUs.

Four constants are fitted on the single-node rows and on one half of the 55, and scored on the other half by the event
simulator; then the halves are swapped. A half is every second row in the order of the SHA-256 of its shape: nobody
chose it. Prints the rows, the misses, the constants fitted on everything (what `A100-80` carries) and the figures.
Reads ../shared/data/vtrain, or the folder given; says so and stops where it is absent.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
import time
from pathlib import Path

import numpy as np
from common.report import Report
from numpy.typing import NDArray

from atlas.cost.calibration.fit import Sample, fit, predict
from atlas.cost.calibration.runs import Machine, Run, blocking_costs, rates_by_tp, stage_seconds
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from atlas.spec.gpus import GPUS, Calibration
from atlas.spec.model import Model

DATA = Path(__file__).parents[2] / "shared" / "data" / "vtrain"
BAR = 0.10
OTHERS = "Calculon 10.5 %, vTrain 14.7 %"
MACHINE = Machine(gpu=GPUS["A100-80"], gpus_per_node=8, net_bytes_per_s=100e9)
"""800 Gbit/s a node: vTrain's validation configs say so, as they say 1F1B, recompute, no overlap of the gradients."""
NUM_RANDOM_SPLITS = 5


def read(path: Path) -> Sample:
    """A table of vTrain's."""
    runs, measured_s = [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            model = Model(
                layers=int(row["# layers"]),
                hidden=int(row["hidden size"]),
                heads=int(row["attention heads"]),
                seq_len=int(row["sequence length"]),
            )
            tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
            microbatch = int(row["micro batch"])
            num_microbatches = int(row["global batch"]) // (dp * microbatch)
            runs.append(Run(model, microbatch, num_microbatches, tp, dp, pp))
            measured_s.append(float(row["iteration time (ms)"]) / 1e3)
    return Sample(runs, np.array(measured_s))


def part(sample: Sample, rows: NDArray[np.int64]) -> Sample:
    return Sample([sample.runs[i] for i in rows], sample.measured_s[rows])


def halves(sample: Sample) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    digests = [hashlib.sha256(run.key.encode()).hexdigest() for run in sample.runs]
    order = np.argsort(digests)
    return order[0::2], order[1::2]


def simulated_s(run: Run, calibration: Calibration) -> float:
    """What the event simulator says."""
    stages, transfer_s = stage_seconds(run, MACHINE, rates_by_tp(MACHINE, calibration))
    program = with_optimizer(one_f_one_b(Layout.even(1, run.pp, run.num_microbatches, 1)))
    timeline = simulate(program, blocking_costs(stages, transfer_s, receiver_waits=False))
    return float(timeline.op_end_ns.max()) / 1e9


def constants(calibration: Calibration) -> str:
    c = calibration
    return (
        f"matrix {c.matrix_efficiency:.3f}, memory {c.memory_efficiency:.3f}, peers {c.peer_efficiency:.3f}, "
        f"floor {c.layer_floor_us:.0f} us"
    )


def random_splits(single: Sample, multi: Sample) -> NDArray[np.float64]:
    """The same score for halves drawn at random: how much of it is the luck of the draw."""
    generator = np.random.default_rng(0)
    scores = []
    for _ in range(NUM_RANDOM_SPLITS):
        order = generator.permutation(len(multi.runs))
        for train, test in ((order[0::2], order[1::2]), (order[1::2], order[0::2])):
            calibration = fit([single, part(multi, train)], MACHINE)
            held = part(multi, test)
            scores.append(float(np.abs(predict(held.runs, MACHINE, calibration) / held.measured_s - 1).mean()))
    return np.array(scores)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--quick", action="store_true", help="leave out the random halves")
    args = parser.parse_args()
    if not (args.data / "multi_node_a100.csv").exists():
        print(f"skipped: no measurements in {args.data}")
        return 0
    began = time.perf_counter()
    single, multi = read(args.data / "single_node_a100.csv"), read(args.data / "multi_node_a100.csv")
    error, half_of = np.zeros(len(multi.runs)), np.zeros(len(multi.runs), dtype="U1")
    first, second = halves(multi)
    report, worst_gap = Report("A100 iteration times, held-out halves", OTHERS), 0.0
    for name, train, test in (("B", first, second), ("A", second, first)):
        calibration = fit([single, part(multi, train)], MACHINE)
        print(f"half {name} of {len(test)} rows, fitted without it: {constants(calibration)}")
        predicted_s = np.array([simulated_s(multi.runs[i], calibration) for i in test])
        closed_s = predict(part(multi, test).runs, MACHINE, calibration)
        worst_gap = max(worst_gap, float(np.abs(closed_s / predicted_s - 1).max()))
        error[test], half_of[test] = predicted_s / multi.measured_s[test] - 1, name
        mean = float(np.abs(error[test]).mean())
        report.figure(f"a100 iteration time, half {name}, mean error", mean, "share", at_most=BAR)
        report.figure(f"a100 iteration time, half {name}, bias", float(error[test].mean()), "share")
    print(f"\n{'error':>7} {'measured s':>10} {'predicted s':>11} half  run  (worst first)")
    for i in np.argsort(-np.abs(error)):
        seconds = multi.measured_s[i]
        print(f"{error[i]:+7.1%} {seconds:10.2f} {seconds * (1 + error[i]):11.2f} {half_of[i]:>4}  {multi.runs[i].key}")
    everything = fit([single, multi], MACHINE)
    print(f"\nfitted on everything, as A100-80 carries it: {constants(everything)}")
    report.figure("a100 iteration time, both halves, mean error", float(np.abs(error).mean()), "share", at_most=BAR)
    report.figure("a100 iteration time, both halves, bias", float(error.mean()), "share")
    report.figure("a100 iteration time, both halves, median error", float(np.median(np.abs(error))), "share")
    unseen = predict(multi.runs, MACHINE, fit([single], MACHINE)) / multi.measured_s - 1
    report.figure("a100 all 55, fitted on single-node rows alone, mean error", float(np.abs(unseen).mean()), "share")
    single_error = predict(single.runs, MACHINE, everything) / single.measured_s - 1
    report.figure("a100 single-node rows (fitted on), mean error", float(np.abs(single_error).mean()), "share")
    report.figure("a100 closed form against event simulator, largest gap", worst_gap, "share")
    if not args.quick:
        scores = random_splits(single, multi)
        report.figure("a100 random halves, mean of the mean errors", float(scores.mean()), "share")
        report.figure("a100 random halves, worst mean error", float(scores.max()), "share")
    report.figure("a100 accuracy bench, wall time", time.perf_counter() - began, "s", at_most=60)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
