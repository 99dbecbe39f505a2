"""Find the best plan for a job: datacenters, parallelism and schedule; its cost, and why other plans were not chosen.

Every plan trains on the job's own global batch. The planner estimates candidates in closed form, simulates the best of
them event by event, and searches the schedule of the best plan. Ctrl-C ends the search and prints the best plan so far.

    east 2 + west 2                  each pipeline has two stages in east and two in west
    east 2 | west 2                  some pipelines have two stages in east, the others two in west
    tp 1 x pp 4 x dp 2 (1x2), b 1    GPUs of a layer, stages, pipelines, microbatch size; (1x2): one cell of two
                                     pipelines, which take turns on the WAN
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas.api import PlanSearch, plan
from atlas.commands import plan_sailor
from atlas.commands.simulate import priced
from atlas.console import (
    Meter,
    job_flags,
    print_json,
    ranged,
    remark,
    require_apart,
    require_drawable,
    require_outputs,
    say,
    show,
    write_text,
)
from atlas.cost.cluster_arrays import cluster_arrays
from atlas.cost.compute import pricing
from atlas.errors import SpecError
from atlas.planner.fabrics import FabricChoice, energy_of
from atlas.planner.families import INNER_STEPS
from atlas.planner.objective import OBJECTIVES
from atlas.planner.report import compared, distinct, front, has_prices, notes, rows
from atlas.planner.run import SearchResult
from atlas.planner.space import KEEPABLE
from atlas.planner.strategies import STRATEGIES
from atlas.planner.verdict import dollars, family_rows, origins
from atlas.spec.plan import load_job_or_plan
from atlas.view.chart import front_svg, write_chart
from atlas.view.table import folded, plain_table, right, seconds

SHOWN = 8
"""Other plans in the table."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("job", type=Path, nargs="?", metavar="JOB.yaml", help="the job: docs/jobs.md explains its keys")
    add(
        "--strategy",
        default="ours",
        metavar="NAME",
        help=f"how to search; {'; '.join(f'{name}: {words}' for name, (words, _) in STRATEGIES.items())}",
    )
    add(
        "--objective",
        metavar="NAME",
        help=f"what to optimise: {', '.join(OBJECTIVES)} (default throughput; with --min-throughput or --deadline, "
        "cost)",
    )
    add("--budget", metavar="USD", help="spend at most this: 500/h (an hour) or 2.5/it (an iteration)")
    add("--min-throughput", metavar="RATE", help="reach at least this: 0.03it/s or 50000tok/s")
    add("--tokens", metavar="N", help="tokens to train on by --deadline, such as 300B or 1e12")
    add("--deadline", metavar="TIME", help="time in which to train --tokens, such as 30d or 12h")
    add(
        "--keep",
        action="append",
        default=[],
        metavar="KEY",
        help=f"keep this key as the job has it: {', '.join(KEEPABLE)}",
    )
    add("--global-batch", type=ranged("global_batch"), metavar="N", help="sequences an iteration (default: the job's)")
    add("--tcp", choices=("one", "many"), default="many", help="TCP connections between two nodes")
    add(
        "--tries",
        type=ranged("plan.tries"),
        metavar="N",
        help="about how many orders the search for the plan's schedule tries (0: none; default: by the job's size)",
    )
    add("--seed", type=ranged("seed"), default=0, metavar="N", help="seed of that search")
    add(
        "--confidence",
        type=ranged("confidence"),
        metavar="P",
        help="choose by this percentile of the iteration time, such as 0.95, where WAN rates and delays vary as "
        "the links' `model:` files describe (docs/weather.md)",
    )
    add("--fabrics", metavar="KINDS", help="try these fabrics, such as rail,photonic, in each datacenter; use the best")
    add(
        "--no-break-even",
        action="store_true",
        help="skip the break-even points: bandwidth, latency, GPUs and prices at which training across regions starts "
        "or stops being worth it",
    )
    job_flags(parser)
    add("--json", action="store_true", help="print the result as JSON instead of tables")
    add("--out", type=Path, metavar="PLAN.yaml", help="write the plan for `atlas simulate`, `whatif` and `train`")
    add("--page", type=Path, metavar="FILE", help="write an HTML page: the placement on a map, and the other plans")
    add(
        "--pareto",
        type=Path,
        metavar="FILE",
        help="write a chart of time and cost with the Pareto front (.svg or .html)",
    )
    plan_sailor.configure(parser)


