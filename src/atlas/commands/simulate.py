"""Simulate a training job across datacenters under one or more schedules.

Without --schedule and --tcp: gpipe, 1f1b and varuna on one TCP connection, and every schedule on many connections. All
times are simulated, except `engine_s`, which is measured. If some runs use many connections, pages and figures leave
out those on one connection: they take so much longer that the others would be too small to see.

In the table, `(turns)` means that pipelines take turns on the WAN, `gap` is iteration / lower bound, and `in flight` is
the largest number of microbatches that a worker holds at once. The rest are shares of the accelerators' time: busy, or
waiting for the WAN (wan), for an input that is not computed yet or moves inside a datacenter (peer), for gradient sums
(sync), or for the pipeline to fill and drain (ends).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from atlas.api import Simulation, simulate
from atlas.commands.view import TimelineOutputs, picture_flags
from atlas.console import (
    Meter,
    as_json,
    job_flags,
    make_folder,
    print_json,
    ranged,
    remark,
    require_apart,
    require_folder,
    search_flags,
    show,
)
from atlas.cost.compute import model_params
from atlas.evaluate import Result, find_schedule
from atlas.ir.replace import write_whole
from atlas.schedules import SCHEDULES
from atlas.sim.weather import Tail
from atlas.spec.plan import load_job_or_plan
from atlas.view import results_table
from atlas.view.chart import curves_svg
from atlas.view.table import groups_note, plain_table, right, seconds, whole_s

RESULTS = "results.json"
MIN_PATH_SHARE = 0.005
"""Smaller parts of the critical path are not listed."""
Row = Mapping[str, Any]
"""The figures of one schedule."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("job", type=Path, metavar="JOB.yaml", help="the job: docs/jobs.md explains its keys")
    add("--schedule", action="append", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    add("--tcp", choices=("one", "many"), help="TCP connections between two nodes (default: see above)")
    job_flags(parser)
    search_flags(parser)
    add("--iterations", type=ranged("iterations"), default=1, metavar="N", help="simulate N iterations in a row")
    add(
        "--monte-carlo",
        type=ranged("jitter_runs"),
        default=0,
        metavar="N",
        help="repeat the run N times with random durations (the job's `jitter`, and the links' `model:` files)",
    )
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    add("--out", type=Path, metavar="DIR", help="write results.json, page.html, figure.svg and timeline files to DIR")
    picture_flags(parser)
    add(
        "--save",
        type=Path,
        metavar="FILE",
        help="write a timeline file for `atlas view` and `atlas compare`, one per schedule",
    )


def run(args: argparse.Namespace) -> int:
    outputs = TimelineOutputs.of(args)
    if args.out is not None:
        require_folder(args.out, "--out")
    outputs.require_writable()
    for name in args.schedule or ():
        find_schedule(name)
    job, plan = load_job_or_plan(args.job, args.set)
    if args.out is not None:
        outputs = _in_folder(args.out, outputs)
        require_apart({"--out": args.out / RESULTS}, job.files)
    outputs.require_apart(job.files)
    with Meter() as meter:
        simulation = simulate(
            plan or job,
            args.schedule,
            tcp=args.tcp,
            tries=args.tries,
            seed=args.seed,
            iterations=args.iterations,
            jitter_runs=args.monte_carlo,
            progress=meter,
        )
    found = simulation.table()
    remark(*(f"{name} skipped: {reason}" for name, reason in simulation.skipped.items()))
    if args.json:
        print_json(found)
    else:
        _show(simulation, found)
    if args.out is not None:
        make_folder(args.out)
        write_whole(args.out / RESULTS, as_json(found).encode())
    drawn = [result.timeline for result in simulation.drawn]
    timelines = [result.timeline for result in simulation.results]
    outputs.write(timelines, drawn, simulation.title, page_notes(simulation), job.files, spread_chart(simulation))
    return 0


def _show(simulation: Simulation, found: Sequence[Row]) -> None:
    title = simulation.title if simulation.wholes else headline(simulation.results[0])
    table = results_table(found, title=title, source="\n".join(notes(found)))
    more = more_table(found)
    show(table, *(("", more) if more else ()), why(found[simulation.results.index(simulation.best)], len(found) == 1))


def _in_folder(folder: Path, outputs: TimelineOutputs) -> TimelineOutputs:
    """The outputs, with default names in the folder for those that were not asked for by flag."""
    return replace(
        outputs,
        page=outputs.page or folder / "page.html",
        svg=outputs.svg or folder / "figure.svg",
        save=outputs.save or folder / "run.timeline",
    )


# ---- the words around the table ------------------------------------------------------------------------------
SPENT_ON = {
    "compute": "compute",
    "wire": "bytes on the wire",
    "latency": "latency",
    "queue": "waiting for busy links",
    "sync": "gradient sync",
    "wait": "other waiting",
}
"""Names of a critical path's categories."""


def headline(result: Result) -> str:
    """`three-dcs: gpt 13.1B on 48 GPUs: stages west 4 + central 4 + east 4, 4 pipelines, 24 microbatches`."""
    return f"{result.case.job.name}: {setup(result)}"


def setup(result: Result) -> str:
    """`gpt 13.1B on 48 GPUs: stages west 4 + central 4 + east 4, 4 pipelines, 24 microbatches`."""
    job, frame = result.case.job, result.case.layout
    stages = " + ".join(f"{name} {count}" for name, count in Counter(frame.rank_dc).items())
    cells = f"{job.cells} cells of " if job.cells > 1 else ""
    pipelines = f"{frame.num_pipelines} pipeline{'s' if frame.num_pipelines > 1 else ''}"
    tp = f" x tp {job.tp}" if job.tp > 1 else ""
    return (
        f"{job.model.family} {_billions(model_params(job.model))} on {result.row()['num_gpus']:,} GPUs: "
        f"stages {stages}{tp}, {cells}{pipelines}, {job.num_microbatches} microbatches"
    )


def _billions(params: int) -> str:
    return f"{params / 1e9:.1f}B" if params >= 1e9 else f"{params / 1e6:.0f}M"


def called(row: Row) -> str:
    """`1f1b on one connection`."""
    return f"{row['schedule']} on {'one connection' if row['tcp'] == 'one' else 'many connections'}"


def notes(found: Sequence[Row]) -> list[str]:
    """The notes under the table."""
    lines = ["All times are simulated."]
    if len(found) > 1:
        lines[0] += f" Speedup is over {called(max(found, key=whole_s))}."
    lines += groups_note(found, times=False)
    lines.append(priced(found[0]["pricing"], found[0]["runtime"]))
    return lines + _too_big(found)


def priced(pricing: str, runtime: str) -> str:
    """`Compute: calibrated constants.`"""
    other = "" if runtime == "atlas" else f" Runtime: {runtime}, which `atlas train` does not execute."
    return f"Compute: {pricing}.{other}"


def page_notes(simulation: Simulation) -> list[str]:
    """The notes under the title of a page, which has a table of its own."""
    drawn, found = simulation.drawn, simulation.table()
    left = [row for row, result in zip(found, simulation.results, strict=True) if result not in drawn]
    shown = [row for row in found if row not in left]
    times = ", ".join(f"{row['schedule']} {seconds(whole_s(row))}" for row in left)
    beside = [f"Not drawn, on one TCP connection: {times}."] if left else []
    spread = [_spread_note(row) for row in shown if row["spread"] is not None]
    return [*(groups_note(found) or [f"{setup(drawn[0])}."]), *beside, *spread, *_too_big(shown)]


def _spread_note(row: Row) -> str:
    found = row["spread"]
    varied, cause = _varied(found)
    return (
        f"{called(row)}, {found['runs']} runs{_of_group(row)} with {varied}: {seconds(found['p50_s'])} an iteration "
        f"in the median and {seconds(found['p95_s'])} at the 95th percentile{f'; {cause}' if cause else ''}."
    )


def spread_chart(simulation: Simulation) -> str:
    """The distribution of iteration times over the runs of a Monte-Carlo; nothing without one."""
    found = {called(result.row()): sorted(result.spread.times_s) for result in simulation.drawn if result.spread}
    series = {
        name: [(s, 100 * (k + 1) / len(times)) for k, s in enumerate(times)] for name, times in found.items() if times
    }
    title = "How long an iteration takes: y % of the runs take at most x"
    return curves_svg(series, "seconds", "% of the runs", title) if series else ""


def _too_big(found: Sequence[Row]) -> list[str]:
    too_big = {row["schedule"]: row for row in found if not row["fits"]}
    return [
        f"! {name} does not fit in memory: it needs {row['peak_gib']:.1f} GiB, a GPU has {row['memory_gib']:.1f} GiB."
        for name, row in too_big.items()
    ]


def why(row: Row, alone: bool) -> str:
    """The critical path of the fastest schedule that fits, and the lower bound."""
    path = {part: s for part, s in row["critical_path_s"].items() if s > MIN_PATH_SHARE * row["iteration_s"]}
    parts = sorted(path, key=lambda part: -path[part])
    spent = ", ".join(f"{100 * path[part] / row['iteration_s']:.0f}% {SPENT_ON[part]}" for part in parts)
    turns = ", pipelines taking turns on the WAN" if row["sharing"] else ""
    best = "" if alone else "Fastest: "
    alone_s = f"{seconds(row['iteration_s'])} an iteration"
    if "all_groups_s" in row:
        alone_s = f"{seconds(row['all_groups_s'])} an iteration of all groups. The slowest group alone: {alone_s}"
    return (
        f"\n{best}{called(row)}{turns}: {alone_s}, "
        f"{row['tokens_per_s']:,.0f} tokens/s, MFU {100 * row['mfu']:.0f}%. "
        f"Its critical path is {spent}. No order of this work on these links can take less than "
        f"{seconds(row['lower_bound_s'])}: {row['lower_bound_reason']}."
    )


def more_table(found: Sequence[Row]) -> Table | None:
    """The time of an iteration in a row of several, and the percentiles of runs with jitter, if they were simulated."""
    one = "slowest group" if "all_groups_s" in found[0] else "one iteration"
    columns: dict[str, list[float]] = {one: [row["iteration_s"] for row in found]}
    if found[0]["steady_s"] is not None:
        columns["steady"] = [row["steady_s"] for row in found]
    if found[0]["spread"] is not None:
        for name, key in (("5%", "p5_s"), ("median", "p50_s"), ("95%", "p95_s"), ("worst", "worst_s")):
            columns[name] = [row["spread"][key] for row in found]
    if len(columns) == 1:
        return None
    table = plain_table(Column("schedule", style="bold"), "TCP", *right(*columns), caption=_of_runs(found[0]))
    for row, *times in zip(found, *columns.values(), strict=True):
        table.add_row(row["schedule"], row["tcp"], *(seconds(value) for value in times))
    return table


def _of_runs(row: Row) -> str:
    """The caption of percentiles; nothing without a Monte-Carlo."""
    if row["spread"] is None:
        return ""
    varied, cause = _varied(row["spread"])
    of = _of_group(row)
    return f"Percentiles are of {row['spread']['runs']} runs{of} with {varied}." + (
        f" First row: {cause}." if cause else ""
    )


def _of_group(row: Row) -> str:
    return " of the slowest group" if "all_groups_s" in row else ""


def _varied(spread: Row) -> tuple[str, str]:
    """What varied between the runs of a Monte-Carlo; with weather, also the cause of the slowest runs."""
    if spread["tail_path"] is None:
        return "the job's jitter", ""
    return "cross traffic from the links' models", Tail(spread["tail_path"], spread["tail_share"]).words()
