"""Train a plan: in each datacenter with `--dc NAME` (docs/operating.md), or all of it on this machine with `--emulate`.
In an emulated run each worker is a process, and an emulated WAN connects the datacenters. Sockets and gradients are
real. Devices are paced: every op takes as long as the plan predicts (`--device cpu` or `cuda`: as long as it needs).

`--dc` trains the model that the job describes, `--emulate` a small stand-in model, unless `--model` names a Hugging
Face folder, or `job`. `--data` names shards (`atlas data tokenize`), or `shipped`. With `--checkpoints` the run is
saved, also when Ctrl-C stops it. The same command resumes it; the plan may be a different one, with the same global
batch. When a worker dies, all workers are restarted from the last complete checkpoint.

Prints the predicted and the measured iteration time; `--page` draws both timelines on one page. A plan that the runtime
cannot execute is refused, with the reason.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from atlas.commands.train_dc import dc_flags, run_dc
from atlas.commands.watching import (
    begin_traces,
    end_traces,
    evidence_of,
    live_page,
    recorded,
    trace_flags,
    watch_flags,
    watched,
    write_evidence,
)
from atlas.console import (
    job_flags,
    ranged,
    require_folder,
    require_outputs,
    whole,
)
from atlas.errors import AtlasError, StopSignal
from atlas.launch.rehearse import Rehearsal, rehearse
from atlas.launch.report import RunReport
from atlas.launch.supervisor import RestartPolicy
from atlas.launch.train_options import OWN, TrainOptions, recipe_options
from atlas.runtime.checkpoint.object_store import require_object_store
from atlas.spec.plan import load_job_or_plan
from atlas.spec.recipe import OBJECT_STORE, Recipe, load_recipe
from atlas.view import write_page


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN.yaml", help="a plan, or a job with --schedule")
    add("--emulate", action="store_true", help="run all datacenters on this machine")
    how_flags(parser)
    add("--device", metavar="NAME", help="paced, cpu, cuda or cuda:N (default: paced; with --dc: cuda)")
    add("--checkpoints", metavar="DIR", help="save to and resume from this folder, or s3://BUCKET/PREFIX")
    add(
        "--slower",
        type=ranged("slower"),
        default=1,
        metavar="X",
        help="multiply every duration by X, for a slow host",
    )
    add("--page", type=Path, metavar="FILE", help="write an HTML page with the predicted and the measured timeline")
    add(
        "--weather-seed",
        type=ranged("seed"),
        metavar="N",
        help="with --emulate: seed of the cross traffic of links that have a `model` (default 0)",
    )
    filler_flags(parser)
    watch_flags(parser)
    trace_flags(parser)
    dc_flags(parser)
    job_flags(parser)


def how_flags(parser: argparse.ArgumentParser) -> None:
    """How the plan is trained: the same for all launchers."""
    add = parser.add_argument
    add("--schedule", metavar="NAME", help="schedule of a job; a plan has its own (default 1f1b)")
    add("--tcp", choices=("one", "many"), help="TCP connections between two nodes (default many)")
    add("--recipe", type=Path, metavar="FILE", help="how to train (docs/recipes.md); the flags below replace its keys")
    add(
        "--steps",
        type=ranged("steps"),
        metavar="N",
        help="total steps of the run, those before a resume included (default 3)",
    )
    add(
        "--model",
        metavar="DIR",
        help="a Hugging Face folder, or `job`: the job's own model with random weights (default: `job`; with "
        "`train --emulate`: a small stand-in)",
    )
    add("--data", metavar="DIR", help="a folder of shards, or `shipped`: the included text (default: synthetic)")
    add(
        "--learning-rate",
        type=ranged("learning_rate"),
        metavar="X",
        help="peak learning rate (default: 0.001 with AdamW, 0.1 with SGD; a stand-in trains with SGD)",
    )
    add("--warmup", type=whole(0, 10**9), metavar="N", help="steps of a linear warm-up (default 0)")
    add(
        "--decay",
        choices=("constant", "linear", "cosine"),
        help="shape of the learning rate after the warm-up (default constant)",
    )
    add(
        "--clip",
        type=ranged("clip"),
        metavar="NORM",
        help="clip gradients to this global norm (default: no clipping)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile layers with torch's compiler (default: on GPUs)",
    )
    add("--seed", type=ranged("seed"), metavar="N", help="seed of weights, dropout and data order (default 0)")
    add("--save-every", type=ranged("save_every"), metavar="N", help="steps between saves (default: at the end)")


def filler_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--filler",
        metavar="NAME",
        help="what uses the time in which workers wait: bubbletea (start `bubbletea serve` too; default: nothing)",
    )
    add("--filler-folder", type=Path, metavar="DIR", help="folder in which the filler's service writes its address")
    add(
        "--filler-mib",
        type=whole(1, 10**7),
        metavar="N",
        help="MiB of each worker's memory for the filler (default 256)",
    )


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""A scheduler sends them before it takes the hosts away: save, and end with 75."""
SHOWN_LOSSES = 3
"""Losses of the first and of the last steps that are printed."""
AGAIN_S = 0.05
"""A signal that Python dropped in a destructor is sent again after this time."""
FLAGS = {
    "steps": "steps",
    "model": "model",
    "data": "data.shards",
    "learning_rate": "learning_rate.peak",
    "warmup": "learning_rate.warmup",
    "decay": "learning_rate.decay",
    "clip": "clip",
    "compile": "compile",
    "seed": "seed",
    "checkpoints": "checkpoints.folder",
    "save_every": "checkpoints.every",
    "trusted": "network.trusted",
    "grace": "network.grace",
    "gather": "network.gather",
    "patience": "network.patience",
    "runs": "logging.folder",
    "log": "logging.lines",
    "timeline": "logging.timeline",
    "metrics_port": "logging.metrics_port",
    "track": "logging.trackers",
    "filler": "filler.name",
    "filler_folder": "filler.folder",
    "filler_mib": "filler.memory_mib",
}
"""By flag: the key of the recipe that it replaces."""


