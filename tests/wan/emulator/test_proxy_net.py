"""The proxy emulates its paths. Bounds are wider than in the bench, because test machines are busy."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from atlas.errors import AtlasError
from atlas.wan.emulator import emulated_net
from atlas.wan.emulator.lateness import EmulatorLateError
from atlas.wan.emulator.paths import PathSpec, Trunk
from atlas.wan.emulator.proxy_net import ProxyNet

sys.path.insert(0, str(Path(__file__).parent))
from emulated_peers import Peer, call, peer, pour, require_round_trip, round_trips_s

PAIR = ("east-0", "west-0")
TRIES = 3


def test_a_round_trip_takes_two_latencies_from_either_end() -> None:
    with peer() as far, ProxyNet({PAIR: PathSpec(latency_s=0.03)}) as net:
        for src, dst in (PAIR, PAIR[::-1]):
            address = net.listen(src, dst, far.address)
            assert min(round_trips_s(address)) >= 0.06
            require_round_trip(address, below_s=0.065)


def test_the_start_may_take_longer_than_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one on a machine compiles, and on a busy host any takes seconds."""
    monkeypatch.setattr(emulated_net, "ANSWER_TIMEOUT_S", 0.001)
    ProxyNet({PAIR: PathSpec()}).close()


def test_the_first_bytes_wait_for_the_handshake() -> None:
    with peer() as far, ProxyNet({PAIR: PathSpec(latency_s=0.03)}) as net:
        began = time.monotonic()
        with call(net.listen(*PAIR, far.address), b"e") as sock:
            sock.sendall(b"x")
            sock.recv(1)
        assert time.monotonic() - began >= 0.12


@pytest.mark.parametrize("streams", [1, 3])
def test_connections_of_a_pair_share_its_cap(streams: int) -> None:
    measured = []
    for _ in range(TRIES):
        with peer() as far, ProxyNet({PAIR: PathSpec(latency_s=0.005, pair_bps=40e6)}) as net:
            _pour_all([net.listen(*PAIR, far.address)] * streams, 0.8)
            measured.append(far.rate_bps(0.2))
        if abs(measured[-1] / 40e6 - 1) < 0.03:
            return
    pytest.fail(f"{measured} for 40 Mbit/s")


def test_one_connection_gets_a_window_per_round_trip_and_two_get_two() -> None:
    path = PathSpec(latency_s=0.02, window_bytes=50_000)
    for streams in (1, 2):
        measured = []
        for _ in range(TRIES):
            with peer() as far, ProxyNet({PAIR: path}) as net:
                _pour_all([net.listen(*PAIR, far.address)] * streams, 1.0)
                measured.append(far.rate_bps(0.2) / (streams * 10e6))
                peaks = [max(c["peak_bytes"]) for c in net.stats.connections]
                assert all(peak <= 50_000 for peak in peaks), "never more than the window in flight"
            if abs(measured[-1] - 1) < 0.06:
                break
        assert abs(measured[-1] - 1) < 0.06, measured


def test_pairs_share_a_trunk_fairly_whatever_their_number_of_connections() -> None:
    path = PathSpec(latency_s=0.005, pair_bps=40e6, trunk=Trunk("t", 40e6))
    for _ in range(TRIES):
        a, b = Peer(), Peer()
        with ProxyNet({("a-0", "b-0"): path, ("a-1", "b-1"): path}) as net:
            one, four = net.listen("a-0", "b-0", a.address), net.listen("a-1", "b-1", b.address)
            _pour_all([one, four, four, four, four], 0.8)
            rates = [a.rate_bps(0.2) / 1e6, b.rate_bps(0.2) / 1e6]
        a.close()
        b.close()
        if abs(sum(rates) - 40) < 2 and abs(rates[0] - 20) < 2:
            return
    pytest.fail(f"{rates} Mbit/s of a trunk of 40")


def test_the_end_of_a_connection_is_delayed_like_its_bytes() -> None:
    with peer() as far, ProxyNet({PAIR: PathSpec(latency_s=0.03)}) as net:
        began = time.monotonic()
        call(net.listen(*PAIR, far.address), b"s").close()
        assert far.ended.acquire(timeout=60)
        assert time.monotonic() - began >= 0.03


def test_closing_the_net_ends_its_connections() -> None:
    with peer() as far, ProxyNet({PAIR: PathSpec()}) as net, call(net.listen(*PAIR, far.address), b"e") as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        net.close()
        assert sock.recv(1) == b""
        assert far.ended.acquire(timeout=60)


