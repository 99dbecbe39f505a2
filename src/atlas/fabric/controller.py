"""The controller: carries out a list of changes as the run goes on, each within a deadline.

The run calls `free` when a transfer on the old circuits has ended, and `ask` when new circuits are needed; `ready`
waits for a change. A switch that is late, refuses, cannot be reached or reports circuits that it does not have ends the
run with a SwitchError. With `fallback` the circuits stay as they are, the run continues without further changes, and
`failed` has the error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from atlas.fabric.circuit_plan import CircuitChange
from atlas.fabric.switch import Switch, SwitchError
from atlas.sim.phases import Gates


class Controller:
    """Of one run. Create it inside a running event loop."""

    def __init__(
        self,
        plan: Sequence[CircuitChange],
        gates: Gates,
        switches: Mapping[str, Switch],
        *,
        deadline_s: float,
        fallback: bool = False,
    ) -> None:
        self.plan, self.switches, self.deadline_s, self.fallback = plan, switches, deadline_s, fallback
        self.failed: SwitchError | None = None
        self.num_changes = 0
        self.change_s: dict[int, tuple[float, float]] = {}
        """By change: when it began and when its circuits carried data, on the monotonic clock."""
        self._left, self._on_demand = gates.left.tolist(), gates.on_demand.tolist()
        self._asked = [False] * len(plan)
        self._begun = [False] * len(plan)
        loop = asyncio.get_running_loop()
        self._done: list[asyncio.Future[None]] = [loop.create_future() for _ in plan]
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin the changes that wait for nothing."""
        for number in range(len(self.plan)):
            self._consider(number)

    def free(self, number: int) -> None:
        """One more transfer or collective on the circuits that this change removes has ended."""
        self._left[number] -= 1
        self._consider(number)

    def ask(self, number: int) -> None:
        """The circuits of this change are needed."""
        self._asked[number] = True
        self._consider(number)

    async def ready(self, number: int) -> None:
        """Return when the circuits of this change carry data; SwitchError."""
        await asyncio.shield(self._done[number])

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for future in self._done:
            future.cancel()

    def _consider(self, number: int) -> None:
        if self._begun[number] or self._left[number] or (self._on_demand[number] and not self._asked[number]):
            return
        self._begun[number] = True
        task = asyncio.get_running_loop().create_task(self._change(number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _change(self, number: int) -> None:
        change = self.plan[number]
        began = time.monotonic()
        try:
            if self.failed is None:
                await self._apply(change)
        except SwitchError as error:
            named = SwitchError(f"{change.dc}: change {number} to {_words(change)}: {error}")
            if not self.fallback:
                self._fail(named)
                return
            self.failed = self.failed or named
        self.change_s[number] = (began, time.monotonic())
        if not self._done[number].done():
            self._done[number].set_result(None)

    async def _apply(self, change: CircuitChange) -> None:
        switch = self.switches[change.dc]
        try:
            async with asyncio.timeout(self.deadline_s):
                await switch.apply(change.circuits)
                missing = set(change.circuits) - await switch.circuits()
        except TimeoutError:
            raise SwitchError(f"the switch was late: nothing settled within {self.deadline_s:g} s") from None
        if missing:
            raise SwitchError(f"the switch acknowledged {len(missing)} circuits that it does not have")
        self.num_changes += 1

    def _fail(self, error: SwitchError) -> None:
        """Raise the error in everything that waits for a change, now or later."""
        self.failed = error
        for future in self._done:
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody waits for this one


def _words(change: CircuitChange) -> str:
    where = f"stage {change.what.ranks[0]}" if change.what.to == "ring" else f"stages {change.what.ranks}"
    return f"the {change.what.to} of {where} in iteration {change.what.iteration}"
