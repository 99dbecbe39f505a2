"""The fit finds the constants and the cross traffic of a known path, and says what it cannot know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from path_samples import BUFFER, CAPACITY_BPS, RTT_NS, cross_of, sampled, written

from atlas.cli import main
from atlas.errors import SpecError
from atlas.weather.cell import packet_rtts
from atlas.weather.fit import learn
from atlas.weather.packets import PacketTable


def test_the_path_of_known_packets_is_found() -> None:
    learnt = learn(sampled(20.0))
    model = learnt.model
    assert model.capacity_bps == pytest.approx(CAPACITY_BPS, rel=0.01)
    assert model.rtt_ns == pytest.approx(RTT_NS, rel=0.01)
    assert model.buffer_bytes == pytest.approx(BUFFER, rel=0.05)
    true = cross_of(len(model.cross_bps))[: len(model.cross_bps)]
    on = (true > 0) & model.known
    assert on.sum() > 50
    assert np.median(model.cross_bps[on]) == pytest.approx(0.5 * CAPACITY_BPS, rel=0.05)
    assert learnt.followed is not None
    assert learnt.followed > 0.9
    assert not model.capacity_is_bound
    assert not model.buffer_is_bound


def test_the_peak_rate_alone_is_never_above_the_capacity() -> None:
    assert learn(sampled(10.0), "peak").model.capacity_bps <= 1.01 * CAPACITY_BPS
    assert learn(sampled(10.0), "constant").model.cross_bps.tolist() == [0.0]


def test_a_sender_that_never_queued_bounds_the_capacity_only() -> None:
    learnt = learn(sampled(10.0, 4e6, burst=1, share=0.0))
    assert learnt.model.capacity_is_bound
    (warning,) = learnt.warnings
    assert "the capacity and the buffer are only known to be at least this" in warning
    assert "fill the path with `atlas wan probe --record`" in warning


def test_a_window_is_named_as_the_limit() -> None:
    learnt = learn(sampled(10.0, 20e6, burst=1, share=0.0))
    assert any("its TCP window or its own rate limited it to" in text for text in learnt.warnings)


def test_a_route_change_is_found_and_the_last_piece_fitted() -> None:
    one = sampled(20.0)
    later = one.sent_ns - one.sent_ns[0] > 9_000_000_000
    moved = PacketTable(
        "t", one.sent_ns, one.num_bytes, np.where(later & ~one.lost, one.rtt_ns + 30_000_000, one.rtt_ns), 0
    )
    learnt = learn(moved)
    assert learnt.model.rtt_ns == pytest.approx(RTT_NS + 30e6, rel=0.01)
    (warning,) = (text for text in learnt.warnings if "the route changed" in text)
    assert f"of {len(one.sent_ns):,}: the route changed: the shortest round trip went from 40.0 to 70.3 ms" in warning
    assert "The rows before it are fitted separately (40 Mbit/s, cross traffic" in warning


def test_a_queue_that_stands_for_seconds_is_no_route_change() -> None:
    one = sampled(20.0)
    middle = (one.sent_ns - one.sent_ns[0]) // 6_000_000_000 == 1
    stood = np.where(middle & ~one.lost, one.rtt_ns.max(), one.rtt_ns)
    learnt = learn(PacketTable("t", one.sent_ns, one.num_bytes, stood, 0))
    assert not any("the route changed" in text for text in learnt.warnings)


def _twice(gap_s: float) -> PacketTable:
    one = sampled(8.0)
    later = one.sent_ns + 8 * 10**9 + round(gap_s * 1e9)
    both = [np.concatenate([a, b]) for a, b in ((one.sent_ns, later), *([x, x] for x in (one.num_bytes, one.rtt_ns)))]
    return PacketTable("t", *both, 0)


def test_the_time_between_two_recordings_is_no_weather() -> None:
    one, apart = learn(sampled(8.0)).model, learn(_twice(3600.0)).model
    assert one.gap is None
    assert apart.gap is not None
    assert apart.gap.sum() == 36_000
    assert apart.mean_share == pytest.approx(one.mean_share, rel=0.03)
    assert apart.rivals == 0


def test_a_table_of_many_days_is_refused() -> None:
    with pytest.raises(SpecError, match=r"rows = '20 days': must cover at most 11 days. Remove older parts"):
        learn(_twice(20 * 86_400.0))


def test_the_cell_without_its_buffer_is_a_cumulative_sum() -> None:
    rng = np.random.default_rng(3)
    gaps = rng.integers(0, 2_000_000, 500)
    at, size = np.cumsum(gaps), rng.integers(100, 1500, 500)
    rtts = packet_rtts(at, size, np.full(500, 5e6), capacity_bps=10e6, rtt_ns=0, buffer_bytes=1e12)
    steps = np.concatenate([[0.0], size[:-1] + (5e6 - 10e6) / 8e9 * np.diff(at)])
    total = np.cumsum(steps)
    queue = total - np.minimum(0.0, np.minimum.accumulate(total))
    np.testing.assert_allclose(rtts, (queue + size) * 8e9 / 10e6, atol=2)


def test_learn_writes_a_model_and_says_what_it_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(sampled(8.0), tmp_path / "east-west.packets.csv")
    out = tmp_path / "east-west.path"
    page = tmp_path / "path.html"
    assert main(["wan", "learn", str(tmp_path), "--out", str(out), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "modelled" in text
    assert "<script" not in text
    assert "held-out last fifth" in capsys.readouterr().out
    first = out.read_bytes()
    main(["wan", "learn", str(tmp_path), "--out", str(out)])
    assert out.read_bytes() == first


def test_learn_says_so_if_no_delay_varied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(sampled(8.0, 4e6, burst=1, share=0.0), tmp_path / "a.packets.csv")
    assert main(["wan", "learn", str(tmp_path), "--out", str(tmp_path / "a.path")]) == 0
    out = capsys.readouterr().out
    assert "nothing to explain: no delay varied in the held-out last fifth" in " ".join(out.split())


def test_learn_writes_nothing_of_a_wrong_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.packets.csv").write_text("sent_ns,bytes,rtt_ns\n5,1,5\n4,1,5\n")
    assert main(["wan", "learn", str(tmp_path), "--out", str(tmp_path / "a.path")]) == 2
    said = capsys.readouterr().err
    assert "row 1.sent_ns = 4: times must not go back" in said
    assert [path.name for path in tmp_path.iterdir()] == ["a.packets.csv"]


@pytest.mark.slow
def test_the_network_keeps_to_what_conservation_shows() -> None:
    fit_gru = pytest.importorskip("atlas.runtime.weather_fit").fit_gru
    table = sampled(6.0)
    model = fit_gru(table, epochs=3)
    assert model.method == "gru"
    assert model.capacity_bps == pytest.approx(CAPACITY_BPS, rel=0.1)
    assert np.array_equal(model.cross_bps, fit_gru(table, epochs=3).cross_bps)
