"""Nodes on one host connect over a Unix socket, except through a proxy or if another user has taken the name."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.wan.transport import unix_sockets
from atlas.wan.transport.base import Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's"),
    pytest.mark.filterwarnings("error"),
]
ONE = TransportSettings(max_streams=1, warm_s=0.2)


def family(a: Endpoint, b: Endpoint, address: tuple[str, int]) -> socket.AddressFamily:
    """Sends a message from a to b and returns the address family that was used."""
    a.connect({b.name: address})
    data = os.urandom(3_000_000)
    a.send(Key(b.name), data).wait(60)
    assert bytes(b.recv(Key(a.name)).wait(60) or b"") == data
    (slot,) = a.channel(b.name)._slots
    assert slot.stream is not None
    return slot.stream.sock.family


def test_a_loopback_address_is_reached_without_tcp() -> None:
    with Endpoint("dc1/a", settings=ONE) as a, Endpoint("dc1/b", settings=ONE) as b:
        assert family(a, b, b.address) == socket.AF_UNIX
        address = b.address
    assert unix_sockets.dial_unix(address) is None, "nothing is left behind"


def test_a_proxy_is_not_bypassed() -> None:
    with (
        Endpoint("dc1/a", settings=ONE) as a,
        Endpoint("dc1/b", settings=ONE) as b,
        ProxyNet({("a", "b"): PathSpec(latency_s=0.005)}) as net,
    ):
        assert family(a, b, net.listen("a", "b", b.address)) == socket.AF_INET


def test_a_unix_socket_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with Endpoint("dc1/a", settings=ONE) as a, Endpoint("dc1/b", settings=ONE) as b:
        assert family(a, b, b.address) == socket.AF_INET


@pytest.mark.parametrize("host", ["10.1.0.4", "localhost", "2001:db8::1"])
def test_only_loopback_addresses_have_a_unix_socket(host: str) -> None:
    assert unix_sockets.listen_unix((host, 7000)) is None
