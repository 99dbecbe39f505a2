"""Where the launchers of all datacenters meet: one listens, the others call and say who they are and which plan they
hold. With certificates both sides speak mutual TLS; without, everybody is on loopback.

    caller     {"atlas": 1, "site": ["west", 0, 1], "life": 8461…, "plan": "9f…", "received": 0}
    rendezvous {"welcome": 0}, or {"refused": "one sentence"}, and then whatever a `ControlChannel` carries

Knows names and the door. What is done together is `coordinator`'s business.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from atlas.errors import AtlasError, WorkerError
from atlas.launch.control_channel import ControlChannel, Message, frame, unframed
from atlas.wan.security.credentials import Security, require_name
from atlas.wan.transport.base import Address

log = logging.getLogger("atlas.launch")
VERSION = 1
HELLO_S = 10.0
RETRY_S = 0.3
MAX_HELLO_BYTES = 1 << 16
MAX_CALLERS = 64
"""That are being greeted at a time."""


class AgentName(NamedTuple):
    """A launcher: one of `num_parts` in its datacenter."""

    datacenter: str
    part: int = 0
    num_parts: int = 1

    @property
    def node(self) -> str:
        """As the transport and certificates name it."""
        return f"{self.datacenter}/site{self.part}"

    def __str__(self) -> str:
        return self.datacenter if self.num_parts == 1 else f"{self.datacenter} ({self.part + 1} of {self.num_parts})"


class JoinedAgent:
    """A launcher that has been here."""

    def __init__(self, name: AgentName, life: int, on_change: Callable[[], None]) -> None:
        self.name, self.life = name, life
        self.channel = ControlChannel(on_change)


Admission = Callable[[AgentName, str], str | None]
"""Why a launcher with this name and plan may not come in; None: it may."""


class Rendezvous:
    """Listens at `address`. `guests` are all that were let in, connected or not; `changed` is notified of both."""

    def __init__(self, address: Address, security: Security, judge: Admission) -> None:
        self._security, self._judge = security, judge
        self.guests: dict[tuple[str, int], JoinedAgent] = {}
        self.changed = threading.Condition()
        self._closing = False
        self._greeting = threading.Semaphore(MAX_CALLERS)
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._server = socket.create_server(address, family=family, backlog=MAX_CALLERS)
        except OSError as error:
            raise AtlasError(
                f"--rendezvous {address[0]}:{address[1]}: cannot listen there: {error.strerror}. Choose a port that is "
                "free and an address of this host, the same in every datacenter"
            ) from None
        self.address: Address = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="rendezvous").start()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for guest in list(self.guests.values()):
            guest.channel.detach()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._server.accept()
            except OSError as error:
                if not self._closing:  # too many open files, a caller that hung up: the next one must be let in
                    log.warning("rendezvous %s:%s: %s; listening goes on", *self.address, error)
                    time.sleep(RETRY_S)
                continue
            if not self._greeting.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HELLO_S)
            if not self._security.trusts(sock.getpeername()[0]):
                if self._security.credentials is None:
                    raise WorkerError("a caller from beyond loopback, and there are no certificates")
                sock = self._security.server_context.wrap_socket(sock, server_side=True)
            hello, early = _read_hello(sock)
            self._admit(sock, hello, early)
        except Exception as error:  # whatever a stranger says ends his connection and nothing else
            log.debug("rendezvous: a caller was turned away: %r", error)
            sock.close()
        finally:
            self._greeting.release()

    def _admit(self, sock: socket.socket, hello: Message, early: bytes) -> None:
        name, life = AgentName(str(hello["site"][0]), int(hello["site"][1]), int(hello["site"][2])), int(hello["life"])
        if isinstance(sock, ssl.SSLSocket):
            require_name(sock.getpeercert(), name.node)
        reason = f"it speaks version {hello.get('atlas')} of this protocol, the rendezvous {VERSION}: install the same"
        if hello.get("atlas") == VERSION:
            reason = self._judge(name, str(hello["plan"])) or ""
        with self.changed:  # who has been let in is here: the next caller is compared with him
            reason = reason or self._disagrees(name)
            if not reason:
                guest = self._guest(name, life)
                sock.sendall(frame({"welcome": guest.channel.num_received}))
                guest.channel.attach(sock, int(hello["received"]), early)
                return
        sock.sendall(frame({"refused": reason}))
        sock.close()

    def _guest(self, name: AgentName, life: int) -> JoinedAgent:
        place = (name.datacenter, name.part)
        known = self.guests.get(place)
        if known is None or known.life != life:
            if known is not None:
                known.channel.detach()
            known = self.guests[place] = JoinedAgent(name, life, self._notify)
        return known

    def _disagrees(self, name: AgentName) -> str:
        """Why a launcher does not fit those of its datacenter that are here; those that are gone count no longer."""
        others = {
            place: guest
            for place, guest in self.guests.items()
            if place[0] == name.datacenter and guest.name.num_parts != name.num_parts
        }
        here = [guest for guest in others.values() if guest.channel.is_connected]
        if here:
            return (
                f"it is one of {name.num_parts} launchers in {name.datacenter}, and one that is here says that there "
                f"are {here[0].name.num_parts}: give --node the same number of hosts on each"
            )
        for place in others:
            del self.guests[place]
        return ""

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


class RendezvousClient:
    """A launcher's way to the rendezvous; calls again when the connection breaks, until `grace_s` have passed."""

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
    ) -> None:
        self.address, self.host, self.mine, self.plan, self.security = address, host, mine, plan, security
        self.grace_s = grace_s
        self.life = secrets.randbits(62)
        self.channel = ControlChannel(self._changed)
        self.local_host = ""
        """The address by which this host reached the rendezvous."""
        self.error: Exception | None = None
        """Why it gave up."""
        self._closing = threading.Event()
        self._is_away = threading.Event()
        self._call(time.monotonic() + patience_s)
        threading.Thread(target=self._keep, daemon=True, name="caller").start()

    def close(self) -> None:
        self._closing.set()
        self._is_away.set()
        self.channel.detach()

    def _changed(self) -> None:
        if not self.channel.is_connected:
            self._is_away.set()

    def _keep(self) -> None:
        while self._is_away.wait() and not self._closing.is_set():
            self._is_away.clear()
            try:
                self._call(time.monotonic() + self.grace_s)
            except Exception as error:  # on a thread: who reads the inbox must hear of it, or would wait forever
                self.error = error
                self.channel.inbox.put({"gone": str(error) if isinstance(error, AtlasError) else repr(error)})
                return

    def _call(self, deadline: float) -> None:
        """Tries until it is let in. A refusal is final; so is a certificate that does not fit."""
        where = f"rendezvous {self.address[0]}:{self.address[1]} in {self.host.datacenter}"
        while not self._closing.is_set():
            try:
                return self._try(where)
            except ssl.SSLError as error:
                raise AtlasError(
                    f"{where}: TLS refused: {error.reason or error}. Give every datacenter a certificate of the same "
                    "CA that is still valid: `atlas wan certs` makes them"
                ) from None
            except (OSError, ValueError, KeyError, TypeError) as error:  # nobody there, or no rendezvous
                if time.monotonic() > deadline:
                    why = getattr(error, "strerror", None) or (error if isinstance(error, OSError) else "not atlas")
                    raise WorkerError(
                        f"{where}: not reached: {why}. Start `atlas train` there, or mend --rendezvous"
                    ) from None
            self._closing.wait(RETRY_S)

    def _try(self, where: str) -> None:
        sock = socket.create_connection(self.address, timeout=HELLO_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.security.require(sock.getpeername()[0], self.host.node):
                sock = self.security.client_context.wrap_socket(sock)
                require_name(sock.getpeercert(), self.host.node)
            self.local_host = sock.getsockname()[0]
            hello = {"atlas": VERSION, "site": list(self.mine), "life": self.life, "plan": self.plan}
            sock.sendall(frame({**hello, "received": self.channel.num_received}))
            answer, early = _read_hello(sock)
        except BaseException:
            sock.close()
            raise
        if "refused" in answer:
            sock.close()
            raise AtlasError(f"{where}: refuses {self.mine}: {answer['refused']}")
        try:
            self.channel.attach(sock, int(answer["welcome"]), early)
        except (KeyError, TypeError, ValueError):
            sock.close()
            raise


def _read_hello(sock: socket.socket) -> tuple[Message, bytes]:
    """The first message, and what came after it."""
    data, deadline = bytearray(), time.monotonic() + HELLO_S
    while (message := unframed(data)) is None:
        if len(data) > MAX_HELLO_BYTES or time.monotonic() > deadline:
            raise ConnectionResetError("no greeting")
        more = sock.recv(4096)
        if not more:
            raise ConnectionResetError("the other side ended the connection before a greeting")
        data += more
    return message, bytes(data)
