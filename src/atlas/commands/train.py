"""Train a plan: in each datacenter with `--dc NAME` (docs/operating.md), or all of it on this machine (`--emulate`):
each worker is a process, the datacenters are connected by an emulated WAN, sockets and gradients are real, and devices
are paced to the plan's own durations (or run at the speed of a CPU or GPU).

By default a small stand-in model is trained. `--model` names a Hugging Face folder, or `job` for the model that the job
describes; `--data` names shards (`atlas data tokenize`), or `shipped`. With `--checkpoints` the run is saved, also by
Ctrl-C, and the same command resumes it, also with another plan of the same batch. When a worker dies, all workers are
restarted from the last complete checkpoint.

Prints the predicted and the measured iteration time; `--page` draws both timelines on one page. A plan that the runtime
cannot execute is refused, with the reason.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.commands.train_dc import dc_flags, run_dc
from atlas.commands.watching import watch_flags, watched
from atlas.console import job_flags, number, require_apart, require_folder, require_writable, whole
from atlas.errors import AtlasError
from atlas.launch.rehearse import Rehearsal, rehearse
from atlas.launch.report import RunReport
from atlas.launch.supervisor import RestartPolicy
from atlas.launch.train_options import TrainOptions
from atlas.spec.plan import load_job_or_plan
from atlas.view import write_page


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.yaml", help="a plan, or a job with --schedule")
    parser.add_argument("--emulate", action="store_true", help="run it on this machine")
    parser.add_argument("--schedule", metavar="NAME", help="for a job: how to run it (default: 1f1b)")
    parser.add_argument("--tcp", choices=("one", "many"), help="connections between two nodes (default: many)")
    parser.add_argument("--steps", type=whole(1, 10**9), default=3, metavar="N", help="of the whole run (default 3)")
    parser.add_argument(
        "--model", default="", metavar="DIR", help="a Hugging Face folder, or job (default: a stand-in; with --dc: job)"
    )
    parser.add_argument("--data", default="", metavar="DIR", help="shards of tokens, or shipped (default: made up)")
    parser.add_argument("--device", metavar="NAME", help="paced, cpu, cuda or cuda:N (default: paced; with --dc: cuda)")
    parser.add_argument(
        "--learning-rate", type=number(0, 1e6), metavar="X", help="default: 0.001 (AdamW; a stand-in: 0.1, SGD)"
    )
    parser.add_argument(
        "--clip",
        type=number(1e-12, 1e12),
        metavar="NORM",
        help="clip gradients to this global norm (default: no clipping)",
    )
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="save there, and resume from there")
    parser.add_argument(
        "--save-every", type=whole(0, 10**9), default=0, metavar="N", help="steps between saves (default: at the end)"
    )
    parser.add_argument(
        "--slower", type=whole(1, 1000), default=1, metavar="X", help="multiply every duration by X, for a slow host"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write both timelines as a page")
    watch_flags(parser)
    dc_flags(parser)
    job_flags(parser)


def run(args: argparse.Namespace) -> int:
    job, plan = load_job_or_plan(args.plan, args.set)
    if args.emulate == (args.dc is not None):
        raise AtlasError(
            "give --emulate to run all of it on this machine, or --dc NAME for this datacenter's part of it"
        )
    if args.dc is not None and args.page is not None:
        raise AtlasError("--page is for --emulate: with --dc give --timeline FILE, which `atlas view` makes a page of")
    wanted = {f"--{name}": path for name in ("page", "log", "timeline") if (path := getattr(args, name)) is not None}
    for flag, path in wanted.items():
        require_writable(path, flag)
    require_apart(wanted, job.files)
    if args.checkpoints is not None:
        require_folder(args.checkpoints, "--checkpoints")
    args.device = args.device or ("paced" if args.emulate else "cuda")
    options = TrainOptions.of(
        plan,
        args.schedule,
        args.tcp,
        steps=args.steps,
        slower=args.slower,
        device=args.device,
        model=args.model or ("" if args.emulate else "job"),
        data=args.data,
        learning_rate=args.learning_rate,
        clip=args.clip,
        checkpoints=args.checkpoints,
        save_every=args.save_every,
        restarts=RestartPolicy(args.max_restarts),
        grace_s=args.grace,
        patience_s=args.patience,
    )
    if args.dc is not None:
        return run_dc(args, job, options)
    choice = watched(args, {"job": job.name, "schedule": options.schedule})
    with RunReport(choice, args.steps) as report:
        result = rehearse(job, options, on_step=report.step)
    _print(job.name, options.schedule, args, result)
    if args.page is not None:
        write_page(args.page, [result.predicted, result.measured], title=f"{job.name}: prediction over measurement")
        print(f"The timeline page: {args.page}")
    return 130 if result.run.stopped else 0


def _print(name: str, schedule: str, args: argparse.Namespace, result: Rehearsal) -> None:
    predicted, measured, run = result.predicted, result.measured, result.run
    shown = run.losses if len(run.losses) <= 6 else [*run.losses[:3], *run.losses[-3:]]
    words = [f"{loss:.4f}" for loss in shown]
    if len(shown) < len(run.losses):
        words.insert(3, "...")
    last = result.first_step + len(run.losses)
    print(
        f"{name}, {schedule}, steps {result.first_step + 1} to {last} "
        f"(emulated: {args.device} devices, {args.model or 'stand-in'} model)\n"
        f"  iteration, simulated  {predicted.iteration_ns / 1e6:10.1f} ms\n"
        f"  iteration, emulated   {measured.iteration_ns / 1e6:10.1f} ms   prediction off by {result.error:+.2%}\n"
        f"  loss by step          {', '.join(words)}\n"
        f"  emulator late by      {run.late_s * 1e3:10.2f} ms   devices overrun {run.overrun_s * 1e3:.2f} ms"
    )
    if run.stopped:
        print(f"Stopped after step {last}, saved in {args.checkpoints}: the same command resumes from there")
