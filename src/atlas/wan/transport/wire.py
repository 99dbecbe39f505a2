"""What is sent on a connection: a preamble, two greetings, then frames one way and records the other way.

A frame is a fixed header and a payload. Headers are complete, so any chunk may be the first on any connection. A record
(acknowledgement, posted receive, freed staging, pong) has a fixed size. No pickle; every size is checked before memory
is allocated; every header has a checksum and the epoch. Knows no sockets, and does not look into payloads.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.wan.congestion.tuning import NEAR_CHUNK_BYTES
from atlas.wan.security.credentials import Protection
from atlas.wan.transport.base import ZERO_TAG, Tag

VERSION = 3
"""Of this protocol; both ends of a connection need the same."""
PREAMBLE = struct.Struct("!8sBB")
PREAMBLE_MAGIC, HEADER_MAGIC, RECORD_MAGIC, GREETING_MAGIC = b"ATLASWAN", b"AF", b"AR", b"ATLG"
MAX_CHUNK_BYTES = NEAR_CHUNK_BYTES
"""The longest that is ever chosen."""
MAX_MESSAGE_BYTES = 1 << 36
MAX_NAME_BYTES = 200
"""Of a node's name in UTF-8."""
MAX_POSTED = 1 << 17
"""Receives that one node may have posted from one peer on one lane. The sender keeps a list of them."""

_CHECKSUM = struct.Struct("!I")
_HEADER = struct.Struct("!2sBBHIQQQI4q")
_RECORD = struct.Struct("!2sBBHIQQ4q")
_GREETING = struct.Struct(f"!4sBHIQQ?HBB{MAX_NAME_BYTES}s{MAX_NAME_BYTES}s")
HEADER_BYTES, RECORD_BYTES, GREETING_BYTES = (each.size + _CHECKSUM.size for each in (_HEADER, _RECORD, _GREETING))


class FrameKind(IntEnum):
    """From sender to receiver."""

    CHUNK = 1
    PING = 2
    WARM = 3
    """Bytes that only open the congestion window. The receiver discards them and answers with a PONG."""
    BYE = 4


class RecordKind(IntEnum):
    """From receiver to sender."""

    ACK = 1
    POSTED = 2
    """A receive with this tag is posted: its bytes need no staging."""
    FREED = 3
    PONG = 4
    FAILED = 5
    """The receiver will never accept this message; `b` is a RefusalReason. Answers a chunk in place of an ACK."""


class RefusalReason(IntEnum):
    """Why a receiver does not accept a message."""

    KEY_USED = 1
    SIZE = 2


REFUSALS: dict[int, str] = {
    RefusalReason.KEY_USED: "a message of the same key is there already; use each key once in an epoch",
    RefusalReason.SIZE: "the buffer posted for it has another size; send as many bytes as the receiver expects",
}


def refusal_text(why: int) -> str:
    return REFUSALS.get(why, "no reason given")


class FrameHeader(NamedTuple):
    """`number` counts the sender's messages of a lane; in a PING it is the sender's clock."""

    kind: int
    lane: int = 0
    epoch: int = 0
    number: int = 0
    total_bytes: int = 0
    offset: int = 0
    num_bytes: int = 0
    tag: Tag = ZERO_TAG
    eager: bool = False
    """Sent without knowing of a posted receive: counts against the receiver's staging."""


class ControlRecord(NamedTuple):
    """`a` and `b`: message and offset (ACK), message and reason (FAILED), total bytes freed (FREED), clock (PONG)."""

    kind: int
    lane: int = 0
    epoch: int = 0
    a: int = 0
    b: int = 0
    tag: Tag = ZERO_TAG


class Greeting(NamedTuple):
    """Sent by both ends. `instance` is a random number of the process: a restarted process has another one."""

    name: str
    peer: str
    """The node that the greeting is for."""
    lane: int
    epoch: int
    instance: int
    staging_bytes: int = 0
    """How much the receiver stages for this lane, in the receiver's greeting."""
    reverse: bool = False
    """The dialer receives and the listener sends: the listener cannot dial."""
    slot: int = 0
    """Of a reverse connection: its number, from the dialer; how many there should be, from the listener."""


def preamble(protection: Protection) -> bytes:
    return PREAMBLE.pack(PREAMBLE_MAGIC, VERSION, protection)


