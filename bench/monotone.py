"""Results that make sense: lower latency, more bandwidth, more nodes or more memory never makes an answer worse.

    python bench/monotone.py                 300 sweeps, half an hour
    python bench/monotone.py --quick         30 sweeps, about two minutes
    python bench/monotone.py --seed 7        other jobs
    python bench/monotone.py --part plan     one part of it: simulate or plan

Random jobs and the examples; one key of each is swept over five values. `simulate` sweeps latency and bandwidth of
the WAN under every schedule that is meant to be monotone, and compares `atlas` with every schedule that fits the same
memory. `plan` sweeps nodes and memory, latency and bandwidth, and reads the figure of the plan. Both call what the
commands call. A sweep is a violation where a better value takes more than 0.1 % longer than any worse one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common.report import Report

from atlas.errors import AtlasError
from atlas.evaluate.job import evaluate_all
from atlas.ir.check import peak_memory
from atlas.planner.run import make_plan
from atlas.spec import Job, load_job, override, parse_job

TOLERANCE = 1e-3
SCHEDULES = ("gpipe", "1f1b", "1f1b-eager", "zero-bubble", "atlas")
"""Meant to be monotone. Varuna decides at run time, and interleaved 1F1B divides a node pair's path between stages."""
EXAMPLES = ("gpt-a", "gpt-b", "three-dcs", "tiny")
LATENCIES, RATES = (1, 2, 5, 10, 20, 30, 40, 60, 100, 200), (0.5, 1, 2, 4, 5, 6, 8, 10, 20, 50)


def random_job(rng: np.random.Generator) -> Job:
    """Two to four datacenters, with a trunk in some, pipelines that share in most, recompute in half."""
    count = int(rng.integers(2, 5))
    wan: dict[str, Any] = {"latency_ms": float(rng.choice(LATENCIES)), "pair_gbps": float(rng.choice(RATES))}
    if rng.random() < 0.25:
        wan["trunk_gbps"] = float(rng.choice([4, 10, 20]))
    dcs = [
        {
            "name": f"d{i}",
            "nodes": 8,
            "gpus_per_node": 1,
            "gpu": "A100-80",
            "net_gbps": float(rng.choice([50, 100, 400])),
        }
        for i in range(count)
    ]
    model = {
        "layers": int(rng.choice([6, 8, 12, 16])), "hidden": int(rng.choice([1024, 2048, 4096])), "heads": 16,
        "vocab": 32_000, "seq_len": int(rng.choice([1024, 2048, 4096])),
    }  # fmt: skip
    how = {
        "pp": int(rng.integers(count, 7)), "num_microbatches": int(rng.choice([4, 8, 12, 16, 24])),
        "pipelines_per_cell": int(rng.choice([1, 2, 3, 4])), "recompute": bool(rng.random() < 0.5),
    }  # fmt: skip
    if rng.random() < 0.3:
        how["memory_gib"] = float(rng.choice([12, 16, 24]))
    return parse_job({"name": "random", "model": model, "cluster": {"datacenters": dcs, "wan": wan}, **how})


def some(rng: np.random.Generator, values: Sequence[float], count: int = 5) -> list[float]:
    return sorted(rng.choice(values, count, replace=False).tolist())


def violation(better_first: Sequence[float]) -> float:
    """By which share the worst offender takes longer than a value that ought to be worse for it."""
    found, least = 0.0, np.inf
    for seconds in reversed(better_first):
        found = max(found, seconds / least - 1)
        least = min(least, seconds)
    return found


# ---- simulate ------------------------------------------------------------------------------------------------
def simulated(job: Job) -> dict[str, float]:
    """Seconds by schedule; those that take more memory than the job allows are in parentheses."""
    names = ["gpipe", "1f1b", "1f1b-eager", "interleaved", "varuna", "zero-bubble", "atlas"]
    results, _ = evaluate_all(job, [(name, "many") for name in names])
    found = {}
    for result in results:
        fits = peak_memory(result.single.program, result.case.memory) <= result.case.memory.cap
        found[result.schedule if fits else f"({result.schedule})"] = result.single.makespan_ns / 1e9
    return found


