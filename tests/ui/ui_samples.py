"""A run's folder as `atlas train --ui` leaves it, made from a simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atlas.ir.timeline import Timeline
from atlas.launch.report import PagePaths, ReportChoice, RunReport
from atlas.spec import Job, load_job
from atlas.ui.run_files import EVENTS, STEPS, TIMELINE, TIMELINE_BYTES, PageFacts, write_facts
from atlas.ui.run_model import RunModel

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"


def paths_of(folder: Path) -> PagePaths:
    return PagePaths(folder / STEPS, folder / EVENTS, folder / TIMELINE, TIMELINE_BYTES)


def passes(job: Job, count: int) -> list[Timeline]:
    """The predicted iteration, again and again, a tenth slower than predicted."""
    one = replace(RunModel(job, "1f1b").predicted(), source="emulated")
    names = ("op_start_ns", "op_end_ns", "transfer_ready_ns", "transfer_start_ns", "transfer_sent_ns")
    names += ("transfer_arrive_ns",)
    length = one.makespan_ns * 11 // 10
    return [replace(one, **{name: getattr(one, name) * 11 // 10 + k * length for name in names}) for k in range(count)]


def report_steps(report: RunReport, job: Job, first: int, count: int) -> None:
    for k, timeline in enumerate(passes(job, count)):
        step = first + k
        report.step(
            {"step": step, "loss": 4.0 - 0.1 * step, "tokens": 4096, "iteration_s": 0.49, "predicted_s": 0.4432},
            timeline,
        )


def saved_run(folder: Path, steps: int = 5) -> Job:
    """Write the records of a run that has ended."""
    job = load_job(TINY)
    write_facts(folder, PageFacts(job.name, "1f1b", "many", steps, device="paced"), job)
    with RunReport(ReportChoice(bar=False, page=paths_of(folder)), steps) as report:
        report_steps(report, job, 1, steps)
        report.note("connection to west lost, resumed after 0.4 s", kind="warning")
    return job
