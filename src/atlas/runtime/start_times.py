"""How long each phase of a worker's start took, from its assignment to the end of its first step. A slow start is
explained in the worker's log; a measured Timeline has all of them (`meta["start_s"]`).

Knows a clock. Does not know what the phases are.
"""

from __future__ import annotations

import sys
import time

WORTH_A_LINE_S = 5.0
"""Starts that take longer are written to the log."""


class StartTimes:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By phase, in order."""
        self._last_s = time.monotonic()

    def note(self, phase: str) -> None:
        """The phase that ends now; it began when the one before it ended."""
        now_s = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def finish(self, phase: str) -> None:
        """As `note`, for the last one."""
        self.note(phase)
        if sum(self.seconds.values()) > WORTH_A_LINE_S:
            sys.stderr.write(f"start: {self}\n")

    def __str__(self) -> str:
        return ", ".join(f"{phase} {took_s:.1f} s" for phase, took_s in self.seconds.items())
