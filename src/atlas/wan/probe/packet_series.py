"""Blocks of bytes on one TCP connection, and when each was sent and answered: what `atlas wan learn` reads.

The sender keeps less than two blocks unsent in its kernel, so a block is timed from when it leaves the host. TCP hides
losses: blocks in flight when the kernel retransmits count as lost.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from atlas.wan.probe.measure import GRACE_S, MAX_SECONDS
from atlas.wan.probe.wire import ProbeError, connect, send_json
from atlas.wan.transport.stream import tcp_facts
from atlas.weather.packets import LOST

MAX_ROWS = 40_000
"""Blocks of one series."""
MIN_BLOCK, MAX_BLOCK = 1448, 1 << 20
"""Bytes of a block: one TCP segment on Ethernet, and the largest."""


def packet_series(address: tuple[str, int], token: str, seconds: float, block_bytes: int) -> dict[str, Any]:
    """Sends for `seconds`; returns `start_ns` (Unix time) and rows of (ns since then, bytes, round trip or LOST)."""
    seconds, block_bytes = min(max(seconds, 0.1), MAX_SECONDS), min(max(block_bytes, MIN_BLOCK), MAX_BLOCK)
    with connect(address, token) as sock:
        send_json(sock, {"do": "acks", "seconds": seconds, "block_bytes": block_bytes})
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, block_bytes)
        return _timed_blocks(sock, seconds, block_bytes)


def _timed_blocks(sock: socket.socket, seconds: float, block_bytes: int) -> dict[str, Any]:
    block = memoryview(os.urandom(block_bytes))
    start_ns, begin_ns = time.time_ns(), time.monotonic_ns()
    sent: list[int] = []
    rtts: list[int] = []
    sock.setblocking(False)
    unsent, retrans, answer, resent_until = 0, _retransmits(sock), b"", 0
    end_ns, give_up_ns = begin_ns + round(seconds * 1e9), begin_ns + round((seconds + GRACE_S) * 1e9)
    while (now_ns := time.monotonic_ns()) < give_up_ns:
        sending = unsent or (now_ns < end_ns and len(sent) < MAX_ROWS)
        if not sending and len(rtts) == len(sent):
            break
        readable, writable, _ = select.select([sock], [sock] if sending else [], [], 0.5)
        if readable:
            data = sock.recv(1 << 16)
            if not data:
                raise ProbeError("the other end closed the connection while packets were recorded")
            answer += data
            if (again := _retransmits(sock)) > retrans:
                retrans, resent_until = again, len(sent)
            now_ns = time.monotonic_ns()
            for _ in range(len(answer) // 4):
                rtts.append(LOST if len(rtts) < resent_until else now_ns - sent[len(rtts)])
            answer = answer[len(answer) // 4 * 4 :]
        if writable:
            if not unsent:
                sent.append(time.monotonic_ns())
                unsent = block_bytes
            unsent -= sock.send(block[block_bytes - unsent :])
    rtts += [LOST] * (len(sent) - len(rtts))
    rows = [(at - begin_ns, rtt) for at, rtt in zip(sent, rtts, strict=True)]
    return {"start_ns": start_ns, "block_bytes": block_bytes, "rows": rows}


def answer_blocks(sock: socket.socket, seconds: float, block_bytes: int) -> None:
    """The receiver's side: four bytes for every block that has arrived."""
    block_bytes = min(max(block_bytes, MIN_BLOCK), MAX_BLOCK)
    sock.settimeout(GRACE_S)
    deadline = time.monotonic() + min(seconds, MAX_SECONDS) + GRACE_S
    buffer = memoryview(bytearray(1 << 20))
    got = answered = 0
    while time.monotonic() < deadline and (part := sock.recv_into(buffer)):
        got += part
        if (done := got // block_bytes) > answered:
            sock.sendall(b"\0\0\0\0" * (done - answered))
            answered = done


def _retransmits(sock: socket.socket) -> int:
    """Segments that the kernel has sent again, or 0 where it does not say."""
    facts = tcp_facts(sock)
    return 0 if facts is None else facts.num_retransmits
