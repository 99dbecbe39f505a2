"""Random paths, and TCP senders that run over several of them at once: what bench/weather.py measures with.

A job is one net of namespaces: some senders, each on a path of its own. Jobs run side by side, each pinned to cores of
its own with its emulator.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from atlas.errors import AtlasError
from atlas.wan.emulator.lateness import EmulatorLateError
from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.paths import PathSpec, Trunk
from atlas.weather.packets import PacketTable

PORT, TRIES, CORES = 5001, 3, 2
NOTSENT_BYTES = 65_536
LEAST_QUEUE_BYTES = 30_000
T = TypeVar("T")
R = TypeVar("R")


class Sender(NamedTuple):
    name: str
    path: PathSpec
    control: str
    """Congestion control."""
    first: bool = False
    """It starts before the others, by the job's `lead_s`."""


# ---- paths ---------------------------------------------------------------------------------------------------------
def random_figures(rng: random.Random) -> tuple[float, float, int]:
    """Bits per second, round trip in seconds, buffer in bytes."""
    bps, rtt_s = rng.uniform(20e6, 100e6), rng.uniform(0.02, 0.08)
    return bps, rtt_s, max(LEAST_QUEUE_BYTES, round(rng.uniform(0.25, 2.0) * bps / 8 * rtt_s))


def random_path(rng: random.Random, seconds: float) -> PathSpec:
    """Cross traffic that does not react."""
    bps, rtt_s, queue = random_figures(rng)
    return PathSpec(rtt_s / 2, None, bps, queue_bytes=queue, cross=random_cross(rng, round(seconds * 10) + 20))


def shared_path(rng: random.Random) -> PathSpec:
    """Node pairs on it share one queue: real flows compete."""
    bps, rtt_s, queue = random_figures(rng)
    return PathSpec(rtt_s / 2, None, None, Trunk("shared", bps), queue_bytes=queue)


def random_cross(rng: random.Random, num: int) -> tuple[float, ...]:
    kind, high = rng.choice(("on-off", "ramp", "bursts")), rng.uniform(0.3, 0.7)
    if kind == "on-off":
        turn = rng.randint(10, 40)
        return tuple(high * (k // turn % 2) for k in range(num))
    if kind == "ramp":
        turn = rng.randint(40, 120)
        return tuple(high * (k % turn) / turn for k in range(num))
    share, found = 0.0, []
    for _ in range(num):
        share = rng.choice((0.0, high)) if rng.random() < 0.15 else share
        found.append(share)
    return tuple(found)


# ---- senders -------------------------------------------------------------------------------------------------------
def run_senders(
    senders: Sequence[Sender], seconds: float, lead_s: float = 0.0, until_s: float | None = None
) -> dict[str, PacketTable] | None:
    """All at once; what became of their packets, by name. None if the emulator was late in every try, or if it is
    later than `until_s` of the monotonic clock."""
    for _ in range(TRIES):
        if until_s is not None and time.monotonic() > until_s:
            return None
        try:
            return _run_senders(senders, seconds, lead_s)
        except EmulatorLateError as error:
            print(f"# {error}", file=sys.stderr, flush=True)
    return None


def _run_senders(senders: Sequence[Sender], seconds: float, lead_s: float) -> dict[str, PacketTable]:
    paths = {(f"a-{i}", f"b-{i}"): sender.path for i, sender in enumerate(senders)}
    with NamespaceNet(paths, gso=False) as net:
        servers = [net.node(b).run(lambda b=b: socket.create_server((net.address(b), PORT))) for _, b in paths]
        drains = [threading.Thread(target=_drain, args=(server,), daemon=True) for server in servers]

        def pouring(a: str, b: str, sender: Sender) -> threading.Thread:
            time_s = seconds + (lead_s if sender.first else 0.0)
            return threading.Thread(
                target=net.node(a).run, args=(lambda: _pour(net.address(b), sender.control, time_s),)
            )

        pours = [pouring(*pair, sender) for pair, sender in zip(paths, senders, strict=True)]
        for thread in drains:
            thread.start()
        net.restart_weather()
        for thread in (p for p, sender in zip(pours, senders, strict=True) if sender.first):
            thread.start()
        time.sleep(lead_s)
        net.record_packets(round(len(senders) * seconds * 20_000))
        net.reset_lateness()
        for thread in (p for p, sender in zip(pours, senders, strict=True) if not sender.first):
            thread.start()
        for thread in (*pours, *drains):
            thread.join(seconds + 60)
        net.certify()
        tables = net.packets()
    return {sender.name: tables[pair] for pair, sender in zip(paths, senders, strict=True)}


def _drain(server: socket.socket) -> None:
    with server, server.accept()[0] as sock:
        while sock.recv(1 << 20):
            pass


def _pour(address: str, control: str, seconds: float) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        sock.connect((address, PORT))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_BYTES)
        sock.settimeout(30)
        block, end = bytes(NOTSENT_BYTES), time.monotonic() + seconds
        while time.monotonic() < end:
            sock.send(block)


# ---- jobs side by side ---------------------------------------------------------------------------------------------
def require_kernel(controls: Iterable[str]) -> None:
    """Raise AtlasError unless this host can run the senders. Compiles the emulator once, before many need it."""
    if os.geteuid() != 0:
        raise AtlasError("network namespaces need root: run this as root")
    if not Path("/dev/net/tun").exists():
        raise AtlasError("/dev/net/tun does not exist: load the kernel module tun")
    for control in controls:
        with socket.socket() as sock:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            except OSError:
                raise AtlasError(f"the kernel has no {control}: load the module tcp_{control}") from None
    with NamespaceNet({("a", "b"): PathSpec()}):
        pass


class Jobs:
    """Calls of one function in processes of their own, as many at once as there are `CORES` cores for each."""

    def __init__(self, parallel: int | None = None) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.parallel = parallel or max(1, len(cores) // CORES)
        context = multiprocessing.get_context("spawn")
        slots: Any = context.Queue()
        for k in range(self.parallel):
            slots.put({cores[(CORES * k + i) % len(cores)] for i in range(CORES)})
        self._pool = ProcessPoolExecutor(self.parallel, context, initializer=_pin, initargs=(slots,))

    def submit(self, call: Callable[[T], R], what: T) -> Future[R]:
        return self._pool.submit(call, what)

    def run(self, call: Callable[[T], R], each: Iterable[T]) -> list[R]:
        return list(self._pool.map(call, each))

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _pin(slots: Any) -> None:
    os.sched_setaffinity(0, slots.get())
