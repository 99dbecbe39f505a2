"""Where the launchers of all datacenters connect: one listens; the others connect and send their name and a digest of
their plan. With certificates both sides use mutual TLS; without, only loopback is allowed.

    launcher   {"atlas": 3, "agent": ["west", 0, 1], "instance": 8461…, "plan": "9f…", "epoch": 0, "received": 0}
    rendezvous {"welcome": 0, "channel": 5102…}, or {"refused": "one sentence"}, and then the messages of a
               `ControlChannel`; another `channel` than before: a new process that knows nothing of earlier messages

Knows names and connections. What the launchers do together is the `coordinator`'s part.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from atlas.callers import MAX_GREETING, CallerServer, start_tls
from atlas.errors import AtlasError, StartAgainError, WorkerError
from atlas.launch.control_channel import ControlChannel, ControlConnection, Message, control_loop, frame
from atlas.wan.security.credentials import Protection, Security, require_name
from atlas.wan.transport.base import Address

log = logging.getLogger("atlas.launch")
VERSION = 3
"""Of this protocol: all launchers of a run need the same."""
HELLO_S = 10.0
"""What a launcher may take to say who it is."""
RETRY_S = 0.3
"""Pause before a launcher dials again."""
REMIND_S = 60.0
"""Between two lines of a launcher that still waits for the others."""
MAX_HELLO_BYTES = 1 << 16

SPARE = -1
"""In place of a launcher's number."""


