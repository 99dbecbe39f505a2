"""Messages between launchers: none lost, none twice, whatever happens to their connections."""

from __future__ import annotations

import queue
import socket
import struct
import time

import pytest

from atlas.errors import AtlasError, WorkerError
from atlas.launch import courier as courier_module
from atlas.launch.courier import Courier, frame, unframed
from atlas.launch.rendezvous import Caller, Rendezvous, SiteName
from atlas.wan.security import Security

EAST, WEST = SiteName("east"), SiteName("west")


def drain(courier: Courier, count: int) -> list[int]:
    return [courier.inbox.get(timeout=5)["n"] for _ in range(count)]


def joined(a: Courier, b: Courier) -> None:
    left, right = socket.socketpair()
    a.attach(left, b.num_received)
    b.attach(right, a.num_received)


def test_messages_outlive_their_connections_in_order_and_once() -> None:
    a, b = Courier(), Courier()
    for n in range(5):
        a.send({"n": n})  # before there is any
    for life in range(1, 6):
        joined(a, b)
        for n in range(5 * life, 5 * life + 5):
            a.send({"n": n})
            b.send({"n": -n})
        if life % 2:
            time.sleep(0.05)
        a.detach()
    joined(a, b)
    assert drain(b, 30) == list(range(30))
    assert drain(a, 25) == [-n for n in range(5, 30)]
    with pytest.raises(queue.Empty):
        b.inbox.get(timeout=0.3)
    a.detach()
    b.detach()


def test_a_connection_that_falls_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "SILENCE_S", 0.6)
    a = Courier()
    left, _silent = socket.socketpair()
    a.attach(left, 0)
    deadline = time.monotonic() + 5
    while a.is_connected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not a.is_connected
    _silent.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 1 << 31), frame({"x": 1})[:-1] + b"]", struct.pack("!I", 2) + b"[]"],
)
def test_garbage_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    a, b = Courier(), Courier()
    left, right = socket.socketpair()
    a.attach(left, 0)
    right.sendall(garbage)
    deadline = time.monotonic() + 5
    while a.is_connected and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not a.is_connected
    right.close()
    joined(a, b)
    b.send({"n": 1})
    assert drain(a, 1) == [1]
    a.detach()
    b.detach()


def test_a_message_has_a_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WorkerError, match="more than the 100"):
        frame({"x": "y" * 100})
    with pytest.raises(ValueError, match="a frame of"):
        unframed(bytearray(struct.pack("!I", 101)))


def test_a_caller_comes_back_by_itself() -> None:
    rendezvous = Rendezvous(("127.0.0.1", 0), Security(), lambda site, plan: None)
    caller = Caller(rendezvous.address, EAST, WEST, "plan", Security(), grace_s=5, patience_s=5)
    guest = rendezvous.guests["west", 0]
    for n in range(3):
        guest.courier.detach()
        guest.courier.send({"n": n})
        assert drain(caller.courier, 1) == [n]
    caller.close()
    rendezvous.close()


def test_who_may_not_come_in_is_told_why() -> None:
    def judge(site: SiteName, plan: str) -> str | None:
        return None if plan == "ours" else "it holds another plan"

    rendezvous = Rendezvous(("127.0.0.1", 0), Security(), judge)
    with pytest.raises(AtlasError, match=r"rendezvous 127\.0\.0\.1:\d+ in east: refuses west: it holds another plan"):
        Caller(rendezvous.address, EAST, WEST, "theirs", Security(), grace_s=1, patience_s=1)
    assert not rendezvous.guests
    with pytest.raises(AtlasError, match=r"cannot listen there.*Choose a port that is free"):
        Rendezvous(rendezvous.address, Security(), judge)
    rendezvous.close()
    with pytest.raises(WorkerError, match=r"not reached.*mend --rendezvous"):
        Caller(rendezvous.address, EAST, WEST, "ours", Security(), grace_s=0.2, patience_s=0.2)
