"""Filling one wait: pieces of prefill for as long as each one's predicted end, plus a margin, lies before the end that
the guard believes in; none once the input has arrived. Training always wins the device.

On a device with a queue the next piece is begun before the last one ends, so that none of the wait is lost between
them. Knows pieces, the guard and the clock; not who asked for the prefill.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from atlas.runtime.waits import Position, SharedDevice
from bubbletea.prefill.engine import Engine, Flight
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.job import Piece
from bubbletea.prefill.throttle import Throttle

IDLE_S = 0.001
"""How often a wait without work looks for some, and for its end."""
LOOK_S = 0.0001
"""How often a full queue is looked at."""
AHEAD = 2
"""Pieces on the device at once: the one that runs, and the one behind it."""


class Filling:
    def __init__(
        self,
        engine: Engine,
        guard: Guard,
        device: SharedDevice,
        margin_ns: int,
        paced_ns: Callable[[Piece], int] | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        """`paced_ns`: how long a piece keeps a paced device busy; None on a real one. Without a throttle, all of every
        wait is used."""
        self.throttle = throttle
        self.engine, self.guard, self.device, self.margin_ns = engine, guard, device, margin_ns
        self._paced_ns = paced_ns
        self._flights: deque[Flight] = deque()
        self._free_ns = 0
        """When the device is expected to be done with what was begun."""
        self.filled_ns = 0
        """Of the device's time, since the last wait was over."""

    def fill(self, position: Position, arrived: Callable[[], bool]) -> None:
        """Pieces as long as they fit; then, as there may be more work before the end, looks out for both."""
        if self.throttle is not None and not self.throttle.may_fill(position.step):
            return
        share = 1.0 if self.throttle is None else self.throttle.share
        end_ns = time.monotonic_ns() + int(share * self.guard.wait_ns(position.index)) - self.margin_ns
        while not arrived():
            self._settle()
            now_ns = time.monotonic_ns()
            if now_ns >= end_ns:
                return
            if len(self._flights) >= AHEAD:
                time.sleep(LOOK_S)
            elif not self._begin_one(now_ns, end_ns):
                self.engine.changed.wait(LOOK_S if self._flights else IDLE_S)

    def over(self, position: Position, waited_ns: int) -> int:
        """The wait is over; how much of it prefill has had."""
        self.guard.observe(position.index, waited_ns)
        self._settle()
        filled_ns, self.filled_ns = self.filled_ns, 0
        return filled_ns

    def _begin_one(self, now_ns: int, end_ns: int) -> bool:
        found = self.engine.next_piece()
        if found is None:
            return False
        _, piece, predicted_ns = found
        cost_ns = predicted_ns if self._paced_ns is None else self._paced_ns(piece)
        done_ns = max(now_ns, self._free_ns if self._flights else 0) + cost_ns
        if done_ns > end_ns:
            return False
        flight = self.engine.step(lambda work: self.device.begin(work, 0 if self._paced_ns is None else cost_ns))
        if flight is not None:
            self._flights.append(flight)
            self._free_ns = done_ns
        return True

    def _settle(self) -> None:
        """Takes note of the pieces that are done."""
        while self._flights and self._flights[0].running.done:
            flight = self._flights.popleft()
            span = self.device.settle(flight.running)
            self.filled_ns += span.end_ns - span.start_ns
            self.engine.settle(flight, span.end_ns - span.start_ns)