class AgentName(NamedTuple):
    """A launcher (its agent): one of `num_parts` in its datacenter, or a spare, which has no number."""

    datacenter: str
    part: int = 0
    num_parts: int = 1

    @property
    def is_spare(self) -> bool:
        return self.part == SPARE

    @property
    def place(self) -> tuple[str, int]:
        return self.datacenter, self.part

    @property
    def node(self) -> str:
        """Its name for the transport and in certificates."""
        return f"{self.datacenter}/spare" if self.is_spare else f"{self.datacenter}/site{self.part}"

    def share(self, count: int) -> slice:
        """This launcher's share of `count` workers of its datacenter."""
        return slice(count * self.part // self.num_parts, count * (self.part + 1) // self.num_parts)

    def __str__(self) -> str:
        if self.is_spare:
            return f"a spare of {self.datacenter}"
        return self.datacenter if self.num_parts == 1 else f"{self.datacenter}/{self.part}"  # counted as by --node


COORDINATOR = AgentName("coordinator")
"""Of `atlas coordinator`: its certificate is for this name in place of a datacenter's."""


class Refusal(NamedTuple):
    """A connection that did not prove its name."""

    host: str
    why: str
    at: float
    """On the monotonic clock."""


class JoinedAgent:
    """A launcher that has joined. `instance`: a random number of its process. `epoch`: of the attempt that it was in
    when it joined; 0: in none."""

    def __init__(self, name: AgentName, instance: int, epoch: int, on_change: Callable[[], None]) -> None:
        self.name, self.instance, self.epoch = name, instance, epoch
        self.home = name
        """The name that it gave; `name` is its place in the run."""
        self.token = secrets.randbits(62)
        """Of this channel."""
        self.channel = ControlChannel(on_change)


Admission = Callable[[AgentName, str], str | None]
"""Why a launcher with this name and plan digest may not join; None: it may."""


class Rendezvous:
    """Listens at `address`. `agents`: the launcher at each place, connected or not. `waiting`: those that have none, by
    the number of their process. `changed`: notified when one joins or is disconnected."""

    def __init__(self, address: Address, security: Security, admission: Admission) -> None:
        self._security, self._admission = security, admission
        self.agents: dict[tuple[str, int], JoinedAgent] = {}
        self.waiting: dict[int, JoinedAgent] = {}
        self.closed: frozenset[tuple[str, int]] = frozenset()
        """Places that the run continues without. A launcher that returns there waits."""
        self.changed = threading.Condition()
        self.refusals: deque[Refusal] = deque(maxlen=MAX_GREETING)
        """Connections that proved no name, or not the one they gave; the latest."""
        self._server = CallerServer(self._talk, self._note_failure)
        try:
            self.address: Address = control_loop().run(self._server.listen_at(*address))
        except OSError as error:
            number = error.errno or 0  # below 0: the name does not resolve
            why = os.strerror(number) if number > 0 else error.strerror or error
            raise AtlasError(
                f"{address[0]}:{address[1]}: the coordinator cannot listen there: {why}. Choose a port that "
                "is free and an address of this host (--rendezvous, the same in every datacenter; --listen of `atlas "
                "coordinator`). If another coordinator listens there, end it, or give --coordinator in place of "
                "--rendezvous"
            ) from None

    def close(self) -> None:
        for agent in self.everyone:
            agent.channel.detach()
        control_loop().run(self._server.close())

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HELLO_S):
            if self._security.credentials is not None:
                await start_tls(writer, self._security.server_context, HELLO_S)
            elif not self._security.trusts(_host(writer)):
                raise WorkerError("a connection from outside loopback, and there are no certificates")
            connection = ControlConnection(reader, writer)
            hello = await connection.receive(MAX_HELLO_BYTES)
        if refused := self._admit(connection, writer, hello):
            writer.write(frame({"refused": refused}))
            return
        self._server.admit()
        await connection.ended.wait()

    def _note_failure(self, error: Exception, writer: asyncio.StreamWriter, is_admitted: bool) -> None:
        log.debug("rendezvous: a connection was refused: %r", error)
        if isinstance(error, ssl.SSLError | WorkerError) and not is_admitted:
            why = getattr(error, "reason", None) or str(error)
            self.refusals.append(Refusal(_host(writer), str(why).replace("_", " ").lower(), time.monotonic()))

    def _admit(self, connection: ControlConnection, writer: asyncio.StreamWriter, hello: Message) -> str:
        """Why a launcher may not join; empty: it has."""
        name = AgentName(str(hello["agent"][0]), int(hello["agent"][1]), int(hello["agent"][2]))
        if (certificate := writer.get_extra_info("peercert")) is not None:
            require_name(certificate, name.node)
        if hello.get("atlas") != VERSION:
            version = f"version {hello.get('atlas')} of the launchers' protocol"
            return f"it uses {version}, the rendezvous uses version {VERSION}: install the same release on both"
        if reason := self._admission(name, str(hello["plan"])):
            return reason
        with self.changed:  # the next launcher is compared with this one
            if reason := self._disagrees(name):
                return reason
            agent, is_new = self._joined(name, int(hello["instance"]), int(hello["epoch"]))
            writer.write(frame({"welcome": agent.channel.num_received, "channel": agent.token}))
            agent.channel.attach(connection, 0 if is_new else int(hello["received"]))
        return ""

    def _joined(self, name: AgentName, instance: int, epoch: int) -> tuple[JoinedAgent, bool]:
        """And whether it has joined just now."""
        for known in (*self.agents.values(), *self.waiting.values()):
            if known.instance == instance:
                return known, False
        new, holder = JoinedAgent(name, instance, epoch, self._notify), self.agents.get(name.place)
        is_taken = holder is not None and holder.home != name and holder.channel.is_connected
        if name.is_spare or name.place in self.closed or is_taken:
            self.waiting[instance] = new
        else:
            self.put(new, name)
        return new, True

    def put(self, agent: JoinedAgent, name: AgentName) -> None:
        """Give it this place. The launcher that had it leaves the run."""
        before = self.agents.get(name.place)
        if before is not None and before is not agent:
            before.channel.detach()
        self.waiting.pop(agent.instance, None)
        agent.name = name
        self.agents[name.place] = agent

    def waiting_in(self, datacenter: str) -> list[JoinedAgent]:
        """Connected launchers of a datacenter without a place."""
        return [a for a in list(self.waiting.values()) if a.home.datacenter == datacenter and a.channel.is_connected]

    @property
    def everyone(self) -> list[JoinedAgent]:
        return [*self.agents.values(), *self.waiting.values()]

    def _disagrees(self, name: AgentName) -> str:
        """Why a launcher conflicts with connected ones of its datacenter; forget disconnected ones that conflict."""
        others = {
            place: agent
            for place, agent in self.agents.items()
            if place[0] == name.datacenter and agent.name.num_parts != name.num_parts and not name.is_spare
        }
        connected = [agent for agent in others.values() if agent.channel.is_connected]
        if connected:
            return (
                f"it was started as one of {name.num_parts} launchers in {name.datacenter}, but another host as one "
                f"of {connected[0].name.num_parts}: give --node I/N with the same N on every host"
            )
        for place in others:
            del self.agents[place]
        return ""

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


