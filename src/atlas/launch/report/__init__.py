"""Reports a run while it runs: a progress bar, files of JSON lines (steps, events), Prometheus metrics, experiment
trackers, and a Timeline that grows step by step. The launcher calls `RunReport.step` after every step; training never
waits for a report, nor fails with it.

Loads no torch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from atlas.ir.store import AppendedLines, Journal
from atlas.ir.timeline import Timeline
from atlas.launch.report.events import GpuFacts, StepEvent
from atlas.launch.report.metrics import MetricsServer, TrainingMetrics
from atlas.launch.report.progress import ProgressBar
from atlas.launch.report.trackers import TrackerError, TrackerThread, figures_of, open_tracker
from atlas.lifetime import Closing

log: Callable[[str], None] = logging.getLogger("atlas.report").warning

__all__ = ["GpuFacts", "PagePaths", "ReportChoice", "RunReport", "StepEvent"]


@dataclass(frozen=True)
class PagePaths:
    """Files of a run's folder, for its live page."""

    steps: Path
    events: Path
    """JSON lines: the start, what went wrong on the way, the end."""
    timeline: Path
    timeline_bytes: int
    """A longer timeline file is begun anew."""


@dataclass(frozen=True)
class ReportChoice:
    """Which reports to make."""

    bar: bool = True
    lines: Path | None = None
    """A file of JSON lines, one per step; a resumed run appends to it."""
    timeline: Path | None = None
    """A file for `atlas view`, readable at any time; a resumed run appends to it."""
    page: PagePaths | None = None
    """What the live page reads."""
    metrics_port: int | None = None
    """0: any free one."""
    metrics_host: str = "127.0.0.1"
    labels: Mapping[str, str] = field(default_factory=dict)
    """For Prometheus: job, schedule."""
    trackers: tuple[str, ...] = ()
    """Names of `trackers.open_tracker`."""
    trackers_asked: bool = True
    """False: they are a default, and one that does not start is only warned of."""
    folder: Path = Path("runs")
    """Where a tracker that writes files writes them."""
    gpus: GpuFacts | None = None
    """To report MFU; None: not on GPUs, or not of one type."""


class RunReport(Closing):
    """`with RunReport(choice, num_steps) as report:`, then `report.step(event, timeline)` for every step.

    Opens files and ports at once, so that an error is reported before training starts.
    """

    def __init__(self, choice: ReportChoice, num_steps: int, warn: Callable[[str], None] = log) -> None:
        self.metrics = TrainingMetrics(choice.labels)
        self._gpus = choice.gpus
        self._warn, self._warned = warn, set[str]()
        self._bar = ProgressBar(num_steps) if choice.bar else None
        self._lines: list[AppendedLines] = []
        self._journals: list[Journal] = []
        self._events: AppendedLines | None = None
        self._handler = _MessageHandler(logging.WARNING, partial(self.note, kind="warning"))
        self._restarts = _MessageHandler(logging.INFO, self.metrics.restarted)
        logging.getLogger("atlas.restarts").addHandler(self._restarts)
        self._server: MetricsServer | None = None
        self._trackers: list[TrackerThread] = []
        try:
            self._open(choice)
        except BaseException:
            self.close()
            raise

    def _open(self, choice: ReportChoice) -> None:
        if choice.lines is not None:
            self._lines.append(AppendedLines(choice.lines))
        if choice.timeline is not None:
            self._journals.append(Journal(choice.timeline))
        if (page := choice.page) is not None:
            self._lines.append(AppendedLines(page.steps))
            self._journals.append(Journal(page.timeline, page.timeline_bytes))
            self._events = AppendedLines(page.events)
            self.note("the run begins", kind="begin")
            logging.getLogger("atlas.launch").addHandler(self._handler)
        if choice.metrics_port is not None:
            self._server = MetricsServer(self.metrics, choice.metrics_port, choice.metrics_host)
        for name in choice.trackers:
            try:
                tracker = open_tracker(name, choice.folder, choice.labels.get("job", "run"), choice.labels)
            except TrackerError as error:
                if choice.trackers_asked:
                    raise
                self._warn(f"report ({name}): {error}. Training continues")
            else:
                self._trackers.append(TrackerThread(name, tracker, self._warn))

    @property
    def metrics_port(self) -> int | None:
        return self._server.port if self._server is not None else None

    def step(self, event: StepEvent, timeline: Timeline | None = None) -> None:
        """Report a step. `timeline`: of the pass that did it."""
        if self._gpus is not None and "num_workers" in event:
            event = self._gpus.figures(event)
        self.metrics.step(event, timeline)
        if timeline is not None:
            for journal in self._journals:
                self._try("timeline", partial(journal.append, event["step"], timeline))
        for lines in self._lines:
            self._try("lines", partial(lines.append, {"time": round(time.time(), 3), **_finite(event)}))
        if self._trackers:
            figures = figures_of(event, timeline)
            for tracker in self._trackers:
                tracker.step(event["step"], figures)
        if self._bar is not None:
            bar = self._bar
            self._try("progress", lambda: bar.step(event))

    def note(self, text: str, kind: str = "note") -> None:
        """Record an event: a host is lost, a spare is taken, the run resumes. `kind`: begin, note, warning or end."""
        if self._events is not None:
            events, first = self._events, text.partition("\n")[0]
            self._try("events", lambda: events.append({"time": round(time.time(), 3), "kind": kind, "text": first}))

    def close(self) -> None:
        logging.getLogger("atlas.launch").removeHandler(self._handler)
        logging.getLogger("atlas.restarts").removeHandler(self._restarts)
        self.note("the run ended", kind="end")
        for part in (self._bar, *self._lines, *self._journals, self._events, self._server, *self._trackers):
            if part is not None:
                self._try("end", part.close)
        self._events = None

    def _try(self, what: str, write: Callable[[], None]) -> None:
        """A full disk or a closed terminal is reported once and does not stop training."""
        try:
            write()
        except (OSError, ValueError) as error:
            if what not in self._warned:
                self._warned.add(what)
                self._warn(f"report ({what}): {error}. Training continues; this part of the report is lost")


class _MessageHandler(logging.Handler):
    """Passes on the text of each record."""

    def __init__(self, level: int, take: Callable[[str], None]) -> None:
        super().__init__(level)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record.getMessage())


def _finite(event: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null instead."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
