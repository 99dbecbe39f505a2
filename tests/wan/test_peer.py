"""Peers: sends never block, turns are kept, waits are bounded, a lost peer is named, strangers are ignored."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from atlas.errors import WorkerError
from atlas.wan.framing import Frame, FrameType
from atlas.wan.peer import Channel, Key, Listener, Mailbox
from atlas.wan.proxy import DelayProxy


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(Mailbox())
    yield listener
    listener.close()


def message(microbatch: int, num_bytes: int = 8) -> Frame:
    return Frame(FrameType.DATA, bytes(num_bytes), shape=(num_bytes,), stage=1, microbatch=microbatch)


def key(microbatch: int) -> Key:
    return Key(0, 0, 1, microbatch)


def test_a_frame_reaches_the_mailbox(listener: Listener) -> None:
    channel = Channel("p0.s0", "p0.s1", listener.address, Mailbox())
    began = time.monotonic_ns()
    channel.send(message(3, 100_000))
    letter = listener.mailbox.wait(key(3), "1F3 waits", 5)
    assert bytes(letter.frame.payload) == bytes(100_000)
    assert began < letter.arrive_ns < time.monotonic_ns()
    channel.close(5)
    listener.mailbox.check()


def test_a_letter_can_be_looked_at_before_it_is_taken(listener: Listener) -> None:
    listener.mailbox.put(message(0))
    assert listener.mailbox.wait(key(0), "", 1, keep=True) == listener.mailbox.wait(key(0), "", 1)
    with pytest.raises(WorkerError, match="nothing came"):
        listener.mailbox.wait(key(0), "", 0.01)


def test_the_smallest_turn_goes_first_while_the_link_is_busy(listener: Listener) -> None:
    with DelayProxy(listener.address, rate_bps=40e6) as proxy:
        channel = Channel("p0.s0", "p0.s1", proxy.address, Mailbox())
        began = time.monotonic()
        for microbatch, turn in [(0, 0), (1, 1), (5, 5), (4, 4), (2, 2)]:
            channel.send(message(microbatch, 300_000), turn)
        assert time.monotonic() - began < 0.05, "send must not wait for the link"
        arrivals = {m: listener.mailbox.wait(key(m), str(m), 10).arrive_ns for m in (0, 1, 2, 4, 5)}
        assert sorted(arrivals, key=lambda m: arrivals[m])[-2:] == [4, 5]
        channel.close(5)


def test_a_wait_without_end_says_who_waited_for_whom(listener: Listener) -> None:
    with pytest.raises(WorkerError, match=r"1F3 on p0.s1 waits for 0SEND_F3 of p0.s0: nothing came within 0.05 s"):
        listener.mailbox.wait(key(3), "1F3 on p0.s1 waits for 0SEND_F3 of p0.s0", 0.05)


def test_a_peer_that_goes_without_bye_ends_the_wait_and_is_named(listener: Listener) -> None:
    channel = Channel("p0.s0", "p0.s1", listener.address, Mailbox())
    time.sleep(0.05)
    channel.cut()
    with pytest.raises(WorkerError, match=r"1F0 waits: the connection from p0\.s0 broke"):
        listener.mailbox.wait(key(0), "1F0 waits", 5)


def test_what_arrived_before_a_failure_can_still_be_fetched(listener: Listener) -> None:
    listener.mailbox.put(message(0))
    listener.mailbox.fail(WorkerError("gone"))
    listener.mailbox.wait(key(0), "", 1)


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, bytes(200)])
def test_strangers_are_turned_away_and_disturb_nobody(listener: Listener, garbage: bytes) -> None:
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(garbage)
    channel = Channel("p0.s0", "p0.s1", listener.address, Mailbox())
    channel.send(message(0))
    listener.mailbox.wait(key(0), "", 5)
    channel.close(5)
    listener.mailbox.check()


def test_a_frame_of_another_epoch_is_not_let_in(listener: Listener) -> None:
    channel = Channel("p0.s0", "p0.s1", listener.address, Mailbox(), epoch=7)
    channel.send(message(0))
    with pytest.raises(WorkerError, match="nothing came"):
        listener.mailbox.wait(key(0), "", 0.1)
    channel.cut()


def test_no_listener_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(WorkerError, match=r"p0.s0 cannot connect to p0.s1 at 127.0.0.1"):
        Channel("p0.s0", "p0.s1", address, Mailbox())
