"""Ask what would change the answer: sweep any key of a job or a plan, find the bottleneck, vary the network.

    --sweep cluster.wan.latency_ms=10,20,40        values; or 10..100:10 for ten of them; or 1..1000:7log by factors
    --sweep cluster.datacenters.east.nodes=8..32:4 any key that `--set` takes
    --sweep lose=east,west                         without a datacenter;  add=east: with one more like it

Without --replan a job is placed as its file says, and a plan keeps its placement. With --replan the planner runs again
at every value.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from atlas.commands.simulate import priced
from atlas.console import (
    Meter,
    as_json,
    job_flags,
    number,
    require_apart,
    require_drawable,
    require_writable,
    say,
    show,
    whole,
)
from atlas.cost.compute import pricing
from atlas.errors import SpecError
from atlas.planner.change import Sweep, parse_sweep
from atlas.planner.judge import Judged, as_dict
from atlas.planner.whatif import Asked, Marginal, Point, marginals, percentiles, spread, sweep
from atlas.schedules.eager import NAME
from atlas.spec import Job
from atlas.spec.plan import load_job_or_plan
from atlas.view.chart import write_curves
from atlas.view.table import plain_table, seconds


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, metavar="JOB|PLAN", help="a job file, or a plan of `atlas plan --out`")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=VALUES", help="may be repeated")
    parser.add_argument("--replan", action="store_true", help="run the planner again at every value")
    parser.add_argument(
        "--monte-carlo", type=whole(1, 100_000), default=0, metavar="N", help="N runs with other networks"
    )
    parser.add_argument(
        "--wan-sigma", type=number(0, 3), metavar="S", help="spread of bandwidth and latency (default 0.2)"
    )
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of the Monte-Carlo runs")
    parser.add_argument("--no-marginals", action="store_true", help="skip the bottleneck table")
    job_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the first sweep's curve (.svg or .html)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="the same curve as an HTML page")


def run(args: argparse.Namespace) -> int:
    wanted = {f"--{flag}": path for flag in ("out", "page") if (path := getattr(args, flag)) is not None}
    for flag, path in wanted.items():
        (require_drawable if flag == "--out" else require_writable)(path, flag)
    require_apart(wanted)
    sweeps = [parse_sweep(text) for text in args.sweep]
    if (args.out or args.page) and not any(one.numeric for one in sweeps):
        raise SpecError(
            where="--out" if args.out else "--page",
            key="sweep",
            value=None,
            rule="a curve needs a sweep over numbers",
            remedy="Give one, such as --sweep cluster.wan.latency_ms=10..100:10",
        )
    job, plan = load_job_or_plan(args.job, args.set)
    require_apart(wanted, job.files)
    asked = Asked(job, plan, replan=args.replan)
    with Meter() as meter:
        now = asked.judged(job)
        found = [(one, sweep(asked, one, meter)) for one in sweeps]
        more: list[Marginal] = [] if args.no_marginals or args.replan else marginals(asked, meter)[1]
        sigma = args.wan_sigma if args.wan_sigma is not None else job.jitter.wan or 0.2
        times: list[float] = []
        if args.monte_carlo:
            times = spread(asked, args.monte_carlo, wan=sigma, compute=job.jitter.compute, seed=args.seed, tick=meter)
    if args.json:
        sys.stdout.write(as_json(_data(job, now, found, more, times)))
    else:
        _show(job, now, found, more, times, sigma)
        if plan is not None and plan.schedule.name == "atlas":
            show(
                f"All of this is simulated with {NAME}, so that figures differ only by what was changed. "
                f"The plan's own schedule takes "
                f"{seconds(plan.predicted.iteration_s)} an iteration."
            )
    for path, as_page in ((args.out, None), (args.page, True)):
        if path is not None:
            _draw(path, next((one, points) for one, points in found if one.numeric), job.name, as_page)
            say(f"wrote {path}")
    return 0


def _data(
    job: Job, now: Judged, found: list[tuple[Sweep, list[Point]]], more: list[Marginal], times: list[float]
) -> Any:
    return {
        "pricing": pricing(job),
        "runtime": job.runtime,
        "now": as_dict(now),
        "sweeps": [{"key": one.key, "points": [vars(point) for point in points]} for one, points in found],
        "marginals": [vars(one) for one in more],
        "bottleneck": more[0].resource if more and more[0].saves_s > 0 else None,
        "monte_carlo": {"runs": len(times), **percentiles(times)} if times else None,
    }


def _show(
    job: Job,
    now: Judged,
    found: list[tuple[Sweep, list[Point]]],
    more: list[Marginal],
    times: list[float],
    sigma: float,
) -> None:
    figures = now.figures
    show(
        f"{job.name}: {now.candidate.where()} ({now.candidate.how()}): {seconds(figures.iteration_s)} an iteration, "
        f"{figures.tokens_per_s:,.0f} tokens/s",
        "",
    )
    for one, points in found:
        show(_sweep_table(one, points, figures.tokens_per_s), "")
    if more:
        show(_bottleneck(more), "", _marginal_table(more), "")
    if times:
        said = ", ".join(f"{key.removesuffix('_s')} {seconds(value)}" for key, value in percentiles(times).items())
        show(f"{len(times)} runs, bandwidth and latency of every link off by a factor (sigma {sigma:g}): {said}", "")
    show("All times are simulated.", priced(pricing(job), job.runtime))


def _sweep_table(one: Sweep, points: list[Point], base: float) -> Any:
    table = plain_table()
    table.add_column(one.key, style="bold", justify="right" if one.numeric else "left", overflow="fold")
    for column in ("iteration", "tokens/s", "against now"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    for point in points:
        if point.tokens_per_s is None:
            table.add_row(str(point.value), "–", "–", "–", f"cannot run: {point.note}")
            continue
        ratio = f"{point.tokens_per_s / base:.3f}x"
        table.add_row(str(point.value), seconds(point.iteration_s), f"{point.tokens_per_s:,.0f}", ratio, point.note)
    return table


def _bottleneck(more: list[Marginal]) -> str:
    best = more[0]
    if best.saves_s <= 1e-4 * best.iteration_s:
        return "No bottleneck among these: 10 % more of any saves less than 0.01 %."
    share = best.saves_s / (best.iteration_s + best.saves_s)
    return (
        f"Bottleneck: {best.resource} ({best.key}). From {best.now:g} to {best.more:g} saves "
        f"{seconds(best.saves_s)}, {100 * share:.1f} % of the iteration."
    )


def _marginal_table(more: list[Marginal]) -> Any:
    table = plain_table()
    for column in ("resource", "from", "to", "saves", "per unit"):
        table.add_column(column, justify="left" if column == "resource" else "right")
    for one in more[:10]:
        unit = one.saves_s / abs(one.more - one.now) if one.more != one.now else 0.0
        table.add_row(one.resource, f"{one.now:g}", f"{one.more:g}", seconds(one.saves_s), seconds(unit))
    return table


def _draw(path: Path, found: tuple[Sweep, list[Point]], name: str, as_page: bool | None) -> None:
    """The curve; `as_page` None: as the file's name says."""
    one, points = found
    line = [(float(p.value), p.iteration_s) for p in points if p.iteration_s is not None]
    wide = len(line) > 2 and min(x for x, _ in line) > 0 and max(x for x, _ in line) / min(x for x, _ in line) >= 50
    write_curves(
        path,
        {"iteration": line},
        one.key,
        "seconds an iteration (simulated)",
        f"{name}: what if {one.key} changes",
        log_x=wide,
        as_page=as_page,
    )
