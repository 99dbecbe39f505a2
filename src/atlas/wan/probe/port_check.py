"""Dials one port as a worker would: connection, certificates and names, round trip, MTU, and the rate of a short burst.

The other side is an `Endpoint` that does nothing else. Knows one connection; not which ports a run needs.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from atlas.errors import AtlasError, WorkerError
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address
from atlas.wan.transport.handshake import dial
from atlas.wan.transport.stream import SocketStream
from atlas.wan.transport.wire import (
    RECORD_BYTES,
    FrameHeader,
    FrameKind,
    Greeting,
    RecordKind,
    pack_header,
    unpack_record,
)

DIAL_S = 4.0
"""For the connection and the handshake together."""
BURST_S, BURST_STREAMS, PIECE_BYTES = 0.6, 4, 64 * 1024
"""Of the rate: long enough for slow start at 100 ms, short enough for a check of many sites."""
ANSWER_S = 3.0
"""For the first answer to a full packet: the handshake has shown that small ones arrive."""
IP_MTU = getattr(socket, "IP_MTU", 14)
"""Of <linux/in.h>; not all versions of Python have the name."""


class PortCheck(NamedTuple):
    """What dialling a port has shown. `error` is empty if it works."""

    error: str = ""
    rtt_ms: float = 0.0
    mtu_bytes: int = 0


class BurstCheck(NamedTuple):
    """The rate of a burst over several connections; an error if full packets do not arrive."""

    error: str = ""
    gbit_s: float = 0.0


def check_port(address: Address, mine: Greeting, security: Security, timeout_s: float = DIAL_S) -> PortCheck:
    try:
        stream, _ = dial(address, mine, security, timeout_s)
    except (OSError, AtlasError) as error:
        return PortCheck(reason(error, timeout_s))
    with contextlib.closing(stream):
        mtu_bytes = 0
        with contextlib.suppress(OSError):
            mtu_bytes = stream.sock.getsockopt(socket.IPPROTO_IP, IP_MTU)
        return PortCheck("", stream.rtt_s * 1e3, mtu_bytes)


def check_burst(address: Address, mine: Greeting, security: Security) -> BurstCheck:
    """Sends for a moment on several connections at once."""
    try:
        streams = [dial(address, mine, security, DIAL_S)[0] for _ in range(BURST_STREAMS)]
    except (OSError, AtlasError) as error:
        return BurstCheck(reason(error, DIAL_S))
    deadline = time.monotonic() + BURST_S
    with ThreadPoolExecutor(len(streams)) as pool:
        found = list(pool.map(lambda stream: _burst(stream, mine, deadline), streams))
    for stream in streams:
        stream.close()
    arrived = [one for one in found if one.num_bytes]
    if not arrived:
        return BurstCheck(
            f"small packets arrive and full ones do not, within {ANSWER_S:g} s: the MTU of the path is smaller than "
            "that of the host, and ICMP is filtered. Lower the MTU of the host's interface, or let ICMP pass"
        )
    taken_s = max(one.last_s for one in arrived) - min(one.first_s for one in arrived)
    return BurstCheck("", sum(one.num_bytes for one in arrived) * 8 / max(taken_s, 1e-3) / 1e9)


class _Burst(NamedTuple):
    """Bytes that one connection delivered, and when."""

    num_bytes: int
    first_s: float
    last_s: float


def _burst(stream: SocketStream, mine: Greeting, deadline: float) -> _Burst:
    begun, payload = time.monotonic(), memoryview(bytes(PIECE_BYTES))
    writer = threading.Thread(target=_write, args=(stream, mine, payload, deadline), daemon=True)
    writer.start()
    num_bytes, last_s = 0, begun
    with contextlib.suppress(OSError, WorkerError):
        while time.monotonic() < deadline:
            record = unpack_record(stream.read_head(RECORD_BYTES, ANSWER_S))
            if record.kind == RecordKind.PONG and record.b:
                num_bytes, last_s = num_bytes + record.b, time.monotonic()
    stream.abort()
    writer.join()
    return _Burst(num_bytes, begun, last_s)


def _write(stream: SocketStream, mine: Greeting, payload: memoryview, deadline: float) -> None:
    with contextlib.suppress(OSError, WorkerError):
        while time.monotonic() < deadline and not stream.aborted:
            header = FrameHeader(FrameKind.WARM, mine.lane, mine.epoch, time.monotonic_ns(), num_bytes=len(payload))
            stream.write(pack_header(header), payload)


def reason(error: BaseException, timeout_s: float) -> str:
    """Why a port was not reached, and what usually causes it."""
    if isinstance(error, ConnectionRefusedError):
        return "refused: nothing listens behind it. Check that --ports is the range that the NAT or firewall forwards"
    if isinstance(error, socket.gaierror):
        return "the name does not resolve here"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s: a firewall drops it, or the address is another host's"
    if isinstance(error, ConnectionResetError):
        return str(error) or "the connection was reset"
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    return str(error)