def read_preamble(data: bytes) -> Protection:
    magic, version, protection = PREAMBLE.unpack(data)
    if magic != PREAMBLE_MAGIC or protection not in tuple(Protection):
        raise WorkerError("the first bytes are not an Atlas preamble")
    if version != VERSION:
        raise WorkerError(f"the peer has protocol version {version}, this side {VERSION}: run the same release on both")
    return Protection(protection)


def _with_checksum(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _require_checksum(data: bytes | bytearray | memoryview, magic: bytes, what: str) -> None:
    view = memoryview(data)
    if view[: len(magic)] != magic or zlib.crc32(view[:-4]) != _CHECKSUM.unpack_from(view, len(view) - 4)[0]:
        raise WorkerError(f"a {what} does not match its checksum: the stream is damaged")


def pack_header(header: FrameHeader) -> bytes:
    kind, lane, epoch, number, total, offset, num_bytes, tag, eager = header
    return _with_checksum(_HEADER.pack(HEADER_MAGIC, kind, eager, lane, epoch, number, total, offset, num_bytes, *tag))


def unpack_header(data: bytes | bytearray, max_message_bytes: int = MAX_MESSAGE_BYTES) -> FrameHeader:
    _require_checksum(data, HEADER_MAGIC, "frame header")
    _, kind, eager, lane, epoch, number, total, offset, num_bytes, *tag = _HEADER.unpack_from(data)
    if not 1 <= kind <= FrameKind.BYE or eager > 1:
        raise WorkerError(f"unknown frame kind {kind}: run the same release on both ends")
    if num_bytes > MAX_CHUNK_BYTES or total > max_message_bytes:
        raise WorkerError(f"a frame of {num_bytes} bytes in a message of {total}: that is more than allowed")
    if kind == FrameKind.CHUNK and offset + num_bytes > total:
        raise WorkerError(f"a chunk ends at byte {offset + num_bytes} of a message of {total}")
    a, b, c, d = tag
    return FrameHeader(kind, lane, epoch, number, total, offset, num_bytes, (a, b, c, d), bool(eager))


def pack_record(record: ControlRecord) -> bytes:
    kind, lane, epoch, a, b, tag = record
    return _with_checksum(_RECORD.pack(RECORD_MAGIC, kind, 0, lane, epoch, a, b, *tag))


def unpack_record(data: bytes | bytearray | memoryview) -> ControlRecord:
    _require_checksum(data, RECORD_MAGIC, "record")
    _, kind, zero, lane, epoch, first, second, *tag = _RECORD.unpack_from(data)
    if not 1 <= kind <= RecordKind.FAILED or zero:
        raise WorkerError(f"unknown record kind {kind}: run the same release on both ends")
    a, b, c, d = tag
    return ControlRecord(kind, lane, epoch, first, second, (a, b, c, d))


def pack_greeting(greeting: Greeting) -> bytes:
    name, peer = greeting.name.encode(), greeting.peer.encode()
    if not (0 < len(name) <= MAX_NAME_BYTES and 0 < len(peer) <= MAX_NAME_BYTES):
        raise WorkerError(f"names {greeting.name!r}, {greeting.peer!r}: give 1 to {MAX_NAME_BYTES} bytes each")
    return _with_checksum(_GREETING.pack(GREETING_MAGIC, VERSION, *greeting[2:], len(name), len(peer), name, peer))


def unpack_greeting(data: bytes | bytearray) -> Greeting:
    if len(data) != GREETING_BYTES:
        raise WorkerError(f"a greeting has {len(data)} bytes, not {GREETING_BYTES}")
    _require_checksum(data, GREETING_MAGIC, "greeting")
    _, version, *fields, name_bytes, peer_bytes, name, peer = _GREETING.unpack_from(data)
    if version != VERSION or not (0 < name_bytes <= MAX_NAME_BYTES and 0 < peer_bytes <= MAX_NAME_BYTES):
        raise WorkerError("a greeting of another release, or without names")
    try:
        return Greeting(name[:name_bytes].decode(), peer[:peer_bytes].decode(), *fields)
    except UnicodeDecodeError:
        raise WorkerError("a greeting's names are not UTF-8") from None
