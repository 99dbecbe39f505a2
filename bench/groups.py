"""Data parallelism across regions whose pipelines are placed differently.

1. Two emulated regions of different shape, worker processes over an emulated WAN: losses against one process, and the
   iteration against the simulated one.
2. `atlas plan` on random Llama jobs over two to four regions: every winning plan is prepared as `atlas train` does, and
   three that use several regions are run: those of several groups of pipelines first, then the shortest.

    python bench/groups.py [--steps 20] [--jobs 20] [--part shapes|plans]
    python bench/groups.py --quick      # 6 steps, 4 jobs, one of them run
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common.report import Report

from atlas.errors import AtlasError
from atlas.launch.hosts import hosts_needed
from atlas.launch.preflight import require_executable
from atlas.launch.prepared_job import prepare_job
from atlas.launch.rehearse import MAX_WORKERS, Rehearsal, rehearse
from atlas.launch.train_options import TrainOptions
from atlas.planner.files import plan_of
from atlas.planner.run import make_plan
from atlas.runtime.reference import train_groups_alone
from atlas.spec import Job, parse_job
from atlas.spec.job import Place
from atlas.spec.plan import Plan, PlanGroup, group_jobs, load_job_or_plan, plan_text

NUM_RUN, RUN_STEPS = 3, 3
SLOWER = 4
"""Every duration, so that seven workers on two cores are not late."""
LONGEST_S = 20.0
"""Of an iteration that is run here."""
MICROBATCH_S, HOST_S = 0.06, 0.03
"""Durations of a plan are multiplied until a microbatch takes so long in the mean, of one pipeline and of all together:
two cores then keep up."""
LLAMAS = {
    "1B": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128_256},
    "1.1B": {"layers": 22, "hidden": 2048, "heads": 32, "kv_heads": 4, "ffn": 5632, "vocab": 32_000},
    "3B": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128_256},
    "8B": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336, "vocab": 128_256},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 steps, 4 jobs, one of them run")
    parser.add_argument("--steps", type=int, default=20, help="of the two regions")
    parser.add_argument("--jobs", type=int, default=20, help="random jobs")
    parser.add_argument("--part", choices=("shapes", "plans"), action="append", help="default: both")
    args = parser.parse_args()
    parts = args.part or ["shapes", "plans"]
    torch.set_num_threads(1)
    report = Report("Data parallelism across regions", "losses within 1e-6, iteration within 5 %, every plan runs")
    if "shapes" in parts:
        measure_shapes(report, 6 if args.quick else args.steps)
    if "plans" in parts:
        measure_plans(report, *((4, 1) if args.quick else (args.jobs, NUM_RUN)))
    return report.finish()


# ---- two regions of different shape --------------------------------------------------------------------------------
def group(dc: str, layers: tuple[int, ...], pipelines: int, microbatches: int) -> PlanGroup:
    places = (Place(dc=dc, stages=len(layers)),)
    return PlanGroup(
        placement=places, layers_per_stage=layers, cells=1, pipelines_per_cell=pipelines, num_microbatches=microbatches
    )


def shapes_job() -> Job:
    """West: two pipelines of two stages. East: three pipelines of one stage, on slower GPUs."""
    job = parse_job(
        {
            "name": "two shapes",
            "model": {"family": "llama", "layers": 8, "hidden": 2048, "heads": 16, "vocab": 32_000, "seq_len": 2048},
            "cluster": {
                "wan": {"latency_ms": 30, "pair_gbps": 10},
                "datacenters": [
                    {"name": "west", "nodes": 4, "gpus_per_node": 1, "gpu": "H100"},
                    {"name": "east", "nodes": 3, "gpus_per_node": 1, "gpu": "A100-80GB"},
                ],
            },
            "num_microbatches": 7,
            "pp": 2,
        }
    )
    job._groups = group_jobs(job, [group("west", (3, 5), 2, 7), group("east", (8,), 3, 2)])
    return job


def measure_shapes(report: Report, steps: int) -> None:
    job = shapes_job()
    options = TrainOptions("1f1b", steps=steps, clip=1.0, slower=SLOWER)
    result = rehearse(job, options)
    training = prepare_job(job, options).training
    alone, _ = train_groups_alone(training, [(2, 7), (3, 2)], steps)
    apart = max(abs(a - b) / abs(b) for a, b in zip(result.run.losses, alone, strict=True))
    report.figure("two regions: losses apart from one process", apart, "relative", at_most=1e-6)
    report.figure("two regions: iteration, emulated", result.measured.iteration_ns / 1e9, "s")
    report.figure("two regions: prediction off by", abs(result.error), "of the iteration", at_most=0.05)


# ---- random jobs ---------------------------------------------------------------------------------------------------
def random_job(seed: int) -> Job:
    """A Llama on two to four regions of unequal size."""
    rng = random.Random(seed)
    names = ["west", "east", "north", "south"][: rng.choice([2, 2, 3, 4])]
    small = seed % 2 == 0
    datacenters: list[dict[str, Any]] = [
        {
            "name": name,
            "nodes": rng.randint(1, 3) if small else rng.randint(2, 16),
            "gpus_per_node": rng.choice([1, 2]) if small else rng.choice([4, 8]),
            "gpu": rng.choice(["A100-80GB", "H100"]),
        }
        for name in names
    ]
    links = [
        {"between": [a, b], "latency_ms": rng.uniform(10, 90), "pair_gbps": rng.choice([5, 10, 25, 50])}
        for k, a in enumerate(names)
        for b in names[k + 1 :]
    ]
    model = LLAMAS[rng.choice(["1B", "1.1B"] if small else ["3B", "8B"])]
    return parse_job(
        {
            "name": f"random {seed}",
            "model": {"family": "llama", "seq_len": rng.choice([1024, 2048]), **model},
            "cluster": {"links": links, "datacenters": datacenters},
            "num_microbatches": rng.choice([64, 128, 256]),
            "pp": len(names),
            "pipelines_per_cell": 1,
        }
    )


class PreparedPlan(NamedTuple):
    plan: Plan
    job: Job
    num_processes: int

    @property
    def num_regions(self) -> int:
        return len({place.dc for group in self.plan.groups for place in group.placement})

    @property
    def slower(self) -> int:
        groups = self.plan.groups
        most = max(group.num_microbatches for group in groups)
        total = sum(group.cells * group.pipelines_per_cell * group.num_microbatches for group in groups)
        return math.ceil(max(MICROBATCH_S * most, HOST_S * total) / self.plan.predicted.iteration_s)

    @property
    def iteration_s(self) -> float:
        """As it is run here."""
        return self.slower * self.plan.predicted.iteration_s


def winning_plan(job: Job, folder: Path) -> PreparedPlan:
    """The winner of `atlas plan`, written, read and prepared as `atlas train` does. Raises AtlasError where it is
    refused."""
    path = folder / "plan.yaml"
    path.write_text(plan_text(plan_of(make_plan(job, tries=0))))
    read, plan = load_job_or_plan(path)
    assert plan is not None
    require_executable(read)
    prepared = prepare_job(read, TrainOptions.of(plan, model="job", steps=RUN_STEPS))
    nodes = {dc.name: dc.nodes for dc in read.cluster.datacenters}
    short = [dc for dc, count in hosts_needed(read).items() if count > nodes[dc]]
    if short:
        raise AtlasError(f"the plan needs more hosts than there are in {', '.join(short)}")
    assert prepared.peers is not None
    return PreparedPlan(plan, read, len(prepared.roles) * read.tp)


def measure_plans(report: Report, num_jobs: int, num_run: int) -> None:
    refused, winners = 0, list[PreparedPlan]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(num_jobs):
            try:
                winners.append(winning_plan(random_job(seed), Path(folder)))
            except AtlasError as error:
                refused += 1
                print(f"random {seed}: {error}", file=sys.stderr)
    several = [one for one in winners if one.num_regions > 1]
    report.figure(f"{num_jobs} random jobs: winning plans that are refused", refused, "plans", at_most=0)
    report.figure(f"{num_jobs} random jobs: winning plans over several regions", len(several), "plans")
    fitting = [one for one in several if one.num_processes <= MAX_WORKERS and one.iteration_s <= LONGEST_S]
    chosen = sorted(fitting, key=lambda one: (-len(one.plan.groups), one.iteration_s))[:num_run]
    for one in chosen:
        run_plan(report, one)
    report.figure("winning plans that were run", len(chosen), "plans", at_least=num_run)


def run_plan(report: Report, one: PreparedPlan) -> None:
    options = TrainOptions.of(one.plan, steps=RUN_STEPS, slower=one.slower)
    result: Rehearsal = rehearse(one.job, options)
    sizes = [(g.cells * g.pipelines_per_cell, g.num_microbatches) for g in one.plan.groups]
    alone, _ = train_groups_alone(prepare_job(one.job, options).training, sizes, RUN_STEPS)
    apart = max(abs(a - b) / abs(b) for a, b in zip(result.run.losses, alone, strict=True))
    who = f"{one.job.name} ({len(one.plan.groups)} groups, {one.num_regions} regions, {one.num_processes} workers)"
    report.figure(f"{who}: losses apart from one process", apart, "relative", at_most=1e-6)
    report.figure(f"{who}: prediction off by", abs(result.error), "of the iteration", at_most=0.05)


if __name__ == "__main__":
    sys.exit(main())
