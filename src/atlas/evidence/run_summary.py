"""The summary of a run, from its files: figures with units, where the time goes, the loss by step.

`run_summary` takes a data point (card and traces), a timeline file, or the folder of a run. `report_page` shows one
summary or several side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError
from atlas.evidence.card import DEGREES, Card
from atlas.evidence.data_point import DataPoint, find_data_point, read_data_point
from atlas.evidence.run_folder import RunFiles, find_run
from atlas.ir.analysis import summary
from atlas.ir.store import json_record, load_timeline
from atlas.ir.timeline import Timeline

MAX_LOG_STEPS = 100_000
"""Of a step log, the last ones."""
PARTS = ("computing", "waiting for the WAN", "waiting for a peer", "gradient sync", "fill and drain", "other")
"""Where all workers' time goes, in the order in which it is drawn."""


@dataclass(frozen=True)
class RunFigure:
    """One figure of a run."""

    value: float | None = None
    unit: str = ""
    better: str = ""
    """"low" or "high", where one of several runs is best."""


@dataclass(frozen=True)
class RunSummary:
    """One column of the report."""

    name: str
    source: str
    figures: dict[str, RunFigure]
    """By label."""
    shares: dict[str, float]
    """By part of `PARTS`: share of all workers' time."""
    workload: str = ""
    """Of runs with the same words here, times can be compared."""
    timeline: Timeline | None = None
    point: DataPoint | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    about: list[tuple[str, str]] = field(default_factory=list)
    """How it ran: model, hardware, parallelism, command."""
    notes: list[str] = field(default_factory=list)


