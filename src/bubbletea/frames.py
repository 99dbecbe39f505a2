"""Frames on a stream between a service, its workers and a decode engine: a fixed head, a small JSON object, raw bytes,
with a checksum over all of it. And the handshake that opens such a stream: both sides prove that they have the same
token without sending it.

No pickle; every size is checked before anything is allocated. Knows no tensors. Blocking sockets
(workers, decode engines) and asyncio streams (the service) read and write the same bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from atlas.callers import CallerServer, start_tls
from atlas.errors import WorkerError

if TYPE_CHECKING:
    from bubbletea.prefill.tls import TlsSocket

log = logging.getLogger("bubbletea.frames")
_HEAD, _CHECKSUM = struct.Struct("!4sBHQI"), struct.Struct("!I")
"""Magic, kind, sizes of fields and payload, CRC-32 of fields and payload; then the CRC-32 of these."""
HEAD_BYTES = _HEAD.size + _CHECKSUM.size
MAGIC = b"BTF3"
MAX_FIELDS_BYTES, MAX_PAYLOAD_BYTES = (1 << 16) - 1, 1 << 30
"""Of one frame. The head has 16 bits for the size of the fields; keys and values of one layer of a prompt fit
into a payload."""
MAX_GREETING_BYTES = 4096
"""Largest fields of a caller before the token is proved; a payload is not accepted."""
GREETING_S = 10.0
"""Time limit of the handshake, of TLS and of the token together."""
WARN_S = 1.0
"""Between two lines in the log about callers without the token: garbage must not fill a disk."""

CHALLENGE, PROOF, WELCOME = 1, 2, 3
"""Kinds of the handshake; other modules number theirs from 16."""

Payload = bytes | bytearray | memoryview
FrameSocket: TypeAlias = "socket.socket | TlsSocket"
"""A blocking one."""


class ClosedError(WorkerError):
    """The other side has closed the connection; not a protocol error."""


class TokenRefused(WorkerError):  # noqa: N818
    """The other side has another token."""


class WireFrame(NamedTuple):
    kind: int
    fields: dict[str, Any]
    payload: Payload = b""
    num_bytes: int = 0
    """Of the whole frame, as it was received."""


def pack(kind: int, fields: Mapping[str, Any], payload: Payload = b"") -> bytes:
    """Head and fields; the payload is sent after them unchanged."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    if len(text) > MAX_FIELDS_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise WorkerError(
            f"a frame with {len(text)} bytes of fields and {len(payload)} of payload is larger than the receiver "
            f"accepts ({MAX_FIELDS_BYTES} and {MAX_PAYLOAD_BYTES})"
        )
    head = _HEAD.pack(MAGIC, kind, len(text), len(payload), _checksum(text, payload, fields))
    return head + _CHECKSUM.pack(zlib.crc32(head)) + text


def _checksum(text: bytes | memoryview, payload: Payload, fields: Mapping[str, Any]) -> int:
    """A payload that has checksums in the fields is not read twice."""
    return zlib.crc32(b"" if "checksums" in fields else payload, zlib.crc32(text))


class _FrameHead(NamedTuple):
    kind: int
    num_fields: int
    num_payload: int
    checksum: int

    @classmethod
    def of(cls, data: bytes, max_fields: int, max_payload: int) -> _FrameHead:
        magic, *found = _HEAD.unpack_from(data)
        head = cls(*found)
        if magic != MAGIC or (zlib.crc32(data[: _HEAD.size]),) != _CHECKSUM.unpack_from(data, _HEAD.size):
            raise WorkerError("not a BubbleTea frame: check that both ends run the same release")
        if head.num_fields > max_fields or head.num_payload > max_payload:
            raise WorkerError(
                f"a frame with {head.num_fields} bytes of fields and {head.num_payload} of payload is larger than "
                f"allowed ({max_fields} and {max_payload})"
            )
        return head

    def frame(self, text: bytes | memoryview, payload: Payload) -> WireFrame:
        try:
            fields = json.loads(bytes(text))
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise WorkerError("the fields of a frame are not a JSON object")
        if self.checksum != _checksum(text, payload, fields):
            raise WorkerError("a frame was damaged on the way")
        return WireFrame(self.kind, fields, payload, HEAD_BYTES + self.num_fields + self.num_payload)


# ---- blocking sockets --------------------------------------------------------------------------------------------
def send(sock: FrameSocket, kind: int, fields: Mapping[str, Any], payload: Payload = b"") -> None:
    sock.sendall(pack(kind, fields, payload))
    if len(payload):
        sock.sendall(payload)


