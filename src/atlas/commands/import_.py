"""Make a job file and a profile from a data point of CCL-Bench: the workload card describes the model and the hardware,
the traces give the time of each layer. Planning can then start from a run that you already have.

Writes JOB.yaml and beside it JOB.profile.json, and simulates the job once, to compare it with the traces. Add
datacenters under `cluster` of the job, then run `atlas plan`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from atlas.api import simulate
from atlas.console import Meter, remark, require_apart, require_outputs, show
from atlas.errors import AtlasError
from atlas.evidence.data_point import read_data_point
from atlas.evidence.importing import import_job
from atlas.ir.replace import write_whole
from atlas.spec import load_job
from atlas.spec.gpus import GPUS
from atlas.view.table import seconds

STEADY = 3
"""Iterations to simulate, so that the time of one is that of a run and not of its first."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="a data point: one workload card and a trace per rank")
    add("--out", type=Path, required=True, metavar="JOB.yaml", help="the job file to write")
    add("--gpu", metavar="TYPE", help="GPU type, if the card names none that Atlas knows")
    add(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        help="whether the run recomputed activations (default: no; traces by Atlas record it)",
    )
    add("--salvage", action="store_true", help="read truncated traces up to the damage")


def run(args: argparse.Namespace) -> int:
    profile = args.out.with_suffix(".profile.json")
    require_outputs({"--out": args.out, "the profile": profile})
    if args.gpu is not None and args.gpu not in GPUS:
        raise AtlasError(f"--gpu {args.gpu}: no such type. There are {', '.join(GPUS)}")
    with Meter() as meter:
        point = read_data_point(args.folder, salvage=args.salvage, progress=meter)
    require_apart({"--out": args.out, "the profile": profile}, [*point.found.traces, args.folder])
    found = import_job(point, gpu=args.gpu, recompute=args.recompute)
    write_whole(profile, (json.dumps(found.profile, indent=1) + "\n").encode())
    write_whole(args.out, found.job_text(profile.name).encode())
    card = point.found.card
    schedule = card.text("atlas.schedule") if card is not None else None
    result = simulate(load_job(args.out), schedule or "1f1b", iterations=STEADY).best
    iteration_s = result.timeline.iteration_ns / 1e9
    off = iteration_s / found.step_s - 1
    show(
        f"Wrote {args.out} and {profile}.",
        f"  step of the traces   {seconds(found.step_s)} ({point.source})",
        f"  simulated iteration  {seconds(iteration_s)} ({result.schedule}), off by {off:+.1%}",
    )
    remark(*found.notes, *point.findings)
    return 0
