"""The flags for reports of a run (`launch.report`) and for its evidence (`evidence.recorder`)."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from atlas.commands.ui import AT
from atlas.console import make_folder, remark, require_folder, say
from atlas.cost.compute import flops_per_token
from atlas.errors import AtlasError
from atlas.evidence.recorder import EvidenceRecorder
from atlas.evidence.write_card import RunFacts
from atlas.ir.timeline import Timeline
from atlas.launch.kineto_merge import merge_traces
from atlas.launch.report import GpuFacts, PagePaths, ReportChoice, RunReport, StepEvent
from atlas.launch.report.events import OnStep
from atlas.launch.report.trackers import NONE, default_trackers
from atlas.launch.train_options import OWN, TrainOptions
from atlas.spec import Job
from atlas.spec.recipe import LoggingRecipe
from atlas.ui.child import PageProcess
from atlas.ui.run_files import EVENTS, STEPS, TIMELINE, TIMELINE_BYTES, PageFacts
from atlas.ui.server import page_address


def watch_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--no-bar", action="store_true", help="do not show a progress bar")
    add(
        "--runs",
        type=Path,
        metavar="DIR",
        help="folder for worker logs and run.json (default with --dc: runs/NAME; of `atlas coordinator`: --state)",
    )
    add("--log", type=Path, metavar="FILE", help="append a JSON line for every step")
    add("--timeline", type=Path, metavar="FILE", help="append the timeline of every step, for `atlas view`")
    add("--metrics-port", type=int, metavar="PORT", help="serve /metrics for Prometheus (0: any port)")
    add("--metrics-host", default="127.0.0.1", metavar="ADDRESS", help="address of /metrics")
    add(
        "--track",
        action="append",
        metavar="NAME",
        help="tracker: tensorboard, wandb, mlflow, none; may be repeated (default: tensorboard, if it is installed and "
        "the run has a folder)",
    )
    add(
        "--ui",
        action="store_true",
        help="serve the live page of the run (docs/page.md); its records go to --runs, or runs/NAME",
    )
    add(
        "--ui-at", metavar="[HOST:]PORT", help="where --ui serves (default: any port of 127.0.0.1; others need a token)"
    )
    add("--evidence", type=Path, metavar="DIR", help="write card, traces and launch files (docs/evidence.md)")


def watched(args: argparse.Namespace, logging: LoggingRecipe, job: Job, options: TrainOptions) -> ReportChoice:
    """The reports that the recipe and the flags choose."""
    page = None
    if _page_wanted(args):
        folder = run_folder(logging, job)
        require_folder(folder, "--runs")
        make_folder(folder)
        page = PagePaths(folder / STEPS, folder / EVENTS, folder / TIMELINE, TIMELINE_BYTES)
    return ReportChoice(
        bar=not args.no_bar,
        lines=Path(logging.lines) if logging.lines is not None else None,
        timeline=Path(logging.timeline) if logging.timeline is not None else None,
        page=page,
        metrics_port=logging.metrics_port,
        metrics_host=args.metrics_host,
        labels={"job": job.name, "schedule": options.schedule},
        trackers=_trackers(args, logging),
        trackers_asked=logging.trackers is not None,
        folder=run_folder(logging, job),
        gpus=_gpu_facts(job, options),
    )


def _trackers(args: argparse.Namespace, logging: LoggingRecipe) -> tuple[str, ...]:
    """The trackers of a run. By default a rehearsal has none, so that it makes no folder."""
    if logging.trackers is not None:
        return tuple(name for name in logging.trackers if name != NONE)
    has_folder = logging.folder is not None or _page_wanted(args) or getattr(args, "dc", None) is not None
    return default_trackers() if has_folder else ()


def run_folder(logging: LoggingRecipe, job: Job) -> Path:
    """Where a run's records go."""
    return Path(logging.folder or Path("runs") / job.name)


def _page_wanted(args: argparse.Namespace) -> bool:
    return bool(args.ui or args.ui_at is not None)


def live_page(
    args: argparse.Namespace, logging: LoggingRecipe, job: Job, options: TrainOptions
) -> AbstractContextManager[object]:
    """What `--ui` asks for: the page of this run, in a process of its own, until the block is left."""
    if not _page_wanted(args):
        return nullcontext()
    host, port = page_address(args.ui_at or AT, "--ui-at")
    folder = run_folder(logging, job)
    facts = PageFacts(job.name, options.schedule, options.tcp, options.steps, options.slower, options.device)
    page = PageProcess(folder, facts, job, host, port)
    remark(f"the page is at {page.url}; after the run: atlas ui {folder}")
    return page


def reports_elsewhere(args: argparse.Namespace) -> str:
    """A remark about reports that a launcher which does not coordinate cannot make; "" if no flag asks for one."""
    flags = ("ui", "ui_at", "log", "timeline", "metrics_port", "track", "evidence")
    given = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag) not in (None, False)]
    if not given:
        return ""
    return (
        f"{', '.join(given)}: only the launcher or `atlas coordinator` that coordinates the run makes these reports. "
        "Give the flags there"
    )


