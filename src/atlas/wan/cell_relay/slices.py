"""Slices of a transfer that are sent through a cell, and notes (control messages about slices), as bytes.

A slice goes from the source to a node of its cell, over the WAN to that node's counterpart, and on to the destination.
Notes about slices return over the hops of one of them, so a path that delivers also acknowledges. Knows no sockets.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.wan.transport.base import ZERO_TAG, Tag
from atlas.wan.transport.wire import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES, MAX_NAME_BYTES

_SLICE = struct.Struct("!HBBqQQQI4qB")
_NOTE = struct.Struct("!HBQ4qBH")
_DONE = struct.Struct("!QQB")
MAX_DONE = 1024
"""Slices in one note."""
MAX_HOPS = 4
"""Source, relay, its counterpart, destination."""


Done = tuple[int, int, int]
"""A slice in a note: message, offset, path."""


class NoteKind(IntEnum):
    ACK = 1
    DEPARTED = 2
    """The slice has left the relay's WAN queue: the sender may send another there."""
    POSTED = 3
    FREED = 4
    FAILED = 5
    """The destination does not accept the message of these slices; `amount` is a RefusalReason."""


class RelaySlice(NamedTuple):
    hops: tuple[str, ...]
    """From the source to the destination, no name twice in a row."""
    lane: int
    turn: int
    number: int
    total_bytes: int
    offset: int
    num_bytes: int
    tag: Tag
    eager: bool
    path: int = 0
    """The index of the path in its sender's list."""

    @property
    def done(self) -> Done:
        """The slice as it appears in a note."""
        return self.number, self.offset, self.path


class RelayNote(NamedTuple):
    """About slices, or a tag, or `amount` bytes. Sent along `hops` from the last to the first."""

    kind: int
    hops: tuple[str, ...]
    lane: int
    slices: tuple[Done, ...] = ()
    amount: int = 0
    tag: Tag = ZERO_TAG


def _pack_hops(hops: tuple[str, ...]) -> bytes:
    names = [hop.encode() for hop in hops]
    return b"".join(bytes([len(name)]) + name for name in names)


def _unpack_hops(data: memoryview, num_hops: int) -> tuple[tuple[str, ...], int]:
    """The names, and the number of bytes that they take."""
    if not 2 <= num_hops <= MAX_HOPS:
        raise WorkerError(f"a slice with {num_hops} hops: 2 to {MAX_HOPS} are allowed")
    names, at = [], 0
    for _ in range(num_hops):
        if at >= len(data) or data[at] > MAX_NAME_BYTES or at + 1 + data[at] > len(data):
            raise WorkerError("the hops of a slice are incomplete")
        names.append(bytes(data[at + 1 : at + 1 + data[at]]).decode("utf-8", "replace"))
        at += 1 + data[at]
    return tuple(names), at


def head_bytes(hops: tuple[str, ...]) -> int:
    """The bytes of a slice before its payload."""
    return _SLICE.size + len(_pack_hops(hops))


def pack_slice(one: RelaySlice, payload: memoryview) -> bytes:
    fields = (one.lane, one.eager, one.path, one.turn, one.number, one.total_bytes, one.offset, one.num_bytes, *one.tag)
    return b"".join((_SLICE.pack(*fields, len(one.hops)), _pack_hops(one.hops), payload))


def unpack_slice(data: memoryview) -> tuple[RelaySlice, memoryview]:
    if len(data) < _SLICE.size:
        raise WorkerError("a slice is incomplete")
    lane, eager, path, turn, number, total, offset, num_bytes, *tag, num_hops = _SLICE.unpack_from(data)
    hops, end = _unpack_hops(data[_SLICE.size :], num_hops)
    payload = data[_SLICE.size + end :]
    if len(payload) != num_bytes or num_bytes > MAX_CHUNK_BYTES or total > MAX_MESSAGE_BYTES:
        raise WorkerError(
            f"a slice of {num_bytes} bytes in a message of {total} has a payload of {len(payload)}; at most "
            f"{MAX_CHUNK_BYTES} in {MAX_MESSAGE_BYTES} are allowed"
        )
    if offset + num_bytes > total:
        raise WorkerError(f"a slice ends at byte {offset + num_bytes} of a message of {total}")
    a, b, c, d = tag
    return RelaySlice(hops, lane, turn, number, total, offset, num_bytes, (a, b, c, d), bool(eager), path), payload


def pack_note(note: RelayNote) -> bytes:
    head = _NOTE.pack(note.lane, note.kind, note.amount, *note.tag, len(note.hops), len(note.slices))
    return head + b"".join(_DONE.pack(*done) for done in note.slices) + _pack_hops(note.hops)


def unpack_note(data: memoryview) -> RelayNote:
    if len(data) < _NOTE.size:
        raise WorkerError("a note is incomplete")
    lane, kind, amount, *tag, num_hops, num_slices = _NOTE.unpack_from(data)
    end = _NOTE.size + num_slices * _DONE.size
    if not 1 <= kind <= NoteKind.FAILED or num_slices > MAX_DONE or end > len(data):
        raise WorkerError(f"a note of kind {kind} about {num_slices} slices in {len(data)} bytes is not valid")
    slices = tuple(_DONE.unpack_from(data, at) for at in range(_NOTE.size, end, _DONE.size))
    hops, _ = _unpack_hops(data[end:], num_hops)
    return RelayNote(kind, hops, lane, slices, amount, (tag[0], tag[1], tag[2], tag[3]))
