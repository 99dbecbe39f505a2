"""How two nodes meet on a fresh connection: preamble, TLS where it must be, one greeting each way, then a Stream.

The listener's answer begins with one byte that says whether it agrees, told only to peers that proved who they are.
Knows the order of these steps; what a node agrees to is decided by the `accept` it is given.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from enum import IntEnum

from atlas.errors import WorkerError
from atlas.wan.security.aead import SECRET_BYTES, AeadCipher, cipher_of
from atlas.wan.security.credentials import Security, TlsExchange, read_by, require_name, write_by
from atlas.wan.transport.stream import SocketStream
from atlas.wan.transport.unix_sockets import dial_unix, has_twin, peer_host
from atlas.wan.transport.wire import GREETING_BYTES, PLAIN, SEALED, Greeting, pack_greeting, preamble, unpack_greeting

Address = tuple[str, int]


class Answer(IntEnum):
    """What a listener says to a greeting."""

    WELCOME = 0
    OLD_EPOCH = 1
    NEW_EPOCH = 2
    """The dialer is ahead of us; it should come again."""
    OTHER_LIFE = 3
    OTHER_NODE = 4
    FULL = 5


REASONS = {
    Answer.OLD_EPOCH: "it is in a later epoch: this side was replaced and must not go on",
    Answer.NEW_EPOCH: "it is still in an earlier epoch",
    Answer.OTHER_LIFE: "it knows another process of our name in this epoch: a restart needs a new epoch",
    Answer.OTHER_NODE: "it is another node than the one we wanted",
    Answer.FULL: "it holds as many connections as its setting max_inbound allows",
}
COME_AGAIN = (Answer.NEW_EPOCH, Answer.FULL)


class RefusedError(WorkerError):
    """A peer that will not talk to us. `final`: nor will it later."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


def dial(
    address: Address,
    mine: Greeting,
    security: Security,
    timeout_s: float,
    began: Callable[[socket.socket], None] = lambda sock: None,
) -> tuple[SocketStream, Greeting]:
    """Connects, greets, and returns the stream with the listener's greeting. Raises OSError or WorkerError.

    `began` hears of the socket first, so that somebody else can shut it down.
    """
    deadline = time.monotonic() + timeout_s
    # What is sealed gains nothing from a twin.
    twin = dial_unix(address) if has_twin(address) and security.trusts(address[0]) else None
    sock = twin or socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        began(sock)
        sock.settimeout(timeout_s)
        if twin is None:
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sealed = security.require(peer_host(sock), mine.peer)
        write_by(sock, preamble(SEALED if sealed else PLAIN), deadline)
        if not sealed:
            begin = time.monotonic()
            write_by(sock, pack_greeting(mine), deadline)
            theirs = _judge(read_by(sock, 1 + GREETING_BYTES, deadline), mine)
            return _stream(sock, None, time.monotonic() - begin), theirs
        talk = TlsExchange(sock, security.client_context, deadline, server_side=False)
        require_name(talk.certificate, mine.peer)
        secret = os.urandom(SECRET_BYTES)
        begin = time.monotonic()
        talk.write(secret + pack_greeting(mine))
        answer = talk.read(SECRET_BYTES + 1 + GREETING_BYTES)
        rtt_s = time.monotonic() - begin
        theirs = _judge(answer[SECRET_BYTES:], mine)
        return _stream(sock, cipher_of(secret, answer[:SECRET_BYTES], is_dialer=True), rtt_s), theirs
    except BaseException:
        sock.close()
        raise


def _stream(sock: socket.socket, seal: AeadCipher | None, rtt_s: float) -> SocketStream:
    """The round trip is that of the greetings: the kernel's own ends at the nearest proxy."""
    stream = SocketStream(sock, seal)
    stream.rtt_s = rtt_s
    return stream


def _judge(answer: bytes, mine: Greeting) -> Greeting:
    theirs = unpack_greeting(answer[1:])
    if answer[0] != Answer.WELCOME:
        reason = {int(kind): text for kind, text in REASONS.items()}.get(answer[0], "no reason given")
        raise RefusedError(f"{mine.peer} refuses: {reason}", final=answer[0] not in COME_AGAIN)
    if theirs.name != mine.peer or theirs.epoch != mine.epoch:
        raise RefusedError(f"{mine.peer} answers as {theirs.name} of epoch {theirs.epoch}", final=True)
    return theirs


def receive(
    sock: socket.socket,
    mode: int,
    security: Security,
    accept: Callable[[Greeting], tuple[Answer, Greeting]],
    timeout_s: float,
) -> tuple[SocketStream, Greeting] | None:
    """The listener's side, after the preamble. None where the answer was no. Leaves closing to the caller."""
    deadline = time.monotonic() + timeout_s
    if mode == PLAIN:
        if not security.trusts(peer_host(sock)):
            raise WorkerError("a plain connection from outside the trusted networks")
        theirs = unpack_greeting(read_by(sock, GREETING_BYTES, deadline))
        answer, mine = accept(theirs)
        write_by(sock, bytes([answer]) + pack_greeting(mine), deadline)
        return (SocketStream(sock), theirs) if answer == Answer.WELCOME else None
    if security.credentials is None:
        raise WorkerError("a TLS connection, but this node has no certificate")
    talk = TlsExchange(sock, security.server_context, deadline, server_side=True)
    message = talk.read(SECRET_BYTES + GREETING_BYTES)
    theirs = unpack_greeting(message[SECRET_BYTES:])
    require_name(talk.certificate, theirs.name)
    answer, mine = accept(theirs)
    secret = os.urandom(SECRET_BYTES)
    talk.write(secret + bytes([answer]) + pack_greeting(mine))
    seal = cipher_of(message[:SECRET_BYTES], secret, is_dialer=False)
    return (SocketStream(sock, seal), theirs) if answer == Answer.WELCOME else None
