"""The progress of a run on the terminal: one bar with loss, tokens per second, iteration time against prediction, and
WAN throughput. Without a terminal (a log file, CI), a plain line every few seconds instead.

Writes to stderr, since results go to stdout. Knows step events and rich.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from atlas.launch.report.events import StepEvent, against_prediction, tokens_per_s

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY_S = 10.0
"""Between two lines where the output is not a terminal."""
BAR_WIDTH = 8
"""Characters."""
OTHER_HARDWARE = 10.0
"""An iteration that takes this many times longer than predicted runs on other hardware than the job describes."""


class ProgressBar:
    """Appears with the first step; `close` leaves the last state on the screen."""

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        self.num_steps = num_steps
        self._stream = stream or sys.stderr
        self._bar: Progress | None = None
        self._line_due = 0.0

    def step(self, event: StepEvent) -> None:
        if self._stream.isatty():
            self._update(event)
        elif time.monotonic() >= self._line_due or event["step"] >= self.num_steps:
            self._line_due = time.monotonic() + LINE_EVERY_S
            print(f"step {event['step']}/{self.num_steps}  {figures(event)}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _update(self, event: StepEvent) -> None:
        if self._bar is None:
            self._bar = self._started()
        taken = len(f"step {self.num_steps}/{self.num_steps} ") + BAR_WIDTH + len(" 00:00:00  ")
        room = self._bar.console.width - taken
        self._bar.update(self._bar.task_ids[0], completed=event["step"], figures=figures(event, room))

    def _started(self) -> Progress:
        from rich.console import Console  # rich.progress: 90 ms, only on a terminal
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=Console(file=self._stream),
        )
        bar.add_task("", total=self.num_steps, figures="")
        bar.start()
        return bar


def figures(event: StepEvent, room: int | None = None) -> str:
    """`loss 2.3412  12.3k tok/s  410 ms (+2.1 %)  WAN 3.2 Gbit/s`: as many of these as there is room for."""
    wan = event.get("wan_gbit_s")
    words = {"loss": f"loss {event['loss']:.4f}", "speed": f"{_short(tokens_per_s(event))} tok/s"}
    if "mfu" in event and "tokens_per_gpu_s" in event:
        words["mfu"] = f"{_short(event['tokens_per_gpu_s'])} tok/s/GPU, MFU {event['mfu']:.1%}"
    words["time"] = _time(event["iteration_s"]) + _off(against_prediction(event))
    if wan is not None:
        words["wan"] = f"WAN {wan:.2f} Gbit/s" if wan >= 0.1 else f"WAN {wan * 1e3:.2f} Mbit/s"
    for least in ("wan", "mfu", "speed", "time"):
        if room is not None and len("  ".join(words.values())) > room:
            words.pop(least, None)
    return "  ".join(words.values())


def _off(off: float | None) -> str:
    """How far the prediction is off; a run on other hardware is not compared with it."""
    if off is None:
        return ""
    return f" ({off:+.1%})" if off < OTHER_HARDWARE else " (not the job's hardware)"


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
