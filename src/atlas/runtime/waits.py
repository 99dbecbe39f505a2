"""A worker's waits, offered to others. Whenever the worker is about to wait for an input, a `Filler` may use the device
until the input has arrived. That is all BubbleTea needs of a worker, and all the worker knows of it.

A filler is named in the assignment and found among the entry points of the group `atlas.fillers`: a callable that
takes its settings (a JSON object) and returns a Filler. One that fails is dropped and training goes on. Where there is
none, waiting costs what it always did.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, TypeVar

from atlas.errors import AtlasError
from atlas.ir.ops import Op
from atlas.ir.program import Ints, Program
from atlas.runtime.assignment import FillerChoice, Json
from atlas.runtime.device import Device, Running, Span
from atlas.wan.transport.base import Handle

GROUP = "atlas.fillers"
T = TypeVar("T")
log = logging.getLogger("atlas.waits")


@dataclass(frozen=True)
class Position:
    """An op that waits: which step of the training, and which of the worker's ops in it."""

    step: int
    index: int
    """In the worker's list of one pass through its Program; the same every time, so windows can be learnt."""


@dataclass(frozen=True, eq=False)
class WorkerFacts:
    """What a filler may know of the worker it lives in."""

    name: str
    """`p0.s1`"""
    datacenter: str
    worker: int
    program: Program
    ops: Sequence[Op]
    """Its own, in order: what `Position.index` counts."""
    compute_ns: Ints
    """[s, k] of its pipeline, as priced; zeros where nothing is paced."""


class SharedDevice:
    """The worker's device as a filler sees it: what it runs appears in the Timeline as P ops."""

    def __init__(self, device: Device, note: Callable[[Span], None]) -> None:
        self._device, self._note = device, note
        self.place = device.place
        """Where tensors live, as torch names it."""

    def run(self, work: Callable[[], T], cost_ns: int = 0) -> tuple[T, Span]:
        """Does `work` now. A paced device is busy with it for `cost_ns`."""
        running = self.begin(work, cost_ns)
        return running.result, self.settle(running)

    def begin(self, work: Callable[[], T], cost_ns: int = 0) -> Running[T]:
        """As `run`, but a device with a queue does not wait; to be settled later."""
        return self._device.begin(work, cost_ns, time.monotonic_ns())

    def settle(self, running: Running[object]) -> Span:
        """Waits for its end, and notes it."""
        span = running.wait()
        self._note(span)
        return span


class Filler(Protocol):
    """Called on the worker's own thread, never while it computes."""

    def attach(self, facts: WorkerFacts, device: SharedDevice) -> None:
        """Once, before training starts."""

    def fill(self, position: Position, arrived: Callable[[], bool]) -> None:
        """The worker has nothing to do until `arrived()`. Return as soon as possible after that; at once is fine."""

    def waited(self, position: Position, began_ns: int, ended_ns: int) -> None:
        """The wait is over; called for every op that can wait, also when its input was there (began = ended)."""

    def ran(self, position: Position, span: Span) -> None:
        """An op of training has run."""

    def close(self) -> None:
        """Training has ended."""


class Waits:
    """How a worker waits."""

    def __init__(self, patience_s: float, filler: Filler | None = None) -> None:
        self.patience_s, self._filler = patience_s, filler
        self.now_for = ""
        """What is waited for at this moment, in words; empty while there is work."""

    def attach(self, facts: WorkerFacts, device: Device, note: Callable[[Span], None]) -> None:
        if self._filler is not None:
            self._call(lambda filler: filler.attach(facts, SharedDevice(device, note)))

    def until(self, position: Position, handles: Sequence[Handle]) -> None:
        """Returns once all are done; raises what went wrong, or who did not come within the patience."""
        began_ns = 0 if self._filler is None else self._fill(position, handles)
        for handle in handles:
            self.now_for = handle.what
            handle.wait(self.patience_s)
        self.now_for = ""
        if self._filler is not None:
            ended_ns = max(began_ns, *(handle.end_ns for handle in handles))
            self._call(lambda filler: filler.waited(position, began_ns, ended_ns))

    def _fill(self, position: Position, handles: Sequence[Handle]) -> int:
        """When the wait began."""

        def arrived() -> bool:
            return all(handle.done for handle in handles)

        began_ns = time.monotonic_ns()
        if not arrived():
            self._call(lambda filler: filler.fill(position, arrived))
        return began_ns

    def ran(self, position: Position, span: Span) -> None:
        if self._filler is not None:
            self._call(lambda filler: filler.ran(position, span))

    def close(self) -> None:
        if self._filler is not None:
            self._call(lambda filler: filler.close())

    def _call(self, what: Callable[[Filler], None]) -> None:
        """A guest that misbehaves is shown the door; training goes on."""
        if self._filler is None:
            return
        try:
            what(self._filler)
        except Exception as error:
            log.exception("the filler failed (%r) and is not called again; training goes on", error)
            self._filler = None


def load_filler(choice: FillerChoice | None) -> Filler | None:
    """The filler of an assignment."""
    if choice is None:
        return None
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if choice.name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise AtlasError(f"filler {choice.name!r}: not installed; there are {known}. Install the package that has it")
    make: Callable[[Json], Filler] = found[choice.name].load()
    return make(choice.settings)
