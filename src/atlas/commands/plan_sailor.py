"""Plan from Sailor's files and score plans with Sailor's formula (docs/sailor.md).

`atlas plan --from-sailor` runs this. `python -m atlas.commands.plan_sailor` does the same and starts in a third of the
CPU time (0.2 instead of 0.6 s): it imports neither pydantic nor the search over jobs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from atlas.cli import CommandParser, guarded
from atlas.console import positive, require_outputs
from atlas.planner.objective import OBJECTIVES, Objective, amount, objective_of
from atlas.sailor.check import check
from atlas.sailor.events import simulated
from atlas.sailor.inputs import Inputs, find_trace, read_inputs
from atlas.sailor.judge import PlanJudge, Verdict, judge
from atlas.sailor.money import Money, money
from atlas.sailor.plan_file import SailorPlan, read_plan, write_plan
from atlas.sailor.search import SailorResult, search
from atlas.spec.document import wrong

OF_A_SEARCH = ("cost", "objective", "min_throughput", "max_usd")
"""Flags that have no effect on a plan that is given."""
MAX_USD, MAX_USD_PER_HOUR = 1e12, 1e6
"""Upper limits of --max-usd and --gpu-price."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("plan from files of Sailor (SOSP'25) instead of a job; docs/sailor.md").add_argument
    add("--from-sailor", type=Path, metavar="DIR", help="the folder with Sailor's files")
    add("--trace", metavar="TRACE.csv", help="GPUs by zone; a path, or a name in DIR/traces")
    add("--model", metavar="NAME", help="a model of Sailor's files, such as OPT-350")
    add("--gpu", action="append", default=[], metavar="TYPE", help="use only this GPU type; may be repeated")
    add(
        "--cost",
        choices=("sailor", "events"),
        help="rank the best plans by Sailor's formula or by event simulation (default sailor)",
    )
    usd = partial(positive, below=MAX_USD)
    add("--max-usd", type=usd, metavar="USD", help="the most that an iteration may cost, in dollars")
    add(
        "--gpu-price",
        action="append",
        default=[],
        metavar="TYPE=USD",
        help="price of a GPU of this type, dollars an hour; may be repeated",
    )
    add("--judge", type=Path, metavar="PLAN.json", help="score this plan instead of searching")
    add("--no-simulate", action="store_true", help="skip our event simulation of the plan")
    add("--out-sailor", type=Path, metavar="PLAN.json", help="write the plan in Sailor's format")


def run(args: argparse.Namespace) -> int:
    """Plan (or judge), print, write."""
    files = args.from_sailor.rglob("*") if args.from_sailor is not None and args.out_sailor is not None else ()
    require_outputs({"--out-sailor": args.out_sailor}, [*files, *filter(None, (args.trace, args.judge))])
    for flag, value in (("--trace", args.trace), ("--model", args.model), ("--from-sailor", args.from_sailor)):
        if value is None:
            raise wrong("command line", flag, "is needed to plan from Sailor's files", f"Give {flag}")
    folder = args.from_sailor
    prices = dict(_price(text) for text in args.gpu_price)
    inputs = read_inputs(folder, find_trace(folder, args.trace), args.model, args.gpu, prices)
    found = None
    if args.judge is not None:
        for name in OF_A_SEARCH:
            if (value := getattr(args, name)) is not None:
                rule = "chooses among plans, and --judge gives one plan"
                raise wrong("command line", f"--{name.replace('_', '-')}", rule, "Leave one of them out", value)
        plan = read_plan(args.judge)
        check(inputs, plan, str(args.judge))
    else:
        found = search(inputs, _objective(args))
        plan = _first_by_events(inputs, found) if args.cost == "events" else found.plan
    row = _row(inputs, plan, judge(inputs, plan), found, simulate=not args.no_simulate)
    sys.stdout.write(json.dumps(row, indent=1) + "\n" if args.json else _as_text(row))
    if args.out_sailor is not None:
        write_plan(plan, args.out_sailor)
        print(f"wrote {args.out_sailor}", file=sys.stderr)
    return 0


def _objective(args: argparse.Namespace) -> Objective:
    """An iteration counts as one token."""
    limit = None
    if args.min_throughput is not None:
        limit, _ = amount(args.min_throughput, "--min-throughput", {"": 1, "it/s": 1}, "0.03it/s")
    found = objective_of(args.objective or "throughput", tokens_per_iteration=1)
    return replace(found, max_usd_per_iteration=args.max_usd, min_tokens_per_s=limit)


def _first_by_events(inputs: Inputs, found: SailorResult) -> SailorPlan:
    return min((found.plan, *found.runners_up), key=lambda plan: simulated(inputs, plan).iteration_s)


def _row(
    inputs: Inputs, plan: SailorPlan, verdict: Verdict, found: SailorResult | None, *, simulate: bool
) -> dict[str, Any]:
    bill = money(inputs, plan, verdict) if all(gpu.usd_per_hour is not None for gpu in inputs.gpus.values()) else None
    row: dict[str, Any] = {
        "model": inputs.model,
        "trace": str(inputs.trace),
        "sailor_s": verdict.iteration_s,
        "throughput": 1 / verdict.iteration_s,
        "num_microbatches": verdict.num_microbatches,
        "sync_s": verdict.sync_s,
        "usd": None if bill is None else {"total": bill.total_usd, "gpus": bill.gpu_usd, "egress": bill.egress_usd},
        "mbs": plan.mbs,
        "num_replicas": plan.num_replicas,
        "num_gpus": plan.num_gpus,
        "gpus": {f"{end.gpu} {end.zone}": count for end, count in sorted(plan.gpus_by_zone().items())},
        "stages": [_stage(plan, i, verdict) for i in range(plan.num_stages)],
    }
    if simulate:
        row["simulated"] = vars(simulated(inputs, plan))
    if found is not None:
        row["looked_at"] = {"outlines": found.num_outlines, "priced": found.num_priced, "judged": found.num_judged}
    row["notes"] = _notes(inputs, plan, bill, found)
    return row


def _stage(plan: SailorPlan, stage: int, verdict: Verdict) -> dict[str, Any]:
    runs = [(key, len(list(run))) for key, run in groupby(plan.replicas[stage])]
    return {
        "layers": [plan.layers[stage][0], plan.layers[stage][-1]],
        "replicas": [{"zone": r.zone, "gpu": r.gpu, "tp": r.tp, "count": count} for r, count in runs],
        "compute_s": verdict.compute_s[stage],
        "comm_s": verdict.comm_s[stage],
    }


def _notes(inputs: Inputs, plan: SailorPlan, bill: Money | None, found: SailorResult | None) -> list[str]:
    notes = [*inputs.notes, *PlanJudge(inputs, plan).clamps()]
    for name, gpu in inputs.gpus.items():
        price = "no price known" if gpu.usd_per_hour is None else f"{gpu.usd_per_hour:g} USD an hour ({gpu.price_from})"
        notes.append(f"{name}: {price}")
    if bill is None:
        notes.append("no cost: give --gpu-price TYPE=USD for every GPU type")
    if found is not None and found.interrupted:
        notes.append("interrupted: the best plan so far")
    return notes


def _as_text(row: dict[str, Any]) -> str:
    """The result for people."""
    usd = "" if row["usd"] is None else f", {row['usd']['total']:.4g} USD ({row['usd']['egress']:.3g} of it egress)"
    lines = [
        f"{row['model']} on {row['num_gpus']} GPUs: {row['num_replicas']} pipelines of {len(row['stages'])} stages, "
        f"microbatch {row['mbs']}, {row['num_microbatches']} microbatches",
        f"  Sailor's formula  {row['sailor_s']:9.3f} s an iteration{usd}",
    ]
    if "simulated" in row:
        lines.append(f"  our simulation    {row['simulated']['iteration_s']:9.3f} s ({row['simulated']['method']})")
    for i, stage in enumerate(row["stages"]):
        where = " + ".join(f"{r['count']} x tp {r['tp']} {r['gpu']} {r['zone']}" for r in stage["replicas"])
        first, last = stage["layers"]
        lines.append(f"  stage {i:2}  layers {first:2}-{last:<2}  {where}")
    return "\n".join([*lines, *(f"  note: {note}" for note in row["notes"])]) + "\n"


def _price(text: str) -> tuple[str, float]:
    gpu, equals, usd = text.partition("=")
    try:
        value = float(usd)
    except ValueError:
        value = -1.0
    if not (gpu and equals and 0 <= value < MAX_USD_PER_HOUR):
        raise wrong("command line", "--gpu-price", "must be TYPE=USD an hour", "Write e.g. A100-40=3.67", text)
    return gpu, value


def main(argv: list[str] | None = None) -> int:
    """`python -m atlas.commands.plan_sailor`: the process's exit code."""
    parser = CommandParser(prog="python -m atlas.commands.plan_sailor", description=__doc__)
    configure(parser)
    add = parser.add_argument
    add("--objective", metavar="NAME", help=f"what to optimise: {', '.join(OBJECTIVES)}")
    add("--min-throughput", metavar="RATE", help="reach at least this many iterations a second, such as 0.03it/s")
    add("--json", action="store_true", help="print the result as JSON")
    return guarded(lambda words: run(parser.parse_args(words)), "atlas", argv)


if __name__ == "__main__":
    sys.exit(main())
