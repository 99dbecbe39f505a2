"""Records steps of a worker with torch.profiler: a real Kineto trace beside our own Timeline.

`ATLAS_KINETO` names the folder; without it nothing is recorded. `ATLAS_KINETO_STEPS` names the steps, `10:12`; without
it the last ones are recorded. A trace that cannot be written is a warning: training goes on. Knows steps, not ops.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

FOLDER, STEPS = "ATLAS_KINETO", "ATLAS_KINETO_STEPS"
LAST_STEPS = 12
"""Recorded: ten count, because metrics leave out the first and the last."""

log = logging.getLogger("atlas.kineto")


class KinetoRecorder:
    """Call `begin` before each step, then `finish`."""

    while_writing: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered while the trace is written, which takes minutes for millions of events."""

    def __init__(self, path: Path, first: int, last: int | None = None) -> None:
        """`last`: the last step to record; None: until `finish`."""
        self._path, self._first, self._last = path, first, last
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds):
            torch.ones(1, device="cuda" if len(kinds) > 1 else "cpu").add_(1)  # the first use takes seconds
        self._profile = torch.profiler.profile(activities=kinds)  # acc_events would take minutes at the end
        self._step: torch.profiler.record_function | None = None

    @classmethod
    def of(cls, rank: int, last_step: int, environment: Mapping[str, str] = os.environ) -> KinetoRecorder | None:
        """What the environment asks for; None: nothing."""
        folder = environment.get(FOLDER)
        if not folder:
            return None
        path, steps = Path(folder) / f"rank{rank}_trace.json", environment.get(STEPS)
        if not steps:
            return cls(path, last_step - LAST_STEPS + 1)
        first, last = map(int, steps.split(":"))
        return cls(path, first - 1, last - 1)  # users count from 1

    def before(self, may_begin: Callable[[int], None]) -> Callable[[int], None]:
        """Mark each step after `may_begin` has allowed it."""

        def begin(step: int) -> None:
            may_begin(step)
            self.begin(step)

        return begin

    def begin(self, step: int) -> None:
        if self._last is not None and step > self._last:
            self.finish()
            return
        if step < self._first:
            return
        if self._step is None:
            self._profile.start()
        else:
            self._step.__exit__(None, None, None)
        self._step = torch.profiler.record_function(f"ProfilerStep#{step}")
        self._step.__enter__()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        if self._step is None:
            return
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the last step ends when its kernels have
            self._step.__exit__(None, None, None)
            with self.while_writing():
                self._profile.stop()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._profile.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            log.warning("%s: the trace could not be written: %s. Training is not affected", self._path, error)
        self._step = None


def named(name: str, work: Callable[[], T]) -> Callable[[], T]:
    """Work that has this name in a trace."""

    def run() -> T:
        with torch.profiler.record_function(name):
            return work()

    return run
