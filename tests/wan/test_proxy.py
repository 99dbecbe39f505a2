"""The emulated path keeps its latency and its rate. Bounds are generous: the machines of others are busy."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from atlas.wan.emulator.delay_proxy import DelayProxy


class Sink:
    """Takes one connection and notes when how many bytes had come."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.server.getsockname()
        self.seen: list[tuple[float, int]] = []
        self.began, self.ended = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        peer, _ = self.server.accept()
        total = 0
        with peer:
            while chunk := peer.recv(65536):
                total += len(chunk)
                self.seen.append((time.monotonic(), total))
                self.began.set()
        self.ended.set()

    def close(self) -> None:
        self.thread.join(5)
        self.server.close()


def seconds_until_arrival(num_bytes: int, latency_s: float, rate_bps: float | None) -> float:
    sink = Sink()
    with DelayProxy(sink.address, latency_s=latency_s, rate_bps=rate_bps) as proxy:
        with socket.create_connection(proxy.address) as sender:
            began = time.monotonic()
            sender.sendall(bytes(num_bytes))
        assert sink.ended.wait(10)
        assert proxy.lateness.num_chunks > 0
        assert proxy.lateness.worst_ns < 1e9
    sink.close()
    assert sink.seen[-1][1] == num_bytes
    return sink.seen[-1][0] - began


@pytest.mark.parametrize(
    ("num_bytes", "latency_s", "rate_bps", "ideal_s"),
    [(1000, 0.0, None, 0.0), (1000, 0.1, None, 0.1), (100_000, 0.0, 4e6, 0.2), (100_000, 0.1, 4e6, 0.3)],
)
def test_bytes_arrive_when_latency_and_rate_say(
    num_bytes: int, latency_s: float, rate_bps: float | None, ideal_s: float
) -> None:
    measured: list[float] = []
    while len(measured) < 8 and (not measured or min(measured) >= ideal_s + 0.06):  # a busy host is late by itself
        measured.append(seconds_until_arrival(num_bytes, latency_s, rate_bps))
    assert all(s > ideal_s - 0.002 for s in measured), "never early"
    assert min(measured) < ideal_s + 0.06


def test_connections_through_one_proxy_share_its_rate() -> None:
    a, b = Sink(), None
    with DelayProxy(a.address, rate_bps=4e6) as proxy:
        began = time.monotonic()
        with socket.create_connection(proxy.address) as sender:
            b = Sink()
            sender.sendall(b"x")
            assert a.began.wait(10), "the first connection is through before the target changes"
            proxy.target = b.address
            with socket.create_connection(proxy.address) as other:
                sender.sendall(bytes(50_000))
                other.sendall(bytes(50_000))
        assert a.ended.wait(10)
        assert b.ended.wait(10)
        assert time.monotonic() - began > 0.19
    a.close()
    b.close()


def test_the_end_of_a_connection_travels_too() -> None:
    sink = Sink()
    with DelayProxy(sink.address, latency_s=0.05) as proxy:
        began = time.monotonic()
        socket.create_connection(proxy.address).close()
        assert sink.ended.wait(10)
        assert time.monotonic() - began > 0.049
    sink.close()


def test_a_closed_proxy_cuts_its_connections() -> None:
    sink = Sink()
    with DelayProxy(sink.address) as proxy, socket.create_connection(proxy.address) as sender:
        sender.sendall(b"x")
        time.sleep(0.05)
        proxy.close()
        assert sink.ended.wait(5)
        sender.settimeout(5)
        assert sender.recv(1) == b""
    sink.close()