def _gpu_facts(job: Job, options: TrainOptions) -> GpuFacts | None:
    """Of a run on GPUs of one type: of the job's own model, or of paced devices, which take the job's time."""
    types, paced = {dc.gpu for dc in job.cluster.datacenters}, options.device == "paced"
    runs_own = options.device.startswith("cuda") and options.model == OWN
    if not (paced or runs_own) or len(types) != 1:
        return None
    gpu = job.cluster.gpu_type(types.pop())
    peak = gpu.fp32_tflops if job.precision == "fp32" else gpu.bf16_tflops
    tokens = job.microbatch * job.num_microbatches * job.model.seq_len / (job.pp * job.tp)
    return GpuFacts(job.tp, flops_per_token(job.model), peak * 1e12, tokens * options.slower if paced else 0.0)


# ---- traces ----------------------------------------------------------------------------------------------------------
def trace_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", metavar="A:B", help="record steps A to B of every worker with torch.profiler, for Perfetto")
    add("--profile-out", type=Path, default=Path("profile"), metavar="DIR", help="folder of --profile")
    add(
        "--record-wan",
        type=Path,
        metavar="DIR",
        help="workers of this host record what they send to other datacenters, for `atlas wan learn` (docs/weather.md)",
    )


def begin_traces(args: argparse.Namespace, num_steps: int) -> None:
    """What `--profile` and `--record-wan` ask for: workers are started with this environment."""
    if args.record_wan is not None:
        require_folder(args.record_wan, "--record-wan")
        os.environ["ATLAS_RECORD_WAN"] = str(args.record_wan.absolute())
    if args.profile is None:
        return
    found = re.fullmatch(r"(\d+):(\d+)", args.profile)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= num_steps:
        raise AtlasError(
            f"--profile {args.profile}: must be A:B, the first and the last step to record, of the steps 1 to "
            f"{num_steps} of this run. Write for example --profile {max(1, num_steps - 2)}:{num_steps}"
        )
    if args.evidence is not None:
        raise AtlasError("--profile and --evidence record different steps: give one of them")
    require_folder(args.profile_out, "--profile-out")
    from atlas.runtime.kineto import FOLDER, STEPS  # torch: 1.9 s

    os.environ |= {FOLDER: str(args.profile_out.absolute()), STEPS: args.profile}


def end_traces(args: argparse.Namespace) -> None:
    """Merge the traces of this host's workers."""
    if args.profile is None:
        return
    try:
        say(f"wrote {merge_traces(args.profile_out)}: open it at ui.perfetto.dev")
    except (AtlasError, OSError, ValueError) as error:
        remark(f"--profile: {error}")


# ---- evidence --------------------------------------------------------------------------------------------------
def evidence_of(folder: Path | None, job: Job, options: TrainOptions) -> EvidenceRecorder | None:
    """What `--evidence` asks for. Raises AtlasError for a folder with files, or where the card would be wrong."""
    if folder is None:
        return None
    require_folder(folder, "--evidence")
    paced = options.device == "paced"
    if not paced and options.model != OWN:
        raise AtlasError(
            f"--evidence describes the job's model, but {options.model or 'a stand-in'} runs on {options.device}. "
            "Train with --model job, or on paced devices"
        )
    facts = RunFacts(
        options.schedule,
        options.tcp,
        command=["atlas", *sys.argv[1:]],
        dataset=options.data or "made up",
        trained=_trained(options),
        device="cpu" if options.device == "cpu" else "",
        slower=options.slower,
    )
    recorder = EvidenceRecorder(folder, job, facts, traced=options.device.startswith("cuda"))
    if recorder.traced:
        from atlas.runtime.kineto import FOLDER  # torch: 1.9 s

        os.environ[FOLDER] = str(folder.absolute())  # workers are started with this environment
    return recorder


def _trained(options: TrainOptions) -> str:
    """The model that runs, where it is not the job's."""
    return (options.model or "a stand-in, paced to the job's durations") if options.model != OWN else ""


def recorded(report: RunReport, evidence: EvidenceRecorder | None, options: TrainOptions) -> OnStep:
    """Reports a step, and keeps its timeline for `--evidence`. The timeline says how the run differs from the job, so
    that `atlas card` can say it too."""
    about: dict[str, object] = {"trained": _trained(options)} if options.model != OWN else {}
    about |= {"slower": options.slower} if options.slower != 1 else {}

    def step(event: StepEvent, timeline: Timeline) -> None:
        timeline.meta.update(about)
        report.step(event, timeline)
        if evidence is not None:
            evidence.step(event["step"], timeline)

    return step


def noted(report: RunReport) -> Callable[[str], None]:
    """Prints a line, and keeps it as an event of the run. The page highlights a loss."""

    def both(line: str) -> None:
        remark(line)
        report.note(line, kind="warning" if " lost" in line else "note")

    return both


def write_evidence(evidence: EvidenceRecorder | None) -> None:
    """At the end of a run. A failure to write is reported and does not fail the run."""
    if evidence is None:
        return
    try:
        point = evidence.write()
    except AtlasError as error:
        remark(f"--evidence: {error}")
        return
    say(f"wrote {evidence.folder}: {len(point.ranks)} traces, times are {point.source}")
    remark(*point.findings)
