"""What travels on a connection: a preamble, two greetings, then frames one way and records the other way.

A frame is a fixed header and a payload, self-describing, so that any chunk may come first on any connection; a
record (acknowledgement, posted receive, freed room, pong) is of fixed size. No pickle, everything bounded before it
is allocated, every header carries its checksum and its epoch. Knows no sockets; the payload is opaque.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.wan.transport.base import Tag

VERSION = 2
PREAMBLE = struct.Struct("!8sBB")
PREAMBLE_MAGIC = b"ATLASWAN"
PLAIN, SEALED = 0x50, 0x53
MAX_CHUNK_BYTES = 4 << 20
MAX_MESSAGE_BYTES = 1 << 36
MAX_NAME_BYTES = 200
MAX_POSTED = 1 << 17
"""Receives that one node may have posted from one peer on one lane. The sender keeps a list of them."""

_HEADER = struct.Struct("!2sBBHIQQQI4qI")
_RECORD = struct.Struct("!2sBBHIQQ4qI")
HEADER_BYTES, RECORD_BYTES = _HEADER.size, _RECORD.size
_GREETING = struct.Struct("!4sBHIQQBBI")
GREETING_BYTES = _GREETING.size + 2 * MAX_NAME_BYTES
_CHECKSUM = struct.Struct("!I")
ZERO_TAG: Tag = (0, 0, 0, 0)


class FrameKind(IntEnum):
    """From sender to receiver."""

    CHUNK = 1
    PING = 2
    WARM = 3
    """Bytes that only open the window; thrown away and answered with a PONG."""
    BYE = 4


class RecordKind(IntEnum):
    """From receiver to sender."""

    ACK = 1
    POSTED = 2
    """A receive of this tag waits: its bytes need no room in the staging."""
    FREED = 3
    PONG = 4
    FAILED = 5
    """The receiver will never take this message; `b` is a Refusal. It answers a chunk, in place of an ACK."""


class RefusalReason(IntEnum):
    """Why a receiver will not take a message."""

    KEY_USED = 1
    SIZE = 2


REFUSALS = {
    RefusalReason.KEY_USED: "a message of the same key is there already; use each key once in an epoch",
    RefusalReason.SIZE: "the buffer posted for it has another size; send as many bytes as the receiver expects",
}


def refusal_text(why: int) -> str:
    return {int(kind): text for kind, text in REFUSALS.items()}.get(why, "no reason given")


class FrameHeader(NamedTuple):
    """Of a frame. `number` counts the sender's messages of a lane; of a PING it is the sender's clock."""

    kind: int
    lane: int = 0
    epoch: int = 0
    number: int = 0
    total_bytes: int = 0
    offset: int = 0
    num_bytes: int = 0
    tag: Tag = ZERO_TAG
    eager: bool = False
    """Sent without knowing whether its receive is posted: counts against the receiver's staging."""


class ControlRecord(NamedTuple):
    """`a` and `b`: message and offset of an ACK; message and reason of a FAILED; bytes freed since the beginning; clock
    of a PONG."""

    kind: int
    lane: int = 0
    epoch: int = 0
    a: int = 0
    b: int = 0
    tag: Tag = ZERO_TAG


class Greeting(NamedTuple):
    """Who speaks (`name`), to whom (`peer`), and in which life: `instance` is drawn anew by every process."""

    name: str
    peer: str
    lane: int
    epoch: int
    instance: int
    staging_bytes: int = 0
    """How much the receiver (a WELCOME) stages for this lane."""


def preamble(mode: int) -> bytes:
    return PREAMBLE.pack(PREAMBLE_MAGIC, VERSION, mode)


def read_preamble(data: bytes) -> int:
    """The mode: PLAIN or SEALED."""
    magic, version, mode = PREAMBLE.unpack(data)
    if magic != PREAMBLE_MAGIC or mode not in (PLAIN, SEALED):
        raise WorkerError("these bytes are no greeting of ours")
    if version != VERSION:
        raise WorkerError(f"the peer speaks version {version}, this side {VERSION}: run the same release on both")
    return int(mode)


