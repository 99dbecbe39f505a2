"""A node with many peers: its threads do not grow with their number, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from connect_errors import until

from atlas.errors import WorkerError
from atlas.wan.security.certs import make_ca, make_node
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Key, Tag
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.shared_channel import SharedChannel
from atlas.wan.transport.shared_threads import DIALERS, READERS, WRITERS, StreamReaders
from atlas.wan.transport.stream_budget import INBOUND_LIMITS, LIMITS, ChannelKind, StreamBudget

HUB = "dc1/hub"
QUICK = TransportSettings(deadline_s=20.0, stall_s=2.0, handshake_s=5.0, heartbeat_s=0.2)


def tag(a: int) -> Tag:
    return (a, 0, 0, 0)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before, num_open = set(threading.enumerate()), descriptors()
    yield
    end = time.monotonic() + 60
    while time.monotonic() < end and set(threading.enumerate()) - before:
        time.sleep(0.02)
    assert not set(threading.enumerate()) - before
    assert descriptors() <= num_open


# ---- the rule ----------------------------------------------------------------------------------------------------
def test_a_few_channels_get_what_they_ask_for() -> None:
    budget = StreamBudget(12)
    assert [budget.outgoing(ChannelKind.FAR) for _ in range(4)] == [12] * 4
    assert [budget.outgoing(ChannelKind.NEAR) for _ in range(16)] == [2] * 16


@pytest.mark.parametrize("count", [5, 17, 48, 49, 1000])
@pytest.mark.parametrize("kind", list(ChannelKind))
@pytest.mark.parametrize("is_expected", [False, True])
def test_streams_with_threads_never_exceed_their_limit(kind: ChannelKind, count: int, *, is_expected: bool) -> None:
    budget = StreamBudget(12)
    if is_expected:
        budget.expect({kind: count})
    shares = [budget.outgoing(kind) for _ in range(count)]
    assert sum(shares) <= LIMITS[kind]
    if is_expected:
        assert len(set(shares)) == 1  # all channels of a kind get the same


# ---- sockets -----------------------------------------------------------------------------------------------------
PEERS = """
import json, sys, threading
from atlas.wan.transport.base import Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
hub, count = tuple(json.loads(sys.argv[1])), int(sys.argv[2])
settings = TransportSettings(max_streams=1, heartbeat_s=30)
peers = [Endpoint(f"dc1/p{i}", settings=settings) for i in range(count)]
print(json.dumps([peer.address for peer in peers]), flush=True)
for peer in peers:
    peer.open("dc1/hub", 0, hub)
for step in range(2):
    for i, peer in enumerate(peers):
        got = peer.recv(Key("dc1/hub", 0, (step, i, 0, 0))).wait(60)
        peer.send(Key("dc1/hub", 0, (step, i, 0, 0)), bytes(reversed(got)))
sys.stdin.readline()
for peer in peers:
    peer.close(0.0)
"""


def test_threads_do_not_grow_with_the_number_of_peers() -> None:
    """Every peer sends and receives. Peers that nothing is sent to get no connection."""
    count, num_idle = 120, 100
    threads, sockets = threading.active_count(), descriptors()
    with Endpoint(HUB, settings=QUICK) as hub:
        command = [sys.executable, "-c", PEERS, json.dumps(hub.address), str(count)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        addresses = dict(zip((f"dc1/p{i}" for i in range(count)), json.loads(child.stdout.readline()), strict=True))
        places = {name: (host, port) for name, (host, port) in addresses.items()}
        hub.expect([ChannelKind.NEAR] * (count + num_idle))
        hub.connect({**places, **{f"dc1/idle{i}": ("127.0.0.1", 1) for i in range(num_idle)}})
        most = 0
        for step in range(2):
            data = [os.urandom(100_000 + i) for i in range(count)]
            replies = [hub.recv(Key(f"dc1/p{i}", 0, (step, i, 0, 0))) for i in range(count)]
            sent = [hub.send(Key(f"dc1/p{i}", 0, (step, i, 0, 0)), each) for i, each in enumerate(data)]
            for each, reply in zip(data, replies, strict=True):
                assert bytes(reply.wait(60) or b"") == each[::-1]
                most = max(most, threading.active_count() - threads)
            for handle in sent:
                handle.wait(60)
        shared, own = READERS + WRITERS + DIALERS, INBOUND_LIMITS[ChannelKind.NEAR]
        assert most <= shared + own + QUICK.max_handshakes + 2  # the acceptor and the watcher
        assert descriptors() - sockets <= 2 * count + 16  # one stream each way
        child.communicate("end\n", timeout=60)
    assert child.returncode == 0


def shared_pair(peer: str, *, reverse: bool = False, security: Security | None = None) -> tuple[Endpoint, Endpoint]:
    """Of the first, all channels share threads; so do the second's connections to it, if it dials for them."""
    settings = replace(QUICK, max_streams=3)
    a, b = (Endpoint(name, settings=settings, security=security) for name in (HUB, peer))
    a.expect([kind for kind in ChannelKind for _ in range(1000)])
    if reverse:
        for i in range(8):  # the first have threads of their own
            b.dial_for(f"dc3/other{i}", 0, ("127.0.0.1", 1))
        b.dial_for(HUB, 0, a.address)
    a.connect({peer: None if reverse else b.address})
    assert isinstance(a.channel(peer), SharedChannel)
    return a, b