def run_summary(
    source: Path, *, salvage: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> RunSummary:
    """Raises AtlasError where there is nothing of a run."""
    if source.is_dir() and _is_data_point(source):
        return _of_point(read_data_point(source, salvage=salvage, progress=progress))
    if source.suffix in (".yaml", ".yml"):
        raise AtlasError(
            f"{source}: is a plan or a job, not a run. Write its evidence first: atlas card {source} --out DIR"
        )
    return _of_run(source, find_run(source))


def _is_data_point(folder: Path) -> bool:
    try:
        return bool(find_data_point(folder).named)
    except AtlasError:
        return False


# ---- a timeline ----------------------------------------------------------------------------------------------------
def _of_run(source: Path, files: RunFiles) -> RunSummary:
    timeline = None if files.timeline is None else load_timeline(files.timeline)
    steps = read_steps(files.log) if files.log is not None else []
    name = str(files.record.get("name") or (source.name if source.is_dir() else source.stem))
    measured = _mean_step_s(steps)
    figures = {
        "iteration": RunFigure(measured if timeline is None else timeline.iteration_ns / 1e9, "s", better="low"),
        "predicted iteration": RunFigure(_last(steps, "predicted_s"), "s"),
        "tokens per second": RunFigure(_tokens_per_s(steps), "tok/s", better="high"),
        "loss, last step": RunFigure(_last(steps, "loss")),
        "steps reported": RunFigure(float(len(steps)) if steps else None),
        **_record_figures(files.record),
    }
    about = [*([("command", " ".join(files.command))] if files.command else []), *_attempts(files.record)]
    if timeline is None:
        return RunSummary(name, "run", figures, {}, steps=steps, about=about)
    found, program = summary(timeline), timeline.program
    total_s = timeline.makespan_ns / 1e9 * program.num_workers
    waits = {cause: seconds / total_s if total_s else 0.0 for cause, seconds in found["bubbles_s"].items()}
    figures |= {
        "accelerators busy": RunFigure(100 * found["utilization"], "%", better="high"),
        "busiest WAN link": RunFigure(100 * max(found["links"].values(), default=0.0), "%"),
        "workers": RunFigure(float(found["num_workers"])),
    }
    shares = dict(zip(PARTS, (found["utilization"], waits["wan"], waits["peer"], waits["sync"]), strict=False))
    shares["fill and drain"] = waits["fill"] + waits["drain"]
    slower, trained = timeline.meta.get("slower", 1), timeline.meta.get("trained", "")
    unlike_job = [("slowed", f"every duration times {slower}")] if slower != 1 else []
    unlike_job += [("model that ran", str(trained))] if trained else []
    shape = f"{program.num_pipelines} pipelines x {program.num_stages} stages, {program.num_microbatches} microbatches"
    return RunSummary(
        f"{timeline.meta.get('job') or name} ({program.name})",
        timeline.source,
        figures,
        shares,
        workload=shape,
        timeline=timeline,
        steps=steps,
        about=[
            ("schedule", program.name + (", pipelines take turns on the WAN" if program.sharing else "")),
            ("datacenters", ", ".join(dict.fromkeys(program.rank_dc))),
            ("shape", shape),
            ("timeline", f"the last {program.num_iterations} iterations"),
            *unlike_job,
            *about,
        ],
    )


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The step log of a run (JSON lines); lines that are not complete are left out."""
    found: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            for line in file:
                record = json_record(line)
                if isinstance(record.get("step"), int):
                    found.append(record)
                    if len(found) > 2 * MAX_LOG_STEPS:
                        del found[:MAX_LOG_STEPS]
    except OSError as error:
        raise AtlasError(f"{path}: cannot be read: {error.strerror}. Check the path") from error
    return found[-MAX_LOG_STEPS:]


def _last(steps: list[dict[str, Any]], key: str) -> float | None:
    value = next((step[key] for step in reversed(steps) if isinstance(step.get(key), int | float)), None)
    return None if value is None else float(value)


def _tokens_per_s(steps: list[dict[str, Any]]) -> float | None:
    """Over the second half of the steps: the first ones warm up."""
    half = [s for s in steps[len(steps) // 2 :] if isinstance(s.get("tokens"), int) and s.get("iteration_s")]
    seconds = sum(float(step["iteration_s"]) for step in half)
    return sum(step["tokens"] for step in half) / seconds if seconds > 0 else None


def _mean_step_s(steps: list[dict[str, Any]]) -> float | None:
    """Over the second half of the steps."""
    half = [float(s["iteration_s"]) for s in steps[len(steps) // 2 :] if isinstance(s.get("iteration_s"), int | float)]
    return sum(half) / len(half) if half else None


def _record_figures(record: dict[str, Any]) -> dict[str, RunFigure]:
    """Of `run.json`: steps that were kept, of those done, and per second of wall time, restarts included."""
    kept, done, rate = (record.get(key) for key in ("steps_kept", "steps_done", "goodput_steps_per_s"))
    share = 100 * kept / done if isinstance(kept, int) and isinstance(done, int) and done > 0 else None
    goodput = float(rate) if isinstance(rate, int | float) else None
    return {
        "steps kept, of those done": RunFigure(share, "%", better="high"),
        "goodput": RunFigure(goodput, "steps/s", better="high"),
    }


def _attempts(record: dict[str, Any]) -> list[tuple[str, str]]:
    attempts = record.get("attempts")
    if not isinstance(attempts, list):
        return []
    reasons = [str(one.get("reason", "")) for one in attempts if isinstance(one, dict) and one.get("reason")]
    return [("attempts", f"{len(attempts)}" + (f": {'; '.join(reasons[:6])}" if reasons else ""))]


# ---- a data point --------------------------------------------------------------------------------------------------
def _of_point(point: DataPoint) -> RunSummary:
    card, step_s = point.found.card, point.value("step_time")
    busy_s = point.value("compute_time")
    figures = {
        "iteration": RunFigure(point.value("avg_step_time") or step_s, "s", better="low"),
        "tokens per second": RunFigure(point.value("tokens_per_s"), "tok/s", better="high"),
        "model FLOPs utilization": RunFigure(point.value("flops_utilization"), "%", better="high"),
        "accelerators busy": RunFigure(100 * busy_s / step_s if busy_s is not None and step_s else None, "%", "high"),
        "exposed communication": RunFigure(point.value("exposed_communication_fraction"), "%", better="low"),
        "compute of ranks, largest / smallest": RunFigure(point.value("compute_imbalance_ratio"), better="low"),
        "traces": RunFigure(float(len(point.ranks))),
    }
    return RunSummary(
        name=point.name,
        source=point.source,
        figures=figures,
        shares=_point_shares(point, step_s),
        workload="" if card is None else f"{card.text('workload.model.model_family')}, {card.tokens:.0f} tokens",
        point=point,
        about=[] if card is None else _card_words(card),
        notes=[f"{point.name}: {finding}" for finding in point.findings],
    )


def _point_shares(point: DataPoint, step_s: float | None) -> dict[str, float]:
    if not step_s:
        return {}

    def share(*names: str) -> float | None:
        values = [point.value(name) for name in names]
        return None if any(v is None for v in values) else sum(v or 0.0 for v in values) / step_s

    computing = share("compute_time") or 0.0
    waits = [share(f"bubble_{cause}_time") for cause in ("wan", "peer", "sync")]
    ends = share("bubble_fill_time", "bubble_drain_time")
    if any(wait is None for wait in waits) or ends is None:
        known = dict(zip(PARTS, (computing, 0.0, 0.0, share("exposed_communication_time") or 0.0), strict=False))
        return {**known, "other": max(0.0, 1 - sum(known.values()))}
    return dict(zip(PARTS, (computing, *(wait or 0.0 for wait in waits), ends), strict=False))


def _card_words(card: Card) -> list[tuple[str, str]]:
    places = card.get("workload.hardware.datacenters")
    names = [str(place.get("name")) for place in places if isinstance(place, dict)] if isinstance(places, list) else []
    words = {
        "description": (card.text("description") or "").strip(),
        "model": card.text("workload.model.model_family") or "",
        "batch": f"{card.number('workload.data.batch_size') or 0:.0f} sequences of {card.seq_len:.0f} tokens",
        "hardware": f"{card.num_devices:.0f} x {card.text('workload.hardware.xpu_spec.model') or '?'}",
        "datacenters": ", ".join(names),
        "parallelism": ", ".join(
            f"{name} {value}" for name in (*DEGREES, "ep") if (value := card.degree(name)) not in (None, 1)
        ),
        "framework": card.text("Model-executor.framework.name") or "",
        "schedule": card.text("atlas.schedule") or "",
    }
    return [(key, value) for key, value in words.items() if value]
