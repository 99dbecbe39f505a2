"""Connections are cut and stalled at random: every byte arrives once, hash-checked. More in `bench/wan_faults.py`."""

from __future__ import annotations

import hashlib
import os
import random
import threading

import pytest
from connect_errors import until

from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.wan.transport.base import Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

FAST = TransportSettings(max_streams=4, num_streams=4, stall_s=0.5, handshake_s=2.0, heartbeat_s=0.2, deadline_s=20)
NUM_MESSAGES, NUM_FAULTS = 100, 40


@pytest.mark.parametrize("stall_share", [0.0, 0.15])
def test_every_byte_arrives_once_whatever_breaks(stall_share: float) -> None:
    before, draw = set(threading.enumerate()), random.Random(1)
    with (
        Endpoint("dc1/a", settings=FAST) as a,
        Endpoint("dc2/b", settings=FAST) as b,
        ProxyNet({("a", "b"): PathSpec(pair_bps=800e6)}) as net,
    ):
        a.connect({"dc2/b": net.listen("a", "b", b.address)})
        data = [os.urandom(1_500_000 + 77 * i) for i in range(NUM_MESSAGES)]
        gets = [b.recv(Key("dc1/a", 0, (i, 0, 0, 0))) for i in range(0, NUM_MESSAGES, 2)]
        sends = [a.send(Key("dc2/b", 0, (i, 0, 0, 0)), data[i], i) for i in range(NUM_MESSAGES)]
        gets += [b.recv(Key("dc1/a", 0, (i, 0, 0, 0))) for i in range(1, NUM_MESSAGES, 2)]
        got, num_faults = [], 0
        for i, handle in enumerate(gets):
            if i * NUM_FAULTS > num_faults * NUM_MESSAGES:
                num_faults += (net.stall if draw.random() < stall_share else net.cut)(number=-1)
            got.append(handle.wait(60))
        for handle in sends:
            handle.wait(30)
        assert num_faults > NUM_FAULTS / 4, "some find no connection that is open"
        assert a.faults.num_replaced > NUM_FAULTS / 8
        a.close()
    expected = [hashlib.sha256(d).digest() for d in data[::2] + data[1::2]]
    assert [hashlib.sha256(g or b"").digest() for g in got] == expected
    until(lambda: not set(threading.enumerate()) - before)