@pytest.mark.parametrize("peer", ["dc1/near", "dc2/far"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_shared_channel_delivers_in_spite_of_cuts(peer: str, *, reverse: bool) -> None:
    a, b = shared_pair(peer, reverse=reverse)
    with a, b:
        data = [os.urandom(1_300_000) for _ in range(20)]
        gets = [b.recv(Key(HUB, 0, tag(i))) for i in range(20)]
        sent = []
        for i in range(20):
            sent.append(a.send(Key(peer, 0, tag(i)), data[i], i))
            if i % 5 == 4:
                gets[i - 2].wait(60)
                a.channel(peer).cut()
                for stream in b._inbound.of((HUB, 0)):
                    stream.abort()
        assert [get.wait(60) for get in gets] == data
        for handle in sent:
            handle.wait(60)
        until(lambda: a.faults.num_replaced > 0)


def test_a_shared_channel_fails_after_the_deadline_with_the_last_error() -> None:
    with Endpoint(HUB, settings=QUICK) as a:
        a.expect([ChannelKind.NEAR] * 1000)
        a.connect({"dc1/p": ("127.0.0.1", 1)})
        sent, channel = a.send(Key("dc1/p", 0, tag(1)), b"lost"), a.channel("dc1/p")
        until(lambda: "refused" in channel.last_error)
        channel._down_since = channel.outbox.last_progress_ns = 0  # that was long ago
        with pytest.raises(WorkerError, match=r"to dc1/p.*refused"):
            sent.wait(60)


def test_a_shared_channel_ends_when_the_peer_restarts() -> None:
    a, b = shared_pair("dc1/near")
    with a:
        a.send(Key("dc1/near", 0, tag(1)), b"first").wait(60)
        b.close()
        restarted = "has restarted: a restart needs a new epoch"
        with Endpoint("dc1/near", b.address, settings=QUICK), pytest.raises(WorkerError, match=restarted):
            a.send(Key("dc1/near", 0, tag(2)), b"second").wait(60)


def test_a_shared_stream_that_gets_no_answer_is_replaced() -> None:
    """The peer's process stops reading, as when its host is lost without a word."""
    a, b = shared_pair("dc1/near")
    with a, b:
        a.send(Key("dc1/near", 0, tag(1)), b"first").wait(60)
        (inbound,) = b._inbound.of((HUB, 0))
        with inbound._writing:  # its answers wait
            sent = a.send(Key("dc1/near", 0, tag(2)), b"second")
            until(lambda: a.faults.num_replaced > 0)
        sent.wait(60)
        assert b.recv(Key(HUB, 0, tag(2))).wait(60) == b"second"


def test_encrypted_shared_channels(tmp_path: Path) -> None:
    make_ca(tmp_path)
    for name in ("dc1", "dc2"):
        make_node(tmp_path, name)
    settings = replace(QUICK, max_streams=1)
    with (
        Endpoint(HUB, settings=settings, security=Security(Credentials.of_folder(tmp_path, HUB))) as a,
        Endpoint("dc2/b", settings=settings, security=Security(Credentials.of_folder(tmp_path, "dc2/b"))) as b,
    ):
        a.expect([ChannelKind.FAR] * 1000)
        a.connect({"dc2/b": b.address})
        data = os.urandom(3_000_001)
        got = b.recv(Key(HUB, 0, tag(1)))
        a.send(Key("dc2/b", 0, tag(1)), data).wait(60)
        assert got.wait(60) == data


def test_a_channel_that_is_closed_while_its_stream_begins_tells_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the last frame the peer waits until its deadline."""
    add, join, is_closing = StreamReaders.add, SharedChannel._join, threading.Event()

    def add_slowly(self: StreamReaders, *args: Any) -> None:
        add(self, *args)
        if "dials" in threading.current_thread().name:
            assert is_closing.wait(60)

    def joined(self: SharedChannel, timeout_s: float) -> None:
        is_closing.set()
        join(self, timeout_s)

    monkeypatch.setattr(StreamReaders, "add", add_slowly)
    monkeypatch.setattr(SharedChannel, "_join", joined)
    with Endpoint(HUB, settings=QUICK) as a, Endpoint("dc1/b", settings=QUICK) as b:
        for end, peer in ((a, b), (b, a)):
            end.expect([ChannelKind.NEAR] * 1000)
            end.connect({peer.name: peer.address})
        got, lost = (b.recv(Key(HUB, 0, tag(k))) for k in (1, 2))
        a.send(Key("dc1/b", 0, tag(1)), b"begun")
        assert got.wait(60) == b"begun"
        a.close()
        with pytest.raises(WorkerError, match="closed its side"):
            lost.wait(60)


def test_a_receive_waits_longer_than_the_deadline_for_a_peer_that_connects_when_it_sends() -> None:
    """A slow peer is not a lost one. Once it has connected, the deadline counts."""
    with Endpoint(HUB, settings=QUICK) as a, Endpoint("dc1/b", settings=replace(QUICK, deadline_s=0.3)) as b:
        for end, peer in ((a, b), (b, a)):
            end.expect([ChannelKind.NEAR] * 1000)
            end.connect({peer.name: peer.address})
        got = b.recv(Key(HUB, 0, tag(1)))
        with pytest.raises(WorkerError, match="no connection from dc2/far"):
            b.recv(Key("dc2/far", 0, tag(1))).wait(60)
        time.sleep(0.3)
        assert not got.done
        a.send(Key("dc1/b", 0, tag(1)), b"late").wait(60)
        assert got.wait(60) == b"late"
        lost = b.recv(Key(HUB, 0, tag(2)))
        a.close()
        with pytest.raises(WorkerError, match="closed its side"):
            lost.wait(60)
