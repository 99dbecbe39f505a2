"""Simulate a training job across datacenters under one or more schedules.

Without --schedule and --tcp: the classics on one TCP connection, and every schedule on many.
Every time in the result is simulated; only `engine_s` is measured. Pictures leave out schedules on one connection if
others ran on many: on the same axis the others would be too small to see.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atlas.commands.files import Outputs, make_folder, picture_flags, require_apart, require_folder
from atlas.commands.numbers import whole
from atlas.commands.terminal import Meter, as_json, say, show
from atlas.commands.words import headline, more_table, notes, page_notes, why
from atlas.cost.cluster_arrays import cluster_arrays
from atlas.evaluate.job import Choice, default_choices, evaluate_all, find_schedule
from atlas.evaluate.result import Result, rows
from atlas.ir.replace import replacing
from atlas.planner.files import candidate_of
from atlas.planner.whole import Whole, simulate_whole
from atlas.schedules import SCHEDULES
from atlas.spec.plan import Plan, load_job_or_plan
from atlas.view import results_table
from atlas.view.table import seconds

RESULTS = "results.json"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="the job: docs/jobs.md explains its keys")
    parser.add_argument(
        "--schedule", action="append", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}; may be repeated"
    )
    parser.add_argument("--tcp", choices=("one", "many"), help="connections between two nodes")
    job_flags(parser)
    search_flags(parser)
    parser.add_argument("--iterations", type=whole(1, 1000), default=1, metavar="N", help="simulate N of them in a row")
    parser.add_argument(
        "--monte-carlo", type=whole(1, 100_000), default=0, metavar="N", help="N runs with the job's `jitter`"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write results.json, page.html, figure.svg and timeline files to DIR"
    )
    picture_flags(parser)
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write a timeline file for `atlas view` and `compare`, one per schedule",
    )


def job_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the job; may be repeated"
    )


def search_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of the search (default 0)")
    parser.add_argument(
        "--tries", type=whole(1, 1_000_000), metavar="N", help="orders a search may try (default: by the job's size)"
    )


def run(args: argparse.Namespace) -> int:
    outputs = Outputs.of(args)
    if args.out is not None:
        require_folder(args.out, "--out")
    outputs.require_writable()
    choices = _choices(args.schedule, args.tcp)
    job, plan = load_job_or_plan(args.job, args.set)
    if args.out is not None:
        outputs = _in_folder(args.out, outputs)
        require_apart({"--out": args.out / RESULTS}, job.files)
    outputs.require_apart(job.files)
    as_planned = plan is not None and args.schedule is None and args.tcp is None
    sharing = True
    if plan is not None and as_planned:
        how = plan.schedule
        choices, sharing = [(how.name, how.tcp)], how.sharing
        args.tries, args.seed = args.tries or how.tries or None, how.seed
    with Meter() as meter:
        results, left_out = evaluate_all(
            job,
            choices,
            skip=args.schedule is None,
            sharing=sharing,
            budget=args.tries,
            seed=args.seed,
            iterations=args.iterations,
            jitter_runs=args.monte_carlo,
            progress=meter,
        )
        together = _whole(plan, args, meter) if plan is not None and as_planned and len(plan.groups) > 1 else None
    found = rows(results)
    if together is not None:
        found[0]["all_groups_s"] = together.iteration_s
    for name, reason in left_out.items():
        say(f"atlas: {name} skipped: {reason}")
    if args.json:
        sys.stdout.write(as_json(found))
    else:
        _show(results, found)
        if plan is not None and together is not None:
            show(
                f"This is the slowest of {len(plan.groups)} groups. All of them, their gradients meeting over the WAN: "
                f"{seconds(together.iteration_s)} an iteration."
            )
    if args.out is not None:
        make_folder(args.out)
        with replacing(args.out / RESULTS) as file:
            file.write(as_json(found).encode())
    _write(outputs, results, job.files)
    return 0


def _whole(plan: Plan, args: argparse.Namespace, progress: Meter) -> Whole:
    """All groups of a plan, as it was predicted."""
    how, candidate = plan.schedule, candidate_of(plan)
    return simulate_whole(
        plan.job,
        cluster_arrays(plan.job),
        candidate,
        how.name,
        sharing=how.sharing,
        budget=args.tries,
        seed=args.seed,
        progress=progress,
    )


def _choices(schedules: Sequence[str] | None, tcp: Any) -> list[Choice]:
    """What to simulate; each pair once, in the order given."""
    if schedules is None:
        return default_choices() if tcp is None else [(name, tcp) for name in SCHEDULES]
    return list(dict.fromkeys((find_schedule(name).name, tcp or "many") for name in schedules))


def _show(results: Sequence[Result], found: Sequence[dict[str, Any]]) -> None:
    table = results_table(found, title=headline(results[0]), source="\n".join(notes(found)))
    more = more_table(found)
    show(table, *([""] if more else []), *([more] if more else []), why(found))


def _in_folder(folder: Path, outputs: Outputs) -> Outputs:
    """With the names of what goes into the folder beside the results."""
    return replace(
        outputs,
        page=outputs.page or folder / "page.html",
        svg=outputs.svg or folder / "figure.svg",
        save=outputs.save or folder / "run.timeline",
    )


def _write(outputs: Outputs, results: Sequence[Result], inputs: Sequence[str]) -> None:
    timelines = [result.timeline for result in results]
    # One connection can take twenty times as long: beside it the others would be too small to see.
    drawn = [result for result in results if result.tcp == "many"] or results
    title = results[0].case.job.name
    outputs.write(timelines, [result.timeline for result in drawn], title, page_notes(results, drawn), inputs)
    for path in outputs.written(timelines):
        say(f"wrote {path}")
