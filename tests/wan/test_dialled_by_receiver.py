"""A node that cannot be dialled dials for both directions: its peers send to it over connections that it opened."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from connect_errors import connect_error, until

from atlas.errors import WorkerError
from atlas.wan.cell_relay.relay import Cell
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Address, Key, Tag
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.stream import SocketStream
from atlas.wan.transport.wire import Greeting

QUICK = TransportSettings(max_streams=3, deadline_s=20.0, stall_s=2.0, handshake_s=5.0, heartbeat_s=0.2)
OPEN, HIDDEN = "dc1/open", "dc2/hidden"


def tag(a: int) -> Tag:
    return (a, 0, 0, 0)


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
    """The second cannot be dialled."""
    with Endpoint(OPEN, settings=QUICK) as a, Endpoint(HIDDEN, settings=QUICK) as b:
        b.dial_for(OPEN, 0, a.address)  # before the sender has opened its channel
        a.connect({HIDDEN: None})
        b.connect({OPEN: a.address})
        yield a, b


def test_bytes_go_both_ways_over_connections_of_one_side(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    for number, (src, dst) in enumerate(((a, b), (b, a))):
        data, out = os.urandom(5_000_003), bytearray(5_000_003)
        got = dst.recv(Key(src.name, 0, tag(number)), out)
        src.send(Key(dst.name, 0, tag(number)), data).wait(60)
        got.wait(60)
        assert out == data
    until(lambda: a.channel(HIDDEN).num_live == QUICK.max_streams)  # the answer says how many the channel uses


def test_a_cut_is_survived_whichever_side_notices_it(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    out = [bytearray(1 << 20) for _ in range(40)]
    data = os.urandom(1 << 20)
    received = [b.recv(Key(OPEN, 0, tag(i)), view) for i, view in enumerate(out)]
    sent = []
    for i in range(len(out)):
        sent.append(a.send(Key(HIDDEN, 0, tag(i)), data))
        if i % 10 == 5:
            a.channel(HIDDEN).cut()
        if i % 10 == 9:
            for stream in b._inbound.of((OPEN, 0)):
                stream.abort()
    for handle in (*received, *sent):
        handle.wait(60)
    assert all(view == data for view in out)
    until(lambda: a.faults.num_replaced > 0)


def test_a_new_connection_takes_the_place_of_a_stale_one(pair: tuple[Endpoint, Endpoint]) -> None:
    """As when a NAT forgets its state: the sender still has the old connection when the receiver has dialled again."""
    a, b = pair
    a.send(Key(HIDDEN, 0, tag(1)), b"first").wait(60)
    dialer, slot = b._dialers[OPEN, 0], a.channel(HIDDEN)._slots[0]
    stale = slot.stream
    assert stale is not None
    stream, theirs = dialer._dial(0)
    assert theirs.slot == QUICK.max_streams
    until(lambda: slot.stream not in (stale, None))
    assert stale.aborted
    stream.close()
    a.send(Key(HIDDEN, 0, tag(2)), b"second").wait(60)
    assert b.recv(Key(OPEN, 0, tag(2))).wait(60) == b"second"


def dialled_late(sock: socket.socket) -> tuple[SocketStream, Greeting]:
    return SocketStream(sock), Greeting(HIDDEN, OPEN, 0, 0, 1, reverse=True)


def test_a_connection_that_waits_for_its_turn_is_closed_with_the_channel(pair: tuple[Endpoint, Endpoint]) -> None:
    """The one before it is in use until the end."""
    a, _ = pair
    near, far = socket.socketpair()
    with near, far:
        a.channel(HIDDEN)._slots[0].dialled.put(dialled_late(near))
        a.close(0)
        assert near.fileno() == -1


def test_a_connection_that_comes_while_the_channel_is_closed_is_closed_too(
    pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    channel = a.channel(HIDDEN)
    may_adopt, here = channel.may_adopt, threading.current_thread()

    def closes_meanwhile(slot: int) -> bool:
        if threading.current_thread() is not here:  # a connection of the peer, which dials several
            return may_adopt(slot)
        a.close(0)
        return True

    monkeypatch.setattr(channel, "may_adopt", closes_meanwhile)
    near, far = socket.socketpair()
    with near, far:
        channel.adopt(*dialled_late(near))
        assert near.fileno() == -1


def test_a_peer_that_is_never_reached_is_named_by_both_sides() -> None:
    hasty = TransportSettings(max_streams=1, deadline_s=0.5, handshake_s=1.0)
    with Endpoint(OPEN, settings=hasty) as a, Endpoint(HIDDEN, settings=hasty) as b:
        with pytest.raises(WorkerError, match="over connections that the peer dials: never connected"):
            a.connect({HIDDEN: None}, timeout_s=0.1)
        nowhere = Endpoint("dc3/closed")
        nowhere.close()
        b.dial_for(OPEN, 0, nowhere.address)
        until(lambda: "refused" in b._dialers[OPEN, 0].last_error)
        with pytest.raises(WorkerError, match=r"dialled for it at .*refused"):
            b.recv(Key(OPEN)).wait(60)


def test_a_restart_needs_a_new_epoch() -> None:
    with Endpoint(HIDDEN, epoch=1, settings=QUICK) as b, Endpoint(OPEN, epoch=2, settings=QUICK) as a:
        b.dial_for(OPEN, 0, a.address)
        with pytest.raises(WorkerError, match="later epoch"):
            b.recv(Key(OPEN)).wait(60)


def test_a_cell_crosses_a_boundary_that_one_side_dials() -> None:
    near, far = ("dc1/n0", "dc1/n1"), ("dc2/f0", "dc2/f1")
    ends = {name: Endpoint(name, settings=QUICK) for name in (*near, *far)}
    pairs = dict(zip(near, far, strict=True))
    cells = {name: Cell(ends[name], pairs, (0, 1), sends=(0,)) for name in near}
    cells |= {name: Cell(ends[name], {f: n for n, f in pairs.items()}, (0, 1), sends=(1,)) for name in far}
    other = {**pairs, **{f: n for n, f in pairs.items()}}
    try:
        for name in far:  # the far side cannot be dialled
            cells[name].dial_for({other[name]: ends[other[name]].address})
        peers: dict[str, dict[str, Address | None]] = {}
        for name in ends:
            mates = near if name in near else far
            peers[name] = {mate: ends[mate].address for mate in mates if mate != name}
            peers[name][other[name]] = None if name in near else ends[other[name]].address
        threads = [threading.Thread(target=cells[name].connect, args=(peers[name],)) for name in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for src, dst, lane in ((near[0], far[0], 0), (far[1], near[1], 1)):
            data = os.urandom(700_000)
            got = cells[dst].recv(Key(src, lane))
            cells[src].send(Key(dst, lane), data).wait(60)
            assert got.wait(60) == data
    finally:
        for cell in cells.values():
            cell.close(0)
        for end in ends.values():
            end.close(0)


# ---- protection ------------------------------------------------------------------------------------------------------
@pytest.fixture
def certs(tmp_path: Path) -> Path:
    pytest.importorskip("cryptography")
    from atlas.wan.security.certs import make_ca, make_node

    make_ca(tmp_path)
    for name in (OPEN, HIDDEN, "dc1/mate"):
        make_node(tmp_path, name)
    return tmp_path


def secured(certs: Path, name: str, *trusted: str, files: str = "") -> Endpoint:
    security = Security(Credentials.of_folder(certs, files or name), trusted)
    return Endpoint(name, security=security, settings=QUICK)


def test_it_is_encrypted_and_proves_names_like_any_other(certs: Path) -> None:
    with secured(certs, OPEN) as a, secured(certs, HIDDEN) as b:
        b.dial_for(OPEN, 0, a.address)
        a.connect({HIDDEN: None})
        data = os.urandom(2_000_001)
        got = b.recv(Key(OPEN))
        a.send(Key(HIDDEN), data).wait(60)
        assert got.wait(60) == data
        assert all(slot.stream is None or slot.stream.cipher is not None for slot in a.channel(HIDDEN)._slots)
    with secured(certs, OPEN) as a, secured(certs, HIDDEN, files="dc1/mate") as b:
        b.dial_for(OPEN, 0, a.address)
        with pytest.raises(WorkerError, match="never connected"):
            a.connect({HIDDEN: None}, timeout_s=0.5)


@pytest.mark.parametrize(("peer", "is_encrypted"), [("dc1/mate", False), (HIDDEN, True)])
def test_a_trusted_network_drops_encryption_inside_a_datacenter_only(
    certs: Path, peer: str, is_encrypted: bool
) -> None:
    with secured(certs, OPEN, "127.0.0.0/8") as a, secured(certs, peer, "127.0.0.0/8") as b:
        a.connect({peer: b.address})
        (stream, *_) = [slot.stream for slot in a.channel(peer)._slots if slot.stream is not None]
        assert (stream.cipher is not None) == is_encrypted
        a.send(Key(peer), b"x" * 100_000).wait(60)
        assert b.recv(Key(OPEN)).wait(60) == b"x" * 100_000


def test_a_trusted_network_does_not_drop_authentication(certs: Path) -> None:
    with secured(certs, "dc1/mate", "127.0.0.0/8") as b:
        with Endpoint(OPEN, settings=QUICK) as a:  # without a certificate
            assert "closed the connection" in connect_error(a, "dc1/mate", b.address)
        with secured(certs, OPEN, "127.0.0.0/8", files=HIDDEN) as a:  # with the certificate of another node
            assert "closed the connection" in connect_error(a, "dc1/mate", b.address)


def test_both_sides_must_trust_the_network(certs: Path) -> None:
    with (
        secured(certs, OPEN, "127.0.0.0/8") as a,
        secured(certs, "dc1/mate") as b,
    ):
        assert "or that both trust the network between them" in connect_error(a, "dc1/mate", b.address)
