"""Frames survive the wire, and nothing that is not a frame gets past it."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.errors import WorkerError
from atlas.wan.framing import DTYPES, ITEM_BYTES, Frame, FrameType, head, read_all

NUMBER = st.integers(0, 2**32 - 1)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    payload = draw(st.binary(min_size=(n := math.prod(shape) * ITEM_BYTES[dtype]), max_size=n))
    numbers = draw(st.tuples(NUMBER, st.integers(0, 255), NUMBER, NUMBER, NUMBER))
    return Frame(draw(st.sampled_from(FrameType)), payload, dtype, shape, *numbers)


def wire(frame: Frame) -> bytes:
    return head(frame) + bytes(frame.payload)


@given(st.lists(frames(), max_size=3))
@settings(deadline=None)
def test_frames_come_out_as_they_went_in(sent: list[Frame]) -> None:
    assert list(read_all(b"".join(map(wire, sent)))) == sent


@given(frames())
@settings(deadline=None)
def test_wire_bytes_is_the_length_on_the_wire(frame: Frame) -> None:
    assert frame.wire_bytes == len(wire(frame))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_garbage_is_refused_with_a_worker_error(data: bytes) -> None:
    with contextlib.suppress(WorkerError):
        list(read_all(data, 1000))


@given(frames(), st.data())
@settings(deadline=None)
def test_a_damaged_header_never_passes(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(wire(frame))
    raw[data.draw(st.integers(0, len(head(frame)) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WorkerError):
        list(read_all(bytes(raw)))


def test_a_frame_that_breaks_off_is_an_error() -> None:
    raw = wire(Frame(FrameType.DATA, b"abcd", "float32", (1,)))
    for length in range(1, len(raw)):
        with pytest.raises(WorkerError, match="breaks off"):
            list(read_all(raw[:length]))


def test_a_frame_larger_than_allowed_is_refused_before_it_is_read() -> None:
    start = head(Frame(FrameType.DATA, bytes(4000), "float32", (1000,)))
    with pytest.raises(WorkerError, match="announces 4000 bytes: at most 100"):
        list(read_all(start, 100))


def test_a_frame_must_agree_with_its_shape() -> None:
    with pytest.raises(WorkerError, match=r"float32 \[2\] has 3 bytes: it must have 8"):
        head(Frame(FrameType.DATA, b"abc", "float32", (2,)))
