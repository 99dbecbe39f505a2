"""One worker's measurements, step by step, on its monotonic clock: spans of its ops in their order, moments of
transfers, spans of fillers in its waits. A step is reported once all its sends are done.

Knows moments. Does not know what an op does, nor the clocks of others.
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
"""Between two looks at transfers that are not done."""


@dataclass
class PendingSend:
    """A transfer that is not done; it gets a handle when its bytes are in host memory."""

    transfer: int
    handle: Handle | None = None

    @property
    def done(self) -> bool:
        return self.handle is not None and self.handle.done

    def wait(self, patience_s: float) -> None:
        """Wait for the copy from the device, and then for the send."""
        deadline = time.monotonic() + patience_s
        while self.handle is None:
            if time.monotonic() > deadline:
                raise WorkerError(f"transfer {self.transfer} was not copied from the device within {patience_s:g} s")
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
    """(ops done before, start, end) of a filler's work."""
    losses: list[float] = field(default_factory=list)
    """By microbatch, ascending, over the pass; on the last stage."""
    norms: list[float] = field(default_factory=list)
    """Global norms of the gradients, if the Program computes them."""
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
    """Passes finished steps to `on_step`, in order."""

    def __init__(self, on_step: Callable[[StepRecord], None]) -> None:
        self._on_step = on_step
        self._waiting: deque[StepRecord] = deque()
        self.current = StepRecord(0)

    def begin(self, first_step: int) -> StepRecord:
        self.current = StepRecord(first_step)
        return self.current

    def end(self, record: StepRecord) -> None:
        self._waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Report steps whose sends are done; cheap if there are none."""
        while self._waiting and self._waiting[0].is_sent:
            self._on_step(self._waiting.popleft())

    def finish(self, patience_s: float) -> None:
        """Wait for the last sends; raises if one fails."""
        for record in self._waiting:
            for sending in record.sendings:
                sending.wait(patience_s)
        self.flush()
