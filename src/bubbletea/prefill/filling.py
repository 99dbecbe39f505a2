"""Filling one wait: pieces of prefill for as long as each one's predicted end, plus a margin, lies before the end that
the guard believes in, the last one cut to what is left; none once the input has arrived. Training always wins the
device.

On a device with a queue the next pieces are begun before the last one ends, so that none of the wait is lost between
them. Knows pieces, the guard and the clock; not who asked for the prefill.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from atlas.runtime.device import Running
from atlas.runtime.waits import Position, SharedDevice
from bubbletea.prefill.engine import BegunPiece, PrefillEngine
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.job import PieceResult, PrefillPiece
from bubbletea.prefill.throttle import Throttle

IDLE_S = 0.001
"""How often a wait without work looks for some, and for its end."""
LOOK_S = 0.0001
"""How often a full queue is looked at."""
AHEAD, MOST = 2, 4
"""Pieces on the device at once: the one that runs and the one behind it, and more where they are short."""
RESERVE_NS = 2_000_000
"""What must be on the device for the host to take its time: to wake up and to launch the next."""

LAUNCHES = 8
"""Over which their average runs."""


class _Begun(NamedTuple):
    flight: BegunPiece
    at_ns: int


class Filling:
    def __init__(
        self,
        engine: PrefillEngine,
        guard: Guard,
        device: SharedDevice,
        margin_ns: int,
        paced_ns: Callable[[PrefillPiece], int] | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        """`paced_ns`: how long a piece keeps a paced device busy; None on a real one. Without a throttle, all of every
        wait is used."""
        self.throttle = throttle
        self.engine, self.guard, self.device, self.margin_ns = engine, guard, device, margin_ns
        self._paced_ns = paced_ns
        self.share = 1.0
        """Of each wait: what the service lets us use."""
        self._queue: deque[_Begun] = deque()
        self._ended_ns = 0
        """When the last piece that was settled did."""
        self._launch_ns = 0
        """How long the host takes to put a piece into the device's queue; 0 where there is none."""
        self.filled_ns = 0
        """Of the device's time, since the last wait was over."""
        self.stop_ns = 0
        """Until when pieces might run in the last wait."""

    def fill(self, position: Position, arrived: Callable[[], bool]) -> None:
        """Pieces as long as they fit; then, as there may be more work before the end, looks out for both."""
        if self.throttle is not None and not self.throttle.may_fill(position.step):
            return
        share = min(self.share, 1.0 if self.throttle is None else self.throttle.share)
        began_ns = time.monotonic_ns()
        self.stop_ns = began_ns + int(share * self.guard.wait_ns(position.index, began_ns)) - self.margin_ns
        if not self._fill_until(arrived) and self._paced_ns is None:
            self.engine.reconsider(lambda cost_ns: began_ns + cost_ns <= self.stop_ns)

    def over(self, position: Position, began_ns: int, ended_ns: int) -> int:
        """The wait is over; how much of it prefill has had."""
        self.guard.observe(position.index, began_ns, ended_ns)
        self._settle()
        filled_ns, self.filled_ns = self.filled_ns, 0
        return filled_ns

    def _fill_until(self, arrived: Callable[[], bool]) -> bool:
        """Whether any piece was begun."""
        begun = False
        while not arrived():
            self._settle()
            now_ns = time.monotonic_ns()
            if now_ns >= self.stop_ns:
                break
            if self._is_full(now_ns):
                time.sleep(LOOK_S)
            elif self._begin_one(now_ns):
                begun = True
            else:
                self.engine.changed.wait(min(LOOK_S if self._queue else IDLE_S, (self.stop_ns - now_ns) / 1e9))
        return begun

    def _cost_ns(self, piece: PrefillPiece) -> int:
        """A paced device is busy for as long as it is told, and for longer where the host is."""
        predicted_ns = self.engine.predict_ns(piece)
        return predicted_ns if self._paced_ns is None else max(self._paced_ns(piece), predicted_ns)

    def _begin_one(self, now_ns: int) -> bool:
        free_ns, launched_ns = self._free_ns(now_ns), now_ns + self._launch_ns

        def begin(work: Callable[[], PieceResult], piece: PrefillPiece) -> Running[PieceResult]:
            return self.device.begin(work, 0 if self._paced_ns is None else self._paced_ns(piece))

        def fits(piece: PrefillPiece) -> bool:
            return max(free_ns + self._cost_ns(piece), launched_ns) <= self.stop_ns

        flight = self.engine.step(begin, fits)
        if flight is None:
            return False
        self._queue.append(_Begun(flight, now_ns))
        if not flight.running.done:
            self._launch_ns += (time.monotonic_ns() - now_ns - self._launch_ns) // LAUNCHES
        return True

    def _is_full(self, now_ns: int) -> bool:
        """What is queued cannot be taken back, and holds training up where the input comes early."""
        num = len(self._queue)
        return num >= AHEAD and (num >= MOST or self._free_ns(now_ns) - now_ns >= RESERVE_NS)

    def _free_ns(self, now_ns: int) -> int:
        """When the device is expected to be done with what was begun: counted anew from the last end that is known,
        or what every prediction has too much would add up."""
        at_ns = self._ended_ns
        for flight, begun_ns in self._queue:
            at_ns = max(at_ns, begun_ns) + flight.predicted_ns
            if flight is self._queue[0].flight:
                at_ns = max(at_ns, now_ns)
        return max(at_ns, now_ns)

    def _settle(self) -> None:
        """Takes note of the pieces that are done."""
        while self._queue and self._queue[0].flight.running.done:
            flight = self._queue.popleft().flight
            span = self.device.settle(flight.running)
            self._ended_ns = span.end_ns
            self.filled_ns += span.end_ns - span.start_ns
            self.engine.settle(flight, span.end_ns - span.start_ns)
