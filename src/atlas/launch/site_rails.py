"""Circuits of photonic rails in a run over several datacenters: every datacenter controls its own. Its first launcher
has the controller and the switch; workers on its other hosts exchange messages with it through the coordinator.

    coordinator -> agent    {"rails": [worker, news]}        a message of a worker on another host
    agent -> coordinator    {"tell": [worker, message]}      for a worker on another host
                            {"kept": text}                   why the circuits stay as they are

Knows what the coordinator sends and who controls; how circuits change: `rails`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from atlas.cost.table import Circuits
from atlas.errors import AtlasError, WorkerError
from atlas.fabric.restconf import RestconfSwitch
from atlas.fabric.switch import EmulatedSwitch, Switch
from atlas.ir.program import Ints, Program
from atlas.launch.control_channel import Message
from atlas.launch.prepared_job import PreparedJob
from atlas.launch.rails import RailControl, RailCosts, RailSettings, changing_pairs, longest_change_s
from atlas.launch.remote_workers import RemoteWorkers
from atlas.launch.rendezvous import AgentName
from atlas.launch.worker_processes import WorkerGroup, WorkerProcesses
from atlas.runtime.assignment import read
from atlas.runtime.topology import WorkerRole
from atlas.spec import Job

EMULATED = "emulated"
Shares = Mapping[AgentName, Sequence[WorkerRole]]


def require_switch(root: str | None, job: Job, datacenter: str) -> None:
    """Raise where `--switch` is no address, or the datacenter has no optical switch."""
    if root is None:
        return
    RestconfSwitch(root)
    here = [dc.fabric for dc in job.cluster.datacenters if dc.name == datacenter]
    if here and (here[0] is None or here[0].kind != "photonic"):
        raise AtlasError(
            f"--switch {root}: {datacenter} has no photonic rails. Leave out --switch, or write fabric: "
            f"{{kind: photonic}} in that datacenter of the job"
        )


# ---- the coordinator's side ------------------------------------------------------------------------------------------
def slowest_change_s(prepared: PreparedJob) -> float:
    return longest_change_s(part.costs.circuits for part in prepared.parts)


def rails_message(prepared: PreparedJob, shares: Shares, agent: AgentName) -> Message | None:
    """What an agent must know of its datacenter's rails; None where no circuits change there."""
    groups: list[Message | None] = []
    for part in prepared.parts:
        circuits = part.costs.circuits
        if circuits is not None:
            here = zip(circuits.switches, part.program.rank_dc, strict=True)
            own = tuple(switches and dc == agent.datacenter for switches, dc in here)
            circuits = dataclasses.replace(circuits, switches=own)
        if circuits is None or not changing_pairs(part.program, circuits):
            groups.append(None)
            continue
        groups.append({"circuits": dataclasses.asdict(circuits), "compute_ns": part.costs.compute_ns[0].tolist()})
    if not any(groups):
        return None
    fabric = prepared.job.cluster.dc(agent.datacenter).fabric
    roles = [role for name, own in shares.items() if name.datacenter == agent.datacenter for role in own]
    return {
        "groups": groups,
        "controls": _controller(shares, agent.datacenter) == agent,
        "workers": [[role.group, role.cell, role.worker] for role in roles],
        "fallback": fabric is not None and fabric.fallback == "ring",
    }


def relay_circuits(workers: RemoteWorkers, shares: Shares) -> None:
    """Pass on messages between the controller of a datacenter and workers on its other hosts."""
    node_of = {role.name: _controller(shares, name.datacenter).node for name, own in shares.items() for role in own}
    workers.handlers["circuits"] = lambda name, news: workers.send_agent(node_of[name], {"rails": [name, news]})
    workers.handlers["tell"] = lambda _node, relayed: workers.send(*relayed)
    workers.handlers["kept"] = lambda node, why: workers.warn(
        f"{workers.title(node)} does not change its circuits: {why}"
    )


def _controller(shares: Shares, datacenter: str) -> AgentName:
    """Its first launcher that has workers."""
    return min(name for name, own in shares.items() if name.datacenter == datacenter and own)


# ---- an agent's side -------------------------------------------------------------------------------------------------
class SiteRails:
    """Of one attempt. `pairs`: by group, ranks whose circuits change; the assignments of workers need them."""

    def __init__(self, known: Message | None = None, programs: Sequence[Program] = ()) -> None:
        """`known`: as the coordinator sent it. `programs`: of all groups."""
        self._known, self._begun = known, False
        self._control: RailControl | None = None
        self._costs = [
            RailCosts(None, np.zeros((0, 0, 0), np.int64))
            if known is None or (group := known["groups"][number]) is None
            else RailCosts(read(Circuits, group["circuits"]), _of_pipelines(group["compute_ns"], program.num_pipelines))
            for number, program in enumerate(programs)
        ]
        self.pairs = [changing_pairs(p, one.circuits) for p, one in zip(programs, self._costs, strict=True)]

    def start(
        self,
        workers: WorkerProcesses,
        role_of: Callable[[Sequence[int]], WorkerRole],
        wanted: Message,
        switch: str,
        reply: Callable[[Message], None],
    ) -> None:
        """Where this launcher controls: from now on handle messages of workers. `wanted`: has the attempt's steps.
        `switch`: an address, or EMULATED."""
        if self._known is None or not self._known["controls"]:
            return

        def make_switch(dc: str, delay_s: float) -> Switch:
            return EmulatedSwitch(delay_s) if switch == EMULATED else RestconfSwitch(switch)

        settings = RailSettings(
            fallback=self._known["fallback"],
            make_switch=make_switch,
            on_kept=lambda error: reply({"kept": str(error)}),
        )
        roles = [role_of(row) for row in self._known["workers"]]
        group = _SiteWorkers(workers, [role.name for role in roles], reply)
        steps = range(wanted["first_step"], wanted["num_steps"])
        self._control = RailControl(group, roles, self._costs, steps, settings)
        self._control.__enter__()

    def begin(self, start_ns: int | None) -> None:
        """The first op may begin then, on this host's clock; None: that is not known yet."""
        if self._control is not None and not self._begun and start_ns is not None:
            self._begun = True
            self._control.begin(start_ns)

    def receive(self, name: str, news: Sequence[Any]) -> None:
        """From a worker on another host."""
        if self._control is not None:
            self._control.receive(name, news)

    def close(self) -> None:
        if self._control is not None:
            self._control.__exit__()


class _SiteWorkers(WorkerGroup):
    """The workers of a datacenter: those of this host, and others through the coordinator."""

    def __init__(self, here: WorkerProcesses, names: Sequence[str], reply: Callable[[Message], None]) -> None:
        super().__init__(names)
        self.handlers = here.handlers
        self._here, self._own, self._reply = here, frozenset(here.names), reply

    def send(self, name: str, message: dict[str, Any]) -> None:
        if name in self._own:
            self._here.send(name, message)
        else:
            self._reply({"tell": [name, message]})

    def exit_reason(self, name: str) -> str:
        return self._here.exit_reason(name)

    def fail(self, error: AtlasError) -> None:
        self._reply({"error": str(error), "user_error": not isinstance(error, WorkerError)})


def _of_pipelines(per_stage: list[list[int]], num_pipelines: int) -> Ints:
    one = np.array(per_stage, np.int64)
    return np.tile(one, (num_pipelines, 1, 1))
