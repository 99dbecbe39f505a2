"""Coordinates the agents of a run: waits for all of them, lets them choose the checkpoint to resume from, starts all
workers at one moment, follows the run, and stops all workers after the same step.

After a failure it starts another attempt (`supervisor`); when a datacenter is lost, on a new plan (`replan`). Knows
agents and messages; touches no folder and no device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from atlas.errors import AtlasError, WorkerError
from atlas.ir.text import to_text
from atlas.launch.active_plan import ActivePlan, Ask
from atlas.launch.clocks import offsets_ns
from atlas.launch.control_channel import pack_text
from atlas.launch.local_sums import sums_by_datacenter
from atlas.launch.membership import LostHostsError, Membership
from atlas.launch.preflight import LauncherMemory, require_memory_together
from atlas.launch.prepared_job import PreparedJob, copy_targets
from atlas.launch.remote_workers import RemoteWorkers
from atlas.launch.rendezvous import AgentName, JoinedAgent, Rendezvous
from atlas.launch.report.events import OnStep
from atlas.launch.run_monitor import RunMonitor, RunOutcome, connect_workers, interrupt_code
from atlas.launch.run_record import RunRecord
from atlas.launch.run_state import FinishedBeforeError, ResumePoint, RunningAttempt, StateFile
from atlas.launch.site_network import SiteFacts, require_apart, require_connected
from atlas.launch.site_rails import rails_message, relay_circuits, slowest_change_s
from atlas.launch.supervisor import run_with_restarts
from atlas.launch.train_options import TrainOptions, compiler
from atlas.runtime.assignment import read
from atlas.runtime.topology import PeerLink, WorkerRole
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address, PeerRoute

REPLY_S = 30.0
"""For an agent's reply that needs no reading of checkpoints."""
FETCH_S = 600.0
"""Workers read a checkpoint before they listen, and it may be large; a worker that dies is reported at once anyway."""
SILENT_PATIENCES = 10
"""The run fails when no worker sends anything for this many times `patience_s`."""
FINISH_S = 5.0
"""How long the agents may take to confirm the end of the run."""

Route = Callable[[str, str, Address], Address]
"""For tests: the address at which `src` reaches an address of `dst`."""


@dataclass(frozen=True)
class RunCallbacks:
    say: Callable[[str], None]
    """Prints a line for the user."""
    on_step: OnStep | None = None
    on_start: Callable[[Mapping[str, int]], None] | None = None
    """Process ids by worker, at every start; for tests."""
    route: Route = lambda src, dst, address: address
    record: RunRecord = field(default_factory=lambda: RunRecord(None, {}))


