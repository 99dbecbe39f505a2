"""The first job: from region names to a verdict. Time of the three commands for 11 questions, the best of each family
against simulating all of it, and `--keep datacenters` on random jobs.

    python bench/first_job.py            11 questions, 30 clusters, 200 jobs
    python bench/first_job.py --quick    2 questions, 4 clusters, 20 jobs
    python bench/first_job.py --part questions
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.report import Report

from atlas.errors import AtlasError
from atlas.planner.families import find_families
from atlas.planner.objective import Objective
from atlas.planner.run import explore, make_plan, start
from atlas.spec import Job

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "planner"))
from plan_jobs import random_job

QUESTIONS = [
    ("llama-3-8b", "1M", ("aws:us-east-1=64xH100", "gcp:europe-west4=32xA100-80GB")),
    ("llama-3-70b", "4M", ("aws:us-west-2=128xH100", "aws:us-east-2=128xH100")),
    ("qwen3-32b", "4M", ("azure:eastus=64xH100", "azure:westeurope=64xH100")),
    ("gpt-3-6.7b", "512 sequences", ("gcp:us-central1=32xA100-40GB", "gcp:asia-northeast1=32xA100-40GB")),
    ("mistral-7b", "2M", ("aws:ap-northeast-1=32xH100", "aws:ap-southeast-2=32xH100")),
    ("llama-3-405b", "16M", ("aws:us-east-1=1024xH100", "azure:swedencentral=512xH200")),
    ("qwen3-8b", "1M", ("gcp:us-east4=16xH100", "aws:us-east-1=16xH100")),
    ("qwen3-0.6b", "256K", ("aws:us-west-2=8xL40S", "aws:eu-north-1=8xL40S")),
    ("gpt-3-175b", "1536 sequences", ("azure:southcentralus=256xA100-80GB", "gcp:us-west1=256xA100-80GB")),
    ("qwen3-14b", "2M", ("aws:us-east-1=32xH100", "aws:us-west-2=32xH100", "aws:us-east-2=32xH100")),
    ("llama-3-8b", "256 sequences", ("aws:sa-east-1=16xH100", "gcp:southamerica-east1=16xA100-80GB")),
]
"""Model, batch and sites; the first is the question of docs/tour.md."""
MOST_S = 60.0


def ask(model: str, batch: str, sites: tuple[str, ...]) -> tuple[float, float, bool]:
    """(wall seconds, CPU seconds, whether all went well) of init and plan in an empty folder."""
    atlas = [sys.executable, "-m", "atlas"]
    dcs = [word for site in sites for word in ("--dc", site)]
    commands = [
        [*atlas, "init", "--model", model, "--batch", batch, *dcs],
        [*atlas, "plan", "job.yaml", "--out", "plan.yaml", "--page", "plan.html"],
    ]
    before, began, well = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), True
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            well &= done.returncode == 0
        well &= done.stdout.startswith(("Worth it", "Not worth it", "Only together"))
        if not well:
            print(done.stdout[-500:], done.stderr[-500:], file=sys.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cpu, well


def families_apart(job: Job) -> float:
    """The worst ratio of a family's best to the best of all its candidates."""
    found = find_families(make_plan(job, tries=0), tries=0)
    worst = 1.0
    for kind, judged in found.best.items():
        every = start(job, Objective(), kind=kind)
        explore(every, "exhaustive")
        assert every.best is not None
        worst = max(worst, judged.figures.iteration_s / every.best.figures.iteration_s)
    return worst


def kept(job: Job) -> bool | None:
    """Whether every plan uses exactly the datacenters of the job; None where none can."""
    names = {dc.name for dc in job.cluster.datacenters}
    try:
        found = make_plan(job, keep=["datacenters"], tries=0)
    except AtlasError:
        return None
    families = find_families(found, keep=["datacenters"], tries=0)
    every = [found.winner, *found.rivals, *families.best.values()]
    return all(set(judged.candidate.gpus) == names for judged in every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of each")
    parser.add_argument("--part", choices=("questions", "families", "kept"), help="only this part")
    args = parser.parse_args()
    report = Report("The first job", "simulating every candidate of a family")
    if args.part in (None, "questions"):
        asked = [ask(*question) for question in (QUESTIONS[:2] if args.quick else QUESTIONS)]
        answered = sum(well for *_, well in asked)
        report.figure("questions answered without an error", answered, "questions", at_least=len(asked))
        report.figure("init and plan, slowest question", max(wall for wall, *_ in asked), "s", at_most=MOST_S)
        report.figure("init and plan, slowest question, CPU", max(cpu for _, cpu, _ in asked), "s")
    if args.part in (None, "families"):
        seeds = range(4) if args.quick else range(30)
        worst = max(families_apart(random_job(seed)) for seed in seeds)
        report.figure(f"best of each family / all of it simulated, worst of {len(seeds)}", worst, "x", at_most=1.01)
    if args.part in (None, "kept"):
        jobs = range(100, 120) if args.quick else range(100, 300)
        answers = [kept(random_job(seed)) for seed in jobs]
        planned = sum(one is not None for one in answers)
        report.figure("jobs with --keep datacenters planned", planned, "jobs", at_least=1)
        report.figure("of them with another datacenter in a plan", answers.count(False), "jobs", at_most=0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
