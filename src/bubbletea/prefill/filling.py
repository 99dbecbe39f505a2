"""Fills one wait: runs pieces of prefill as long as the predicted end of each, plus a margin, is before the end of the
wait that the guard predicts. The last piece is cut to the remaining time; no piece starts after the input has arrived.

On a device with a queue the next pieces are queued before the current one ends, so that the device does not idle
between them. Knows pieces, the guard and the clock; not requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from atlas.runtime.device import Running
from atlas.runtime.waits import Arrival, Position, SharedDevice
from bubbletea.prefill.engine import BegunPiece, PrefillEngine
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.job import PieceResult, PrefillPiece
from bubbletea.prefill.throttle import Throttle

IDLE_S, FOREVER_S = 0.001, float("inf")
"""Polling interval of a wait without work: of an input that cannot wake the filler, and of one that does."""
LOOK_S = 0.0001
"""Polling interval while the device's queue is full."""
AHEAD, MOST = 2, 4
"""Pieces on the device at once: the running one and the next, and more if they are short."""
RESERVE_NS = 2_000_000
"""Work that must be queued on the device to cover the time in which the host wakes up and launches the next piece."""

LAUNCHES = 8
"""Number of launches in the moving average of their duration."""


class _Begun(NamedTuple):
    flight: BegunPiece
    at_ns: int


class WaitFilling:
    def __init__(
        self,
        engine: PrefillEngine,
        guard: Guard,
        device: SharedDevice,
        margin_ns: int,
        paced_ns: Callable[[PrefillPiece], int] | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        """`paced_ns`: how long a piece occupies a paced device; None on a real one. Without a throttle, all of every
        wait is used."""
        self.throttle = throttle
        self.engine, self.guard, self.device, self.margin_ns = engine, guard, device, margin_ns
        self._paced_ns = paced_ns
        self.share = 1.0
        """The share of each wait that the service allows."""
        self._queue: deque[_Begun] = deque()
        self._ended_ns = 0
        """End of the last settled piece."""
        self._launch_ns = 0
        """How long the host takes to queue a piece; 0 for a device without a queue."""
        self.filled_ns = 0
        """Device time of the pieces since the end of the last wait."""
        self.stop_ns = 0
        """When pieces had to end in the last wait."""

    def fill(self, position: Position, arrived: Callable[[], bool], began_ns: int | None = None) -> None:
        """Runs pieces as long as they fit; without work, waits for work and for the input until the end. `began_ns`:
        when the wait began; None: now."""
        if self.throttle is not None and not self.throttle.may_fill(position.step):
            return
        share = min(self.share, 1.0 if self.throttle is None else self.throttle.share)
        start_ns = time.monotonic_ns() if began_ns is None else began_ns
        self.stop_ns = start_ns + int(share * self.guard.wait_ns(position.index, start_ns)) - self.margin_ns
        idle_s = FOREVER_S if isinstance(arrived, Arrival) and arrived.notify(self.engine.changed.set) else IDLE_S
        if not self._fill_until(arrived, idle_s):
            self.engine.reconsider(lambda piece, cost_ns: start_ns + self._longer_ns(piece, cost_ns) <= self.stop_ns)

    @property
    def is_busy(self) -> bool:
        """Whether a piece was started and not settled."""
        return bool(self._queue)

    def over(self, position: Position, began_ns: int, ended_ns: int) -> int:
        """The wait is over; returns the time that prefill used."""
        self.guard.observe(position.index, began_ns, ended_ns)
        self._settle()
        filled_ns, self.filled_ns = self.filled_ns, 0
        return filled_ns

    def _fill_until(self, arrived: Callable[[], bool], idle_s: float) -> bool:
        """Returns whether any piece was started."""
        begun = False
        while True:
            self.engine.changed.clear()  # before the look at inputs and tasks, so that no change is missed
            if arrived():
                break
            self._settle()
            now_ns = time.monotonic_ns()
            if now_ns >= self.stop_ns:
                break
            if self._is_full(now_ns):
                time.sleep(LOOK_S)
            elif self._begin_one(now_ns):
                begun = True
            else:
                self.engine.changed.wait(min(LOOK_S if self._queue else idle_s, (self.stop_ns - now_ns) / 1e9))
        return begun

    def _longer_ns(self, piece: PrefillPiece, host_ns: int) -> int:
        """A paced device is busy for the given time, or longer if the host needs longer."""
        return host_ns if self._paced_ns is None else max(self._paced_ns(piece), host_ns)

    def _begin_one(self, now_ns: int) -> bool:
        free_ns, launched_ns = self._free_ns(now_ns), now_ns + self._launch_ns

        def begin(work: Callable[[], list[PieceResult]], piece: PrefillPiece) -> Running[list[PieceResult]]:
            return self.device.begin(work, 0 if self._paced_ns is None else self._paced_ns(piece))

        def fits(piece: PrefillPiece) -> bool:
            cost_ns = self._longer_ns(piece, self.engine.predict_ns(piece))
            return max(free_ns + cost_ns, launched_ns) <= self.stop_ns

        flight = self.engine.step(begin, fits)
        if flight is None:
            return False
        self._queue.append(_Begun(flight, now_ns))
        if not flight.running.done:
            self._launch_ns += (time.monotonic_ns() - now_ns - self._launch_ns) // LAUNCHES
        return True

    def _is_full(self, now_ns: int) -> bool:
        """A queued piece cannot be withdrawn, and delays training if the input arrives early."""
        num = len(self._queue)
        return num >= AHEAD and (num >= MOST or self._free_ns(now_ns) - now_ns >= RESERVE_NS)

    def _free_ns(self, now_ns: int) -> int:
        """When the device is expected to finish all started pieces. Counted from the last known end, so that prediction
        errors do not add up."""
        at_ns = self._ended_ns
        for flight, begun_ns in self._queue:
            at_ns = max(at_ns, begun_ns) + flight.predicted_ns
            if flight is self._queue[0].flight:
                at_ns = max(at_ns, now_ns)
        return max(at_ns, now_ns)

    def _settle(self) -> None:
        """Records the pieces that have ended."""
        while self._queue and self._queue[0].flight.running.done:
            flight = self._queue.popleft().flight
            span = self.device.settle(flight.running)
            self._ended_ns = span.end_ns
            self.filled_ns += span.end_ns - span.start_ns
            self.engine.settle(flight, span.end_ns - span.start_ns)
