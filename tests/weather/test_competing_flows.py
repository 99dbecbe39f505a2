"""Competing TCP flows: how they share a queue, and how a recording shows that cross traffic reacts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from path_samples import BUFFER, CAPACITY_BPS, RTT_NS, part, sampled, tcp_table, written

from atlas.cli import main
from atlas.commands.wan_emulate import cluster_paths
from atlas.errors import AtlasError, SpecError
from atlas.spec import load_job, override
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.rivals import CWND, RING, SEGMENT_BYTES, advance_rivals, rival_tables, start_rivals
from atlas.weather.fit import learn
from atlas.weather.packets import LOST, PacketTable
from atlas.weather.path_model import PathModel, load_model, save_model

JOB = Path(__file__).parents[2] / "examples" / "tiny.yaml"
FIGURES = (8e9 / CAPACITY_BPS, BUFFER, float(RTT_NS), SEGMENT_BYTES)


def test_one_flow_fills_the_path_and_backs_off_when_the_queue_is_full() -> None:
    flows = rival_tables(1)
    start_rivals(flows, 0, RTT_NS)
    fills = (CAPACITY_BPS / 8e9 * RTT_NS + BUFFER) / SEGMENT_BYTES
    free_ns, windows = 0.0, []
    for k in range(1, 400):
        free_ns = advance_rivals(*flows, free_ns, k * 50_000_000, *FIGURES)
        windows.append(float(flows[0][0, CWND]))
    later = np.array(windows[40:])
    assert 0.95 * fills < later.max() < 1.1 * fills
    assert later.min() >= 0.65 * fills
    assert (np.diff(later) < -0.2 * fills).sum() >= 2, "it has lost packets several times"
    assert free_ns > 0.99 * 400 * 50_000_000, "the link is never idle for long"


def test_two_flows_that_start_together_share_the_path() -> None:
    flows = rival_tables(2)
    start_rivals(flows, 0, RTT_NS)
    start_rivals(part(flows, slice(1, None)), 5_000_000, RTT_NS)
    advance_rivals(*flows, 0.0, 60_000_000_000, *FIGURES)
    sent = flows[1][:, 1].astype(float)
    assert 0.25 < sent[0] / sent.sum() < 0.75
    assert sent.sum() * SEGMENT_BYTES * 8 / 60 == pytest.approx(CAPACITY_BPS, rel=0.05)


def test_the_same_flows_give_the_same_packets() -> None:
    one, other = (tcp_table(5.0, rivals=1) for _ in range(2))
    np.testing.assert_array_equal(one.rtt_ns, other.rtt_ns)


@pytest.mark.parametrize("lead_s", [1.5, 3.0, 4.0])
def test_a_competing_flow_is_found(lead_s: float) -> None:
    model = learn(tcp_table(30.0, rivals=1, lead_s=lead_s)).model
    assert model.rivals == 1
    assert model.capacity_bps == pytest.approx(CAPACITY_BPS, rel=0.01)
    # The queue never empties beside the other flow, so what always waits in it looks like a longer round trip.
    longest_ns = model.rtt_ns + model.buffer_bytes * 8e9 / model.capacity_bps
    assert longest_ns == pytest.approx(RTT_NS + BUFFER * 8e9 / CAPACITY_BPS, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.7, 0.75, 0.8])
def test_traffic_that_does_not_react_is_not_taken_for_a_flow(share: float) -> None:
    assert learn(tcp_table(30.0, share=share)).model.rivals == 0


@pytest.mark.parametrize("mean", [0.5, 0.7])
def test_traffic_that_varies_at_random_is_not_taken_for_a_flow(mean: float) -> None:
    shares = np.clip(mean * (1 + 0.2 * np.random.default_rng(7).standard_normal(400)), 0, 1.5)
    assert learn(tcp_table(30.0, shares=shares)).model.rivals == 0


def test_traffic_that_changes_between_two_rates_is_not_taken_for_a_flow() -> None:
    shares = np.where(np.arange(400) // 17 % 2 == 0, 0.2, 0.7)
    assert learn(tcp_table(30.0, shares=shares)).model.rivals == 0


@pytest.mark.parametrize("num_packets", [2, 8])
def test_a_flow_is_found_in_a_table_of_blocks(num_packets: int) -> None:
    """As `atlas wan probe --record` writes them on a fast path."""
    table = tcp_table(30.0, rivals=1)
    last = np.arange(num_packets - 1, len(table.sent_ns), num_packets)
    lost = np.add.reduceat(table.lost, last - (num_packets - 1)) > 0
    blocks = PacketTable(
        "blocks", table.sent_ns[last], np.full(len(last), num_packets * SEGMENT_BYTES), table.rtt_ns[last], len(last)
    )
    blocks.rtt_ns[lost] = LOST
    assert learn(blocks).model.rivals == 1


def test_traffic_that_stops_is_not_taken_for_a_flow() -> None:
    assert learn(sampled(20.0)).model.rivals == 0


def test_other_methods_do_not_look_for_flows() -> None:
    table = tcp_table(12.0, rivals=1)
    assert [learn(table, method).model.rivals for method in ("peak", "pairs")] == [0, 0]


def test_the_peak_is_kept_unless_packet_pairs_clearly_exceed_it() -> None:
    table = sampled(20.0)
    auto, peak = learn(table).model, learn(table, "peak").model
    assert (auto.capacity_bps, auto.method) == (peak.capacity_bps, "peak")
    np.testing.assert_array_equal(auto.cross_bps, peak.cross_bps)
    crowded = tcp_table(20.0, share=0.5)
    assert learn(crowded, "peak").model.capacity_bps < 0.8 * CAPACITY_BPS
    assert learn(crowded).model.capacity_bps == pytest.approx(CAPACITY_BPS, rel=0.01)


def test_learn_says_that_cross_traffic_reacts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tcp_table(30.0, rivals=1), tmp_path / "a.packets.csv")
    assert main(["wan", "learn", str(tmp_path), "--out", str(tmp_path / "a.path")]) == 0
    assert "it reacts to the sender like a competing TCP flow" in capsys.readouterr().out
    assert load_model(tmp_path / "a.path").rivals == 1


@pytest.mark.parametrize("rivals", [-1, 17, 1.5, True, None])
def test_a_wrong_number_of_flows_is_refused(tmp_path: Path, rivals: object) -> None:
    cross = np.zeros(3)
    path = tmp_path / "a.path"
    save_model(path, PathModel(1e6, 1e6, 1e6, cross, cross > 0, rivals=rivals))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="must be a whole number from 0 to 16"):
        load_model(path)
    if isinstance(rivals, int) and not isinstance(rivals, bool):
        with pytest.raises(AtlasError, match="rivals must be 0 to 16"):
            PathSpec(pair_bps=1e6, rivals=rivals)


def test_an_emulator_with_a_queue_gets_flows_and_a_proxy_shares(tmp_path: Path) -> None:
    cross = np.full(100, 2e9)
    model = PathModel(5e9, 80e6, 1e7, cross, cross > 0, rivals=2)
    save_model(tmp_path / "a.path", model)
    job = override(load_job(JOB), [f"cluster.wan.model={tmp_path / 'a.path'}"])
    found = {lan: next(iter(cluster_paths(job.cluster, nodes_per_dc=1, lan=lan).values())) for lan in (True, False)}
    assert (found[True].rivals, found[True].rivals_back, found[True].cross) == (2, 2, ())
    assert (found[False].rivals, found[False].cross[0]) == (0, 0.4)
    save_model(tmp_path / "a.path", replace(model, rivals=0))
    assert next(iter(cluster_paths(job.cluster, nodes_per_dc=1, lan=True).values())).cross[0] == 0.4


def test_the_ring_holds_a_fast_path() -> None:
    from atlas.wan.emulator.rivals import segment_bytes

    bdp, queue = 5e9 / 8 * 0.08, 50e6
    assert (bdp + queue) * 2 / segment_bytes(bdp, queue) < RING
    assert segment_bytes(1e5, 1e5) == SEGMENT_BYTES