def receive(sock: FrameSocket, *, max_payload: int = MAX_PAYLOAD_BYTES) -> WireFrame:
    head = _FrameHead.of(bytes(_exactly(sock, HEAD_BYTES)), MAX_FIELDS_BYTES, max_payload)
    return head.frame(_exactly(sock, head.num_fields), _exactly(sock, head.num_payload))


def _exactly(sock: FrameSocket, count: int) -> memoryview:
    view, done = np.empty(count, np.uint8).data, 0  # without zeros first, as a bytearray would have
    while done < count:
        got = sock.recv_into(view[done:])
        if not got:
            raise ClosedError("the other side has closed the connection")
        done += got
    return view


# ---- asyncio -----------------------------------------------------------------------------------------------------
async def receive_async(
    reader: asyncio.StreamReader, *, max_fields: int = MAX_FIELDS_BYTES, max_payload: int = MAX_PAYLOAD_BYTES
) -> WireFrame:
    try:
        head = _FrameHead.of(await reader.readexactly(HEAD_BYTES), max_fields, max_payload)
        text = await reader.readexactly(head.num_fields)
        return head.frame(text, await reader.readexactly(head.num_payload) if head.num_payload else b"")
    except asyncio.IncompleteReadError:
        raise ClosedError("the other side has closed the connection") from None


def write(writer: asyncio.StreamWriter, kind: int, fields: Mapping[str, Any], payload: Payload = b"") -> int:
    """Returns the number of bytes, 0 if the connection is closed."""
    if writer.is_closing():
        return 0
    head = pack(kind, fields, payload)
    writer.write(head)
    if len(payload):
        writer.write(payload)
    return len(head) + len(payload)


class FrameServer(CallerServer):
    """Runs one task per connection on the event loop, until `close`. A subclass talks to one caller in `_talk`, and
    calls `_admit` first."""

    def __init__(self, token: str, context: ssl.SSLContext | None = None) -> None:
        """`context`: callers need a certificate, and everything is encrypted."""
        super().__init__(self._talk, self._warn)
        self.token, self.context = token, context
        self._warned_s = -WARN_S

    def _warn(self, error: Exception, _writer: asyncio.StreamWriter, is_admitted: bool) -> None:
        if isinstance(error, ClosedError | OSError):
            return  # the caller has disconnected or is silent
        now_s = time.monotonic()
        if is_admitted or now_s - self._warned_s >= WARN_S:
            self._warned_s = self._warned_s if is_admitted else now_s
            log.warning("a connection is closed: %s", error if isinstance(error, WorkerError) else repr(error))

    async def _admit(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda who: {},
    ) -> dict[str, Any]:
        """The accepting side of the handshake; returns the caller's fields once the token is proved. `answer` is sent
        back."""
        async with asyncio.timeout(GREETING_S):
            if self.context is not None:
                await start_tls(writer, self.context, GREETING_S)
            mine = secrets.token_hex(16)
            write(writer, CHALLENGE, {"nonce": mine})
            await writer.drain()
            proof = await receive_async(reader, max_fields=MAX_GREETING_BYTES, max_payload=0)
            theirs, given = str(proof.fields.get("nonce", "")), proof.fields.get("proof")
            if proof.kind != PROOF or not _equal(given, _proof(self.token, "caller", mine, theirs)):
                write(writer, WELCOME, {})  # without a proof: the caller learns why it is refused
                await writer.drain()
                raise TokenRefused("a caller has another token: give both sides the same")
            write(writer, WELCOME, {**answer(proof.fields), "proof": _proof(self.token, "service", theirs, mine)})
            await writer.drain()
        self.admit()
        return proof.fields

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


# ---- greeting ----------------------------------------------------------------------------------------------------
def _equal(given: object, expected: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(str(given).encode(errors="replace"), expected.encode())


def _proof(token: str, role: str, first: str, second: str) -> str:
    said = f"bubbletea {role} {first} {second}".encode(errors="replace")
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def greet(sock: FrameSocket, token: str, who: Mapping[str, Any]) -> dict[str, Any]:
    """The connecting side of the handshake; returns the other side's answer."""
    sock.settimeout(GREETING_S)
    challenge = receive(sock, max_payload=0)
    theirs, mine = str(challenge.fields.get("nonce", "")), secrets.token_hex(16)
    send(sock, PROOF, {**who, "nonce": mine, "proof": _proof(token, "caller", theirs, mine)})
    welcome = receive(sock, max_payload=0)
    expected = _proof(token, "service", mine, theirs)
    if welcome.kind != WELCOME or not _equal(welcome.fields.get("proof"), expected):
        raise TokenRefused("the service has another token: give both sides the same")
    sock.settimeout(None)
    return welcome.fields
