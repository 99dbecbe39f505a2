"""Coordinate a run on a host of its own, without GPUs: the launchers (`atlas train PLAN --dc NAME --coordinator
HOST:PORT`) connect to it from all datacenters (docs/operating.md).

The folder `--state` keeps its state: if it is killed and started again within `--grace`, it reconnects to the running
workers. Ctrl-C stops all workers after the same step, with a checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.commands.network_flags import PORT, address_of
from atlas.commands.train import end_on_signals, how_flags, recipe_of
from atlas.commands.train_dc import group_flags
from atlas.commands.watching import evidence_of, live_page, noted, recorded, watch_flags, watched, write_evidence
from atlas.console import job_flags, require_outputs
from atlas.launch.coordinator import RunCallbacks
from atlas.launch.rendezvous import COORDINATOR
from atlas.launch.report import RunReport
from atlas.launch.run_record import RunRecord
from atlas.launch.supervisor import RestartPolicy
from atlas.launch.train_options import OWN, TrainOptions, recipe_options
from atlas.spec.plan import load_job_or_plan


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN.yaml", help="a plan, or a job with --schedule")
    add(
        "--listen",
        default=f"127.0.0.1:{PORT}",
        metavar="HOST:PORT",
        help=f"where the launchers connect to (default 127.0.0.1:{PORT})",
    )
    add(
        "--state",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the state of this run; no other run may use it",
    )
    how_flags(parser)
    group_flags(parser)
    watch_flags(parser)
    job_flags(parser)


def run(args: argparse.Namespace) -> int:
    from atlas.launch.agent import AgentSettings  # torch: 1.9 s
    from atlas.launch.multi_dc import coordinate  # torch

    recipe = recipe_of(args)
    job, plan = load_job_or_plan(args.plan, [*recipe.job_overrides, *args.set])
    require_outputs({"--log": recipe.logging.lines, "--timeline": recipe.logging.timeline}, job.files)
    options = TrainOptions.of(
        plan,
        args.schedule,
        args.tcp,
        device="cuda",
        restarts=RestartPolicy(args.max_restarts),
        **recipe_options(recipe, model=OWN),
    )
    settings = AgentSettings(
        COORDINATOR,
        address_of("--listen", args.listen),
        certificates=args.certs,
        trusted_networks=recipe.network.trusted,
        auto_replan=args.auto_replan,
        without=tuple(args.without),
    )

    end_on_signals()
    choice = watched(args, recipe.logging, job, options)
    record = RunRecord(Path(recipe.logging.folder or args.state), {"run": job.name, "steps": options.steps})
    evidence = evidence_of(args.evidence, job, options)
    with live_page(args, recipe.logging, job, options), RunReport(choice, options.steps) as report:
        callbacks = RunCallbacks(noted(report), recorded(report, evidence, options), record=record)
        code = coordinate(job, options, settings, callbacks, args.state)
    write_evidence(evidence)
    return code