class Coordinator:
    """Listens at once; `run` runs to the end; always `close`. `plan`: the digest that all launchers must have."""

    def __init__(
        self,
        address: Address,
        security: Security,
        plan: str,
        prepared: PreparedJob,
        options: TrainOptions,
        callbacks: RunCallbacks,
        ask: Ask,
        state: StateFile,
    ) -> None:
        self.options, self._file = options, state
        self._callbacks, self._say = callbacks, callbacks.say
        self.membership = Membership(prepared.datacenters, plan, state, options, callbacks.say)
        self.active = ActivePlan(prepared, self.membership, options, callbacks.say, ask)
        self._num_done = 0
        self._left_running = state.state.running
        """By an earlier coordinator."""
        self._failure: BaseException | None = None
        self._found: Mapping[str, Any] = {}
        """What the agents of the last attempt reported."""
        self.rendezvous = Rendezvous(address, security, self.membership.why_not)
        self.membership.use(self.rendezvous)

    @property
    def prepared(self) -> PreparedJob:
        return self.active.prepared

    def close(self) -> None:
        self.rendezvous.close()
        self._file.close()

    def run(self) -> RunOutcome:
        """The outcome; raises an error that no restart can fix."""
        try:
            outcome = run_with_restarts(self._next, lambda: self._num_done, self.options.restarts, self._say)
        except KeyboardInterrupt as interrupt:
            self._finish("interrupted", interrupt_code(interrupt))
            raise
        except FinishedBeforeError as error:
            self._finish(error.sentence, error.code)
            if error.code == 2:
                raise AtlasError(error.sentence) from None
            return RunOutcome(0, [], error.sentence, error.code)
        except AtlasError as error:
            self._finish(str(error), error.exit_code)
            raise
        self._finish(outcome.sentence, outcome.exit_code)
        return outcome

    def fail(self, name: AgentName, error: BaseException) -> None:
        """This launcher's own agent has failed, on its own thread: the run ends and is not restarted."""
        self._failure = error
        agent = self.rendezvous.agents.get((name.datacenter, name.part))
        if agent is not None:
            agent.channel.put({"failed": str(error) or repr(error)})

    def _finish(self, text: str, code: int) -> None:
        self._file.update(running=None, finished=(text, code))
        agents = self.rendezvous.everyone
        for agent in agents:
            with contextlib.suppress(WorkerError):  # an agent that does not read must not block the others
                agent.channel.send({"finish": {"text": text, "code": code}})
        deadline = time.monotonic() + FINISH_S
        for agent in agents:
            agent.channel.wait_sent(max(0.0, deadline - time.monotonic()) if agent.channel.is_connected else 0.0)

    # ---- who is in the run -----------------------------------------------------------------------------------------
    def _gather(self) -> list[JoinedAgent]:
        """Wait for a launcher at every place; continue on fewer hosts if one does not come back in time."""
        while True:
            try:
                return self.membership.gather(self._check, self.prepared.predicted_s)
            except LostHostsError as error:
                self.active.lose(error.places)

    def _check(self) -> None:
        if isinstance(self._failure, WorkerError):
            raise AtlasError(str(self._failure))  # no restart would help
        if self._failure is not None:
            raise self._failure
        state = self._file.state
        if state.finished is not None and any(agent.epoch == state.epoch for agent in self.rendezvous.everyone):
            raise FinishedBeforeError(*state.finished)

    # ---- one attempt -----------------------------------------------------------------------------------------------
    def _next(self) -> RunOutcome:
        """The attempt that an earlier coordinator has left running, or a new one; and others, where hosts came back."""
        running, self._left_running = self._left_running, None
        outcome = self._rejoin(running) if running is not None else None
        while outcome is None or (outcome.paused and outcome.num_done < self.options.steps):
            if outcome is not None:
                self.active.grow(outcome.num_done)
            outcome = self._attempt()
        return outcome

    def _rejoin(self, running: RunningAttempt) -> RunOutcome | None:
        """Follow the workers of an earlier coordinator's attempt; None if not all of their launchers are left."""
        epoch = self._file.state.epoch
        agents = self.membership.rejoined(running.instances, epoch)
        if agents is None or running.program != _program_digest(self.prepared):
            return None
        with self._workers(epoch, agents) as workers:
            with workers.interrupts_held():
                found = workers.wait_for("rejoined", REPLY_S, of=workers.agents)
                if any(facts["start_ns"] is None for facts in found.values()):
                    return None
                offsets = offsets_ns(workers)
            some = workers.names[0]
            zero_ns = found[workers.agent_of(some)]["start_ns"] - offsets[some]
            self._say(f"the coordinator was restarted; the workers kept running, and step {running.num_done} was done")
            monitor = self._monitor(workers, running.start, running.num_done)
            return self._followed(workers, monitor, lambda: monitor.rejoin(zero_ns, offsets))

    def _attempt(self) -> RunOutcome:
        agents = self._gather()
        state = self._file.next_attempt()
        num_steps = self.options.steps
        with self._workers(state.epoch, agents) as workers:
            for agent in agents:
                begin = {"begin": state.epoch, "name": list(agent.name)}
                workers.send_agent(agent.name.node, {**begin, "datacenters": list(self.membership.datacenters)})
            found = workers.wait_for("begun", REPLY_S, of=workers.agents)
            self._sums, sites = sums_by_datacenter(self.prepared, found, self._say), self._sites(workers, found)
            self._found = found
            start = self._resume_point(workers, agents, found, sites)
            if start.first_step >= num_steps:
                sentence = f"{start.first_step} steps are done already, and --steps is {num_steps}. Give more steps"
                return RunOutcome(start.first_step, [], sentence)
            self._num_done = max(self._num_done, start.first_step)
            self._prepare(workers, agents, start)
            monitor = self._monitor(workers, start, start.first_step)
            self._connect(workers, sites, start, monitor)
            if start.resume is not None:
                self._say(f"resumed from the checkpoint of step {start.resume}")
            instances = {agent.name.node: agent.instance for agent in agents}
            running = RunningAttempt(start, instances, _program_digest(self.prepared), start.first_step)
            self._file.update(running=running)
            return self._followed(workers, monitor, monitor.play)

    def _workers(self, epoch: int, agents: Sequence[JoinedAgent]) -> RemoteWorkers:
        by_name = {agent.name: agent for agent in agents}
        shares = self.prepared.roles_by_agent(list(by_name))
        owner = {role.name: by_name[name] for name, roles in shares.items() for role in roles}
        agent_of_worker = {role.name: owner[role.name] for role in self.prepared.roles}  # in the Program's order
        workers = RemoteWorkers(epoch, self.rendezvous, agents, agent_of_worker, self.membership.grace_s)
        workers.warn = self._say
        relay_circuits(workers, shares)
        return workers

    def _monitor(self, workers: RemoteWorkers, start: ResumePoint, first_step: int) -> RunMonitor:
        def note_done(num_done: int) -> None:
            if self._file.state.running is not None:
                self._file.update(running=dataclasses.replace(self._file.state.running, num_done=num_done))
            workers.send_agents({"done": num_done})

        return RunMonitor(
            workers,
            self.prepared.program,
            self.prepared.costs,
            first_step,
            silence_s=SILENT_PATIENCES * self.options.patience_s,
            saves=start.saves,
            copies=bool(start.copies),
            say=self._say,
            on_step=self._callbacks.on_step,
            on_done=note_done,
            may_pause=self.active.could_grow,
            saves_on_the_way=self.options.save_every > 0,
            predicted_s=self.prepared.predicted_s,
        )

    def _followed(self, workers: RemoteWorkers, monitor: RunMonitor, follow: Callable[[], RunOutcome]) -> RunOutcome:
        """The outcome of an attempt whose workers run; afterwards a restarted coordinator finds none."""
        hosts = {node: [name for name in workers.names if workers.agent_of(name) == node] for node in workers.agents}
        machines = {agent: str(facts.get("machine", "")) for agent, facts in self._found.items()}
        try:
            with self._callbacks.record.attempt(self._file.state.attempt, hosts, monitor, machines):
                return follow()
        finally:
            self._num_done = max(self._num_done, monitor.num_done)
            self._file.update(running=None)

    def _sites(self, workers: RemoteWorkers, found: Mapping[str, Any]) -> dict[str, SiteFacts]:
        """By agent: its place in the network. Raises if a pair that must exchange messages cannot."""
        sites = {agent: read(SiteFacts, facts["site"]) for agent, facts in found.items()}
        pairs = {(workers.agent_of(a), workers.agent_of(b)) for a, b in self.prepared.peers}
        if any(facts["server"] is not None for facts in found.values()):  # all checkpoint servers connect
            pairs = set(combinations(sites, 2))
        require_apart(list(sites.values()))
        require_connected((sites[a], sites[b]) for a, b in sorted(pairs) if a != b)
        return sites

    def _resume_point(
        self,
        workers: RemoteWorkers,
        agents: Sequence[JoinedAgent],
        found: Mapping[str, Any],
        sites: Mapping[str, SiteFacts],
    ) -> ResumePoint:
        """Connect the checkpoint servers of all agents and choose the checkpoint to resume from."""
        servers = {agent: facts["server"] for agent, facts in found.items()}
        without = [agent.partition("/")[0] for agent, port in servers.items() if port is None]
        if without and len(without) < len(servers):
            raise AtlasError(
                f"{', '.join(without)} has no --checkpoints, the others have: give every datacenter a folder, or none"
            )
        if without:
            return ResumePoint()
        folders = {agent: facts["folder"] for agent, facts in found.items()}
        for agent in workers.agents:
            routes = {node: sites[agent].route(sites[node], port) for node, port in servers.items() if node != agent}
            others = {node for node, folder in folders.items() if not folder or folder != folders[agent]}
            stores = {node: facts["stores"] if node in others else [] for node, facts in found.items()}
            workers.send_agent(agent, {"servers": routes, "stores": stores})
        workers.wait_for("connected", REPLY_S, of=workers.agents)
        asked = workers.agents[0]
        workers.send_agent(asked, {"choose": True})
        chosen = workers.wait_for("chosen", FETCH_S, of=[asked])[asked]
        step = chosen["save"][1] if chosen["save"] is not None else None
        if step is None and chosen["next"]:
            self._say("no complete checkpoint is left in the connected datacenters: starting from the first step")
        copies = copy_targets(self.membership.members, [agent.name for agent in agents], folders)
        return ResumePoint(step or 0, chosen["next"], step, copies, saves=True)

    def _prepare(self, workers: RemoteWorkers, agents: Sequence[JoinedAgent], start: ResumePoint) -> None:
        prepared, options = self.prepared, self.options
        backend = compiler(options.compile, [facts.get("device", options.device) for facts in self._found.values()])
        common = {
            "groups": [
                {
                    "program": pack_text(to_text(part.program)),
                    "training": dataclasses.asdict(dataclasses.replace(prepared.training_of(number), compile=backend)),
                    "num_cells": part.job.cells,
                }
                for number, part in enumerate(prepared.parts)
            ],
            "shapes": [dataclasses.asdict(shape) for shape in prepared.shapes],
            "tp": prepared.job.tp,
            "num_steps": options.steps,
            "first_step": start.first_step,
            "attempt": start.attempt,
            "resume": start.resume,
            "save_every": options.save_every,
            "keep": options.keep,
            "streams": 1 if options.tcp == "one" else 0,
            "patience_s": options.patience_s + slowest_change_s(prepared),
        }
        shares = prepared.roles_by_agent([agent.name for agent in agents])
        memories = {agent.name: self._memory(agent.name, shares[agent.name], start) for agent in agents}
        require_memory_together(list(memories.values()))
        for agent in agents:
            roles, memory = shares[agent.name], memories[agent.name]
            mates = [other for other in memories.values() if other is not memory and memory.shares_gpu(other)]
            pace = {
                role.name: prepared.parts[role.group].costs.compute_ns[role.worker // role.program.num_ranks].tolist()
                for role in roles
                if options.device == "paced"
            }
            own: dict[str, Any] = {"workers": [[role.group, role.cell, role.worker] for role in roles]}
            own |= {"compute_ns": pace, "needs": memory.needs}
            own["beside"] = [need for mate in mates for need in mate.needs]
            own["rails"] = rails_message(prepared, shares, agent.name)
            own |= {"copy_to": start.copies.get(agent.name.node), "sums": self._sums[agent.name.datacenter]}
            workers.send_agent(agent.name.node, {"prepare": {**common, **own}})
        pids = workers.wait_for("prepared", FETCH_S, of=workers.agents)
        if self._callbacks.on_start is not None:
            self._callbacks.on_start({name: pid for found in pids.values() for name, pid in found.items()})

    def _memory(self, name: AgentName, roles: Sequence[WorkerRole], start: ResumePoint) -> LauncherMemory:
        facts = self._found[name.node]
        needs = self.prepared.needs_of(roles, saves=start.saves)
        device = facts.get("device", self.options.device)
        return LauncherMemory(str(name), needs, device, facts.get("memory", ""), facts.get("free_bytes"))

    def _connect(
        self, workers: RemoteWorkers, sites: Mapping[str, SiteFacts], start: ResumePoint, monitor: RunMonitor
    ) -> None:
        """Send workers the addresses of their peers, and checkpoint servers the workers that will copy to them."""
        ports = workers.wait_for("listening", FETCH_S)
        roles = {role.node: role for role in self.prepared.roles}
        clients: dict[str, dict[str, PeerRoute]] = {agent: {} for agent in workers.agents}
        for node, role in roles.items():
            if (server := start.copies.get(workers.agent_of(role.name))) is not None:
                client = sites[workers.agent_of(role.name)]
                clients[server][node] = sites[server].route(client, ports[role.name])
        for agent, nodes in clients.items():
            workers.send_agent(agent, {"admit": nodes})
        workers.wait_for("admitted", REPLY_S, of=workers.agents)

        def address_of(role: WorkerRole, link: PeerLink) -> Address | None:
            here, peer = sites[workers.agent_of(role.name)], roles[link.peer].name
            address = here.route(sites[workers.agent_of(peer)], ports[peer]).address
            return None if address is None else self._callbacks.route(role.node, link.peer, address)

        connect_workers(workers, list(roles.values()), links_of=self.prepared.links_of, address_of=address_of)
        workers.wait_for("ready", FETCH_S, meanwhile=monitor.note)  # copies of earlier saves may finish meanwhile


def _program_digest(prepared: PreparedJob) -> str:
    return hashlib.sha256("".join(to_text(part.program) for part in prepared.parts).encode()).hexdigest()
