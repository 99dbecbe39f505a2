"""Reports a run while it runs: a progress bar, a file of JSON lines, Prometheus metrics, and a Timeline that grows
step by step. The launcher calls `RunReport.step` after every step; training never waits for a report, nor fails with
it.

Loads no torch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas.ir.store import AppendedLines, Journal
from atlas.ir.timeline import Timeline
from atlas.launch.report.events import GpuFacts, StepEvent
from atlas.launch.report.metrics import MetricsServer, TrainingMetrics
from atlas.launch.report.progress import ProgressBar

log: Callable[[str], None] = logging.getLogger("atlas.report").warning

__all__ = ["GpuFacts", "ReportChoice", "RunReport", "StepEvent"]


@dataclass(frozen=True)
class ReportChoice:
    """Which reports to make."""

    bar: bool = True
    lines: Path | None = None
    """A file of JSON lines, one per step; a resumed run appends to it."""
    timeline: Path | None = None
    """A file for `atlas view`, readable at any time; a resumed run appends to it."""
    metrics_port: int | None = None
    """0: any free one."""
    metrics_host: str = "127.0.0.1"
    labels: Mapping[str, str] = field(default_factory=dict)
    """For Prometheus: job, schedule."""
    gpus: GpuFacts | None = None
    """To report MFU; None: not on GPUs, or not of one type."""


class RunReport:
    """`with Report(choice, num_steps) as report:`, then `report.step(event, timeline)` for every step.

    Opens files and ports at once, so that an error is reported before training starts.
    """

    def __init__(
        self,
        choice: ReportChoice,
        num_steps: int,
        first_step: int = 0,
        warn: Callable[[str], None] = log,
    ) -> None:
        self.metrics = TrainingMetrics(choice.labels)
        self._gpus = choice.gpus
        self._warn, self._warned = warn, set[str]()
        self._bar = ProgressBar(num_steps, first_step) if choice.bar else None
        self._lines: AppendedLines | None = None
        self._journal: Journal | None = None
        self._server: MetricsServer | None = None
        try:
            self._open(choice)
        except BaseException:
            self.close()
            raise

    def _open(self, choice: ReportChoice) -> None:
        if choice.lines is not None:
            self._lines = AppendedLines(choice.lines)
        if choice.timeline is not None:
            self._journal = Journal(choice.timeline)
        if choice.metrics_port is not None:
            self._server = MetricsServer(self.metrics, choice.metrics_port, choice.metrics_host)

    @property
    def metrics_port(self) -> int | None:
        return self._server.port if self._server is not None else None

    def step(self, event: StepEvent, timeline: Timeline | None = None) -> None:
        """Report a step. `timeline`: of the pass that did it."""
        if self._gpus is not None and "num_workers" in event:
            event = self._gpus.figures(event)
        self.metrics.step(event, timeline)
        if self._lines is not None:
            lines = self._lines
            self._try("lines", lambda: lines.append({"time": round(time.time(), 3), **_finite(event)}))
        if self._journal is not None and timeline is not None:
            journal = self._journal
            self._try("timeline", lambda: journal.append(event["step"], timeline))
        if self._bar is not None:
            bar = self._bar
            self._try("progress", lambda: bar.step(event))

    def close(self) -> None:
        for part in (self._bar, self._lines, self._journal, self._server):
            if part is not None:
                self._try("end", part.close)

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try(self, what: str, write: Callable[[], None]) -> None:
        """A full disk or a closed terminal is reported once and does not stop training."""
        try:
            write()
        except (OSError, ValueError) as error:
            if what not in self._warned:
                self._warned.add(what)
                self._warn(f"report ({what}): {error}. Training continues; this part of the report is lost")


def _finite(event: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null instead."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
