"""Error of `atlas simulate` in iteration time, for 55 Megatron runs that vTrain measured on 64 to 512 A100.

Every run becomes a job file (`runtime: megatron`, 800 Gbit/s a node) that is loaded and simulated like the command
does. Four constants of the GPU type are fitted on the single-node rows and on one half of the 55 rows, and scored on
the other half; then the halves are swapped. A half is every second row in the order of the SHA-256 of its shape. Prints
the rows, the constants fitted on everything (those of `A100-80`) and the figures. Reads ../shared/data/vtrain, or the
folder given as an argument; exits with 77 if it is absent.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common.fit import Floats, least_squares, soften
from common.report import Report, not_measured

from atlas.cost.price import price
from atlas.errors import AtlasError
from atlas.evaluate import evaluate
from atlas.ir.program import Kind
from atlas.spec import Job, load_job, parse_job
from atlas.spec.gpus import GPUS, Calibration

DATA = Path(__file__).parents[2] / "shared" / "data" / "vtrain"
BAR, BIAS_BAR = 0.07, 0.03
OTHERS = "Calculon 10.5 %, vTrain 14.7 %"
PER_NODE, NET_GBPS = 8, 800
"""From vTrain's validation configs, like 1F1B, recompute and no overlap of the gradient reduction."""
SINGLE_STEP = 17
"""Of the single-node rows every 17th is fitted on: rows that differ in microbatches alone are multiples of each
other."""
START = Calibration(matrix_efficiency=0.8, memory_efficiency=0.55, peer_efficiency=0.7, layer_floor_us=800.0)


@dataclass(frozen=True)
class Measured:
    """One row."""

    data: dict[str, Any]
    """The job without its GPU type."""
    seconds: float

    @property
    def key(self) -> str:
        """Identifies the run, without its time."""
        d = self.data
        shape = f"H{d['model']['hidden']} layers {d['model']['layers']} b{d['microbatch']} M{d['num_microbatches']}"
        return f"{shape} tp{d['tp']} dp{d['cells']} pp{d['pp']}"


def read(path: Path) -> list[Measured]:
    """Read one of vTrain's tables."""
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
            num_gpus, microbatch = tp * dp * pp, int(row["micro batch"])
            node = {
                "name": "dc",
                "nodes": -(-num_gpus // PER_NODE),
                "gpus_per_node": min(num_gpus, PER_NODE),
                "gpu": "A100-80",
                "net_gbps": NET_GBPS,
            }
            data = {
                "model": {
                    "layers": int(row["# layers"]),
                    "hidden": int(row["hidden size"]),
                    "heads": int(row["attention heads"]),
                    "seq_len": int(row["sequence length"]),
                },
                "cluster": {"datacenters": [node]},
                "runtime": "megatron",
                "precision": "fp16",
                "gradient_bytes": 2,
                "microbatch": microbatch,
                "num_microbatches": int(row["global batch"]) // (dp * microbatch),
                "tp": tp,
                "pp": pp,
                "cells": dp,
                "pipelines_per_cell": 1,
            }
            rows.append(Measured(data, float(row["iteration time (ms)"]) / 1e3))
    return rows


def gpu_with(calibration: Calibration) -> dict[str, Any]:
    return GPUS["A100-80"].model_copy(update={"calibration": calibration}).model_dump(exclude_none=True)


def simulated_s(run: Measured, calibration: Calibration, folder: Path) -> float | None:
    """The result of `atlas simulate JOB.yaml --schedule 1f1b` for the run's job file; None if it is refused."""
    cluster = {**run.data["cluster"], "gpus": {"A100-80": gpu_with(calibration)}}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**run.data, "cluster": cluster}))
    try:
        result = evaluate(load_job(path), "1f1b")
    except AtlasError as error:
        print(f"refused: {run.key}: {error}")
        return None
    row = result.row()
    if not row["fits"]:
        print(f"does not fit: {run.key}: {row['peak_gib']:.1f} of {row['memory_gib']:.1f} GiB")
    return float(row["iteration_s"]) if row["fits"] else None


def closed_s(job: Job) -> float:
    """1F1B in closed form, from the simulator's costs: for the fit, which needs thousands of evaluations."""
    stages = price(job).compute_ns[0]
    busy, closing = stages[:, [Kind.F, Kind.B]].sum(axis=1), stages[:, [Kind.SYNC, Kind.STEP]].sum(axis=1)
    return float(busy.sum() + (job.num_microbatches - 1) * busy.max() + closing.max()) / 1e9


