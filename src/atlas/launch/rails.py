"""The control plane of photonic rails in a run. Workers report what has ended on their circuits and what they need; a
`Controller` changes circuits on the switches, and workers get a message when theirs are set up.

Each cell has its own circuits. The controller runs on a thread of its own; what it cannot do ends the run with a
SwitchError, and the end of the thread with a WorkerError. Knows ranks, steps and changes; not what is sent or summed
(`runtime.circuits`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from atlas.cost.table import Circuits
from atlas.errors import AtlasError, WorkerError
from atlas.fabric.circuit_plan import CircuitChange, circuit_plan
from atlas.fabric.controller import DEADLINE_S, DELAYS, Controller
from atlas.fabric.switch import EmulatedSwitch, Switch, SwitchError
from atlas.ir.assemble import repeated
from atlas.ir.circuit_phases import hop_pairs
from atlas.ir.program import Ints, Program
from atlas.launch.worker_processes import WorkerGroup
from atlas.runtime.circuits import RING
from atlas.runtime.topology import WorkerRole
from atlas.sim.lower import gates_of
from atlas.sim.phases import reconfigurations

END_S = 5.0
"""What the controller's thread may take to end."""
MakeSwitch = Callable[[str, float], Switch]
"""By datacenter and delay, seconds."""


class RailCosts(NamedTuple):
    """What the control plane needs of Costs."""

    circuits: Circuits | None
    compute_ns: Ints
    """[c, s, k]."""


@dataclass(frozen=True)
class RailSettings:
    """How circuits are changed in a run."""

    fallback: bool = False
    """Whether the run goes on with the circuits as they are where a switch fails."""
    make_switch: MakeSwitch = lambda dc, delay_s: EmulatedSwitch(delay_s)
    deadline_s: float | None = None
    """Of a change; None: from its delay."""
    on_kept: Callable[[SwitchError], None] = lambda error: None
    """Called with the reason why the circuits stay as they are, once for each cell."""


@dataclass(frozen=True)
class RailReport:
    """What a run did with its circuits."""

    num_changes: int
    rows: list[dict[str, Any]]
    """Of the first cell, by change: as `sim.phases.fabric_rows`, times from the start of the run."""
    failed: str = ""
    """With a fallback: why the circuits stayed as they were."""


def changing_pairs(program: Program, circuits: Circuits | None) -> tuple[tuple[int, int], ...]:
    """Of ranks whose circuits change."""
    if circuits is None or not reconfigurations(program, circuits):
        return ()
    return tuple(hop_pairs(program, circuits.switches))


def longest_change_s(circuits: Iterable[Circuits | None]) -> float:
    """How long a change may take at most; 0 where no circuits change."""
    delays = [max(one.delay_ns) for one in circuits if one is not None]
    return DEADLINE_S + DELAYS * max(delays) / 1e9 if delays else 0.0


