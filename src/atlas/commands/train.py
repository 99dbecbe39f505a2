"""Train a plan. For now as a rehearsal on this machine: every worker a process with a paced device, the datacenters
apart by emulated paths, a small stand-in model with real gradients, the plan's own durations (`--emulate`).

Prints the iteration time that was predicted and the one that was measured; `--page` lays the two timelines over each
other. A plan that the runtime cannot execute is refused, with the reason. Several hosts and real models are to come.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.commands.files import Outputs
from atlas.commands.simulate import job_flags, whole
from atlas.errors import AtlasError
from atlas.spec.plan import load_job_or_plan


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.yaml", help="a plan, or a job with --schedule")
    parser.add_argument("--emulate", action="store_true", help="rehearse it on this machine")
    parser.add_argument("--schedule", metavar="NAME", help="for a job: how to run it (default: 1f1b)")
    parser.add_argument("--tcp", choices=("one", "many"), help="connections between two nodes (default: many)")
    parser.add_argument("--steps", type=whole(1, 100), default=3, metavar="N", help="iterations (default 3)")
    parser.add_argument(
        "--slower", type=whole(1, 1000), default=1, metavar="X", help="every duration times X, for a slow host"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write prediction over measurement as a page")
    job_flags(parser)


def run(args: argparse.Namespace) -> int:
    job, plan = load_job_or_plan(args.plan, args.set)
    if plan is not None and plan.runnable != "yes":
        raise AtlasError(f"{args.plan}: runnable: {plan.runnable}")
    if not args.emulate:
        raise AtlasError("only a rehearsal on one machine can be run today: add --emulate")
    outputs = Outputs(page=args.page)
    outputs.require_writable()
    from atlas.launch.rehearse import rehearse

    schedule = args.schedule or (plan.schedule.name if plan else "1f1b")
    tcp = args.tcp or (plan.schedule.tcp if plan else "many")
    budget = plan.schedule.tries or None if plan else None
    result = rehearse(job, schedule, tcp=tcp, steps=args.steps, slower=args.slower, budget=budget)
    predicted, measured = result.predicted, result.run.timeline
    losses = ", ".join(f"{loss:.4f}" for loss in result.run.losses)
    print(
        f"{job.name}, {schedule} on {tcp} connection(s), {args.steps} steps (emulated: paced devices, stand-in model)\n"
        f"  iteration, simulated  {predicted.iteration_ns / 1e6:10.1f} ms\n"
        f"  iteration, emulated   {measured.iteration_ns / 1e6:10.1f} ms   prediction {result.error:+.2%}\n"
        f"  loss by step          {losses}\n"
        f"  emulator late by      {result.run.late_s * 1e3:10.2f} ms   "
        f"devices overrun {result.run.overrun_s * 1e3:.2f} ms"
    )
    if args.page is not None:
        from atlas.view import write_page

        write_page(args.page, [predicted, measured], title=f"{job.name}: prediction over measurement")
        print(f"The timeline page: {args.page}")
    return 0