def run(args: argparse.Namespace) -> int:
    end_on_signals()
    if args.emulate == (args.dc is not None):
        raise AtlasError(
            "give either --emulate to run the whole plan on this machine, or --dc NAME to run this datacenter's part"
        )
    if args.dc is not None and args.page is not None:
        raise AtlasError("--page is for --emulate: with --dc give --timeline FILE, and draw it with `atlas view`")
    if args.dc is None and args.switch is not None:
        raise AtlasError("--switch needs --dc: with --emulate the switches are emulated. Leave out --switch")
    if args.dc is not None and args.weather_seed is not None:
        raise AtlasError("--weather-seed is for --emulate: with --dc the links are real. Leave out --weather-seed")
    recipe = recipe_of(args)
    job, plan = load_job_or_plan(args.plan, [*recipe.job_overrides, *args.set])
    _require_files(args, recipe, job.files)
    device = args.device or ("paced" if args.emulate else "cuda")
    options = TrainOptions.of(
        plan,
        args.schedule,
        args.tcp,
        slower=args.slower,
        weather_seed=args.weather_seed or 0,
        device=device,
        restarts=RestartPolicy(args.max_restarts),
        **recipe_options(recipe, model="" if args.emulate else OWN),
    )
    evidence = evidence_of(args.evidence, job, options)
    begin_traces(args, options.steps)
    if args.dc is not None:
        return run_dc(args, job, options, recipe, evidence)
    choice = watched(args, recipe.logging, job, options)
    with live_page(args, recipe.logging, job, options), RunReport(choice, options.steps) as report:
        result = rehearse(job, options, on_step=recorded(report, evidence, options))
    _print(job.name, options, result)
    write_evidence(evidence)
    end_traces(args)
    if args.page is not None:
        write_page(args.page, [result.predicted, result.measured], title=f"{job.name}: predicted and measured")
        print(f"The timeline page: {args.page}")
    return result.run.exit_code


def end_on_signals() -> None:
    """From now on a scheduler's signal raises StopSignal in the main thread."""

    def stop(number: int, stack: object) -> None:
        raise StopSignal

    before = sys.unraisablehook

    def again(lost: sys.UnraisableHookArgs) -> None:
        """Python drops an exception that is raised in a destructor: send the signal once more."""
        if not isinstance(lost.exc_value, StopSignal):
            before(lost)
            return
        timer = threading.Timer(AGAIN_S, os.kill, (os.getpid(), STOP_SIGNALS[0]))
        timer.daemon = True
        timer.start()

    if threading.current_thread() is threading.main_thread():
        sys.unraisablehook = again
        for number in STOP_SIGNALS:
            signal.signal(number, stop)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe of `--recipe`, with the keys that flags replace."""
    given = {key: getattr(args, flag, None) for flag, key in FLAGS.items()}
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    return load_recipe(args.recipe, {key: None if value in ([], "") else value for key, value in plain.items()})


def _require_files(args: argparse.Namespace, recipe: Recipe, inputs: Sequence[str]) -> None:
    """Raise now if a file or a folder that the run will write cannot be written."""
    named = {"--page": args.page, "--log": recipe.logging.lines, "--timeline": recipe.logging.timeline}
    require_outputs(named, [*inputs, *([args.recipe] if args.recipe is not None else [])])
    place = recipe.checkpoints.folder
    if place is not None and place.startswith(OBJECT_STORE):
        require_object_store(place, "--checkpoints")
    elif place is not None:
        require_folder(Path(place), "--checkpoints")


def _print(name: str, options: TrainOptions, result: Rehearsal) -> None:
    predicted, measured, run = result.predicted, result.measured, result.run
    few = SHOWN_LOSSES
    shown = run.losses if len(run.losses) <= 2 * few else [*run.losses[:few], *run.losses[-few:]]
    words = [f"{loss:.4f}" for loss in shown]
    if len(shown) < len(run.losses):
        words.insert(few, "...")
    last = result.first_step + len(run.losses)
    print(
        f"{name}, {options.schedule}, steps {result.first_step + 1} to {last} "
        f"(emulated: {options.device} devices, {options.model or 'stand-in'} model)\n"
        f"  iteration, simulated  {predicted.iteration_ns / 1e6:10.1f} ms\n"
        f"  iteration, emulated   {measured.iteration_ns / 1e6:10.1f} ms   prediction off by {result.error:+.2%}\n"
        f"  loss by step          {', '.join(words)}\n"
        f"  emulator late by      {run.late_s * 1e3:10.2f} ms   devices late by {run.overrun_s * 1e3:.2f} ms"
    )
    if result.was_host_too_slow:
        print("This host was too slow for these durations, so the emulated time is not valid: give a larger --slower")
    if run.rails is not None:
        print(f"  circuit changes       {run.rails.num_changes:8}")
        if run.rails.failed:
            print(f"The circuits were not changed: {run.rails.failed}")
    if run.stopped:
        print(f"Stopped after step {last}, saved in {options.checkpoints}: the same command resumes from there")
