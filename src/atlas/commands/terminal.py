"""What commands say on the terminal: tables on stdout, everything that is no result on stderr. Knows rich."""

from __future__ import annotations

import json
import math
import sys
import threading
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

PATIENCE_S = 1.0
"""What takes less than this needs no progress bar."""


def show(*things: Any) -> None:
    """Tables and sentences, as wide as the terminal, or 80 columns where there is none. What is indented stays so."""
    console = Console(highlight=False)
    with console.capture() as capture:
        for thing in things:
            console.print(_indented(thing) if isinstance(thing, str) else thing, markup=False)
    sys.stdout.write(capture.get())


def _indented(line: str) -> str | Padding:
    words = line.lstrip(" ")
    return line if words == line else Padding(Text(words), (0, 0, 0, len(line) - len(words)), expand=False)


def as_json(data: Any) -> str:
    """Strict JSON: what is not a number (an infinite ratio) becomes null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def say(text: str) -> None:
    """A remark that is no result."""
    sys.stdout.flush()
    print(text, file=sys.stderr)


class Meter:
    """A progress bar on stderr, once it is worth one, and only where somebody watches."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._timer = threading.Timer(PATIENCE_S, self._bar.start) if console.is_terminal else None

    def __call__(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=what, completed=done, total=total or None)

    def __enter__(self) -> Meter:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._bar.stop()
