"""What one worker saw, step by step, on its monotonic clock: spans of its ops in their order, moments of transfers,
spans of whoever filled its waits. A step is told once all its sends have left.

Knows moments. Does not know what an op does, nor how clocks of others run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atlas.errors import WorkerError
from atlas.runtime.device import Span
from atlas.wan.transport.base import Handle

LOOK_S = 0.001


@dataclass
class PendingSend:
    """A transfer on its way; it has a handle from when its bytes are in host memory."""

    transfer: int
    handle: Handle | None = None

    @property
    def done(self) -> bool:
        return self.handle is not None and self.handle.done

    def wait(self, patience_s: float) -> None:
        """For both: the copy from the device, which may still be under way, and the send."""
        deadline = time.monotonic() + patience_s
        while self.handle is None:
            if time.monotonic() > deadline:
                raise WorkerError(f"transfer {self.transfer} did not come off the device within {patience_s:g} s")
            time.sleep(LOOK_S)
        self.handle.wait(patience_s)


@dataclass
class StepRecord:
    """One pass through the Program. Transfers are numbered as the Program numbers them."""

    first_step: int
    """Of the training: the step of the Program's first iteration."""
    op_start_ns: list[int] = field(default_factory=list)
    op_end_ns: list[int] = field(default_factory=list)
    ready_ns: dict[int, int] = field(default_factory=dict)
    start_ns: dict[int, int] = field(default_factory=dict)
    arrive_ns: dict[int, int] = field(default_factory=dict)
    fills: list[tuple[int, int, int]] = field(default_factory=list)
    """(ops done before, start, end) of what a filler ran."""
    losses: list[float] = field(default_factory=list)
    """By microbatch, ascending, over the pass; on the last stage."""
    norms: list[float] = field(default_factory=list)
    """Global norms of the gradients, where they were taken."""
    tokens: int = 0
    """Trained on by this worker's pipeline; on the last stage."""
    sendings: list[PendingSend] = field(default_factory=list)

    def note_op(self, span: Span) -> None:
        self.op_start_ns.append(span.start_ns)
        self.op_end_ns.append(span.end_ns)

    def note_fill(self, span: Span) -> None:
        self.fills.append((len(self.op_start_ns), span.start_ns, span.end_ns))

    @property
    def is_sent(self) -> bool:
        return all(sending.done for sending in self.sendings)

    def to_json(self, skew_ns: int = 0) -> dict[str, Any]:
        for sending in self.sendings:
            assert sending.handle is not None
            self.start_ns[sending.transfer] = sending.handle.start_ns
        return {
            "step": self.first_step,
            "loss": sum(self.losses) / len(self.losses) if self.losses else None,
            "losses": self.losses,
            "norms": self.norms,
            "tokens": self.tokens,
            "op_start_ns": [at + skew_ns for at in self.op_start_ns],
            "op_end_ns": [at + skew_ns for at in self.op_end_ns],
            "ready_ns": [(t, at + skew_ns) for t, at in self.ready_ns.items()],
            "start_ns": [(t, at + skew_ns) for t, at in self.start_ns.items()],
            "arrive_ns": [(t, at + skew_ns) for t, at in self.arrive_ns.items()],
            "fills": [(index, start + skew_ns, end + skew_ns) for index, start, end in self.fills],
        }


class Recorder:
    """Hands finished steps to `tell`, in order."""

    def __init__(self, tell: Callable[[StepRecord], None]) -> None:
        self._tell = tell
        self._waiting: deque[StepRecord] = deque()
        self.current = StepRecord(0)

    def begin(self, first_step: int) -> StepRecord:
        self.current = StepRecord(first_step)
        return self.current

    def end(self) -> None:
        self._waiting.append(self.current)
        self.flush()

    def flush(self) -> None:
        """Tells what has been sent in full; cheap when there is nothing to tell."""
        while self._waiting and self._waiting[0].is_sent:
            self._tell(self._waiting.popleft())

    def finish(self, patience_s: float) -> None:
        """Waits for the last sends, and raises where one fails."""
        for record in self._waiting:
            for sending in record.sendings:
                sending.wait(patience_s)
        self.flush()