def run(args: argparse.Namespace) -> int:
    _require_one_kind(args)
    if args.from_sailor is not None:
        return plan_sailor.run(args)
    if args.job is None:
        raise SpecError(where="command line", key="JOB.yaml", rule="is missing", remedy="Name a job file")
    wanted = require_outputs({"--out": args.out, "--page": args.page, "--pareto": args.pareto})
    require_drawable(args.pareto, "--pareto")
    job, _ = load_job_or_plan(args.job, args.set, to_plan=True)
    require_apart(wanted, job.files)
    if args.pareto is not None and not has_prices(cluster_arrays(job)):
        raise SpecError(
            where=job.where,
            key="usd_per_gpu_hour",
            rule="the Pareto front (--pareto) needs prices, and no datacenter has one",
            remedy="Write usd_per_gpu_hour in the cluster",
        )
    with Meter() as meter:
        search = plan(
            job,
            objective=args.objective,
            budget=args.budget,
            min_throughput=args.min_throughput,
            tokens=args.tokens,
            deadline=args.deadline,
            strategy=args.strategy,
            keep=args.keep,
            global_batch=args.global_batch,
            tcp=args.tcp,
            tries=args.tries,
            seed=args.seed,
            confidence=args.confidence,
            fabrics=args.fabrics,
            break_even=not args.no_break_even,
            progress=meter,
        )
        search.break_even  # noqa: B018 - found here, while the bar is shown
    if args.json:
        print_json(search.as_dict())
    else:
        _show(search)
    if search.found.interrupted:
        remark("interrupted: this is the best plan so far")
    _write(args, search)
    return 0


OF_A_JOB = (
    *("job", "strategy", "confidence", "fabrics", "budget", "tokens", "deadline", "keep", "global_batch", "tcp"),
    *("tries", "seed", "no_break_even", "set", "out", "page", "pareto"),
)
OF_SAILOR = ("trace", "model", "gpu", "cost", "gpu_price", "max_usd", "judge", "no_simulate", "out_sailor")
"""Flags that only a job has, and flags that only Sailor's files have."""
DEFAULTS = {"strategy": "ours", "tcp": "many", "seed": 0}
"""Of flags that are never None or False."""


def _require_one_kind(args: argparse.Namespace) -> None:
    """Raise SpecError for a flag that the given kind of input (a job, or Sailor's files) does not use."""
    theirs = args.from_sailor is not None
    for name in OF_A_JOB if theirs else OF_SAILOR:
        value = getattr(args, name)
        if value not in (None, [], DEFAULTS.get(name)) and value is not False:
            flag = "JOB.yaml" if name == "job" else f"--{name.replace('_', '-')}"
            rule = "cannot be used with --from-sailor" if theirs else "needs --from-sailor DIR"
            raise SpecError(where="command line", key=flag, rule=rule, remedy=f"Leave out {flag}")


# ---- tables ------------------------------------------------------------------------------------------------
def _show(search: PlanSearch) -> None:
    planned = search.found
    best, job = planned.winner, planned.job
    figures, candidate = best.figures, best.candidate
    money = has_prices(planned.cluster)
    lines = [
        search.verdict,
        "",
        f"{job.name}: {planned.objective.words()}, {planned.space.sequences:,} sequences an iteration",
        f"  {candidate.where()}",
        f"  {candidate.how()}, {candidate.num_gpus:,} GPUs"
        + (", pipelines taking turns on the WAN" if candidate.sharing else ""),
        f"  {seconds(figures.iteration_s)} an iteration, {figures.tokens_per_s:,.0f} tokens/s, "
        f"schedule {planned.schedule}",
    ]
    if money:
        lines.append(
            f"  ${figures.usd_per_iteration:,.4g} an iteration (${figures.egress_usd:,.3g} of it egress), "
            f"${figures.usd_per_hour:,.2f} an hour, ${figures.usd_per_tera_token:,.0f} per trillion tokens"
        )
    if planned.percentile_choice is not None:
        lines.append(f"  {planned.percentile_choice.words()}")
    if (energy := energy_of(job.cluster, best)) is not None:
        lines.append(
            f"  {energy.watts / 1e3:,.1f} kW ({energy.fabric_watts / 1e3:,.1f} kW of it fabric), fabric "
            f"{dollars(energy.fabric_usd)}, {energy.tokens_per_joule:.3g} tokens per joule"
            + (f", {figures.tokens / figures.usd_per_iteration:,.0f} tokens per dollar" if money else "")
        )
    lines += [*(f"  {line}" for line in notes(planned)), f"  Runnable: {search.plan.runnable}."]
    lines += [f"  {line}" for line in origins(job)]
    show(*lines, "")
    if len(planned.cluster.names) > 1:
        show(_families(search, money), "")
    if search.fabrics:
        show(_fabrics(search.fabrics), "")
    if search.break_even:
        show("Break-even points:", *(f"  {one.text}" for one in search.break_even), "")
    show(_table(planned, money))