class RendezvousClient:
    """A launcher's connection to the rendezvous. Reconnects when it breaks, for up to `grace_s`."""

    def __init__(
        self,
        address: Address,
        host: AgentName,
        mine: AgentName,
        plan: str,
        security: Security,
        *,
        grace_s: float,
        patience_s: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.address, self.host, self.mine, self.plan, self.security = address, host, mine, plan, security
        self.grace_s, self._say = grace_s, say
        self.instance = secrets.randbits(62)
        self.channel = ControlChannel(self._changed)
        self.restart: Callable[[], None] = lambda: self.channel.restart(())
        """Begins again with a new coordinator: the agent reports its step."""
        self.epoch: Callable[[], int] = lambda: 0
        """Of the attempt that the agent is in."""
        self._token: int | None = None
        self._closing = threading.Event()
        self._disconnected = threading.Event()
        self._connect(time.monotonic() + patience_s)
        threading.Thread(target=self._keep, daemon=True, name="rendezvous client").start()

    def close(self) -> None:
        self._closing.set()
        self._disconnected.set()
        self.channel.detach()

    def _changed(self) -> None:
        if not self.channel.is_connected:
            self._disconnected.set()

    def _keep(self) -> None:
        while self._disconnected.wait() and not self._closing.is_set():
            self._disconnected.clear()
            try:
                self._connect(time.monotonic() + self.grace_s)
            except Exception as error:  # on a thread: reported through the inbox, whose reader would wait forever
                text = str(error) if isinstance(error, AtlasError) else repr(error)
                self.channel.inbox.put({"gone": text, "code": getattr(error, "exit_code", 2)})
                return

    def _connect(self, deadline: float) -> None:
        """Retry until it has joined. A refusal is final; so is a TLS error."""
        at, is_apart = f"{self.address[0]}:{self.address[1]}", self.host == COORDINATOR
        where = f"coordinator at {at}" if is_apart else f"rendezvous {at} in {self.host.datacenter}"
        remedy = (
            "Start it, or correct --coordinator"
            if is_apart
            else f"Start the launcher of {self.host.datacenter}, or correct --rendezvous"
        )
        remind = time.monotonic() + HELLO_S
        while not self._closing.is_set():
            try:
                return self._try(where)
            except ssl.SSLError as error:
                raise AtlasError(
                    f"{where}: TLS refused: {error.reason or error}. Give every datacenter a certificate of the same "
                    "CA that is still valid: `atlas wan certs` makes them"
                ) from None
            except (OSError, ValueError, KeyError, TypeError) as error:  # no listener, or not a rendezvous
                why = getattr(error, "strerror", None) or str(error) or "timed out"
                why = why if isinstance(error, OSError) else "not a rendezvous of Atlas"
                if (now := time.monotonic()) > remind:
                    remind = now + REMIND_S
                    self._say(f"waiting for the {where}: {why}")
                if now > deadline:
                    raise StartAgainError(f"{where}: not reached: {why}. {remedy}") from None
            self._closing.wait(RETRY_S)

    def _try(self, where: str) -> None:
        sock = socket.create_connection(self.address, timeout=HELLO_S)
        connection, reply = control_loop().run(self._greet(sock))
        try:
            if "refused" in reply:
                raise AtlasError(f"{where}: refused {self.mine}: {reply['refused']}")
            token, num_received = int(reply["channel"]), int(reply["welcome"])
        except (AtlasError, KeyError, TypeError, ValueError):
            connection.close()
            raise
        if self._token not in (None, token):
            self.restart()
        self._token = token
        self.channel.attach(connection, num_received)

    async def _greet(self, sock: socket.socket) -> tuple[ControlConnection, Message]:
        """The connection and the rendezvous's reply."""
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            protection = self.security.protection(_host(writer), self.mine.node, self.host.node)
            if protection is not Protection.PLAIN:  # inside a trusted network too: a hello proves its name
                await start_tls(writer, self.security.client_context, HELLO_S)
                require_name(writer.get_extra_info("peercert"), self.host.node)
            hello = {"atlas": VERSION, "agent": list(self.mine), "instance": self.instance, "plan": self.plan}
            writer.write(frame({**hello, "epoch": self.epoch(), "received": self.channel.num_received}))
            connection = ControlConnection(reader, writer)
            async with asyncio.timeout(HELLO_S):
                return connection, await connection.receive(MAX_HELLO_BYTES)
        except BaseException:
            writer.transport.abort()
            raise


def _host(writer: asyncio.StreamWriter) -> str:
    return str((writer.get_extra_info("peername") or ["a closed connection"])[0])
