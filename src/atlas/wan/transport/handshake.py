"""How two nodes set up a connection: preamble, TLS if required, one greeting each way, then a SocketStream.

The listener's answer begins with one byte that accepts or refuses. Peers without a valid certificate get no answer. The
dialer of a reverse connection, on which the listener sends, confirms the answer with one byte, which gives the listener
the round trip. Knows the order of these steps; the caller's `accept` decides which greetings are accepted.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from enum import IntEnum

from atlas.errors import WorkerError
from atlas.wan.security.aead import SECRET_BYTES, cipher_of
from atlas.wan.security.credentials import PlainExchange, Protection, Security, TlsExchange, require_name
from atlas.wan.transport.base import Address
from atlas.wan.transport.stream import SocketStream
from atlas.wan.transport.unix_sockets import can_be_unix, dial_unix, peer_host
from atlas.wan.transport.wire import GREETING_BYTES, Greeting, pack_greeting, preamble, unpack_greeting


class GreetingAnswer(IntEnum):
    """The listener's answer to a greeting."""

    WELCOME = 0
    OLD_EPOCH = 1
    NEW_EPOCH = 2
    """The dialer is in a later epoch than the listener. It should try again."""
    OTHER_LIFE = 3
    OTHER_NODE = 4
    FULL = 5
    NOT_READY = 6
    """The listener has not opened the channel that a reverse connection is for. The dialer should try again."""


REASONS: dict[int, str] = {
    GreetingAnswer.OLD_EPOCH: "it is in a later epoch: this side was replaced and must stop",
    GreetingAnswer.NEW_EPOCH: "it is still in an earlier epoch",
    GreetingAnswer.OTHER_LIFE: "another process with this side's name is connected in this epoch: a restart "
    "needs a new epoch",
    GreetingAnswer.OTHER_NODE: "it is another node than the one addressed",
    GreetingAnswer.FULL: "it has as many connections as its setting max_inbound allows",
    GreetingAnswer.NOT_READY: "it has nothing to send on this lane yet",
}
RETRY = (GreetingAnswer.NEW_EPOCH, GreetingAnswer.FULL, GreetingAnswer.NOT_READY)
CONFIRM = b"\1"
FIRST_RETRY_S = 0.02
"""Pause after the first failure to connect."""


class RefusedError(WorkerError):
    """A peer refused the connection. `final`: trying again will not help."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


def is_final(error: BaseException) -> bool:
    """Whether dialling again will not help: the peer refuses for good, or this side has no certificates."""
    return error.final if isinstance(error, RefusedError) else not isinstance(error, OSError | WorkerError)


class RetryPause:
    """The pause before a connection is dialled again. It doubles with each failure, and is random by half, so that
    many connections are not dialled at once."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._pause_s = longest_s, FIRST_RETRY_S

    def next_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(self._longest_s, 2 * self._pause_s)
        return pause_s * (0.5 + random.random())

    def reset(self) -> None:
        """It was connected."""
        self._pause_s = FIRST_RETRY_S


def dial(
    address: Address,
    mine: Greeting,
    security: Security,
    timeout_s: float,
    on_socket: Callable[[socket.socket], None] = lambda sock: None,
) -> tuple[SocketStream, Greeting]:
    """Connects and returns the stream with the listener's greeting. Raises OSError or WorkerError.

    `on_socket` gets the socket before it connects, so that another thread can shut it down.
    """
    deadline = time.monotonic() + timeout_s
    # An encrypted connection gains nothing from a Unix socket.
    unix = dial_unix(address) if can_be_unix(address) and security.trusts(address[0]) else None
    family, where = (unix.family, address) if unix is not None else resolve(address)
    sock = unix or socket.socket(family, socket.SOCK_STREAM)
    try:
        on_socket(sock)
        sock.settimeout(timeout_s)
        if unix is None:
            sock.connect(where)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protection = security.protection(peer_host(sock), mine.name, mine.peer)
        exchange, secret = PlainExchange(sock, deadline), b""
        exchange.write(preamble(protection))
        if protection is not Protection.PLAIN:
            exchange = TlsExchange(exchange, security.client_context, server_side=False)
            require_name(exchange.certificate, mine.peer)
            secret = os.urandom(SECRET_BYTES)
        begin = time.monotonic()
        exchange.write(secret + pack_greeting(mine))
        answer = exchange.read(len(secret) + 1 + GREETING_BYTES)
        rtt_s = time.monotonic() - begin  # the kernel's own estimate would end at the nearest proxy
        theirs = _accepted(answer[len(secret) :], mine)
        if mine.reverse:
            exchange.write(CONFIRM)
        is_encrypted = protection is Protection.ENCRYPTED
        cipher = cipher_of(secret, answer[: len(secret)], is_dialer=True) if is_encrypted else None
        return SocketStream(sock, cipher, rtt_s=rtt_s), theirs
    except BaseException:
        sock.close()
        raise


def resolve(address: Address) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """The family and the socket address of a host, which may be a name. Raises OSError."""
    family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    return family, where


def _accepted(answer: bytes, mine: Greeting) -> Greeting:
    theirs = unpack_greeting(answer[1:])
    if answer[0] != GreetingAnswer.WELCOME:
        reason = REASONS.get(answer[0], "no reason given")
        raise RefusedError(f"{mine.peer} refuses: {reason}", final=answer[0] not in RETRY)
    if theirs.name != mine.peer or theirs.epoch != mine.epoch:
        found = f"{theirs.name} of epoch {theirs.epoch}"
        raise RefusedError(f"{mine.peer} of epoch {mine.epoch} was dialled, and {found} answers", final=True)
    return theirs


def receive(
    sock: socket.socket,
    mode: int,
    security: Security,
    accept: Callable[[Greeting], tuple[GreetingAnswer, Greeting]],
    timeout_s: float,
) -> tuple[SocketStream, Greeting] | None:
    """The listener's side, after the preamble. None if the greeting was refused. The caller closes the socket."""
    exchange, secret, protection = PlainExchange(sock, time.monotonic() + timeout_s), b"", Protection(mode)
    host = peer_host(sock)
    if protection is Protection.PLAIN and not security.accepts(protection, host, "", ""):
        raise WorkerError("a plain connection from outside the trusted networks, or to a node with a certificate")
    if protection is not Protection.PLAIN:
        if security.credentials is None:
            raise WorkerError("a TLS connection, but this node has no certificate")
        exchange, secret = TlsExchange(exchange, security.server_context, server_side=True), os.urandom(SECRET_BYTES)
    message = exchange.read(len(secret) + GREETING_BYTES)
    theirs = unpack_greeting(message[len(secret) :])
    if isinstance(exchange, TlsExchange):
        require_name(exchange.certificate, theirs.name)
    if not security.accepts(protection, host, theirs.peer, theirs.name):
        raise WorkerError(f"{theirs.name} at {host} does not encrypt, and is outside the trusted networks")
    answer, mine = accept(theirs)
    begin, rtt_s = time.monotonic(), 0.0
    exchange.write(secret + bytes([answer]) + pack_greeting(mine))
    if answer != GreetingAnswer.WELCOME:
        return None
    if theirs.reverse:
        exchange.read(len(CONFIRM))
        rtt_s = time.monotonic() - begin
    is_encrypted = protection is Protection.ENCRYPTED
    cipher = cipher_of(message[: len(secret)], secret, is_dialer=False) if is_encrypted else None
    return SocketStream(sock, cipher, rtt_s=rtt_s), theirs
