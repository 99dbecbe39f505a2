"""Frames, records, greetings and slices survive packing; anything else is refused before memory is allocated."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.errors import WorkerError
from atlas.wan.cell_relay.slices import (
    NoteKind,
    RelayNote,
    RelaySlice,
    pack_note,
    pack_slice,
    unpack_note,
    unpack_slice,
)
from atlas.wan.security.credentials import Protection
from atlas.wan.transport.wire import (
    GREETING_BYTES,
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    RECORD_BYTES,
    ControlRecord,
    FrameHeader,
    FrameKind,
    Greeting,
    RecordKind,
    pack_greeting,
    pack_header,
    pack_record,
    preamble,
    read_preamble,
    unpack_greeting,
    unpack_header,
    unpack_record,
)

CORPUS = Path(__file__).parent / "corpus"
u64, i64 = st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
tags = st.tuples(i64, i64, i64, i64)
names = st.text("abc/é.0", min_size=1, max_size=60)


@given(st.integers(0, 65535), st.integers(0, 2**32 - 1), u64, st.integers(0, 2**30), tags, st.booleans(), st.data())
def test_a_header_survives(lane: int, epoch: int, number: int, total: int, tag, eager: bool, data) -> None:  # type: ignore[no-untyped-def]
    num_bytes = data.draw(st.integers(0, min(total, MAX_CHUNK_BYTES)))
    offset = data.draw(st.integers(0, total - num_bytes))
    header = FrameHeader(FrameKind.CHUNK, lane, epoch, number, total, offset, num_bytes, tag, eager)
    assert unpack_header(pack_header(header)) == header


@given(st.sampled_from(RecordKind), st.integers(0, 65535), st.integers(0, 2**32 - 1), u64, u64, tags)
def test_a_record_survives(kind: RecordKind, lane: int, epoch: int, a: int, b: int, tag) -> None:  # type: ignore[no-untyped-def]
    record = ControlRecord(kind, lane, epoch, a, b, tag)
    assert unpack_record(pack_record(record)) == record


@given(names, names, st.integers(0, 65535), st.integers(0, 2**32 - 1), u64, u64, st.booleans())
def test_a_greeting_survives(
    name: str, peer: str, lane: int, epoch: int, instance: int, staging: int, reverse: bool
) -> None:
    greeting = Greeting(name, peer, lane, epoch, instance, staging, reverse, lane)
    assert unpack_greeting(pack_greeting(greeting)) == greeting


@given(st.lists(names, min_size=2, max_size=4), i64, u64, tags, st.binary(max_size=100), st.booleans())
def test_a_slice_survives(hops, turn: int, number: int, tag, payload: bytes, eager: bool) -> None:  # type: ignore[no-untyped-def]
    one = RelaySlice(tuple(hops), 3, turn, number, 10 + len(payload), 10, len(payload), tag, eager, 2)
    assert unpack_slice(memoryview(pack_slice(one, memoryview(payload)))) == (one, payload)
    note = RelayNote(NoteKind.ACK, tuple(hops), 3, ((number, 10, 0), (1, 2, 3)), 10, tag)
    assert unpack_note(memoryview(pack_note(note))) == note


@pytest.mark.parametrize(
    "header",
    [
        FrameHeader(9),
        FrameHeader(FrameKind.CHUNK, num_bytes=MAX_CHUNK_BYTES + 1, total_bytes=1 << 30),
        FrameHeader(FrameKind.CHUNK, total_bytes=1 << 60),
        FrameHeader(FrameKind.CHUNK, total_bytes=10, offset=5, num_bytes=6),
        FrameHeader(FrameKind.CHUNK, total_bytes=10, offset=2**64 - 1, num_bytes=1),
    ],
    ids=["kind", "chunk too large", "message too large", "beyond the end", "wraps around"],
)
def test_an_impossible_header_is_refused(header: FrameHeader) -> None:
    with pytest.raises(WorkerError):
        unpack_header(pack_header(header))


READERS = {
    "header": (
        HEADER_BYTES,
        unpack_header,
        pack_header(FrameHeader(FrameKind.CHUNK, 1, 2, 3, 400, 5, 60, (7, 8, 9, 10))),
    ),
    "record": (RECORD_BYTES, unpack_record, pack_record(ControlRecord(RecordKind.ACK, 1, 2, 3, 4, (5, 6, 7, 8)))),
    "greeting": (GREETING_BYTES, unpack_greeting, pack_greeting(Greeting("dc1/a", "dc2/b", 1, 2, 3, 4))),
}


@pytest.mark.parametrize("reader", READERS)
def test_any_flipped_bit_is_detected(reader: str) -> None:
    _, unpack, good = READERS[reader]
    unpack(good)
    rng = random.Random(1)
    for bit in rng.sample(range(len(good) * 8), min(len(good) * 8, 800)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WorkerError):
            unpack(bad)


@given(st.binary(max_size=700))
def test_garbage_raises_nothing_but_worker_errors(data: bytes) -> None:
    for size, unpack, _ in READERS.values():
        with pytest.raises(WorkerError):
            unpack(data[:size].ljust(size, b"\0"))
    for parse in (unpack_slice, unpack_note):
        try:
            parse(memoryview(data))
        except WorkerError:
            continue


def _read_start(data: bytes) -> None:
    read_preamble(data[:10].ljust(10, b"\0"))
    unpack_greeting(data[10 : 10 + GREETING_BYTES].ljust(GREETING_BYTES, b"\0"))


def test_the_corpus_is_refused() -> None:
    """Inputs that caused errors once, or that port scanners send. File names describe them."""
    files = sorted(CORPUS.iterdir())
    assert len(files) >= 10
    for file in files:
        with pytest.raises(WorkerError):
            _read_start(file.read_bytes())


def test_a_preamble_has_the_mode() -> None:
    assert read_preamble(preamble(Protection.PLAIN)) == Protection.PLAIN
    assert read_preamble(preamble(Protection.ENCRYPTED)) == Protection.ENCRYPTED
    with pytest.raises(WorkerError, match="the same release"):
        read_preamble(preamble(Protection.PLAIN)[:8] + b"\xee" + preamble(Protection.PLAIN)[9:])
