"""CUDA as a device: compute on one stream, copies on two others, so that an activation leaves and the next arrives
while the GPU computes. Host memory is pinned. A thread of its own waits for copies, never the one that launches
kernels.

Handles streams, events and copies. It knows neither ops nor peers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.runtime.device import CopyTimes, Device, Running, Span
from atlas.runtime.spans import SpanUnion

T = TypeVar("T")
log = logging.getLogger("atlas.cuda")
CLOSE_S = 30.0
"""How long to wait for the copying thread to end."""
NUM_KEPT = 4096
"""The last spans of compute and of copies are kept for statistics."""
REBASE_NS = 20 * 10**9
"""How often the GPU's clock is compared with the host's: an event's time is a float32 of milliseconds."""


class Cuda(Device):
    """One GPU, possibly shared with other processes."""

    is_thread = False

    def __init__(self, name: str = "cuda:0") -> None:
        self.place = name if ":" in name else f"{name}:0"
        torch.cuda.set_device(self.place)
        # The backward pass has its own thread. If its first op is a matrix product, torch warns that it has no context.
        torch.ones(1, device=self.place, requires_grad=True).mul(2).backward()  # type: ignore[no-untyped-call]
        self._compute = torch.cuda.current_stream()
        self._down, self._up = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._copies = Copies(self.place)
        self._base = self._compare_clocks()
        self._computed: deque[Span] = deque(maxlen=NUM_KEPT)
        self._copied: deque[_Timed] = deque(maxlen=NUM_KEPT)

    def ran(self, span: Span) -> None:
        if span.end_ns - self._base.at_ns > REBASE_NS:
            self._base = self._compare_clocks()
        self._computed.append(span)

    def begin(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> Running[T]:
        """Queued on the compute stream; its span is measured by the GPU."""
        start, end = _event(), _event(blocking=True)
        start.record(self._compute)
        result = work()
        end.record(self._compute)
        return _Queued(result, _Timed(start, end, self._base))

    def _compare_clocks(self) -> _Base:
        event = _event()
        event.record(self._compute)
        event.synchronize()
        return _Base(event, time.monotonic_ns())

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def download(self, tensor: Tensor, then: Callable[[Tensor], None]) -> None:
        host = self.buffer(tuple(tensor.shape), tensor.dtype)
        self._down.wait_stream(self._compute)
        with torch.cuda.stream(self._down):
            start, done = _event(), _event(blocking=True)
            start.record(self._down)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._down)
            done.record(self._down)
        self._copied.append(_Timed(start, done, self._base))
        self._copies.put(done.synchronize, host, then)

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
        with torch.cuda.device(self.place), torch.cuda.stream(self._up):
            there = torch.empty_like(tensor, device=self.place)
            start, done = _event(), _event()
            start.record(self._up)
            there.copy_(tensor, non_blocking=True)
            done.record(self._up)
        self._copied.append(_Timed(start, done, self._base))

        def get(_source: Tensor = tensor) -> Tensor:
            """Keeps the source until the copy is done."""
            stream = torch.cuda.current_stream()
            stream.wait_event(done)
            there.record_stream(stream)
            return there

        return get

    def copied(self) -> CopyTimes:
        copies = [copy.span() for copy in list(self._copied)]
        compute = SpanUnion(self._computed)
        since_ns = self._computed[0].start_ns if self._computed else 0
        kept = [span for span in copies if span.start_ns >= since_ns]
        total_ns = sum(span.end_ns - span.start_ns for span in kept)
        return CopyTimes(len(kept), total_ns, sum(map(compute.within_ns, kept)))

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.place)

    def on_failure(self, report: Callable[[WorkerError], None]) -> None:
        self._copies.report = report

    def close(self) -> None:
        self._copies.close()


_Copy = tuple[Callable[[], None], Tensor, Callable[[Tensor], None]]


class Copies:
    """Copies to the host, each passed on when it is done, in order, on a thread.

    The first failure is reported at once and raised by the next `put`: otherwise a peer would wait for bytes that never
    come, and the error would name the wrong worker.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.report: Callable[[WorkerError], None] = lambda error: None
        self._error: WorkerError | None = None
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hand_over, daemon=True, name=f"atlas {place} copies")
        self._thread.start()

    def put(self, wait: Callable[[], None], host: Tensor, then: Callable[[Tensor], None]) -> None:
        """`wait` returns when the copy is done."""
        if self._error is not None:
            raise self._error
        self._queue.put((wait, host, then))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _hand_over(self) -> None:
        while (copy := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                wait, host, then = copy
                wait()
                then(host)
            except Exception as error:
                log.exception("a copy from %s failed", self.place)
                self._error = WorkerError(f"a copy from {self.place} to the host failed: {error!r}")
                self.report(self._error)


def _event(*, blocking: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]


class _Base(NamedTuple):
    """One moment on both clocks."""

    event: torch.cuda.Event
    at_ns: int

    def moment_ns(self, event: torch.cuda.Event) -> int:
        elapsed_ms: float = self.event.elapsed_time(event)
        return self.at_ns + round(elapsed_ms * 1e6)


class _Timed(NamedTuple):
    """Work or a copy between two events of its stream."""

    start: torch.cuda.Event
    done: torch.cuda.Event
    base: _Base

    def span(self) -> Span:
        """Waits for its end, without holding the GIL."""
        self.done.synchronize()
        return Span(self.base.moment_ns(self.start), self.base.moment_ns(self.done))


class _Queued(NamedTuple, Generic[T]):
    """Work on the compute stream."""

    result: T
    timed: _Timed

    @property
    def done(self) -> bool:
        found: bool = self.timed.done.query()  # type: ignore[no-untyped-call]
        return found

    def wait(self) -> Span:
        return self.timed.span()
