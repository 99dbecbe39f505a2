"""Error of `atlas simulate` in iteration time and peak memory, for runs that Sailor measured on GH200 and mixed GPU
types.

Every run becomes files: a profile (Sailor's per-layer tables), and a job or, if pipelines differ in GPU types, a plan
of several groups. They are loaded and simulated like the command does. Nothing is fitted for time. GH200 runs use
`runtime: torch`, mixed ones `runtime: megatron`. Reads ../shared/data/sailor, or the folder given as an argument (runs
in `measured/gh200-*` and `measured/mit`); exits with 77 if it is absent.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common.report import Report, not_measured

from atlas import api

DATA = Path(__file__).parents[2] / "shared" / "data" / "sailor"
ZONE = "us-central1-a"
MODELS = {
    "opt": ("OPT-350", {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 50272, "seq_len": 2048}),
    "neo": ("GPT-Neo-2.7", {"layers": 32, "hidden": 2560, "heads": 20, "vocab": 50257, "seq_len": 2048}),
}
PER_NODE = {"GH-96": 4}
MEMORY_GIB = {"GH-96": 95.6, "Titan-RTX": 24, "RTX-2080": 11, "RTX-3090": 24}
"""From Sailor's cluster file."""
BARS = {"gh200": (0.065, 0.05), "mixed": (0.10, None)}
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Run:
    """One measured run."""

    name: str
    kind: str
    """gh200 or mixed."""
    model: str
    pipelines: tuple[tuple[str, ...], ...]
    """GPU type of each stage, by pipeline."""
    layers_per_stage: tuple[int, ...]
    microbatch: int
    num_microbatches: int
    tp: int
    seconds: float
    peak_bytes: float


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def read_runs(data: Path) -> list[Run]:
    runs = []
    for path in sorted((data / "measured").rglob("*.json")):
        folder = path.relative_to(data / "measured").parts[0]
        raw = load(path)
        (plan,) = raw["pipeline_list"]
        stages = [[(vms[0][0], tp) for vms, tp in stage] for stage in plan["tmp_per_stage"]]
        pipelines = tuple(zip(*([gpu for gpu, _ in stage] for stage in stages), strict=True))
        dp = len(pipelines)
        # The first number of a stage is its first layer: a list may repeat a number.
        model = "neo" if "neo" in folder.lower() else "opt"
        begins = [layers[0] for layers in plan["layers_per_stage"]]
        ends = [*begins[1:], MODELS[model][1]["layers"] + 2]
        counts = [b - a for a, b in zip(begins, ends, strict=True)]
        counts[0] -= 1  # the embedding is layer 0, the head the last one
        counts[-1] -= 1
        mixed = len({gpu for one in pipelines for gpu in one}) > 1
        runs.append(
            Run(
                name=f"{folder} {path.stem.removeprefix('plan_config_')}",
                kind="mixed" if mixed else "gh200",
                model=model,
                pipelines=pipelines,
                layers_per_stage=tuple(counts),
                microbatch=raw["mbs"],
                num_microbatches=math.ceil(raw["gbs"] / (raw["mbs"] * dp)),
                tp=stages[0][0][1],
                seconds=raw["real"],
                peak_bytes=raw["max_mem"],
            )
        )
    return runs


class Tables:
    """Sailor's measurements of layers and networks."""

    def __init__(self, data: Path) -> None:
        self.times = load(data / "profiles_tmp.json")
        self.sizes = load(data / "llm_info.json")
        self.rates = load(data / "multizone_bandwidths_het.json")

    def profile(self, run: Run) -> dict[str, Any]:
        """The profile file of a run."""
        name, shape = MODELS[run.model]
        sizes = self.sizes[name][str(run.tp)]
        last = shape["layers"] + 1

        def piece(gpu: str, layer: int) -> dict[str, Any]:
            forward, backward, update = self.times[name][gpu][str(run.microbatch)][str(run.tp)][str(layer)]
            size = sizes[str(layer)]
            return {
                "forward_s": forward,
                "backward_s": backward,
                "update_s": update,
                "params": size["params_floats"],
                "activation_bytes": float(FLOAT_BYTES * size["act_mem_floats"] * run.microbatch),
            }

        entries = [
            {
                "gpu": gpu,
                "microbatch": run.microbatch,
                "tp": run.tp,
                **{key: shape[key] for key in ("seq_len", "hidden", "heads", "vocab")},
                "precision": "fp32",
                "embedding": piece(gpu, 0),
                "layers": [piece(gpu, layer) for layer in range(1, last)],
                "head": piece(gpu, last),
            }
            for gpu in sorted({gpu for one in run.pipelines for gpu in one})
        ]
        return {"model": name, "entries": entries}

    def bytes_per_s(self, a: str, b: str, count: int, size_bytes: float) -> float:
        """Of `count` pairs of GPUs in two nodes, together: GB/s = a log2(MB)^2 + b log2(MB) + c, up to a maximum."""
        found = self.rates[ZONE][a].get(str(count), {}).get(ZONE, {}).get(b, {}).get(str(count))
        found = found or self.rates[ZONE][b][str(count)][ZONE][a][str(count)]
        (x2, x1, x0), most = found
        x = max(0.0, math.log2(size_bytes / 1e6))  # below 1 MB the fit is invalid: keep its value at 1 MB
        return float(min(most, (x2 * x * x + x1 * x + x0) * 1e9))