def pack_header(header: FrameHeader) -> bytes:
    kind, lane, epoch, number, total, offset, num_bytes, tag, eager = header
    body = _HEADER.pack(b"AF", kind, eager, lane, epoch, number, total, offset, num_bytes, *tag, 0)[:-4]
    return body + _CHECKSUM.pack(zlib.crc32(body))


def unpack_header(data: bytes | bytearray, max_message_bytes: int = MAX_MESSAGE_BYTES) -> FrameHeader:
    magic, kind, eager, lane, epoch, number, total, offset, num_bytes, *tag, checksum = _HEADER.unpack(data)
    if magic != b"AF" or zlib.crc32(memoryview(data)[:-4]) != checksum:
        raise WorkerError("a frame's header does not match its checksum: the stream is damaged")
    if not 1 <= kind <= FrameKind.BYE or eager > 1:
        raise WorkerError(f"a frame of kind {kind}: no release of ours writes that")
    if num_bytes > MAX_CHUNK_BYTES or total > max_message_bytes:
        raise WorkerError(f"a frame of {num_bytes} bytes in a message of {total}: that is more than allowed")
    if kind == FrameKind.CHUNK and offset + num_bytes > total:
        raise WorkerError(f"a chunk ends at byte {offset + num_bytes} of a message of {total}")
    return FrameHeader(
        kind, lane, epoch, number, total, offset, num_bytes, (tag[0], tag[1], tag[2], tag[3]), bool(eager)
    )


def pack_record(record: ControlRecord) -> bytes:
    kind, lane, epoch, a, b, tag = record
    body = _RECORD.pack(b"AR", kind, 0, lane, epoch, a, b, *tag, 0)[:-4]
    return body + _CHECKSUM.pack(zlib.crc32(body))


def unpack_record(data: bytes | bytearray | memoryview) -> ControlRecord:
    magic, kind, zero, lane, epoch, a, b, *tag, checksum = _RECORD.unpack(data)
    if magic != b"AR" or zlib.crc32(memoryview(data)[:-4]) != checksum or zero:
        raise WorkerError("a record does not match its checksum: the stream is damaged")
    if not 1 <= kind <= RecordKind.FAILED:
        raise WorkerError(f"a record of kind {kind}: no release of ours writes that")
    return ControlRecord(kind, lane, epoch, a, b, (tag[0], tag[1], tag[2], tag[3]))


def pack_greeting(greeting: Greeting) -> bytes:
    """Of fixed size, so that its reader knows what to expect."""
    name, peer = greeting.name.encode(), greeting.peer.encode()
    if not (0 < len(name) <= MAX_NAME_BYTES and 0 < len(peer) <= MAX_NAME_BYTES):
        raise WorkerError(f"names {greeting.name!r}, {greeting.peer!r}: give 1 to {MAX_NAME_BYTES} bytes each")
    _, _, lane, epoch, instance, staging = greeting
    names = name.ljust(MAX_NAME_BYTES, b"\0") + peer.ljust(MAX_NAME_BYTES, b"\0")
    fields = (b"ATLG", VERSION, lane, epoch, instance, staging, len(name), len(peer))
    body = _GREETING.pack(*fields, 0)[:-4] + names
    return body + _CHECKSUM.pack(zlib.crc32(body))


def unpack_greeting(data: bytes | bytearray) -> Greeting:
    if len(data) != GREETING_BYTES or zlib.crc32(memoryview(data)[:-4]) != _CHECKSUM.unpack(data[-4:])[0]:
        raise WorkerError("a greeting does not match its checksum")
    fixed = _GREETING.size - 4
    magic, version, lane, epoch, instance, staging, a, b = struct.unpack("!4sBHIQQBB", data[:fixed])
    if magic != b"ATLG" or version != VERSION or not (0 < a <= MAX_NAME_BYTES and 0 < b <= MAX_NAME_BYTES):
        raise WorkerError("this is no greeting of our release")
    try:
        name = bytes(data[fixed : fixed + a]).decode()
        peer = bytes(data[fixed + MAX_NAME_BYTES : fixed + MAX_NAME_BYTES + b]).decode()
    except UnicodeDecodeError:
        raise WorkerError("a greeting's names are not UTF-8") from None
    return Greeting(name, peer, lane, epoch, instance, staging)
