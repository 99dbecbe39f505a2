"""The error of a connection that cannot be made, without a time limit that a busy host may miss."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from atlas.errors import AtlasError
from atlas.wan.transport.base import Address
from atlas.wan.transport.channel import Channel
from atlas.wan.transport.endpoint import Endpoint

LIMIT_S = 60.0
"""Milliseconds are enough on an idle machine."""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


def await_error(channel: Channel) -> str:
    """The first error of a channel that cannot connect."""
    until(lambda: channel.last_error != "never connected")
    assert not channel.num_live
    return channel.last_error


def connect_error(end: Endpoint, peer: str, address: Address) -> str:
    """What `connect` raises, once an attempt has failed."""
    await_error(end.open(peer, 0, address))
    with pytest.raises(AtlasError) as raised:
        end.connect({peer: address}, timeout_s=0.0)
    return str(raised.value)