def _ranking(caption: str, first: str, second: str, cost: str | None) -> Any:
    """An empty table of plans: two columns of text, the time, the cost if any, and why a plan was not chosen."""
    figures = right("iteration", *([cost] if cost else []))
    why = folded("why not chosen", ratio=3)
    return plain_table(*folded(first, second, ratio=3), *figures, *why, caption=caption)


def _families(search: PlanSearch, money: bool) -> Any:
    caption = f"Low communication is simulated as data parallelism that exchanges gradients every {INNER_STEPS} steps."
    table = _ranking(caption, "best of each family", "stages in", "$/T tokens" if money else None)
    for row in family_rows(search.families):
        plan = row["plan"]
        cost = [dollars(plan["usd_per_tera_token"]) if plan else ""] if money else []
        figures = [plan["where"], seconds(plan["iteration_s"])] if plan else ["", ""]
        table.add_row(row["family"], *figures, *cost, row["lost"] or "chosen", style=None if row["lost"] else "green")
    return table


def _fabrics(choices: Sequence[FabricChoice]) -> Any:
    caption = "Best plan with each choice of fabrics, without a search of its schedule; the first choice is used."
    figures = right("GPUs", "iteration", "kW", "fabric", "tokens/J")
    table = plain_table(*folded("fabric", "datacenters", ratio=2), *figures, caption=caption)
    for one in choices:
        row = one.row()
        if one.planned is None:
            table.add_row(one.words, f"cannot run: {one.note}", *[""] * 5)
            continue
        energy = ["-"] * 3
        if "watts" in row:
            energy = [f"{row['watts'] / 1e3:,.0f}", dollars(row["fabric_usd"]), f"{row['tokens_per_joule']:.3g}"]
        sites = f"{len(row['sites'])}: {', '.join(row['sites'])}"
        table.add_row(one.words, sites, f"{row['num_gpus']:,}", seconds(row["iteration_s"]), *energy)
    return table


def _table(planned: SearchResult, money: bool) -> Any:
    caption = f"{compared(planned)} {priced(pricing(planned.job), planned.job.runtime)}"
    caption += " * Pareto-optimal." if money else ""
    table = _ranking(caption, "stages in", "parallelism", "$/iteration" if money else None)
    on_front = {judged.candidate for judged in front(planned)} if money else set()
    shown = distinct(planned)[: SHOWN + 1]
    for judged, row in zip(shown, rows(planned), strict=False):
        mark = "*" if judged.candidate in on_front else ""
        cost = [f"{row['usd_per_iteration']:,.4g}{mark}"] if money else []
        lost = row["lost"] or "chosen"
        cells = [row["where"], row["how"], seconds(row["iteration_s"]), *cost, lost]
        table.add_row(*cells, style="green" if judged.candidate == planned.winner.candidate else None)
    return table


# ---- files -------------------------------------------------------------------------------------------------
def _write(args: argparse.Namespace, search: PlanSearch) -> None:
    if args.out is not None:
        search.save(args.out)
        say(f"wrote {args.out}. Next: atlas simulate {args.out}")
    if args.page is not None:
        write_text(args.page, search.page())
    if args.pareto is not None:
        title = f"{search.found.job.name}: time and cost"
        write_chart(args.pareto, front_svg(search.table(), search.as_dict()["pareto"], title=title), title)
        say(f"wrote {args.pareto}")
