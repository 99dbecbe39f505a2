"""Change a job or a plan and simulate it again: sweep any key, find the bottleneck, vary the network.

    --sweep cluster.wan.latency_ms=10,20,40         three values
    --sweep cluster.wan.latency_ms=10..100:10       ten values, evenly spaced (1..1000:7log: by equal factors)
    --sweep cluster.datacenters.east.nodes=8..32:4  any key that `--set` takes
    --sweep lose=east,west                          without one datacenter
    --sweep add=east                                with one more datacenter like east

Without --replan, a job is placed as its file says and a plan keeps its placement. With --replan, the planner runs again
at every value.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Column

from atlas.api import WhatIf, whatif
from atlas.commands.simulate import priced
from atlas.console import (
    Meter,
    job_flags,
    print_json,
    ranged,
    require_apart,
    require_drawable,
    require_outputs,
    say,
    show,
)
from atlas.cost.compute import pricing
from atlas.errors import SpecError
from atlas.planner.change import Sweep, parse_sweep
from atlas.planner.whatif import Marginal, Point, percentiles
from atlas.spec.plan import load_job_or_plan
from atlas.view.chart import write_chart
from atlas.view.table import folded, plain_table, right, seconds

SHOWN_RESOURCES = 10
"""Rows of the bottleneck table."""
MIN_SAVED_SHARE = 1e-4
"""A resource that saves less of the iteration is no bottleneck."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("job", type=Path, metavar="JOB|PLAN", help="a job file, or a plan of `atlas plan --out`")
    add("--sweep", action="append", default=[], metavar="KEY=VALUES", help="a key and its values")
    add("--replan", action="store_true", help="run the planner again at every value")
    add(
        "--monte-carlo",
        type=ranged("monte_carlo"),
        default=0,
        metavar="N",
        help="simulate N networks with random bandwidths and latencies, or as the links' `model:` files describe them",
    )
    add(
        "--wan-sigma",
        type=ranged("wan_sigma"),
        metavar="S",
        help="multiply bandwidths and latencies by log-normal factors of sigma S (default: the job's `jitter.wan`, or "
        "0.2)",
    )
    add("--seed", type=ranged("seed"), default=0, metavar="N", help="seed of the random networks")
    add("--no-marginals", action="store_true", help="skip the bottleneck table")
    job_flags(parser)
    add("--json", action="store_true", help="print the results as JSON instead of tables")
    add("--out", type=Path, metavar="FILE", help="write the first sweep's curve (.svg or .html)")
    add("--page", type=Path, metavar="FILE", help="write the first sweep's curve as an HTML page")


def run(args: argparse.Namespace) -> int:
    wanted = require_outputs({"--out": args.out, "--page": args.page})
    require_drawable(args.out, "--out")
    if wanted and not any(parse_sweep(text).numeric for text in args.sweep):
        raise SpecError(
            where="--out" if args.out else "--page",
            key="sweep",
            rule="a curve needs a sweep over numbers",
            remedy="Give one, such as --sweep cluster.wan.latency_ms=10..100:10",
        )
    job, plan = load_job_or_plan(args.job, args.set)
    require_apart(wanted, job.files)
    with Meter() as meter:
        found = whatif(
            plan or job,
            *args.sweep,
            replan=args.replan,
            bottleneck=not args.no_marginals,
            monte_carlo=args.monte_carlo,
            wan_sigma=args.wan_sigma,
            seed=args.seed,
            progress=meter,
        )
    if args.json:
        print_json(found.as_dict())
    else:
        _show(found)
    for path, as_page in ((args.out, None), (args.page, True)):
        if path is not None:
            write_chart(path, found.curve(), found.title, as_page=as_page, below=_below(found))
            say(f"wrote {path}")
    return 0


def _below(found: WhatIf) -> str:
    """The bottleneck table, for a page."""
    if not found.marginals:
        return ""
    cells = []
    for one in found.marginals[:SHOWN_RESOURCES]:
        share = one.saves_s / (one.iteration_s + one.saves_s)
        cells.append((one.resource, f"{one.now:g}", f"{one.more:g}", seconds(one.saves_s), f"{100 * share:.1f} %"))
    head = "".join(f"<th align=left>{name}</th>" for name in ("resource", "from", "to", "saves", "of the iteration"))
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    said = html.escape(_bottleneck(found.marginals))
    return f"<h2>Bottleneck</h2><p>{said}</p><table cellpadding=4>{head}{rows}</table>"


def _show(found: WhatIf) -> None:
    job, now, figures = found.job, found.now, found.now.figures
    show(
        f"{job.name}: {now.candidate.where()} ({now.candidate.how()}): {seconds(figures.iteration_s)} an iteration, "
        f"{figures.tokens_per_s:,.0f} tokens/s",
        "",
    )
    for one, points in found.sweeps:
        show(_sweep_table(one, points, figures.tokens_per_s), "")
    if found.marginals:
        show(_bottleneck(found.marginals), "", _marginal_table(found.marginals), "")
    if times := found.runs.times_s:
        said = ", ".join(f"{key.removesuffix('_s')} {seconds(value)}" for key, value in percentiles(times).items())
        varied = f"bandwidth and latency of every link varied (sigma {found.wan_sigma:g})"
        if found.runs.tail is not None:
            varied = "cross traffic drawn from the models of the links"
            said += f"; {found.runs.tail.words()}"
        show(f"{len(times)} runs, {varied}: {said}", "")
    show("All times are simulated.", priced(pricing(job), job.runtime))


def _sweep_table(one: Sweep, points: list[Point], base: float) -> Any:
    key = Column(one.key, style="bold", justify="right" if one.numeric else "left", overflow="fold")
    table = plain_table(key, *right("iteration", "tokens/s", "vs now"), *folded("where"))
    for point in points:
        if point.tokens_per_s is None:
            table.add_row(str(point.value), "–", "–", "–", f"cannot run: {point.note}")
            continue
        ratio = f"{point.tokens_per_s / base:.3f}x"
        table.add_row(str(point.value), seconds(point.iteration_s), f"{point.tokens_per_s:,.0f}", ratio, point.note)
    return table


def _bottleneck(more: Sequence[Marginal]) -> str:
    best = more[0]
    if best.saves_s <= MIN_SAVED_SHARE * best.iteration_s:
        return "No bottleneck: 10 % more of any resource, or 10 % less latency, saves less than 0.01 %."
    share = best.saves_s / (best.iteration_s + best.saves_s)
    return (
        f"Bottleneck: {best.resource} ({best.key}). Changing it from {best.now:g} to {best.more:g} saves "
        f"{seconds(best.saves_s)}, {100 * share:.1f} % of the iteration."
    )


def _marginal_table(more: Sequence[Marginal]) -> Any:
    table = plain_table("resource", *right("from", "to", "saves", "per unit"))
    for one in more[:SHOWN_RESOURCES]:
        unit = one.saves_s / abs(one.more - one.now) if one.more != one.now else 0.0
        table.add_row(one.resource, f"{one.now:g}", f"{one.more:g}", seconds(one.saves_s), seconds(unit))
    return table
