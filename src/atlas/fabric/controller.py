"""The controller: carries out a list of changes as the run goes on, each within a deadline.

The run calls `free` when a transfer on the old circuits has ended, and `ask` when new circuits are needed; `ready`
waits for a change. A switch that is late, refuses, cannot be reached or reports circuits that it does not have ends the
run with a SwitchError. With `fallback` the circuits stay as they are, the run continues without further changes, and
`failed` has the error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atlas.fabric.circuit_plan import CircuitChange
from atlas.fabric.switch import Switch, SwitchError
from atlas.sim.phases import Gates

DEADLINE_S, DELAYS = 2.0, 3
"""A switch is late after this time beyond so many times its delay."""


@dataclass
class _ChangeState:
    """Of one change."""

    left: int
    on_demand: bool
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    asked: bool = False
    begun: bool = False


class Controller:
    """Of one run. Use it inside a running event loop."""

    def __init__(
        self,
        plan: Sequence[CircuitChange],
        gates: Gates,
        switches: Mapping[str, Switch],
        *,
        deadline_s: float,
        fallback: bool = False,
        period: int = 0,
        on_done: Callable[[int], None] = lambda number: None,
        on_failed: Callable[[SwitchError], None] = lambda error: None,
        on_kept: Callable[[SwitchError], None] = lambda error: None,
    ) -> None:
        """`period`: changes of an iteration, where iterations beyond the plan are like its last one. `on_done`: called
        when the circuits of a change carry data; `on_failed`: with what ends the run; `on_kept`: with the reason why
        the circuits stay as they are."""
        self.plan, self.switches, self.deadline_s, self.fallback = plan, switches, deadline_s, fallback
        self.failed: SwitchError | None = None
        self.num_changes = 0
        self.change_s: dict[int, tuple[float, float]] = {}
        """By change: when it began and when its circuits carried data, on the monotonic clock."""
        self._left, self._on_demand = gates.left.tolist(), gates.on_demand.tolist()
        self._period, self._on_done, self._on_failed, self._on_kept = period, on_done, on_failed, on_kept
        self._states: dict[int, _ChangeState] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin the changes that wait for nothing."""
        for number in range(len(self.plan)):
            self.consider(number)

    def free(self, number: int, count: int = 1) -> None:
        """`count` more transfers or collectives have ended on the circuits that this change removes."""
        self._state(number).left -= count
        self.consider(number)

    def ask(self, number: int) -> None:
        """The circuits of this change are needed."""
        self._state(number).asked = True
        self.consider(number)

    async def ready(self, number: int) -> None:
        """Return when the circuits of this change carry data; SwitchError."""
        await asyncio.shield(self._state(number).done)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for state in self._states.values():
            state.done.cancel()

    def forget(self, before: int) -> None:
        """Drop what is known of changes before this one: all of them are done."""
        for number in [number for number in self._states if number < before]:
            del self._states[number]

    def _state(self, number: int) -> _ChangeState:
        if number not in self._states:
            index = self._index(number)
            state = self._states[number] = _ChangeState(self._left[index], bool(self._on_demand[index]))
            if self.failed is not None and not self.fallback:
                state.done.set_exception(self.failed)
                state.done.exception()
        return self._states[number]

    def _index(self, number: int) -> int:
        """Of the change in the plan."""
        return number if number < len(self.plan) else len(self.plan) - self._period + number % self._period

    def consider(self, number: int) -> None:
        """Begin a change if nothing is in its way."""
        state = self._state(number)
        if state.begun or state.left or (state.on_demand and not state.asked):
            return
        state.begun = True
        task = asyncio.get_running_loop().create_task(self._change(number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _change(self, number: int) -> None:
        change, state = self.plan[self._index(number)], self._state(number)
        began = time.monotonic()
        try:
            if self.failed is None:
                await self._apply(change)
        except SwitchError as error:
            named = SwitchError(f"{change.dc}: change {number} to {self._words(number)}: {error}")
            if not self.fallback:
                self._fail(named)
                return
            if self.failed is None:
                self.failed = named
                self._on_kept(named)
        self.change_s[number] = (began, time.monotonic())
        if not state.done.done():
            state.done.set_result(None)
            self._on_done(number)

    async def _apply(self, change: CircuitChange) -> None:
        switch = self.switches[change.dc]
        try:
            async with asyncio.timeout(self.deadline_s):
                await switch.apply(change.circuits)
                missing = set(change.circuits) - await switch.circuits()
        except TimeoutError:
            raise SwitchError(
                f"the switch was late: the circuits were not ready within {self.deadline_s:g} s"
            ) from None
        if missing:
            raise SwitchError(f"the switch acknowledged {len(missing)} circuits that it does not have")
        self.num_changes += 1

    def _fail(self, error: SwitchError) -> None:
        """Raise the error in everything that waits for a change, now or later."""
        self.failed = error
        for state in self._states.values():
            if not state.done.done():
                state.done.set_exception(error)
                state.done.exception()  # avoids a warning if nothing waits for it
        self._on_failed(error)

    def _words(self, number: int) -> str:
        what = self.plan[self._index(number)].what
        iteration = number // self._period if self._period else what.iteration
        where = f"stage {what.ranks[0]}" if what.to == "ring" else f"stages {what.ranks}"
        return f"the {what.to} of {where} in iteration {iteration}"
