"""Monotone results: lower latency, more bandwidth, more nodes or more memory never makes a result worse.

    python bench/monotone.py                          300 sweeps, a process for each core
    python bench/monotone.py --quick                  30 sweeps, and 6 of --wide
    python bench/monotone.py --first 40 --sweeps 20   sweeps 40 to 59 only
    python bench/monotone.py --seed 7                 other jobs
    python bench/monotone.py --part plan              one part of it: simulate or plan
    python bench/monotone.py --wide                   jobs of every kind (common/wide_jobs.py)
    python bench/monotone.py --wide --show 17         print the job of sweep 17 as YAML, with its command

Random jobs and the examples; one key of each is swept over five values. Of three sweeps in a row two are of
`simulate`: latency and bandwidth of the WAN under every schedule that is meant to be monotone, and `atlas` compared
with every schedule that fits the same memory. The third is of `plan`: nodes, memory, latency or bandwidth, and the
figure of the plan. Both call what the commands call. A sweep is a violation where a better value takes more than
0.1 % longer than any worse one, or is refused as infeasible while a worse one is accepted; a job that is refused at
every value is drawn anew. Each sweep draws from its own generator, so a range gives the same sweeps in any process; its
JSON line has the values and the seconds. No time is measured, so sweeps may run beside each other.

Without `--wide` a job has one A100 a node and two to four datacenters of eight nodes. Latencies below 1 ms and of 3 ms
were added, and refused values count: a seed gives other sweeps than before, and those of docs/log.md are older. With
`--wide` datacenters differ in GPU type, GPUs a node, nodes and links, tp is 1 to 8, models have 1B to 70B parameters,
and other runtimes are simulated. Both parts then sweep nodes, memory, latency, bandwidth and the network of one
datacenter; `simulate` keeps the placement while nodes change.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from common.report import Report
from common.wide_jobs import LATENCIES, RATES, wide_sweep

from atlas.errors import AtlasError, InfeasibleError
from atlas.evaluate import evaluate_all
from atlas.planner.run import make_plan
from atlas.spec import Job, load_job, override, parse_job

TOLERANCE = 1e-3
SCHEDULES = ("gpipe", "1f1b", "1f1b-eager", "zero-bubble", "atlas")
"""Meant to be monotone. Varuna decides at run time, and interleaved 1F1B divides a node pair's path between stages."""
EXAMPLES = ("gpt-a", "gpt-b", "three-dcs", "tiny")
QUICK, QUICK_WIDE = 30, 6
"""Sweeps of `--quick`: of usual jobs, and of jobs of every kind."""


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
    """By which share the worst offender takes longer than a value that ought to be worse for it; infinite where it is
    refused (infinite seconds) and the worse one accepted."""
    found, least = 0.0, np.inf
    for seconds in reversed(better_first):
        if least < np.inf:
            found = max(found, seconds / least - 1)
        least = min(least, seconds)
    return found


@dataclass
class Tally:
    """What the sweeps of one schedule, or over one key of a plan, came to."""

    sweeps: int = 0
    violations: int = 0
    refused: int = 0
    """Violations in which a better value was refused."""
    worst: float = 0.0
    """Of the others."""
    lost: int = 0
    """Cases in which `atlas` took longer than another schedule within the same memory."""
    most_lost: float = 1.0
    cases: int = 0

    def add(self, better_first: Sequence[float]) -> float:
        found = violation(better_first)
        self.sweeps += 1
        self.violations += found > TOLERANCE
        self.refused += found == np.inf
        self.worst = max(self.worst, found if found < np.inf else 0.0)
        return found


@dataclass
class Tallies:
    """By schedule for `simulate`, by key for `plan`."""

    simulate: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in SCHEDULES})
    plan: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in (*SWEPT, "network")})


Found = TypeVar("Found")


def accepted(work: Callable[[Job], Found], jobs: Iterable[Callable[[], Job]], refused: Found) -> list[Found]:
    """What `work` finds for each job, `refused` for those that are infeasible; an error if all are."""
    found, errors = list[Found](), list[InfeasibleError]()
    for job in jobs:
        try:
            found.append(work(job()))
        except InfeasibleError as error:
            found.append(refused)
            errors.append(error)
    if len(errors) == len(found):
        raise errors[0]
    return found


