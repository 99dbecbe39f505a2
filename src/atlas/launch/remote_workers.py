"""The workers of all datacenters as one group: messages go out and replies come in through their agents' control
channels. A failure of a worker or of an agent is reported as one error and ends the attempt.

Agents are named by their node (`west/site0`), workers by their own name (`p0.s1`). Knows messages, not training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from atlas.errors import StopSignal, WorkerError
from atlas.launch.control_channel import Message
from atlas.launch.rendezvous import JoinedAgent, Rendezvous
from atlas.launch.site_records import unpacked
from atlas.launch.worker_processes import WorkerGroup, WorkerMessage
from atlas.lifetime import Repeating

POLL_S = 0.1
BY_SCHEDULER = "scheduler"
"""Value of an agent's {"interrupt"}: its scheduler sent a signal, no user pressed Ctrl-C."""


class RemoteWorkers(WorkerGroup):
    """The workers of one attempt. `with RemoteWorkers(...)`: leaving the block has every agent end its workers.

    `agent_of_worker`: the agent that runs each worker, in the order of the Program. `grace_s`: how long an agent may be
    out of reach.
    """

    def __init__(
        self,
        epoch: int,
        rendezvous: Rendezvous,
        agents: Sequence[JoinedAgent],
        agent_of_worker: Mapping[str, JoinedAgent],
        grace_s: Callable[[JoinedAgent], float],
    ) -> None:
        super().__init__(list(agent_of_worker))
        self.epoch, self._grace_s = epoch, grace_s
        self._rendezvous, self._agent_of_worker = rendezvous, dict(agent_of_worker)
        self._agents = {agent.name.node: agent for agent in agents}
        self._exit_reasons: dict[str, str] = {}
        self._held: list[WorkerMessage] | None = None
        for agent in agents:
            agent.channel.deliver_to(partial(self._take, agent))
        self._watched = dict(self._agents)
        self._watcher = Repeating("watch of the agents", POLL_S, self._watch)

    @property
    def agents(self) -> list[str]:
        """By node."""
        return list(self._agents)

    def agent_of(self, name: str) -> str:
        """The node of the agent that runs a worker."""
        return self._agent_of_worker[name].name.node

    def send_agent(self, node: str, message: Message) -> None:
        """A message to the agent itself."""
        self._agents[node].channel.send({"epoch": self.epoch, **message})

    def send_agents(self, message: Message) -> None:
        for node in self._agents:
            self.send_agent(node, message)

    @property
    def clock_of(self) -> dict[str, str]:
        return {name: self.agent_of(name) for name in self.names}

    def send(self, name: str, message: Message) -> None:
        """To a worker, or to an agent."""
        if name in self._agents:
            self.send_agent(name, message)
            return
        self._agent_of_worker[name].channel.send({"epoch": self.epoch, "to": name, "message": message})

    def exit_reason(self, name: str) -> str:
        return self._exit_reasons.get(name, "ended without an error message")

    def title(self, name: str) -> str:
        if name in self._agents:
            agent = self._agents[name].name
            return f"{'datacenter' if agent.num_parts == 1 else 'host'} {agent}"
        return f"worker {name} in {self._agent_of_worker[name].name.datacenter}"

    def _next(self, timeout_s: float, missing: Callable[[], str]) -> WorkerMessage:
        while True:
            new = super()._next(timeout_s, missing)
            if new.message is None or "interrupt" not in new.message:
                return new
            if self._held is None:
                raise StopSignal if new.message["interrupt"] == BY_SCHEDULER else KeyboardInterrupt
            self._held.append(new)

    @contextmanager
    def interrupts_held(self) -> Iterator[None]:
        """Inside the block a user's Ctrl-C waits."""
        self._held = []
        try:
            yield
        finally:
            self._deferred.extend(self._held)
            self._held = None

    def close(self) -> None:
        for node in self._agents:
            try:
                self.send_agent(node, {"end": True})
            except WorkerError:  # disconnected for long; the next attempt has another agent
                continue
        self._watcher.close()
        for agent in self._agents.values():
            agent.channel.deliver_to(None)

    def _watch(self) -> None:
        """Report agents that are out of reach for too long, or were replaced."""
        for node, agent in list(self._watched.items()):
            if (why := self._why_lost(agent)) is not None:
                self._put(node, {"error": why})
                del self._watched[node]

    def _why_lost(self, agent: JoinedAgent) -> str | None:
        if self._rendezvous.agents.get((agent.name.datacenter, agent.name.part)) is not agent:
            return "its launcher was started again"
        grace_s = self._grace_s(agent)
        if not agent.channel.is_connected and time.monotonic() - agent.channel.gone_since > grace_s:
            return f"its launcher has been out of reach for {grace_s:g} s"
        return None

    def _take(self, agent: JoinedAgent, message: Message) -> None:
        """On the thread of the channels."""
        try:
            self._receive(agent, message)
        except Exception as error:  # reported as this agent's error
            self._put(agent.name.node, {"error": f"its launcher sent an invalid message: {error!r}"})

    def _receive(self, agent: JoinedAgent, message: Message) -> None:
        if "interrupt" in message or "failed" in message:
            self._put(agent.name.node, {"error": message["failed"]} if "failed" in message else message)
        elif message.get("epoch") != self.epoch:
            return  # of an earlier attempt
        elif "records" in message:
            for name, record in unpacked(message["records"]):
                self._put(name, record)
        elif "from" in message:
            name = str(message["from"])
            if message["message"] is None:
                self._exit_reasons[name] = str(message.get("exit_reason", ""))
            self._put(name, message["message"])
        else:
            self._put(agent.name.node, message)

    def _put(self, name: str, message: dict[str, Any] | None) -> None:
        if message is not None and (key := next((key for key in self.handlers if key in message), None)) is not None:
            self.handlers[key](name, message[key])
            return
        self._received.put(WorkerMessage(name, message, time.monotonic_ns()))
