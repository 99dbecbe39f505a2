"""Slices of a transfer on their way through a cell, and the notes that come back: names of hops, numbers, bytes.

A slice goes from the source to a node of its cell, over the WAN to that node's counterpart, and on to the
destination; notes about slices return over the hops of one of them, so a path that delivers also acknowledges. Knows
no sockets.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.wan.transport.base import Tag
from atlas.wan.transport.wire import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES, ZERO_TAG

_SLICE = struct.Struct("!HBBqQQQI4qB")
_NOTE = struct.Struct("!HBQ4qBH")
_DONE = struct.Struct("!QQB")
MAX_DONE = 1024
MAX_HOPS, MAX_HOP_BYTES = 4, 200


Done = tuple[int, int, int]
"""A slice that got somewhere: message, offset, path."""


class NoteKind(IntEnum):
    ACK = 1
    DEPARTED = 2
    """The slice has left the relay's WAN queue: there is room for another."""
    POSTED = 3
    FREED = 4
    FAILED = 5
    """The destination will never take the message of these slices; `amount` is a Refusal."""


class RelaySlice(NamedTuple):
    hops: tuple[str, ...]
    """Source first, destination last, no name twice in a row."""
    lane: int
    turn: int
    number: int
    total_bytes: int
    offset: int
    num_bytes: int
    tag: Tag
    eager: bool
    path: int = 0
    """Which of its sender's paths this is."""

    @property
    def done(self) -> Done:
        """What a note says of it."""
        return self.number, self.offset, self.path


class Note(NamedTuple):
    """About slices, or a tag, or `amount` bytes; travels `hops` from the last to the first."""

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
    """The names, and where they end."""
    if not 2 <= num_hops <= MAX_HOPS:
        raise WorkerError(f"a slice of {num_hops} hops")
    names, at = [], 0
    for _ in range(num_hops):
        if at >= len(data) or data[at] > MAX_HOP_BYTES or at + 1 + data[at] > len(data):
            raise WorkerError("a slice's hops break off")
        names.append(bytes(data[at + 1 : at + 1 + data[at]]).decode("utf-8", "replace"))
        at += 1 + data[at]
    return tuple(names), at


def head_bytes(hops: tuple[str, ...]) -> int:
    """What a slice is longer than its payload."""
    return _SLICE.size + len(_pack_hops(hops))


def pack_slice(one: RelaySlice, payload: memoryview) -> bytes:
    fields = (one.lane, one.eager, one.path, one.turn, one.number, one.total_bytes, one.offset, one.num_bytes, *one.tag)
    return b"".join((_SLICE.pack(*fields, len(one.hops)), _pack_hops(one.hops), payload))


def unpack_slice(data: memoryview) -> tuple[RelaySlice, memoryview]:
    if len(data) < _SLICE.size:
        raise WorkerError("a slice breaks off")
    lane, eager, path, turn, number, total, offset, num_bytes, *tag, num_hops = _SLICE.unpack_from(data)
    hops, end = _unpack_hops(data[_SLICE.size :], num_hops)
    payload = data[_SLICE.size + end :]
    if len(payload) != num_bytes or num_bytes > MAX_CHUNK_BYTES or total > MAX_MESSAGE_BYTES:
        raise WorkerError(f"a slice of {num_bytes} bytes brings {len(payload)}")
    if offset + num_bytes > total:
        raise WorkerError(f"a slice ends at byte {offset + num_bytes} of a message of {total}")
    a, b, c, d = tag
    return RelaySlice(hops, lane, turn, number, total, offset, num_bytes, (a, b, c, d), bool(eager), path), payload


def pack_note(note: Note) -> bytes:
    head = _NOTE.pack(note.lane, note.kind, note.amount, *note.tag, len(note.hops), len(note.slices))
    return head + b"".join(_DONE.pack(*done) for done in note.slices) + _pack_hops(note.hops)


def unpack_note(data: memoryview) -> Note:
    if len(data) < _NOTE.size:
        raise WorkerError("a note breaks off")
    lane, kind, amount, *tag, num_hops, num_slices = _NOTE.unpack_from(data)
    end = _NOTE.size + num_slices * _DONE.size
    if not 1 <= kind <= NoteKind.FAILED or num_slices > MAX_DONE or end > len(data):
        raise WorkerError(f"a note of kind {kind} about {num_slices} slices")
    slices = tuple(_DONE.unpack_from(data, at) for at in range(_NOTE.size, end, _DONE.size))
    hops, _ = _unpack_hops(data[end:], num_hops)
    return Note(kind, hops, lane, slices, amount, (tag[0], tag[1], tag[2], tag[3]))