# ---- simulate ------------------------------------------------------------------------------------------------
def simulated(job: Job) -> dict[str, float]:
    """Seconds by schedule; those that take more memory than the job allows are in parentheses."""
    names = ["gpipe", "1f1b", "1f1b-eager", "interleaved", "varuna", "zero-bubble", "atlas"]
    results, _ = evaluate_all(job, [(name, "many") for name in names])
    found = {}
    for result in results:
        fits = result.single.program.peak_held(result.case.memory) <= result.case.memory.cap
        found[result.schedule if fits else f"({result.schedule})"] = result.single.makespan_ns / 1e9
    return found


def sweep_simulate(rng: np.random.Generator) -> dict[str, Any]:
    """One sweep. A job that cannot run is drawn anew."""
    while True:
        job = random_job(rng)
        if rng.random() < 0.2:
            job = load_job(Path(__file__).parents[1] / "examples" / f"{rng.choice(EXAMPLES)}.yaml", [])
        by_latency = rng.random() < 0.5
        key = "latency_ms" if by_latency else "pair_gbps"
        values = some(rng, LATENCIES) if by_latency else some(rng, RATES)[::-1]
        with suppress(AtlasError):
            jobs = [partial(override, job, [f"cluster.wan.{key}={value}"]) for value in values]
            rows = accepted(simulated, jobs, {})
            return {"key": key, "values": values, "job": short(job), "rows": rows}


def sweep_wide(rng: np.random.Generator, part: str) -> dict[str, Any]:
    """One sweep of either part. A job that cannot run is drawn anew."""
    while True:
        with suppress(AtlasError):
            sweep = wide_sweep(rng, part)
            line = {"kind": sweep.kind, "key": sweep.key, "values": sweep.values, "job": sweep.words}
            if part == "simulate":
                return {**line, "rows": accepted(simulated, sweep.jobs(), {})}
            return {**line, **planned(sweep.jobs())}


def add_simulated(tallies: dict[str, Tally], line: dict[str, Any]) -> dict[str, Any]:
    """Count a sweep; its line with what was found instead of its rows."""
    rows, violations, lost = line.pop("rows"), {}, {}
    seconds = {name: [row.get(name, row.get(f"({name})", np.inf)) for row in rows] for name in SCHEDULES}
    for name in SCHEDULES:
        if (found := tallies[name].add(seconds[name])) > TOLERANCE:
            violations[name] = found
    atlas = tallies["atlas"]
    for value, row in zip(line["values"], rows, strict=True):
        if not row:
            continue
        atlas.cases += 1
        best_s, best = min((s, name) for name, s in row.items() if not name.startswith("("))
        ratio = row["atlas"] / best_s
        atlas.most_lost = max(atlas.most_lost, ratio)
        if ratio > 1 + 1e-9:
            atlas.lost += 1
            lost[str(value)] = (best, ratio)
    return {**line, "seconds": seconds, "violations": violations, "atlas_slower": lost}


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


def sweep_plan(rng: np.random.Generator) -> dict[str, Any]:
    """One sweep. A job that cannot run is drawn anew."""
    while True:
        kind = str(rng.choice(list(SWEPT), p=[0.35, 0.35, 0.15, 0.15]))
        key, choices, less = SWEPT[kind]
        job = random_job(rng)
        values = some(rng, choices)[:: 1 if less else -1]
        with suppress(AtlasError):
            jobs = [partial(override, job, [f"{key}={int(v) if kind == 'nodes' else v}"]) for v in values]
            return {"kind": kind, "key": key, "values": values, "job": short(job), **planned(jobs)}


def planned(jobs: Iterable[Callable[[], Job]]) -> dict[str, Any]:
    """Seconds and plans."""

    def best(job: Job) -> tuple[float, str]:
        plan = make_plan(job, global_batch=64)
        return plan.iteration_s, f"{plan.winner.candidate.where()} {plan.winner.candidate.how()}"

    seconds, plans = zip(*accepted(best, jobs, (np.inf, "refused")), strict=True)
    return {"seconds": seconds, "plans": plans}


