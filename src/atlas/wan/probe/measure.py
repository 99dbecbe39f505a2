"""What one host measures towards another: round trips, and the goodput of K streams. Everything is bounded in time
and bytes. The receiver counts bytes in bins of its own clock; the sender would only see its kernel's buffers fill.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from atlas.wan.probe.wire import ProbeError, connect, read_exactly, read_json, send_json
from atlas.wan.transport.base import Address

BIN_NS = 2_000_000
"""In which the receiver counts bytes."""
MIN_BINS = 8
"""A steady part shorter than this (16 ms) is too short for a rate."""
PING = b"atlas wan probe: are you there?\n"
PING_GAP_S = 0.004
"""Between two pings, so that they do not queue behind each other."""
MAX_PINGS, MAX_STREAMS, MAX_SECONDS, MAX_BYTES = 1000, 64, 30.0, 4_000_000_000
"""What an agent does for one request at most."""
MAX_WAIT_S = 5.0
"""The longest that a transfer may be asked to wait before it starts."""
BLOCK_BYTES = 256 * 1024
"""Of one call of `send`."""
NOTSENT_BYTES = 128 * 1024
"""Unsent bytes in the kernel: without a bound, a stream continues for seconds after its time."""
STEADY_UNTIL = 0.92
"""The end of the steady part, as a share of the time: the streams do not stop at exactly the same moment."""
GRACE_S = 15.0
"""What a measurement may take beyond its time before it is given up."""


@dataclass(frozen=True)
class RoundTrips:
    """Round-trip times in seconds."""

    min_s: float
    median_s: float
    p95_s: float
    jitter_s: float
    """Mean absolute difference between consecutive round trips."""
    count: int


@dataclass(frozen=True)
class Goodput:
    """What `streams` connections carried together in the steady part of a transfer."""

    streams: int
    bps: float
    seconds: float
    num_bytes: int


def round_trips(address: Address, token: str, count: int = 30) -> RoundTrips:
    """Sends small messages and waits for their echo, on one connection."""
    taken: list[float] = []
    with connect(address, token) as sock:
        send_json(sock, {"do": "echo"})
        for i in range(max(3, min(count, MAX_PINGS)) + 1):
            began = time.monotonic()
            sock.sendall(PING)
            read_exactly(sock, len(PING))
            if i:  # the first one warms up
                taken.append(time.monotonic() - began)
            time.sleep(PING_GAP_S)
    ordered = sorted(taken)
    jitter_s = statistics.fmean(abs(a - b) for a, b in pairwise(taken))
    return RoundTrips(
        ordered[0], statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))], jitter_s, len(ordered)
    )


def goodput(
    address: Address, token: str, streams: int, seconds: float, *, max_bytes: int = 1_000_000_000, wait_s: float = 0.0
) -> Goodput:
    """Sends on `streams` connections at once for `seconds`, or until `max_bytes` are sent."""
    streams, seconds = max(1, min(streams, MAX_STREAMS)), max(0.1, min(seconds, MAX_SECONDS))
    max_bytes = min(max_bytes, MAX_BYTES)
    deadline = time.monotonic() + min(wait_s, MAX_WAIT_S)
    socks = [connect(address, token) for _ in range(streams)]
    try:
        for sock in socks:
            send_json(sock, {"do": "sink", "seconds": seconds})
        time.sleep(max(0.0, deadline - time.monotonic()))
        with ThreadPoolExecutor(streams) as pool:  # all sockets have timeouts
            jobs = [pool.submit(_send, sock, seconds, max_bytes // streams) for sock in socks]
    finally:
        for sock in socks:
            sock.close()
    if errors := [error for job in jobs if (error := job.exception()) is not None]:
        raise ProbeError(f"{len(errors)} of {streams} streams broke: {errors[0]}")
    return _steady([job.result() for job in jobs], streams, seconds)


def _send(sock: socket.socket, seconds: float, max_bytes: int) -> dict[str, Any]:
    block = memoryview(os.urandom(BLOCK_BYTES))  # random, because a middlebox could compress zeros
    sock.settimeout(seconds + GRACE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_BYTES)
    sent, deadline = 0, time.monotonic() + seconds
    while sent < max_bytes and time.monotonic() < deadline:
        sent += sock.send(block[: min(BLOCK_BYTES, max_bytes - sent)])
    sock.shutdown(socket.SHUT_WR)
    return read_json(sock)


def receive(sock: socket.socket, seconds: float) -> dict[str, Any]:
    """The receiver's side: counts bytes by bin of its clock, until the sender stops or its time is over."""
    buffer = memoryview(bytearray(1 << 20))
    bins: Counter[int] = Counter()
    total, first_ns = 0, 0
    sock.settimeout(min(seconds, MAX_SECONDS) + GRACE_S)
    deadline = time.monotonic() + min(seconds, MAX_SECONDS) + GRACE_S
    while total < MAX_BYTES and time.monotonic() < deadline:
        got = sock.recv_into(buffer)
        if not got:
            break
        now_ns = time.monotonic_ns()
        first_ns = first_ns or now_ns
        bins[now_ns // BIN_NS] += got
        total += got
    return {"first_ns": first_ns, "bins": sorted(bins.items())}


def _steady(answers: list[dict[str, Any]], streams: int, seconds: float) -> Goodput:
    """The rate in the second half of the time, after slow start and before any stream has stopped."""
    total: Counter[int] = Counter()
    for answer in answers:
        total.update({int(when): int(count) for when, count in answer["bins"]})
    starts = [min(int(when) for when, _ in answer["bins"]) for answer in answers if answer["bins"]]
    ends = [max(int(when) for when, _ in answer["bins"]) for answer in answers if answer["bins"]]
    if len(starts) < streams:
        raise ProbeError(f"{streams - len(starts)} of {streams} streams carried nothing")
    last = min(*ends, max(starts) + round(seconds * STEADY_UNTIL * 1e9 / BIN_NS)) if ends else 0
    first = max(starts) + (last - max(starts)) // 2
    if last - first < MIN_BINS:
        raise ProbeError(f"the transfer ended too long before its {seconds:g} s to be timed. Raise --max-mb")
    taken_s = (last - first) * BIN_NS / 1e9
    return Goodput(streams, _slope_bps(total, first, last), taken_s, sum(total.values()))


def _slope_bps(total: Counter[int], first: int, last: int) -> float:
    """The slope of a line through the bytes received so far.

    A stream that its window limits arrives in one burst per round trip. Bytes divided by time would depend on whether
    34 or 35 of the bursts fall into the interval.
    """
    when = np.arange(first, last, dtype=np.float64)
    seen = np.cumsum([total.get(int(i), 0) for i in when], dtype=np.float64)
    return float(np.polyfit((when - first) * BIN_NS / 1e9, seen, 1)[0]) * 8
