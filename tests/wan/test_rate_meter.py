"""The rate of a path, measured from acknowledgements."""

from __future__ import annotations

import pytest

from atlas.wan.congestion.tuning import NUM_SPANS, SAMPLE_S, RateMeter

SPAN_BYTES = 625_000
"""In one span at 100 Mbit/s."""
BEFORE_BPS = 80e6


def meter_after(num_spans: int) -> RateMeter:
    """Knew of 80 Mbit/s; then came a burst at 100."""
    meter, now = RateMeter(), 100.0
    meter.learn(BEFORE_BPS, now)
    for _ in range(num_spans + 1):
        meter.acknowledged(SPAN_BYTES, now)
        now += SAMPLE_S + 1e-6
    meter.pause()
    return meter


@pytest.mark.parametrize("num_spans", [1, NUM_SPANS])
def test_a_rate_is_raised_only_after_bursts_too_short_to_measure(num_spans: int) -> None:
    meter = meter_after(num_spans)
    seen_bps = 100e6 if num_spans == NUM_SPANS else BEFORE_BPS
    assert meter.rate_bps == pytest.approx(seen_bps, rel=1e-3)
    meter.raise_by(1.5)
    assert meter.rate_bps == pytest.approx(seen_bps if num_spans == NUM_SPANS else 1.5 * BEFORE_BPS, rel=1e-3)


def test_a_short_burst_after_a_long_one_may_raise_it_again() -> None:
    meter = meter_after(NUM_SPANS)
    meter.acknowledged(SPAN_BYTES, 200.0)
    meter.pause()
    meter.raise_by(1.5)
    assert meter.rate_bps == pytest.approx(150e6, rel=1e-3)
