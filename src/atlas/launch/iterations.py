"""One pass through a Program after the other, as the workers of an emulated run tell of them. Knows what they measured;
who hears of it is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atlas.ir.timeline import Timeline
from atlas.launch.measured import Records, RunClock
from atlas.wan.transport.stream_slot import Faults


@dataclass(frozen=True)
class StepProgress:
    """One pass through the Program, as all workers have told it."""

    num_done: int
    """Steps of the training, this one included."""
    loss: float
    tokens: int
    seconds: float
    """Since the end of the one before."""
    wan_bytes: int
    """Over all emulated paths, since the one before."""
    faults: Faults
    """Of the transport, since the one before."""
    timeline: Timeline
    """Of this pass, counted from the start of the run."""


class Passes:
    """Turns what the workers tell into one Progress per pass."""

    def __init__(
        self,
        records: Records,
        view: RunClock,
        num_workers: int,
        sent_bytes: Callable[[], int],
        on_step: Callable[[StepProgress], None] | None,
        *,
        keep: bool,
    ) -> None:
        """`sent_bytes`: over all emulated paths, since they were opened. `keep`: all passes, or the last alone."""
        self._records, self._view, self._num_workers = records, view, num_workers
        self._sent_bytes, self._on_step, self._keep = sent_bytes, on_step, keep
        self._num_told: dict[int, int] = {}
        self._num_passes = 0
        self._end_ns, self._num_bytes, self._faults = 0, sent_bytes(), Faults()

    def note(self, first_step: int) -> None:
        """A worker has told of its pass that begins with this step."""
        self._num_told[first_step] = self._num_told.get(first_step, 0) + 1
        if self._num_told[first_step] < self._num_workers:
            return
        del self._num_told[first_step]
        self._num_passes += 1
        if self._on_step is not None:
            self._on_step(self._progress(first_step))
        if not self._keep and self._num_passes > 1:
            self._records.forget_pass()

    def _progress(self, first_step: int) -> StepProgress:
        records = self._records
        number = self._num_passes - 1 - records.num_forgotten
        timeline = records.timeline(self._view, number, number + 1)
        told = [steps[number] for steps in records.by_worker.values() if steps[number]["losses"]]
        before = (self._end_ns, self._num_bytes, self._faults)
        self._end_ns = int(timeline.op_end_ns.max())
        self._num_bytes, self._faults = self._sent_bytes(), records.faults
        return StepProgress(
            first_step + records.program.num_iterations,
            sum(step["loss"] for step in told) / len(told),
            sum(step["tokens"] for step in told),
            (self._end_ns - before[0]) / 1e9,
            self._num_bytes - before[1],
            self._faults.since(before[2]),
            timeline,
        )
