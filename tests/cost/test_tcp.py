"""One connection is limited by its window, many by the cap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.cost.tcp import many_bps, stream_bps, streams_to_fill


@pytest.mark.parametrize(("latency_ms", "mbps"), [(10, 1220), (20, 600), (30, 396), (40, 293)])
def test_one_connection_is_a_constant_window_over_the_round_trip(latency_ms: float, mbps: float) -> None:
    assert stream_bps(3_000_000, latency_ms / 1e3, 5e9) / 1e6 == pytest.approx(mbps, rel=0.03)


def test_many_connections_reach_the_cap_whatever_the_distance() -> None:
    assert many_bps(3_000_000, 0.04, 5e9) == 5e9
    assert many_bps(3_000_000, 0.04, 5e9, num_streams=4) == 4 * 0.3e9


@given(st.floats(1e3, 1e9), st.floats(0, 10), st.floats(1e3, 1e12))
def test_streams_to_fill_is_enough_and_one_less_is_not(window: float, latency_s: float, cap: float) -> None:
    num = streams_to_fill(window, latency_s, cap)
    assert many_bps(window, latency_s, cap, num) >= cap * (1 - 1e-9)
    assert num == 1 or many_bps(window, latency_s, cap, num - 1) < cap
