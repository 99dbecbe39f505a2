"""One connection is limited by its window."""

from __future__ import annotations

import pytest

from atlas.cost.cluster_arrays import stream_bps


@pytest.mark.parametrize(("latency_ms", "mbps"), [(10, 1220), (20, 600), (30, 396), (40, 293)])
def test_one_connection_is_a_constant_window_over_the_round_trip(latency_ms: float, mbps: float) -> None:
    assert stream_bps(3_000_000, latency_ms / 1e3) / 1e6 == pytest.approx(mbps, rel=0.03)
