"""Connections cut and stalled at random points: every byte once, hash-checked. The full size is in bench/wan_faults."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest

from atlas.wan.emulator.chaos import Chaos
from atlas.wan.transport.base import Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

FAST = TransportSettings(max_streams=4, num_streams=4, stall_s=0.5, handshake_s=2.0, heartbeat_s=0.2, deadline_s=20)


@pytest.mark.parametrize("stall_share", [0.0, 0.15])
def test_every_byte_arrives_once_whatever_breaks(stall_share: float) -> None:
    before = set(threading.enumerate())
    with (
        Endpoint("dc1/a", settings=FAST) as a,
        Endpoint("dc2/b", settings=FAST) as b,
        Chaos(b.address, 3e6, stall_share=stall_share, max_faults=60) as chaos,
    ):
        a.connect({"dc2/b": chaos.address})
        data = [os.urandom(1_500_000 + 77 * i) for i in range(100)]
        gets = [b.recv(Key("dc1/a", 0, (i, 0, 0, 0))) for i in range(0, 100, 2)]
        sends = [a.send(Key("dc2/b", 0, (i, 0, 0, 0)), data[i], i) for i in range(100)]
        gets += [b.recv(Key("dc1/a", 0, (i, 0, 0, 0))) for i in range(1, 100, 2)]
        got = [g.wait(60) for g in gets]
        for s in sends:
            s.wait(30)
        assert chaos.num_faults > 20
        a.close()
    expected = [hashlib.sha256(d).digest() for d in data[::2] + data[1::2]]
    assert [hashlib.sha256(g or b"").digest() for g in got] == expected
    assert not set(threading.enumerate()) - before