def test_jitter_delays_but_never_reorders_or_loses() -> None:
    with peer() as far, ProxyNet({PAIR: PathSpec(latency_s=0.005, jitter_s=0.01)}) as net:
        with call(net.listen(*PAIR, far.address), b"e") as sock:
            sent = b"".join(i.to_bytes(4, "big") for i in range(20_000))
            threading.Thread(target=sock.sendall, args=(sent,), daemon=True).start()
            got = b""
            while len(got) < len(sent):
                got += sock.recv(1 << 16)
        assert got == sent


def test_a_sender_stops_after_a_window_if_the_receiver_does_not_read() -> None:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    server.bind(("127.0.0.1", 0))
    server.listen()
    path = PathSpec(latency_s=0.001, window_bytes=200_000)
    with (
        server,
        ProxyNet({PAIR: path}) as net,
        socket.create_connection(net.listen(*PAIR, server.getsockname())) as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        sock.settimeout(0.7)
        with pytest.raises(TimeoutError):
            sock.sendall(bytes(64_000_000))
        assert max(net.stats.connections[0]["peak_bytes"]) <= 200_000


def test_a_cut_resets_both_ends_and_can_refuse_new_connections() -> None:
    with peer() as far, ProxyNet({PAIR: PathSpec(latency_s=0.002)}) as net:
        address = net.listen(*PAIR, far.address)
        with call(address, b"e") as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            assert net.cut(*PAIR, refuse=True) == 1
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
        assert far.ended.acquire(timeout=60)
        assert _is_refused(address)
        net.resume(*PAIR)
        assert round_trips_s(address, 1)


def test_a_stalled_connection_is_silent_until_it_is_resumed_and_loses_nothing() -> None:
    path = PathSpec(latency_s=0.002)
    with peer() as far, ProxyNet({PAIR: path}) as net, call(net.listen(*PAIR, far.address), b"e") as sock:
        sock.sendall(b"a")
        assert sock.recv(1) == b"a"
        assert net.stall(*PAIR, number=-1) == 1
        sock.sendall(b"b")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert net.resume() == 1
        sock.settimeout(60)
        assert sock.recv(1) == b"b"


def test_a_path_can_be_changed_while_it_is_used() -> None:
    with peer() as far, ProxyNet({PAIR: PathSpec(latency_s=0.002)}) as net:
        address = net.listen(*PAIR, far.address)
        require_round_trip(address, below_s=0.02)
        assert net.change(*PAIR, latency_s=0.03).latency_s == 0.03
        assert min(round_trips_s(address, 5)) >= 0.06


def test_a_late_run_and_an_unused_net_are_not_certified() -> None:
    with peer() as far, ProxyNet({PAIR: PathSpec(latency_s=0.002)}) as net:
        with pytest.raises(EmulatorLateError, match="nothing went through"):
            net.certify()
        round_trips_s(net.listen(*PAIR, far.address), 3)
        assert net.lateness.num_pieces >= 6
        with pytest.raises(EmulatorLateError, match="the emulator was late"):
            net.certify(p99_s=0.0)
        net.certify(p99_s=10.0, worst_s=10.0)


def test_wrong_arguments_raise_an_error() -> None:
    with ProxyNet({PAIR: PathSpec()}) as net:
        with pytest.raises(AtlasError, match="no path between 'east-0' and 'mars-0'"):
            net.listen("east-0", "mars-0", ("127.0.0.1", 1))
        with pytest.raises(AtlasError, match="latency_s"):
            net.change(*PAIR, latency_s=-1)
    for wrong in ({"pair_bps": 0.0}, {"window_bytes": -1}, {"loss": 1.0}, {"latency_s": 100.0}):
        with pytest.raises(AtlasError):
            PathSpec(**wrong)  # type: ignore[arg-type]


def _is_refused(address: tuple[str, int]) -> bool:
    try:
        with call(address, b"e") as sock:
            return sock.recv(1) == b""
    except ConnectionError:
        return True


def _pour_all(addresses: list[tuple[str, int]], seconds: float) -> None:
    threads = [threading.Thread(target=pour, args=(address, seconds)) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_cross_traffic_takes_its_share_of_one_direction() -> None:
    path = PathSpec(latency_s=0.005, pair_bps=40e6, cross=(0.75,))
    measured = []
    for _ in range(TRIES):
        with peer() as far, ProxyNet({PAIR: path}) as net:
            _pour_all([net.listen(*PAIR, far.address)], 0.6)
            measured.append(far.rate_bps(0.2))
        if abs(measured[-1] / 10e6 - 1) < 0.05:
            return
    raise AssertionError(measured)


def test_cross_traffic_needs_a_rate() -> None:
    with pytest.raises(AtlasError, match="needs pair_bps"):
        PathSpec(cross=(0.5,))
    with pytest.raises(AtlasError, match="from 0 to 100"):
        PathSpec(pair_bps=1e6, cross_back=(-1.0,))
