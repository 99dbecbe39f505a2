"""List the schedules, or print the Program that one of them makes for a job.

A Program is what the simulator and the runtime take: one line per worker, its ops in order. Pipelines with the same ops
share a line; docs/tour.md explains an example.
"""

from __future__ import annotations

import argparse
import sys

from atlas.console import Meter, job_flags, print_json, remark, search_flags, show
from atlas.errors import AtlasError
from atlas.evaluate import build, find_schedule, prepare
from atlas.ir.text import to_text, to_torch_csv
from atlas.schedules import SCHEDULES
from atlas.spec.plan import load_job_or_plan
from atlas.view.table import plain_table, whole_words


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--show", nargs=2, metavar=("NAME", "JOB.yaml"), help="print the Program of this schedule for this job")
    add("--tcp", choices=("one", "many"), default="many", help="TCP connections between two nodes")
    job_flags(parser)
    search_flags(parser)
    add("--torch", action="store_true", help="print the Program as a CSV for torch.distributed.pipelining")
    add("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    if args.show is None and args.torch:
        raise AtlasError("--torch: needs --show NAME JOB.yaml, the Program to print. Give it, or leave out --torch")
    if args.show is None:
        _list(args.json)
        return 0
    schedule = find_schedule(args.show[0], "--show")
    job, plan = load_job_or_plan(args.show[1], args.set)
    tries, seed = plan.schedule.search(args.tries, args.seed) if plan is not None else (args.tries, args.seed)
    if job.groups:
        remark(f"this is one of the plan's {len(job.groups)} groups of pipelines")
    with Meter() as meter:
        program = build(prepare(job, schedule, args.tcp), schedule, budget=tries, seed=seed, progress=meter)
    sys.stdout.write(to_torch_csv(program) if args.torch else to_text(program))
    return 0


def _list(in_json: bool) -> None:
    if in_json:
        found = [{"schedule": s.name, "summary": s.summary, "shares": s.shares} for s in SCHEDULES.values()]
        print_json(found)
        return
    table = plain_table(*whole_words("schedule", style="bold"), "what it does")
    for schedule in SCHEDULES.values():
        table.add_row(schedule.name, schedule.summary)
    show(table)
