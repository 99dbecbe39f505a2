"""A worker's waits, for others to use. While the worker waits for an input, a `Filler` may use the device until the
input arrives. BubbleTea needs nothing else of a worker.

A filler is named in the assignment and found among the entry points of the group `atlas.fillers`: a callable that
takes its settings (a JSON object, with the worker's `device`) and returns a Filler. A filler that fails is not called
again, and training continues. Without a filler, waiting costs nothing extra.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from atlas.ir.program import Ints, Op, Program
from atlas.runtime.assignment import FillerChoice, Json, find_filler
from atlas.runtime.device import Device, Paced, Running, Span
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Handle

T = TypeVar("T")
log = logging.getLogger("atlas.waits")


class Pending(Protocol):
    """An operation that was started; a transport's `Handle` is one."""

    what: str

    @property
    def done(self) -> bool: ...

    @property
    def end_ns(self) -> int:
        """When it was done, on the monotonic clock."""
        ...

    def wait(self, timeout_s: float | None = None) -> object:
        """Return when it is done; raise its error, or a WorkerError after `timeout_s`."""
        ...


Wait = Callable[[Sequence[Pending]], None]
"""Returns when all are done; raises the error of one, or a timeout."""


class Arrival:
    """Whether all inputs of an op have arrived."""

    def __init__(self, handles: Sequence[Pending]) -> None:
        self._handles = handles

    def __call__(self) -> bool:
        return all(handle.done for handle in self._handles)

    def notify(self, wake: Callable[[], None]) -> bool:
        """Call `wake` when an input arrives, on any thread. Returns False if some inputs can only be polled."""
        if not all(isinstance(handle, Handle) for handle in self._handles):
            return False
        for handle in self._handles:
            if isinstance(handle, Handle):
                handle.on_done(lambda _: wake())
        return True


@dataclass(frozen=True)
class Position:
    """An op that waits: the step of the training, and its index among the worker's ops."""

    step: int
    index: int
    """In the worker's ops of one pass through its Program; the same in every pass, so waits can be predicted."""


@dataclass(frozen=True, eq=False)
class WorkerFacts:
    """Facts about the worker, for its filler."""

    name: str
    """`p0.s1`"""
    datacenter: str
    worker: int
    """Its number over all cells."""
    program: Program
    ops: Sequence[Op]
    """Its own, in order: `Position.index` counts them."""
    compute_ns: Ints
    """[s, k] of its pipeline, by the cost model; zeros if it is not paced."""
    plan: str = ""
    """The id of the Program (`ir.text.program_id`)."""
    host: str = "127.0.0.1"
    """Its address inside the datacenter."""
    security: Security = field(default_factory=Security)
    """The run's certificates."""


class SharedDevice:
    """The worker's device for a filler: its work appears in the Timeline as P ops."""

    def __init__(self, device: Device, note: Callable[[Span], None]) -> None:
        self._device, self._note = device, note
        self.place = device.place
        """The torch device of tensors."""

    def run(self, work: Callable[[], T], cost_ns: int = 0) -> tuple[T, Span]:
        """Do `work` now. A paced device is busy with it for `cost_ns`."""
        running = self.begin(work, cost_ns)
        return running.result, self.settle(running)

    def begin(self, work: Callable[[], T], cost_ns: int = 0) -> Running[T]:
        """As `run`, but a device with a queue does not wait; call `settle` later."""
        return self._device.begin(work, cost_ns, time.monotonic_ns())

    def occupied(self, span: Span) -> None:
        """A filler's work runs in another process; a paced device is busy with it."""
        if isinstance(self._device, Paced):
            self._device.free_ns = max(self._device.free_ns, span.end_ns)
        self._note(span)

    def settle(self, running: Running[object]) -> Span:
        """Wait for its end and record it."""
        span = running.wait()
        self._note(span)
        return span


class Filler(Protocol):
    """Uses a worker's waits. Called on the worker's own thread, never while it computes."""

    def attach(self, facts: WorkerFacts, device: SharedDevice) -> None:
        """Once, before training starts."""

    def fill(self, position: Position, arrived: Callable[[], bool]) -> None:
        """The worker is idle until `arrived()`. Return as soon as possible after that; returning at once is fine.
        `arrived` may be an `Arrival`, which can wake the filler."""

    def waited(self, position: Position, began_ns: int, ended_ns: int) -> None:
        """The wait is over. Called for every op that can wait, also if it did not wait (began = ended)."""

    def ran(self, position: Position, span: Span) -> None:
        """An op of training has finished."""

    def close(self) -> None:
        """Training has ended."""


class Waits:
    """A worker's waits for its inputs."""

    def __init__(self, patience_s: float, filler: Filler | None = None) -> None:
        self.patience_s, self._filler = patience_s, filler
        self.now_for = ""
        """What the worker waits for at this moment, in words; empty while it computes."""

    @property
    def has_filler(self) -> bool:
        return self._filler is not None

    def attach(self, facts: WorkerFacts, device: Device, note: Callable[[Span], None]) -> None:
        self._call(lambda filler: filler.attach(facts, SharedDevice(device, note)))

    def until(self, position: Position, handles: Sequence[Pending]) -> None:
        """Wait until all are done; raises their error, or a timeout."""
        began_ns = 0 if self._filler is None else self._fill(position, handles)
        for handle in handles:
            self.now_for = handle.what
            handle.wait(self.patience_s)
        self.now_for = ""
        if self._filler is not None:
            ended_ns = max(began_ns, *(handle.end_ns for handle in handles))
            self._call(lambda filler: filler.waited(position, began_ns, ended_ns))

    def _fill(self, position: Position, handles: Sequence[Pending]) -> int:
        """Let the filler use the wait; returns when the wait began."""
        began_ns, arrived = time.monotonic_ns(), Arrival(handles)
        if not arrived():
            self._call(lambda filler: filler.fill(position, arrived))
        return began_ns

    def ran(self, position: Position, span: Span) -> None:
        self._call(lambda filler: filler.ran(position, span))

    def close(self) -> None:
        self._call(lambda filler: filler.close())

    def _call(self, what: Callable[[Filler], None]) -> None:
        """Call the filler, if there is one. If it fails it is not called again, and training continues."""
        if self._filler is None:
            return
        try:
            what(self._filler)
        except Exception as error:
            log.exception("the filler failed (%r) and is not called again; training continues", error)
            failed, self._filler = self._filler, None
            with contextlib.suppress(Exception):
                failed.close()  # its service must not count on this worker


def load_filler(choice: FillerChoice | None, device: str = "") -> Filler | None:
    """The filler of an assignment. It may fork this process, so this comes before threads."""
    if choice is None:
        return None
    make: Callable[[Json], Filler] = find_filler(choice.name).load()
    return make({**choice.settings, "device": device})
