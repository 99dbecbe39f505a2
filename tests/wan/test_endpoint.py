"""Endpoints over loopback: bytes arrive, in turn order, bounded, and nothing is left behind."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from connect_errors import connect_error, until

from atlas.errors import WorkerError
from atlas.wan.security.credentials import Protection
from atlas.wan.transport import channel
from atlas.wan.transport.base import Key, Tag
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.wire import preamble
from atlas.weather.packets import read_path

QUICK = TransportSettings(max_streams=3, deadline_s=20.0, stall_s=2.0, handshake_s=5.0, heartbeat_s=0.2)
HASTY = replace(QUICK, deadline_s=1.0)
"""For tests that wait for the deadline."""


def tag(a: int, b: int = 0) -> Tag:
    return (a, b, 0, 0)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before, descriptors = set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))
    yield
    end = time.monotonic() + 60
    while time.monotonic() < end and set(threading.enumerate()) - before:
        time.sleep(0.02)
    assert not set(threading.enumerate()) - before
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


@pytest.fixture
def pair() -> Iterator[tuple[Endpoint, Endpoint]]:
    with Endpoint("dc1/a", settings=QUICK) as a, Endpoint("dc2/b", settings=QUICK) as b:
        a.connect({"dc2/b": b.address}, lanes=(0, 1))
        b.connect({"dc1/a": a.address}, lanes=(0,))
        yield a, b


@pytest.mark.parametrize("num_bytes", [0, 1, 65_536, 65_537, 5_000_003])
def test_a_posted_receive_gets_every_byte(pair: tuple[Endpoint, Endpoint], num_bytes: int) -> None:
    a, b = pair
    data, out = os.urandom(num_bytes), bytearray(num_bytes)
    got = b.recv(Key("dc1/a", 0, tag(1)), out)
    sent = a.send(Key("dc2/b", 0, tag(1)), data)
    got.wait(60)
    sent.wait(60)
    assert out == data
    assert sent.start_ns <= got.end_ns


def test_a_message_without_a_receive_is_staged_and_delivered_later(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    data = os.urandom(300_000)
    a.send(Key("dc2/b", 0, tag(1)), data).wait(60)
    a.send(Key("dc2/b", 0, tag(2)), data).wait(60)
    assert b.recv(Key("dc1/a", 0, tag(1))).wait(60) == data
    out = np.zeros(300_000, np.uint8)
    b.recv(Key("dc1/a", 0, tag(2)), out).wait(60)
    assert out.tobytes() == data


def test_both_directions_and_lanes_at_once(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    data = [os.urandom(400_000) for _ in range(30)]
    gets = [b.recv(Key("dc1/a", i % 2, tag(i))) for i in range(30)] + [
        a.recv(Key("dc2/b", 0, tag(i))) for i in range(30)
    ]
    for i in range(30):
        a.send(Key("dc2/b", i % 2, tag(i)), data[i])
        b.send(Key("dc1/a", 0, tag(i)), data[-i])
    assert [g.wait(60) for g in gets] == data + [data[-i] for i in range(30)]


def test_later_turns_never_use_the_credit_reserved_for_an_earlier_one() -> None:
    """Turns 1.. fill the staging unasked; turn 0 is sent last, waited for first, and must get through."""
    small = TransportSettings(max_streams=2, staging_bytes=1 << 20, deadline_s=60)
    with Endpoint("dc1/a", settings=small) as a, Endpoint("dc2/b", settings=small) as b:
        a.connect({"dc2/b": b.address})
        data = os.urandom(200_000)
        late = [a.send(Key("dc2/b", 0, tag(turn)), data, turn) for turn in range(1, 20)]
        time.sleep(0.3)
        assert sum(handle.done for handle in late) <= 5
        urgent = a.send(Key("dc2/b", 0, tag(0)), data, 0)
        urgent.wait(60)  # uses the reserved credit: its receive is not posted
        for turn in range(20):
            assert b.recv(Key("dc1/a", 0, tag(turn))).wait(60) == data


def test_a_message_larger_than_the_staging_waits_for_its_receive() -> None:
    small = TransportSettings(max_streams=2, staging_bytes=1 << 16)
    with Endpoint("dc1/a", settings=small) as a, Endpoint("dc2/b", settings=small) as b:
        a.connect({"dc2/b": b.address})
        data = os.urandom(3_000_000)
        sent = a.send(Key("dc2/b", 0, tag(0)), data)
        time.sleep(0.2)
        assert not sent.done
        assert b.recv(Key("dc1/a", 0, tag(0))).wait(60) == data


def test_a_cut_stream_is_replaced_and_nothing_is_lost_or_duplicated(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    data = [os.urandom(2_000_000) for _ in range(20)]
    gets = [b.recv(Key("dc1/a", 0, tag(i))) for i in range(20)]
    for i in range(20):
        a.send(Key("dc2/b", 0, tag(i)), data[i], i)
        if i % 5 == 0:
            a.channel("dc2/b").cut()
    assert [g.wait(60) for g in gets] == data
    until(lambda: a.faults.num_replaced > 0)  # other streams may have delivered everything before one is replaced


def test_a_wrong_size_is_an_error_at_the_receiver(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    got = b.recv(Key("dc1/a", 0, tag(0)), bytearray(10))
    a.send(Key("dc2/b", 0, tag(0)), b"x" * 11)
    with pytest.raises(WorkerError, match="has 11 bytes, but the buffer for it has 10"):
        got.wait(60)


def test_waits_end_when_the_peer_closes(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    got = b.recv(Key("dc1/a", 0, tag(0)), what="3F17 on dc2/b")
    a.close()
    with pytest.raises(WorkerError, match=r"3F17 on dc2/b.*dc1/a has closed its side"):
        got.wait(60)


def test_a_peer_learns_of_a_close_from_a_stream_that_is_late(
    pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "CLOSE_S", 0.01)
    write_end = channel.Channel._write_end

    def late(*arguments: Any) -> None:
        time.sleep(0.2)
        write_end(*arguments)

    monkeypatch.setattr(channel.Channel, "_write_end", late)
    a, b = pair
    got = b.recv(Key("dc1/a", 0, tag(0)))
    a.close(60)
    with pytest.raises(WorkerError, match="dc1/a has closed its side"):
        got.wait(60)


def test_a_lost_peer_is_an_error_with_names_op_and_progress_after_the_deadline() -> None:
    b = Endpoint("dc2/b", settings=HASTY)
    with Endpoint("dc1/a", settings=HASTY) as a:
        a.connect({"dc2/b": b.address})
        b.close()
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"1SEND_F3: 0 of 5 bytes.*dc1/a -> dc2/b .*nothing was delivered"):
            a.send(Key("dc2/b", 0, tag(0)), b"12345", what="1SEND_F3").wait(60)
        assert time.monotonic() - begin > 0.9
        with pytest.raises(WorkerError, match="nothing was delivered"):
            a.send(Key("dc2/b", 0, tag(1)), b"12345").wait(60)


def test_close_waits_for_a_connection_that_has_just_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with Endpoint("dc2/b", settings=QUICK) as b, socket.create_connection(b.address) as sock:
        began, ended, admit = threading.Event(), threading.Event(), b._acceptor.admit

        def starved(*connection: Any) -> None:
            began.set()
            b._closing.wait()
            time.sleep(0.3)
            admit(*connection)
            ended.set()

        monkeypatch.setattr(b._acceptor, "admit", starved)
        sock.sendall(preamble(Protection.PLAIN))
        began.wait()
        b.close()
        assert ended.is_set()


def test_an_address_without_a_listener_is_an_error() -> None:
    with Endpoint("dc1/a", settings=QUICK) as a:
        assert re.search(r"dc1/a -> dc2/b .* refused", connect_error(a, "dc2/b", ("127.0.0.1", 1)))


def test_a_receive_from_a_peer_that_never_connects_fails_at_the_deadline() -> None:
    with Endpoint("dc2/b", settings=HASTY) as b, pytest.raises(WorkerError, match="no connection from dc1/a"):
        b.recv(Key("dc1/a", 0, tag(0))).wait(60)


@pytest.mark.parametrize(("mine", "theirs", "match"), [(1, 2, "later epoch"), (2, 1, "earlier epoch")])
def test_epochs_never_mix(mine: int, theirs: int, match: str) -> None:
    with (
        Endpoint("dc1/a", epoch=mine, settings=QUICK) as a,
        Endpoint("dc2/b", epoch=theirs, settings=QUICK) as b,
    ):
        assert match in connect_error(a, "dc2/b", b.address)


def test_a_restarted_sender_in_the_same_epoch_is_refused() -> None:
    with Endpoint("dc2/b", settings=QUICK) as b:
        with Endpoint("dc1/a", settings=QUICK) as a:
            a.connect({"dc2/b": b.address})
        with (
            Endpoint("dc1/a", settings=QUICK) as again,
            pytest.raises(WorkerError, match="a restart needs a new epoch"),
        ):
            again.connect({"dc2/b": b.address})


def test_a_restarted_receiver_in_the_same_epoch_is_an_error() -> None:
    b = Endpoint("dc2/b", settings=QUICK)
    with Endpoint("dc1/a", settings=QUICK) as a:
        a.connect({"dc2/b": b.address})
        address = b.address
        b.close()
        with Endpoint("dc2/b", address, settings=QUICK), pytest.raises(WorkerError, match="has restarted"):
            a.send(Key("dc2/b"), b"hello").wait(60)


def test_a_node_with_many_peers_in_its_datacenter_has_few_streams() -> None:
    with Endpoint("dc1/a", settings=replace(QUICK, max_streams=12)) as a:
        nowhere = ("127.0.0.1", 1)
        channels = [a.open(f"dc1/p{i}", 0, nowhere) for i in range(100)]
        far = a.open("dc2/b", 0, nowhere)
        assert [channels[0].num_slots, channels[-1].num_slots, far.num_slots] == [2, 1, 12]
        assert sum(channel.num_slots for channel in channels) <= 64 + 100


def test_the_wrong_node_is_refused() -> None:
    with (
        Endpoint("dc1/a", settings=QUICK) as a,
        Endpoint("dc2/c", settings=QUICK) as c,
        pytest.raises(WorkerError, match="another node"),
    ):
        a.connect({"dc2/b": c.address})


def test_connections_outside_trusted_networks_need_certificates() -> None:
    from atlas.wan.security.credentials import Security

    with (
        Endpoint("dc1/a", settings=QUICK, security=Security(trusted_networks=())) as a,
        Endpoint("dc2/b", settings=QUICK) as b,
    ):
        assert "atlas wan certs" in connect_error(a, "dc2/b", b.address)


def test_channels_to_other_datacenters_record_what_they_send(tmp_path: Path) -> None:
    settings = replace(QUICK, record_folder=str(tmp_path))
    with Endpoint("dc1/a", settings=settings) as a, Endpoint("dc2/b", settings=QUICK) as b:
        a.connect({"dc2/b": b.address}, lanes=(0,))
        out = bytearray(3_000_000)
        got = b.recv(Key("dc1/a", 0, tag(1)), out)
        a.send(Key("dc2/b", 0, tag(1)), os.urandom(len(out))).wait(60)
        got.wait(60)
    name, table = read_path(tmp_path)
    assert name == "dc1.a~dc2.b~0"
    assert int(table.num_bytes.sum()) == 3_000_000
    assert (table.rtt_ns > 0).all()
    assert abs(table.sent_ns[0] / 1e9 - time.time()) < 60