def sweep_simulate(report: Report, count: int, rng: np.random.Generator) -> None:
    worst = dict.fromkeys(SCHEDULES, 0.0)
    violations, lost, most_lost, swept = dict.fromkeys(SCHEDULES, 0), 0, 1.0, 0
    while swept < count:
        if rng.random() < 0.2:
            path = Path(__file__).parents[1] / "examples" / f"{rng.choice(EXAMPLES)}.yaml"
            job = load_job(path, [])
        else:
            job = random_job(rng)
        by_latency = rng.random() < 0.5
        key = "latency_ms" if by_latency else "pair_gbps"
        values = some(rng, LATENCIES) if by_latency else some(rng, RATES)[::-1]
        try:
            rows = [simulated(override(job, [f"cluster.wan.{key}={value}"])) for value in values]
        except AtlasError as error:
            print(f"{job.name}: {error}")
            continue
        swept += 1
        print(f"simulate {swept} of {count}: {short(job)}", flush=True)
        for name in SCHEDULES:
            seconds = [row.get(name, row.get(f"({name})", 0.0)) for row in rows]
            found = violation(seconds)
            worst[name] = max(worst[name], found)
            violations[name] += found > TOLERANCE
            if found > TOLERANCE:
                print(f"violation {name} {found:.2%} {key}={values} {[round(s, 5) for s in seconds]} {short(job)}")
        for value, row in zip(values, rows, strict=True):
            best = min((s, name) for name, s in row.items() if not name.startswith("("))
            most_lost = max(most_lost, row["atlas"] / best[0])
            if row["atlas"] > best[0] * (1 + 1e-9):
                lost += 1
                print(f"atlas loses to {best[1]} {row['atlas'] / best[0]:.4f} {key}={value} {short(job)}")
    report.figure("simulate: sweeps over latency and bandwidth", swept, "sweeps")
    for name in SCHEDULES:
        report.figure(f"simulate, {name}: violations beyond 0.1 %", violations[name], "sweeps", at_most=0)
        report.figure(f"simulate, {name}: worst", 100 * worst[name], "%")
    report.figure("simulate: cases in which atlas is slower than another schedule", lost, "cases", at_most=0)
    report.figure("simulate: atlas / fastest, worst", most_lost, "x")


def short(job: Job) -> str:
    c = job.cluster
    return (
        f"{job.name} dcs={len(c.datacenters)} wan={c.wan.latency_ms}ms/{c.wan.pair_gbps}/{c.wan.trunk_gbps} "
        f"pp={job.pp} M={job.num_microbatches} C={job.pipelines_per_cell} R={job.recompute} mem={job.memory_gib} "
        f"L={job.model.layers} H={job.model.hidden} S={job.model.seq_len}"
    )


# ---- plan ----------------------------------------------------------------------------------------------------
SWEPT = {
    "nodes": ("cluster.datacenters.d0.nodes", (2, 3, 4, 5, 6, 8, 10, 12, 16), False),
    "memory": ("memory_gib", (16, 20, 24, 32, 40, 48, 64, 72), False),
    "latency": ("cluster.wan.latency_ms", LATENCIES, True),
    "bandwidth": ("cluster.wan.pair_gbps", RATES, False),
}
"""Key, values, and whether less is better."""


def sweep_plan(report: Report, count: int, rng: np.random.Generator) -> None:
    worst = dict.fromkeys(SWEPT, 0.0)
    violations, swept = dict.fromkeys(SWEPT, 0), dict.fromkeys(SWEPT, 0)
    while sum(swept.values()) < count:
        kind = str(rng.choice(list(SWEPT), p=[0.35, 0.35, 0.15, 0.15]))
        key, choices, less = SWEPT[kind]
        job = random_job(rng)
        values = some(rng, choices)[:: 1 if less else -1]
        whole = kind == "nodes"
        try:
            seconds = [
                make_plan(override(job, [f"{key}={int(value) if whole else value}"]), global_batch=64).iteration_s
                for value in values
            ]
        except AtlasError as error:
            print(f"{job.name}: {error}")
            continue
        swept[kind] += 1
        print(f"plan {sum(swept.values())} of {count}: {kind}, {short(job)}", flush=True)
        found = violation(seconds)
        worst[kind] = max(worst[kind], found)
        violations[kind] += found > TOLERANCE
        if found > TOLERANCE:
            print(f"violation plan {found:.2%} {key}={values} {[round(s, 5) for s in seconds]} {short(job)}")
    for kind, num in swept.items():
        report.figure(f"plan: sweeps over {kind}", num, "sweeps")
        report.figure(f"plan, {kind}: violations beyond 0.1 %", violations[kind], "sweeps", at_most=0)
        report.figure(f"plan, {kind}: worst", 100 * worst[kind], "%")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="30 sweeps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("simulate", "plan"))
    args = parser.parse_args()
    count = 30 if args.quick else args.sweeps
    report = Report("Monotone results (simulated)", "the same job with a better value of one key")
    if args.part != "plan":
        sweep_simulate(
            report, count * (1 if args.part else 2) // (1 if args.part else 3), np.random.default_rng(args.seed)
        )
    if args.part != "simulate":
        sweep_plan(report, count if args.part else -(-count // 3), np.random.default_rng([args.seed, 1]))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