def closed(jobs: Sequence[Job], calibration: Calibration) -> Floats:
    gpu = GPUS["A100-80"].model_copy(update={"calibration": calibration})
    found = []
    for job in jobs:
        cluster = job.cluster.model_copy(update={"gpus": {"A100-80": gpu}})
        found.append(closed_s(job.model_copy(update={"cluster": cluster})))
    return np.array(found)


def to_point(c: Calibration) -> Floats:
    """Log odds of the shares, log of the floor: every point is a valid calibration."""
    shares = np.array([c.matrix_efficiency, c.memory_efficiency, c.peer_efficiency])
    return np.append(np.log(shares / (1 - shares)), np.log(c.layer_floor_us))


def from_point(point: Floats) -> Calibration:
    matrix, memory, peer = (1 / (1 + np.exp(-point[:3]))).tolist()
    floor_us = float(np.exp(point[3]))
    return Calibration(
        matrix_efficiency=matrix, memory_efficiency=memory, peer_efficiency=peer, layer_floor_us=floor_us
    )


def fit(samples: Sequence[Sequence[Measured]]) -> Calibration:
    """The constants with the least error; every sample has the same weight, whatever its number of runs."""
    jobs = [[parse_job(run.data) for run in sample] for sample in samples]
    seconds = [np.array([run.seconds for run in sample]) for sample in samples]

    def residuals(point: Floats) -> Floats:
        calibration = from_point(point)
        parts = [
            soften(np.log(closed(some, calibration) / s)) / np.sqrt(len(s))
            for some, s in zip(jobs, seconds, strict=True)
        ]
        return np.concatenate(parts)

    return from_point(least_squares(residuals, to_point(START), max_steps=25))


def constants(c: Calibration) -> str:
    return (
        f"matrix {c.matrix_efficiency:.3f}, memory {c.memory_efficiency:.3f}, peers {c.peer_efficiency:.3f}, "
        f"floor {c.layer_floor_us:.0f} us"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--shipped", action="store_true", help="fit nothing: score the built-in constants of A100-80")
    args = parser.parse_args()
    if not (args.data / "multi_node_a100.csv").exists():
        return not_measured("accuracy_a100", f"no data in {args.data}")
    began = time.perf_counter()
    runs = read(args.data / "multi_node_a100.csv")
    report = Report("A100 iteration times, atlas simulate with runtime: megatron", OTHERS)
    order = np.argsort([hashlib.sha256(run.key.encode()).hexdigest() for run in runs])
    halves = {"B": (order[0::2], order[1::2]), "A": (order[1::2], order[0::2])}
    predicted, half_of, refused = np.zeros(len(runs)), np.full(len(runs), "-"), 0
    single = [] if args.shipped else read(args.data / "single_node_a100.csv")[::SINGLE_STEP]
    shipped = GPUS["A100-80"].calibration
    assert shipped is not None
    with tempfile.TemporaryDirectory() as folder:
        for name, (train, test) in halves.items():
            found = shipped if args.shipped else fit([single, [runs[i] for i in train]])
            how = "as shipped" if args.shipped else "fitted without it"
            print(f"half {name} of {len(test)} rows, {how}: {constants(found)}")
            for i in test:
                seconds = simulated_s(runs[i], found, Path(folder))
                refused += seconds is None
                predicted[i], half_of[i] = seconds or np.nan, name
    error = predicted / np.array([run.seconds for run in runs]) - 1
    print(f"\n{'error':>7} {'measured s':>10} {'predicted s':>11} half  run  (worst first)")
    for i in np.argsort(-np.abs(error)):
        print(f"{error[i]:+7.1%} {runs[i].seconds:10.2f} {predicted[i]:11.2f} {half_of[i]:>4}  {runs[i].key}")
    for name in halves:
        part = error[half_of == name]
        report.figure(f"a100 iteration time, half {name}, mean error", float(np.nanmean(np.abs(part))), "share")
        report.figure(f"a100 iteration time, half {name}, bias", float(np.nanmean(part)), "share")
    report.figure("a100 iteration time, mean error", float(np.nanmean(np.abs(error))), "share", at_most=BAR)
    report.figure("a100 iteration time, size of the bias", abs(float(np.nanmean(error))), "share", at_most=BIAS_BAR)
    report.figure("a100 iteration time, median error", float(np.nanmedian(np.abs(error))), "share")
    report.figure("a100 iteration time, worst error", float(np.nanmax(np.abs(error))), "share")
    report.figure("a100 rows", len(runs), "rows")
    report.figure("a100 rows refused", refused, "rows", at_most=0)
    if not args.shipped:
        print(f"fitted on all rows (the constants of A100-80): {constants(fit([single, runs]))}")
    report.figure("a100 accuracy bench, wall time", time.perf_counter() - began, "s", at_most=900)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