def add_planned(tallies: dict[str, Tally], line: dict[str, Any]) -> dict[str, Any]:
    kind = line.pop("kind")
    found = tallies[kind].add(line["seconds"])
    return {**line, "violations": {kind: found} if found > TOLERANCE else {}}


# ---- the report ------------------------------------------------------------------------------------------------
def write(report: Report, tallies: Tallies, parts: Sequence[str], prefix: str) -> None:
    """The lines of usual jobs, or with a prefix of jobs of every kind."""

    def one(name: str, tally: Tally) -> None:
        report.figure(f"{name}: violations beyond 0.1 %", tally.violations, "sweeps", at_most=0)
        report.figure(f"{name}: of these a better value refused", tally.refused, "sweeps")
        report.figure(f"{name}: worst", 100 * tally.worst, "%")

    if "simulate" in parts:
        atlas, name = tallies.simulate["atlas"], f"{prefix}simulate"
        report.figure(f"{name}: sweeps", atlas.sweeps, "sweeps")
        for schedule, tally in tallies.simulate.items():
            one(f"{name}, {schedule}", tally)
        report.figure(f"{name}: cases in which atlas is slower than another schedule", atlas.lost, "cases", at_most=0)
        report.figure(f"{name}: atlas / fastest, worst", atlas.most_lost, "x")
        report.figure(f"{name}: cases", atlas.cases, "cases")
    if "plan" in parts:
        for kind, tally in tallies.plan.items():
            if tally.sweeps:
                report.figure(f"{prefix}plan: sweeps over {kind}", tally.sweeps, "sweeps")
                one(f"{prefix}plan, {kind}", tally)


def part_of(number: int) -> str:
    return "plan" if number % 3 == 2 else "simulate"


def generator(seed: int, number: int, part: str) -> np.random.Generator:
    return np.random.default_rng([seed, number, part == "plan"])


def swept(seed: int, number: int, part: str, wide: bool) -> dict[str, Any]:
    """In a process of its own: one sweep, as a line."""
    rng = generator(seed, number, part)
    if wide:
        return {"sweep": number, "part": part, "wide": True, **sweep_wide(rng, part)}
    return {"sweep": number, "part": part, **(sweep_plan(rng) if part == "plan" else sweep_simulate(rng))}


def show(seed: int, number: int, part: str) -> None:
    """The job of a wide sweep at each of its values, and the command that repeats it."""
    rng = generator(seed, number, part)
    while True:
        with suppress(AtlasError):
            sweep = wide_sweep(rng, part)
            _ = accepted(simulated, sweep.jobs(), {}) if part == "simulate" else planned(sweep.jobs())
            break
    how = "simulate JOB --schedule all" if part == "simulate" else "plan JOB --batch '64 sequences'"
    print(f"# atlas {how}; {sweep.key} = {sweep.values}")
    for value in sweep.values:
        print(f"--- # {sweep.key} = {value}")
        print(yaml.safe_dump(sweep.data_at(value), sort_keys=False, default_flow_style=None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first sweep")
    parser.add_argument("--sweeps", type=int, default=300, help="how many, from the first on")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} sweeps, and {QUICK_WIDE} with --wide")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("simulate", "plan"))
    parser.add_argument("--wide", action="store_true", help="jobs of every kind")
    parser.add_argument("--show", type=int, metavar="N", help="only print the jobs of wide sweep N")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    args = parser.parse_args()
    if args.show is not None:
        show(args.seed, args.show, args.part or part_of(args.show))
        return 0
    report = Report("Monotone results (simulated)", "the same job with a better value of one key")
    parts = [args.part] if args.part else ["simulate", "plan"]
    numbers = {args.wide: args.sweeps} if not args.quick else {False: QUICK, True: QUICK_WIDE}
    tallies = {wide: Tallies() for wide in numbers}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        sweeps = [
            pool.submit(swept, args.seed, number, args.part or part_of(number), wide)
            for wide, num_sweeps in numbers.items()
            for number in range(args.first, args.first + num_sweeps)
        ]
        for done in as_completed(sweeps):
            line = done.result()
            to = tallies["wide" in line]
            line = add_planned(to.plan, line) if line["part"] == "plan" else add_simulated(to.simulate, line)
            print(json.dumps(line), flush=True)
    for wide, found in tallies.items():
        write(report, found, parts, "wide jobs, " if wide else "")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
