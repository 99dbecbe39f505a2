"""Compare two timelines: iteration time, idle time by cause, critical path, and every op.

A and B are timeline files, or JOB.yaml:SCHEDULE to simulate now.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from atlas.api import simulate
from atlas.commands.view import TimelineOutputs, of_groups, picture_flags
from atlas.console import Meter, job_flags, print_json, search_flags, show
from atlas.errors import AtlasError
from atlas.evaluate import Progress
from atlas.ir.analysis import summary
from atlas.ir.difference import difference
from atlas.ir.store import load_timeline
from atlas.ir.timeline import Timeline
from atlas.spec.plan import load_job_or_plan
from atlas.view import compare_table
from atlas.view.table import groups_note, side_by_side


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name in ("a", "b"):
        add(name, metavar=name.upper(), help="a timeline file, or JOB.yaml:SCHEDULE")
    add(
        "--tcp",
        choices=("one", "many"),
        default="many",
        help="TCP connections between two nodes, for JOB.yaml:SCHEDULE",
    )
    job_flags(parser)
    search_flags(parser)
    add("--json", action="store_true", help="print the comparison as JSON")
    picture_flags(parser)


def run(args: argparse.Namespace) -> int:
    outputs = TimelineOutputs.of(args)
    outputs.require_writable()
    (make_a, from_a), (make_b, from_b) = (_source(text, args) for text in (args.a, args.b))
    inputs = (*from_a, *from_b)
    outputs.require_apart(inputs)
    with Meter() as meter:
        a, b = make_a(meter), make_b(meter)
    _require_related(a, b, args)
    found = difference(a, b)
    one, other = ({**summary(timeline), **of_groups(timeline)} for timeline in (a, b))
    notes = groups_note([{**row, "tcp": timeline.meta.get("tcp")} for row, timeline in ((one, a), (other, b))])
    if args.json:
        print_json({"a": one, "b": other, "difference": asdict(found)})
    else:
        show(side_by_side(one, other), "", compare_table(found), *notes)
    outputs.write([a, b], [a, b], f"{a.program.name} and {b.program.name}", notes, inputs)
    return 0


def _require_related(a: Timeline, b: Timeline, args: argparse.Namespace) -> None:
    """Raise where the two are of jobs that have nothing in common: no datacenter, and another shape."""
    one, other = a.program, b.program
    shapes = [(p.num_pipelines, p.num_stages, p.num_microbatches) for p in (one, other)]
    names = [frozenset(p.rank_dc) for p in (one, other)]
    if not names[0] & names[1] and shapes[0] != shapes[1]:
        said = [
            f"{text} has {pipelines} pipelines of {stages} stages in {', '.join(sorted(dcs))}"
            for text, (pipelines, stages, _), dcs in zip((args.a, args.b), shapes, names, strict=True)
        ]
        raise AtlasError(f"unrelated jobs cannot be compared: {'; '.join(said)}. Compare two runs of one job")


def _source(text: str, args: argparse.Namespace) -> tuple[Callable[[Progress], Timeline], tuple[str, ...]]:
    """A function that makes the timeline, and the files it reads."""
    job, colon, schedule = text.rpartition(":")
    if Path(text).exists() or not colon:
        if Path(text).suffix in (".yaml", ".yml"):
            raise AtlasError(f"{text} is a job: name a schedule with it, such as {text}:atlas, or give a timeline file")
        return (lambda progress: load_timeline(text)), (text,)
    loaded, plan = load_job_or_plan(job, args.set)

    def simulated(progress: Progress) -> Timeline:
        options = {"tcp": args.tcp, "tries": args.tries, "seed": args.seed, "progress": progress}
        return simulate(plan or loaded, schedule, **options).best.timeline

    return simulated, loaded.files
