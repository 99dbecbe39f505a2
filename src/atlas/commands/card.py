"""Write a run as evidence that others can check: a folder with CCL-Bench's workload card, a trace per worker and the
launch files.

SOURCE is a plan or a job (it is simulated), a timeline file of a run (then give --job), or the folder of a run. The
card and the traces say whether times are simulated, emulated or measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from atlas.api import simulate
from atlas.console import Meter, job_flags, remark, require_folder, search_flags, show, whole
from atlas.cost.arrange import arrange
from atlas.errors import AtlasError
from atlas.evidence.data_point import DataPoint
from atlas.evidence.recorder import require_same
from atlas.evidence.run_folder import find_run
from atlas.evidence.write_card import RunFacts, require_new, write_data_point
from atlas.ir.store import load_timeline
from atlas.spec.plan import Plan, load_job_or_plan, plan_text

SHOWN = 4
"""Metrics that are printed."""
DEFAULT_STEPS = 7
"""Simulated: five count, because the first and the last are left out."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a plan, a job, a timeline file, or the folder of a run")
    add("--out", type=Path, required=True, metavar="DIR", help="the folder to write; new or empty")
    add("--job", type=Path, metavar="FILE", help="the plan or job of a timeline file")
    add("--schedule", metavar="NAME", help="for a job: its schedule (default 1f1b)")
    add("--steps", type=whole(1, 1000), default=DEFAULT_STEPS, metavar="N", help="iterations to simulate")
    add("--contributor", default="", metavar="NAME", help="your name, for the card")
    add("--contact", default="", metavar="EMAIL", help="your email address, for the card")
    job_flags(parser)
    search_flags(parser)


def run(args: argparse.Namespace) -> int:
    require_folder(args.out, "--out")
    require_new(args.out)
    is_yaml = args.source.suffix in (".yaml", ".yml")
    if is_yaml and args.job is not None:
        raise AtlasError(f"--job is for a timeline file, and {args.source} is a plan or a job. Leave out --job")
    point = _simulated(args) if is_yaml else _recorded(args)
    figures = [f"  {m.name}: {m.value:.6g} {m.unit}" for m in point.ccl[:SHOWN] if m.value is not None]
    show(f"Wrote {args.out}: {len(point.ranks)} traces, times are {point.source}.", *figures)
    remark(*point.findings)
    return 0


def _simulated(args: argparse.Namespace) -> DataPoint:
    job, plan = load_job_or_plan(args.source, args.set)
    schedule = args.schedule or (None if plan is not None else "1f1b")
    with Meter() as meter:
        options = {"iterations": args.steps, "tries": args.tries, "seed": args.seed, "progress": meter}
        simulation = simulate(plan or job, schedule, **options)
    found = simulation.best
    if simulation.wholes:
        remark(
            f"the card describes the slowest of {len(simulation.wholes[0].results)} groups of pipelines; "
            "the others need cards of their own"
        )
    facts = RunFacts(found.schedule, found.tcp, command=["atlas", *sys.argv[1:]], **_stated(args, plan))
    return write_data_point(args.out, found.timeline, found.case.job, found.case.arrangement, facts)


def _recorded(args: argparse.Namespace) -> DataPoint:
    """From the timeline file of a run, which has every op of its last steps."""
    source = find_run(args.source)
    job_file = args.job or source.job
    if job_file is None:
        raise AtlasError(f"{args.source}: the card needs the run's plan or job. Give it with --job FILE")
    job, plan = load_job_or_plan(job_file, args.set)
    timeline = load_timeline(source.require_timeline(args.source))
    arrangement = arrange(job)
    require_same(job, arrangement.num_pipelines, timeline.program, args.source, job_file)
    facts = RunFacts(
        timeline.program.name,
        str(timeline.meta.get("tcp", "many")),
        command=source.command or ["atlas", *sys.argv[1:]],
        slower=int(timeline.meta.get("slower", 1)),
        trained=str(timeline.meta.get("trained", "")),
        **_stated(args, plan),
    )
    return write_data_point(args.out, timeline, job, arrangement, facts)


def _stated(args: argparse.Namespace, plan: Plan | None) -> dict[str, Any]:
    """Facts of the card that no run shows."""
    text = "" if plan is None else plan_text(plan)
    return {"plan_text": text, "contributor": args.contributor, "contact": args.contact}