def files(run: Run, tables: Tables, folder: Path) -> Path:
    """Write the job or plan file of a run, with its profile."""
    (folder / "profile.json").write_text(json.dumps(tables.profile(run)))
    shape = MODELS[run.model][1]
    sent = FLOAT_BYTES * run.microbatch * shape["seq_len"] * shape["hidden"]
    kinds = sorted({gpu for one in run.pipelines for gpu in one})
    used = Counter(gpu for one in run.pipelines for gpu in one)

    def gbps(a: str, b: str, per_node: int) -> float:
        """Rate of a node: of all its GPUs, or of one tp group if the table has no more."""
        count = min(per_node, 8)
        return tables.bytes_per_s(a, b, count, sent) * 8 / 1e9

    datacenters = []
    for gpu in kinds:
        per_node = PER_NODE.get(gpu, 8)
        nodes = -(-used[gpu] * run.tp // per_node)
        datacenters.append(
            {"name": gpu, "nodes": nodes, "gpus_per_node": per_node, "gpu": gpu, "net_gbps": gbps(gpu, gpu, per_node)}
        )
    links = [{"between": [a, b], "latency_ms": 0.02, "pair_gbps": gbps(a, b, 8)} for a in kinds for b in kinds if a < b]
    peaks = {"bf16_tflops": 100.0, "fp32_tflops": 20.0, "memory_gbytes_per_s": 600.0}  # the profile replaces them
    cluster = {
        "datacenters": datacenters,
        "gpus": {gpu: {**peaks, "memory_gib": MEMORY_GIB.get(gpu, 40)} for gpu in kinds},
        **({"links": links} if links else {}),
    }
    placements = Counter(run.pipelines)
    first = next(iter(placements))
    job = {
        "name": run.name,
        "model": shape,
        "cluster": cluster,
        "runtime": "torch" if run.kind == "gh200" else "megatron",
        "profile": str(folder / "profile.json"),
        "recompute": False,
        "precision": "fp32",
        "gradient_bytes": 4,
        "optimizer_bytes": 8,
        "microbatch": run.microbatch,
        "num_microbatches": run.num_microbatches,
        "tp": run.tp,
        "pp": len(run.layers_per_stage),
        "cells": placements[first],
        "pipelines_per_cell": 1,
        "placement": places(first),
        "layers_per_stage": list(run.layers_per_stage),
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job if run.kind == "gh200" else plan(run, job, placements)))
    return path


def places(pipeline: tuple[str, ...]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for gpu in pipeline:
        if found and found[-1]["dc"] == gpu:
            found[-1]["stages"] += 1
        else:
            found.append({"dc": gpu, "stages": 1})
    return found


def plan(run: Run, job: dict[str, Any], placements: Counter[tuple[str, ...]]) -> dict[str, Any]:
    """Pipelines on different GPU types are groups of a plan."""
    groups = [
        {
            "placement": places(pipeline),
            "layers_per_stage": list(run.layers_per_stage),
            "cells": count,
            "pipelines_per_cell": 1,
            "num_microbatches": run.num_microbatches,
        }
        for pipeline, count in placements.items()
    ]
    zero = ("iteration_s", "tokens_per_s", "usd_per_iteration", "usd_per_hour", "usd_per_trillion_tokens")
    more = ("egress_usd_per_iteration", "wan_gb_per_iteration", "peak_gib", "memory_gib")
    predicted = {**dict.fromkeys((*zero, *more), 0.0), "tokens_per_iteration": 1, "num_gpus": 1}
    origin = {"job": run.name, "strategy": "measured", "objective": "none", "estimated": 0, "simulated": 0}
    return {
        "plan": 1,
        "runnable": "no, because another framework ran it",
        "groups": groups,
        "schedule": {"name": "1f1b", "tcp": "many"},
        "predicted": predicted,
        "origin": origin,
        "job": job,
    }


def simulate(path: Path) -> tuple[float, float]:
    """(seconds, peak bytes of the fullest GPU), from `atlas simulate FILE --schedule 1f1b`."""
    found = api.simulate(path, "1f1b")
    (row,) = found.table()
    groups = found.wholes[0].results if found.wholes else found.results
    return row.get("all_groups_s", row["iteration_s"]), max(one.row()["peak_gib"] for one in groups) * 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    args = parser.parse_args()
    if not (args.data / "measured").exists():
        return not_measured("accuracy_sailor", f"no data in {args.data}")
    tables, runs = Tables(args.data), read_runs(args.data)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for run in runs:
            found.append(simulate(files(run, tables, Path(folder))))
    seconds, peaks = np.array(found).T
    time_error = seconds / [run.seconds for run in runs] - 1
    peak_error = peaks / [run.peak_bytes for run in runs] - 1
    print(f"{'run':28} pp dp tp  b  M {'s':>6} {'predicted':>9} {'error':>6} {'GB':>5} {'predicted':>9} {'error':>6}")
    for i, run in enumerate(runs):
        print(
            f"{run.name:28} {len(run.layers_per_stage):2} {len(run.pipelines):2} {run.tp:2} {run.microbatch:2} "
            f"{run.num_microbatches:2} {run.seconds:6.2f} {seconds[i]:9.2f} {time_error[i]:+6.1%} "
            f"{run.peak_bytes / 1e9:5.1f} {peaks[i] / 1e9:9.1f} {peak_error[i]:+6.1%}"
        )
    report = Report("Sailor's measured runs, atlas simulate", "Sailor itself: GH200 8.9 % in time, mixed types 10.0 %")
    for kind, (time_bar, peak_bar) in BARS.items():
        at = [i for i, run in enumerate(runs) if run.kind == kind]
        if not at:
            continue
        report.figure(f"{kind} rows", len(at), "rows")
        for what, error, bar in (
            ("iteration time", time_error[at], time_bar),
            ("peak memory", peak_error[at], peak_bar),
        ):
            report.figure(f"{kind} {what}, mean error", float(np.abs(error).mean()), "share", at_most=bar)
            report.figure(f"{kind} {what}, bias", float(error.mean()), "share")
            report.figure(f"{kind} {what}, worst error", float(np.abs(error).max()), "share")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
