"""Real TCP between namespaces, if this process may make them; otherwise the error names the alternatives."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atlas.errors import AtlasError
from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.netdev import in_thread, make_namespace
from atlas.wan.emulator.paths import PathSpec, Trunk

sys.path.insert(0, str(Path(__file__).parent))
from emulated_peers import Peer, pour, require_round_trip, round_trips_s

PAIR = ("east-0", "west-0")


def _may_make_namespaces() -> bool:
    try:
        namespace = make_namespace("10.99.0.1", gso=True, sysctls={})
    except AtlasError:
        return False
    import os

    os.close(namespace.fd)
    os.close(namespace.tun_fd)
    return True


needs_root = pytest.mark.skipif(not _may_make_namespaces(), reason="network namespaces and TUN need root")


def on_path(path: PathSpec, use: Callable[[NamespaceNet, Peer], None], **options: bool) -> None:
    with NamespaceNet({PAIR: path}, **options) as net:  # type: ignore[arg-type]
        far = net.node("west-0").run(lambda: Peer(net.address("west-0"), 5000))
        try:
            net.node("east-0").run(lambda: use(net, far))
        finally:
            far.close()


@needs_root
def test_real_tcp_has_the_delay() -> None:
    def use(net: NamespaceNet, far: Peer) -> None:
        assert min(round_trips_s(far.address)) >= 0.04
        require_round_trip(far.address, below_s=0.045)
        assert net.lateness.num_pieces > 20

    on_path(PathSpec(latency_s=0.02), use)


@needs_root
@pytest.mark.parametrize("gso", [True, False])
def test_the_rate_is_goodput(gso: bool) -> None:
    measured: list[float] = []

    def use(net: NamespaceNet, far: Peer) -> None:
        pour(far.address, 1.2)
        measured.append(far.rate_bps(0.4) / 50e6)

    for _ in range(3):
        on_path(PathSpec(latency_s=0.005, pair_bps=50e6), use, gso=gso)
        if abs(measured[-1] - 1) < 0.05:
            return
    pytest.fail(f"{measured} of the rate")


@needs_root
def test_loss_is_about_as_configured_and_tcp_recovers() -> None:
    def use(net: NamespaceNet, far: Peer) -> None:
        sent = pour(far.address, 1.0)
        assert far.ended.acquire(timeout=60)
        assert sum(count for _, count in far.arrivals) == sent
        there = net.stats.directions[PAIR]
        assert 0.004 < there.lost / (there.lost + there.num_pieces) < 0.05

    on_path(PathSpec(latency_s=0.001, loss=0.02, pair_bps=100e6), use, gso=False)


@needs_root
def test_a_cut_path_is_silent_and_comes_back() -> None:
    def use(net: NamespaceNet, far: Peer) -> None:
        assert round_trips_s(far.address, 2)
        net.cut(*PAIR)
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection(far.address, timeout=0.3)
        net.resume(*PAIR)
        assert round_trips_s(far.address, 2)

    on_path(PathSpec(latency_s=0.001), use)


@needs_root
def test_processes_run_on_their_node_and_end_with_the_net() -> None:
    with NamespaceNet({PAIR: PathSpec(latency_s=0.001)}) as net:
        script = "import socket; print(socket.create_server(('', 0)).getsockname()); open('/proc/net/dev').read()"
        said = net.node("east-0").popen([sys.executable, "-c", script], stdout=subprocess.PIPE).communicate()[0]
        assert b"0.0.0.0" in said
        devices = net.node("east-0").run(lambda: Path("/proc/thread-self/net/dev").read_text())
        assert "wan0" in devices
        assert "eth0" not in devices
        sleeper = net.node("west-0").popen(["sleep", "60"])
        with pytest.raises(AtlasError, match="no node 'mars-0'"):
            net.node("mars-0")
    assert sleeper.returncode == -9


@needs_root
def test_a_crash_leaves_nothing_behind() -> None:
    """The forwarder and what it holds end with the process that made them, however that ends."""
    script = (
        "import os, sys\n"
        "from atlas.wan.emulator.namespace_net import NamespaceNet\n"
        "from atlas.wan.emulator.paths import PathSpec\n"
        "net = NamespaceNet({('a', 'b'): PathSpec()})\n"
        "print(net._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == -9
    forwarder = Path("/proc") / done.stdout.strip()
    deadline = time.monotonic() + 60
    while forwarder.exists() and "Z" not in (forwarder / "stat").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not forwarder.exists() or " Z " in (forwarder / "stat").read_text()


@needs_root
def test_kernel_shaping_works_or_raises_an_error() -> None:
    problem = ""
    try:
        on_path(PathSpec(latency_s=0.02), lambda net, far: _is_delayed(far), kernel=True)
    except AtlasError as error:
        problem = str(error)
    assert not problem or "leave kernel shaping off" in problem


def _is_delayed(far: Peer) -> None:
    assert min(round_trips_s(far.address)) >= 0.04


def test_without_privileges_the_error_names_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    from atlas.wan.emulator import netdev

    class Refusing:
        def unshare(self, flags: int) -> int:
            import ctypes

            ctypes.set_errno(1)
            return -1

    monkeypatch.setattr(netdev, "_LIBC", Refusing())
    with pytest.raises(AtlasError, match="proxy grade"):
        make_namespace("10.99.0.1", gso=True, sysctls={})


def test_a_call_in_a_thread_raises_its_error() -> None:
    def fail() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        in_thread(fail)
    assert in_thread(threading.get_ident) != threading.get_ident()


@needs_root
def test_cross_traffic_shares_the_queue_and_every_packet_is_recorded() -> None:
    def use(net: NamespaceNet, far: Peer) -> None:
        net.record_packets(100_000)
        net.restart_weather()
        pour(far.address, 0.8)
        far.ended.acquire(timeout=60)
        found = net.packets()
        table = found[PAIR]
        arrived = ~table.lost
        span_s = float((table.sent_ns + table.rtt_ns)[arrived].max() - table.sent_ns[0]) / 1e9
        carried_bps = int(table.num_bytes[arrived].sum()) * 8 / span_s
        assert 0.1 * 20e6 < carried_bps < 0.35 * 20e6, "cross traffic takes three quarters"
        assert table.rtt_ns[~table.lost].min() >= 20_000_000
        assert len(found[PAIR[::-1]].sent_ns) > 0, "acknowledgements"

    on_path(PathSpec(latency_s=0.01, pair_bps=20e6, queue_bytes=50_000, cross=(0.75,)), use, gso=False)


@needs_root
def test_competing_flows_share_the_queue() -> None:
    def use(net: NamespaceNet, far: Peer) -> None:
        pour(far.address, 0.6)  # the flows have filled the queue by then
        far.ended.acquire(timeout=60)
        net.record_packets(100_000)
        pour(far.address, 0.8)
        far.ended.acquire(timeout=60)
        table = net.packets()[PAIR]
        arrived = ~table.lost
        span_s = float((table.sent_ns + table.rtt_ns)[arrived].max() - table.sent_ns[0]) / 1e9
        carried_bps = int(table.num_bytes[arrived].sum()) * 8 / span_s
        assert 0.02 * 20e6 < carried_bps < 0.7 * 20e6, "four flows take part of the link, and leave some"
        assert np.median(table.rtt_ns[arrived]) > 25_000_000, "their packets wait in the queue too"

    on_path(PathSpec(latency_s=0.01, pair_bps=20e6, queue_bytes=50_000, rivals=4), use, gso=False)


@needs_root
def test_a_pair_without_a_rate_gives_its_trunk_the_queue() -> None:
    def use(net: NamespaceNet, far: Peer) -> None:
        net.record_packets(100_000)
        pour(far.address, 0.6)
        far.ended.acquire(timeout=60)
        table = net.packets()[PAIR]
        assert table.lost.any(), "a queue of 50 KB overflows"
        full_ns = 20_000_000 + 50_000 * 8e9 / 20e6
        assert table.rtt_ns[~table.lost].max() <= full_ns + 1_000_000

    on_path(PathSpec(latency_s=0.01, trunk=Trunk("shared", 20e6), queue_bytes=50_000), use, gso=False)
