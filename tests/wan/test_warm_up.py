"""What a warm-up finds on a simulated path."""

from __future__ import annotations

import threading
import time

import pytest

from atlas.wan.congestion.tuning import LOSSY_STREAMS
from atlas.wan.congestion.warm_up import FIRST_BYTES, KernelStats, WarmUp

RTT_S, TICK_S, STREAMS = 0.04, 0.001, 12


class PathOfNumbers:
    """Delivers `rate_bps`; each stream no more than `stream_bps`, as if it had stopped growing."""

    def __init__(self, rate_bps: float, stream_bps: float = float("inf"), *, loses: bool = False) -> None:
        self.rate_bps, self.stream_bps, self.loses = rate_bps, stream_bps, loses
        self.delivered_bytes = self.num_packets = 0
        self.is_late = False

    def look(self) -> KernelStats:
        return KernelStats(self.delivered_bytes, self.num_packets // 100 if self.loses else 0, self.is_late)

    def play(self, warm_up: WarmUp, until_s: float = 3.0) -> float:
        """When it was over."""
        now, free, under_way = 0.0, 0.0, list[tuple[float, int]]()
        while now < until_s and not warm_up.over:
            now += TICK_S
            while num_bytes := warm_up.await_turn(0, 0.0, now):
                bps = min(self.rate_bps, self.stream_bps * warm_up.num_streams)
                free = max(free, now) + num_bytes * 8 / bps
                under_way.append((free + RTT_S, num_bytes))
            self.is_late = free - now > RTT_S / 4 and self.stream_bps == float("inf")
            while under_way and under_way[0][0] <= now:
                _, num_bytes = under_way.pop(0)
                self.delivered_bytes += num_bytes
                self.num_packets += num_bytes // 1448
                warm_up.came_back(num_bytes, now)
        return now


@pytest.mark.parametrize("rate_bps", [5e6, 100e6, 2e9])
def test_it_finds_the_rate_of_the_path(rate_bps: float) -> None:
    path = PathOfNumbers(rate_bps)
    warm_up = WarmUp(RTT_S, 0.0, 0.0, 5.0, path.look, STREAMS)
    assert path.play(warm_up) < 2.5
    assert warm_up.rate_bps == pytest.approx(rate_bps, rel=0.1)
    assert not warm_up.is_lossy


def test_more_streams_take_part_after_losses() -> None:
    path = PathOfNumbers(300e6, stream_bps=70e6, loses=True)
    warm_up = WarmUp(RTT_S, 0.0, 0.0, 5.0, path.look, STREAMS)
    path.play(warm_up)
    assert warm_up.is_lossy
    assert warm_up.num_streams >= LOSSY_STREAMS
    assert warm_up.rate_bps == pytest.approx(300e6, rel=0.1)


@pytest.mark.parametrize(("num_streams", "found_bps"), [(12, 300e6), (2, 120e6)])
def test_more_streams_take_part_if_windows_limit_the_rate(num_streams: int, found_bps: float) -> None:
    path = PathOfNumbers(300e6, stream_bps=60e6)
    warm_up = WarmUp(RTT_S, 0.0, 0.0, 5.0, path.look, num_streams)
    path.play(warm_up)
    assert warm_up.over
    assert not warm_up.is_lossy
    assert warm_up.rate_bps == pytest.approx(found_bps, rel=0.1)


def test_a_known_rate_may_be_in_flight_from_the_start() -> None:
    known = WarmUp(RTT_S, 100e6, 0.0, 5.0, lambda: None, STREAMS)
    assert (
        known.limit_bytes
        > 100e6 / 8 * RTT_S
        > WarmUp(RTT_S, 0.0, 0.0, 5.0, lambda: None, STREAMS).limit_bytes
        == FIRST_BYTES
    )


def test_a_stream_at_the_limit_waits_for_an_answer() -> None:
    warm_up = WarmUp(RTT_S, 0.0, time.monotonic(), 60.0, lambda: None, STREAMS)
    while num_bytes := warm_up.await_turn(0, 0.0, time.monotonic()):
        pass
    got = list[int]()
    waiter = threading.Thread(target=lambda: got.append(warm_up.await_turn(0, 60.0, time.monotonic())))
    waiter.start()
    time.sleep(0.05)
    assert not got
    assert not num_bytes
    warm_up.came_back(FIRST_BYTES, time.monotonic())
    waiter.join(60)
    assert got
    assert got[0] > 0


def test_it_ends_in_time_without_answers() -> None:
    warm_up = WarmUp(RTT_S, 0.0, 0.0, 1.0, lambda: None, STREAMS)
    assert warm_up.await_turn(0, 0.0, 0.5) > 0
    assert warm_up.await_turn(0, 0.0, 1.5) == 0
    assert warm_up.over
