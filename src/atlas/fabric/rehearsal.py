"""Runs a Program in real time against switches, without a model: ops and transfers are waits, changes of circuits are
real calls. The time it took can be compared with the simulation.

Links serve first come, first served. Times are those of the costs, times `slower`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from atlas.cost.table import Costs
from atlas.fabric.circuit_plan import circuit_plan
from atlas.fabric.controller import Controller
from atlas.fabric.switch import Switch, SwitchError
from atlas.ir.program import Program
from atlas.sim import lower
from atlas.sim.lower import NONE, Tables
from atlas.sim.simulate import run


@dataclass(frozen=True)
class FabricRehearsal:
    """Seconds are those of the job: `slower` is taken out."""

    predicted_s: float
    measured_s: float
    num_changes: int
    failed: SwitchError | None
    """With a fallback: why the circuits stayed as they were."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def rehearse_fabric(
    program: Program,
    costs: Costs,
    switches: Mapping[str, Switch],
    *,
    slower: float = 1.0,
    deadline_s: float = 30.0,
    fallback: bool = False,
) -> FabricRehearsal:
    """One run of the Program; SwitchError where a switch fails and there is no fallback. The delay of `switches` is
    their own: give them that of the costs, times `slower`, to compare with the prediction."""
    tables = lower(program, costs)
    events = run(tables)
    predicted_s = int(events.op_end_ns.max() - events.op_start_ns.min()) / 1e9
    made = _RehearsalRun(program, costs, tables, slower)
    controller = asyncio.run(made.play(switches, deadline_s, fallback))
    changes, failed = (0, None) if controller is None else (controller.num_changes, controller.failed)
    return FabricRehearsal(predicted_s, (made.end_s - made.zero_s) / slower, changes, failed)


class _RehearsalRun:
    def __init__(self, program: Program, costs: Costs, tables: Tables, slower: float) -> None:
        self.program, self.tables, self.scale = program, tables, slower / 1e9
        self.plan = circuit_plan(program, costs.circuits) if tables.gates is not None else []
        self.controller: Controller | None = None
        self.zero_s = self.end_s = 0.0

    async def play(self, switches: Mapping[str, Switch], deadline_s: float, fallback: bool) -> Controller | None:
        gates = self.tables.gates
        self.arrived = [asyncio.Event() for _ in range(len(self.tables.transfer_dst))]
        self.free_s = [0.0] * len(self.tables.link_policy)
        num_groups = len(self.tables.group_ptr) - 1
        self.members = [int(n) for n in (self.tables.group_ptr[1:] - self.tables.group_ptr[:-1])]
        self.together = [asyncio.Event() for _ in range(num_groups)]
        self.left = list(self.members)
        lead_s = 0.0
        if gates is not None:
            self.controller = Controller(self.plan, gates, switches, deadline_s=deadline_s, fallback=fallback)
            lead_s = max(0.0, -float(gates.released_ns.min(initial=0)) * self.scale)
        self.zero_s = time.monotonic() + lead_s
        try:
            async with asyncio.TaskGroup() as tasks:
                self.tasks = tasks
                if self.controller is not None:
                    self.controller.start()
                for worker in range(self.program.num_workers):
                    tasks.create_task(self.work(worker))
        except* SwitchError as group:
            first = group.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        finally:
            if self.controller is not None:
                self.controller.close()
        return self.controller

    async def work(self, worker: int) -> None:
        """The ops of a worker, in order. `now` is when its own ops left it free: late wake-ups do not add up."""
        t, now = self.tables, self.zero_s
        for op in range(int(t.worker_ptr[worker]), int(t.worker_ptr[worker + 1])):
            if (transfer := int(t.op_input[op])) != NONE and not self.arrived[transfer].is_set():
                await self.arrived[transfer].wait()
                now = time.monotonic()
            if (group := int(t.op_group[op])) != NONE:
                await self.meet(group, now)
                now = time.monotonic()
            now += int(t.op_ns[op]) * self.scale
            await asyncio.sleep(now - time.monotonic())
            if group != NONE:
                self.left_group(group)
            if (sent := int(t.op_output[op])) != NONE:
                self.tasks.create_task(self.carry(sent, now))
        self.end_s = max(self.end_s, now)

    async def meet(self, group: int, now: float) -> None:
        """Wait for all members of a collective, and for its circuits."""
        gate = self.gate(group, of_group=True)
        self.left[group] -= 1
        if self.left[group]:
            await self.together[group].wait()
            return
        await asyncio.sleep(now - time.monotonic())
        if gate != NONE and self.controller is not None:
            self.controller.ask(gate)
            await self.controller.ready(gate)
        self.left[group] = self.members[group]
        self.together[group].set()

    def left_group(self, group: int) -> None:
        gates = self.tables.gates
        self.left[group] -= 1
        if self.left[group] or gates is None or self.controller is None:
            return
        for gate in gates.group_frees[gates.group_frees_ptr[group] : gates.group_frees_ptr[group + 1]].tolist():
            self.controller.free(gate)

    async def carry(self, transfer: int, ready_s: float) -> None:
        """A transfer: its circuits, then its link, then its latency."""
        t, gates = self.tables, self.tables.gates
        at = ready_s + int(t.transfer_before_ns[transfer]) * self.scale
        gate = self.gate(transfer, of_group=False)
        if gate != NONE and self.controller is not None and gates is not None:
            await asyncio.sleep(at - time.monotonic())
            if int(gates.asker[gate]) == transfer:
                self.controller.ask(gate)
            if gate not in self.controller.change_s:
                await self.controller.ready(gate)
                at = time.monotonic()
        link = int(t.channel_link[t.transfer_channel[transfer]])
        sent = max(at, self.free_s[link]) + int(t.transfer_work_ns[transfer]) * self.scale
        self.free_s[link] = sent
        await asyncio.sleep(sent + int(t.transfer_latency_ns[transfer]) * self.scale - time.monotonic())
        self.arrived[transfer].set()
        if gates is not None and self.controller is not None:
            for freed in gates.transfer_frees[transfer].tolist():
                if freed != NONE:
                    self.controller.free(freed)

    def gate(self, which: int, *, of_group: bool) -> int:
        gates = self.tables.gates
        if gates is None:
            return NONE
        return int(gates.group_gate[which] if of_group else gates.transfer_gate[which])