class _CellRails:
    """The circuits of one cell. Used on the controller's thread only."""

    def __init__(self, roles: Sequence[WorkerRole], costs: RailCosts, steps: range, rails: RailControl) -> None:
        program = roles[0].program
        assert costs.circuits is not None
        self.program, self.steps, self.rails = program, steps, rails
        self.names = {role.worker: role.name for role in roles}
        whole = program if program.num_iterations > 1 else repeated(program, 2)
        gates = gates_of(whole, costs.circuits, costs.compute_ns)
        assert gates is not None
        self.plan, self.released_ns = self._named(circuit_plan(whole, costs.circuits)), gates.released_ns.tolist()
        self.period = len(self.plan) // whole.num_iterations
        changes = [change.what for change in self.plan[: self.period]]
        self.hops = {(one.ranks, one.pipeline): k for k, one in enumerate(changes) if one.to == "hop"}
        self.rings = {one.ranks[0]: k for k, one in enumerate(changes) if one.to == "ring"}
        pairs = hop_pairs(program, costs.circuits.switches)
        self.num_inputs = {pair: len(b) * program.num_microbatches for pair, b in pairs.items()}
        self.counts: Counter[tuple[str, int, int]] = Counter()
        delays_s = dict(zip(program.rank_dc, costs.circuits.delay_ns, strict=True))
        self.controller = Controller(
            self.plan,
            gates,
            {dc: rails.switch(dc, delay / 1e9) for dc, delay in delays_s.items()},
            deadline_s=rails.deadline_s,
            fallback=rails.settings.fallback,
            period=self.period,
            on_done=self.opened,
            on_failed=rails.fail,
            on_kept=rails.settings.on_kept,
        )

    def _named(self, plan: list[CircuitChange]) -> list[CircuitChange]:
        """With the ports of this cell's workers: cells share a switch."""
        names = {self.program.worker_name(worker): name for worker, name in self.names.items()}

        def port(text: str) -> str:
            worker, _, number = text.partition("/")
            return f"{names.get(worker, worker)}/{number}"

        return [replace(change, circuits=tuple((port(a), port(b)) for a, b in change.circuits)) for change in plan]

    def begin(self, zero_s: float) -> None:
        """The first step begins with the rings of a step before, free since that step's SYNC."""
        loop = asyncio.get_running_loop()
        for k in self.hops.values():
            wait_s = zero_s + self.released_ns[k] / 1e9 - time.monotonic()
            loop.call_later(max(0.0, wait_s), self.controller.consider, k)

    def note(self, role: WorkerRole, what: str, step: int, rank: int) -> None:
        first, own = (step - self.steps.start) * self.period, role.rank
        pair = (min(own, rank), max(own, rank))
        if what == "ask":
            self.controller.ask(first + self.hops[pair, role.worker // self.program.num_ranks])
        elif what == "got":
            for end in pair:
                self.controller.free(first + self.rings[end], self.num_inputs[pair])
        elif self._all_did(what, step, own):
            if what == "ready":
                self.controller.ask(first + self.rings[own])
            elif step + 1 in self.steps:
                for ranks, c in self.hops:
                    if own in ranks:
                        self.controller.free(first + self.period + self.hops[ranks, c])

    def _all_did(self, what: str, step: int, rank: int) -> bool:
        """Whether all workers of a rank have reported it."""
        self.counts[what, step, rank] += 1
        if self.counts[what, step, rank] < self.program.num_pipelines:
            return False
        del self.counts[what, step, rank]
        return True

    def opened(self, number: int) -> None:
        iteration, k = divmod(number, self.period)
        change = self.plan[k].what
        ranks, step, num_ranks = change.ranks, self.steps.start + iteration, self.program.num_ranks
        if change.to == "hop":
            a, b = (self.names[change.pipeline * num_ranks + rank] for rank in ranks)
            self.rails.notify(a, step, ranks[1])
            self.rails.notify(b, step, ranks[0])
        else:
            for c in range(self.program.num_pipelines):
                self.rails.notify(self.names[c * num_ranks + ranks[0]], step, RING)
            self.controller.forget((iteration - 1) * self.period)

    def rows(self, zero_ns: int, first: int) -> list[dict[str, Any]]:
        found = []
        for number, (began_s, ended_s) in sorted(self.controller.change_s.items()):
            iteration, k = divmod(number, self.period)
            if iteration < first:
                continue
            one = self.plan[k].what
            row = {"dc": self.plan[k].dc, "to": one.to, "ranks": list(one.ranks), "pipeline": one.pipeline}
            times = {"start_ns": int(began_s * 1e9) - zero_ns, "end_ns": int(ended_s * 1e9) - zero_ns}
            found.append({**row, "iteration": iteration - first, **times})
        return found


class RailControl:
    """`with RailControl(...) as rails:`; `begin` when the start of the run is known. It does nothing where no circuits
    change."""

    def __init__(
        self,
        workers: WorkerGroup,
        roles: Sequence[WorkerRole],
        costs: Sequence[RailCosts],
        steps: range,
        settings: RailSettings,
    ) -> None:
        """`costs`: by group. `steps`: of the run."""
        self.workers, self.settings = workers, settings
        self._roles: Mapping[str, WorkerRole] = {role.name: role for role in roles}
        self._costs, self._steps = costs, steps
        programs = {role.group: role.program for role in roles}
        self.pairs = [
            changing_pairs(programs[group], one.circuits) if group in programs else ()
            for group, one in enumerate(costs)
        ]
        """By group: of ranks whose circuits change."""
        self.deadline_s = (settings.deadline_s or longest_change_s(one.circuits for one in costs)) * any(self.pairs)
        """Of a change; 0 where no circuits change."""
        self._cells: dict[tuple[int, int], _CellRails] = {}
        self._switches: dict[str, Switch] = {}
        self._zero_ns = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="circuit controller")

    def __enter__(self) -> RailControl:
        if not any(self.pairs):
            return self
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._make(), self._loop).result()
        self.workers.handlers["circuits"] = self.receive
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        if not any(self.pairs):
            return
        self.workers.handlers.pop("circuits", None)
        with contextlib.suppress(RuntimeError):  # it has ended before
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)

    def switch(self, dc: str, delay_s: float) -> Switch:
        """The switch of a datacenter, for all cells."""
        if dc not in self._switches:
            self._switches[dc] = self.settings.make_switch(dc, delay_s)
        return self._switches[dc]

    @property
    def lead_ns(self) -> int:
        """How long before the first op the circuits of the first step may begin to change."""
        return max((-min(cell.released_ns) for cell in self._cells.values()), default=0)

    def begin(self, zero_ns: int) -> None:
        """`zero_ns`: when the first op may begin, on the monotonic clock."""
        self._zero_ns = zero_ns
        for cell in self._cells.values():
            self._loop.call_soon_threadsafe(cell.begin, zero_ns / 1e9)

    def report(self, first: int = 0) -> RailReport | None:
        """After the run; `first`: iterations before this one are left out. None where no circuits change."""
        if not self._cells:
            return None
        controllers = [cell.controller for cell in self._cells.values()]
        failed = next((str(one.failed) for one in controllers if one.failed is not None), "")
        rows = next(iter(self._cells.values())).rows(self._zero_ns, first)
        return RailReport(sum(one.num_changes for one in controllers), rows, failed)

    # ---- between the controller and the workers ----------------------------------------------------------------------
    def notify(self, name: str, step: int, rank: int) -> None:
        self.workers.send(name, {"circuits": [step, rank]})

    def fail(self, error: AtlasError) -> None:
        """End the run with this error."""
        self.workers.fail(error)

    def receive(self, name: str, news: Sequence[Any]) -> None:
        """Handle a worker's message; called on any thread."""
        with contextlib.suppress(RuntimeError):  # the controller has ended
            self._loop.call_soon_threadsafe(self._note, name, news)

    def _note(self, name: str, news: Sequence[Any]) -> None:
        role = self._roles[name]
        self._cells[role.group, role.cell].note(role, *news)

    async def _make(self) -> None:
        for key in dict.fromkeys((role.group, role.cell) for role in self._roles.values()):
            roles = [role for role in self._roles.values() if (role.group, role.cell) == key]
            if self.pairs[key[0]]:
                self._cells[key] = _CellRails(roles, self._costs[key[0]], self._steps, self)

    def _run(self) -> None:
        why = "it was stopped"
        self._loop.set_exception_handler(self._unexpected)
        try:
            self._loop.run_forever()
        except BaseException as error:  # also SystemExit: the workers would wait for it
            why = repr(error)
        finally:
            if not self._closing:
                self.fail(WorkerError(f"the controller of the circuits ended ({why}): circuits are no longer changed"))
            self._end()

    def _end(self) -> None:
        """Cancel what the controllers still do."""
        self._loop.set_exception_handler(lambda loop, context: None)
        for cell in self._cells.values():
            cell.controller.close()
        with contextlib.suppress(BaseException):  # what ended one change may end another
            self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        self._loop.close()

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a callback or a switch raised that is no SwitchError."""
        error = context.get("exception") or context["message"]
        if not self._closing and not isinstance(error, SwitchError):
            self.fail(WorkerError(f"the controller of the circuits failed: {error!r}"))
