"""Neighbours on one host: who sends writes, who waits reads, no thread between them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from atlas.errors import WorkerError
from atlas.wan.transport.base import Key
from atlas.wan.transport.direct import SEND_BUFFER_BYTES, DirectTransport
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.unix_sockets import dial_unix

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's"),
    pytest.mark.filterwarnings("error"),
]
A, B = (("127.0.0.1", 70_000 + 2 * os.getpid() + i) for i in range(2))
"""Names only: no port has these numbers, and another run of the tests on this host has others."""


@pytest.fixture
def pair() -> Iterator[tuple[DirectTransport, DirectTransport]]:
    a, b = DirectTransport("dc/a", A, patience_s=60.0), DirectTransport("dc/b", B, patience_s=60.0)
    assert a.dial("dc/b", 0, B)
    yield a, b
    a.close(0.0)
    b.close(0.0)
    assert dial_unix(B, "direct") is None, "a door stays open"


def to_b(number: int) -> Key:
    return Key("dc/b", 0, (number, 0, 0, 0))


def from_a(number: int) -> Key:
    return Key("dc/a", 0, (number, 0, 0, 0))


def test_a_message_goes_straight_into_its_buffer_without_a_thread(
    pair: tuple[DirectTransport, DirectTransport],
) -> None:
    a, b = pair
    before, buffer = set(threading.enumerate()), bytearray(100_000)
    received = b.recv(from_a(1), buffer)
    sent = a.send(to_b(1), bytes(range(250)) * 400)
    assert sent.done, "the kernel has it"
    assert not received.done, "nobody has read it"
    assert received.wait(60) is not None
    assert bytes(buffer) == bytes(range(250)) * 400
    assert not set(threading.enumerate()) - before


def test_any_order_of_receives(pair: tuple[DirectTransport, DirectTransport]) -> None:
    a, b = pair
    buffers = {number: bytearray(2) for number in (1, 2, 3)}
    late = b.recv(from_a(3), buffers[3])
    for number in (1, 2, 3):
        a.send(to_b(number), bytes([number, number]))
    late.wait(60)
    for number in (2, 1):
        b.recv(from_a(number), buffers[number]).wait(60)
    assert {number: bytes(buffer) for number, buffer in buffers.items()} == {n: bytes([n, n]) for n in (1, 2, 3)}


def test_more_than_the_kernel_holds_does_not_stop_the_sender(pair: tuple[DirectTransport, DirectTransport]) -> None:
    a, b = pair
    data = bytes(3 * SEND_BUFFER_BYTES)
    began = time.monotonic()
    sent = [a.send(to_b(number), data) for number in range(3)]
    assert time.monotonic() - began < 30.0
    assert not sent[-1].done
    assert a.is_sending
    for number in range(3):
        assert bytes(b.recv(from_a(number)).wait(60) or b"") == data
    sent[-1].wait(60)
    assert not a.is_sending


def test_a_wrong_size_is_an_error_and_the_next_message_arrives(pair: tuple[DirectTransport, DirectTransport]) -> None:
    a, b = pair
    wrong, right = b.recv(from_a(1), bytearray(3)), b.recv(from_a(2), bytearray(4))
    a.send(to_b(1), b"1234")
    a.send(to_b(2), b"5678")
    with pytest.raises(WorkerError, match="has 4 bytes, but the buffer for it has 3"):
        wrong.wait(60)
    assert bytes(right.wait(60) or b"") == b"5678"


def test_a_silent_peer_and_a_lost_one_are_named(pair: tuple[DirectTransport, DirectTransport]) -> None:
    a, b = pair
    with pytest.raises(WorkerError, match=r"1F2 waits for p0: nothing came within 0\.1 s; 0 bytes came from dc/a"):
        b.recv(from_a(1), what="1F2 waits for p0").wait(0.1)
    assert b.dial("dc/a", 1, A)
    waiting = a.recv(Key("dc/b", 1), what="0B2 waits for p1")
    b.close(0.0)
    with pytest.raises(WorkerError, match="0B2 waits for p1: the connection from dc/b was lost"):
        waiting.wait(60)
    with pytest.raises(WorkerError, match="the connection was lost"):
        a.send(to_b(1), b"gone").wait(60)


def test_other_peers_are_refused(pair: tuple[DirectTransport, DirectTransport]) -> None:
    a, _ = pair
    assert not a.dial("dc/other", 0, B), "another node than the one that was meant"
    assert not a.dial("dc/b", 0, B), "a second link of the same name"
    assert not a.dial("dc/b", 1, ("127.0.0.1", 61_003)), "nobody is there"
    stranger = DirectTransport("dc/c", ("127.0.0.1", 61_003), epoch=1)
    assert not stranger.dial("dc/b", 0, B), "another life"
    stranger.close(0.0)


def test_a_second_endpoint_has_its_own_socket() -> None:
    with Endpoint("dc/b") as endpoint:
        beside, a = DirectTransport("dc/b", endpoint.address), DirectTransport("dc/a", A)
        assert a.dial("dc/b", 0, endpoint.address)
        a.close(0.0)
        beside.close(0.0)
