"""Sailor's formula against figures worked out by hand, its clamp, and what its money counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sailor_samples import write_inputs

from atlas.sailor.events import simulated
from atlas.sailor.inputs import Inputs, read_inputs
from atlas.sailor.judge import PlanJudge, all_reduce_s, combined_comm_s, judge, stage_memory_bytes
from atlas.sailor.links import BandwidthFit
from atlas.sailor.money import money
from atlas.sailor.plan_file import Replica, SailorPlan

FLAT = BandwidthFit(0.0, 0.0, 2.0, 0.02)
"""2 GB/s whatever the size."""


def flat_inputs(folder: Path, **options: object) -> Inputs:
    """Two regions with flat bandwidths: 2 GB/s inside, 0.5 GB/s across, whatever the count."""
    trace = write_inputs(folder, {"X-40_east-a": 4, "X-40_west-a": 4}, **options)  # type: ignore[arg-type]
    path = folder / "multizone_bandwidths_het.json"
    table = json.loads(path.read_text())
    for a, rows in table.items():
        for by_count in rows["X-40"].values():
            for b, row in by_count.items():
                row["X-40"] = {n: [[0.0, 0.0, 2.0 if a == b else 0.5], 2e9] for n in row["X-40"]}
    path.write_text(json.dumps(table))
    return read_inputs(folder, trace, "toy")


def plan_across(num_replicas: int = 2, mbs: int = 2, tp: int = 1) -> SailorPlan:
    east, west = Replica("east-a", "X-40", tp, tp), Replica("west-a", "X-40", tp, tp)
    return SailorPlan(mbs, ((0, 1, 2), (3, 4)), ((east,) * num_replicas, (west,) * num_replicas))


def test_every_part_of_the_formula_by_hand(tmp_path: Path) -> None:
    inputs = flat_inputs(tmp_path)
    verdict = judge(inputs, plan_across())
    layer = 0.004 + 0.02 * 2
    compute = (2.1 * layer, 1.6 * layer)
    send = 2_000_000 * 4 * 2 / 1e9 / 0.5
    comm = (send, 2 * send)
    ring = 2 * (2 - 1) * (200e6 * 4 / 2 / 1e9) / 2.0
    assert verdict.num_microbatches == 4
    assert verdict.compute_s == pytest.approx(compute)
    assert verdict.comm_s == pytest.approx(comm)
    assert verdict.sync_s == pytest.approx(ring)
    total = 3 * max(compute[0] + comm[0], compute[1] + comm[1]) + sum(comm) + sum(compute) + 0.003 + ring
    assert verdict.iteration_s == pytest.approx(total)
    assert not PlanJudge(inputs, plan_across()).clamps()


def test_the_first_stage_waits_twice_only_in_pipelines_of_more_than_three() -> None:
    assert combined_comm_s([0.0], [0.0]) == [0.0]
    assert combined_comm_s([1.0, 0.0], [0.0, 2.0]) == [1.0, 4.0]
    assert combined_comm_s([1.0, 1.0, 0.0], [0.0, 2.0, 2.0]) == [1.0, 3.0, 4.0]
    assert combined_comm_s([1.0, 1.0, 1.0, 0.0], [0.0, 2.0, 2.0, 2.0]) == [2.0, 3.0, 3.0, 4.0]


def test_gradients_go_in_buckets_of_500_mb() -> None:
    assert all_reduce_s(FLAT, 1.2e9, 4) == pytest.approx(2 * 3 * (0.5 / 4 + 0.5 / 4 + 0.2 / 4) / 2.0)
    assert all_reduce_s(FLAT, 1.2e9, 1) == 0.0


def test_memory_counts_state_activations_in_flight_and_what_is_reserved(tmp_path: Path) -> None:
    inputs = flat_inputs(tmp_path)
    assert stage_memory_bytes(inputs, (1, 2), 1, 2, 3) == 24 * 100_000_000 + 4 * 80_000_000 * 2 * 3 + 2_000_000_000
    assert stage_memory_bytes(inputs, (1,), 2, 1, 1) == 24 * 25_000_000 + 4 * 20_000_000 + 3_000_000_000


def test_a_fit_that_goes_negative_is_clamped_and_reported(tmp_path: Path) -> None:
    fit = BandwidthFit(0.0, 0.5, 1.0, 0.05)
    assert fit.raw_gb_per_s(1e5) < 0
    assert fit.seconds(1e5) == pytest.approx(1e5 / 1e9 / 0.05)
    assert fit.clamped(1e5)
    assert not fit.clamped(1e6)
    inputs = flat_inputs(tmp_path, activation=10_000)
    path = tmp_path / "multizone_bandwidths_het.json"
    path.write_text(path.read_text().replace("[0.0, 0.0, 0.5]", "[0.0, 0.5, 0.5]"))
    found = PlanJudge(read_inputs(tmp_path, inputs.trace, "toy"), plan_across())
    assert found.verdict([3, 5]).iteration_s > 0
    assert any("clamped" in note and "east-a/X-40 to west-a/X-40" in note for note in found.clamps())


def test_money_is_gpu_time_and_every_byte_that_leaves_its_zone(tmp_path: Path) -> None:
    inputs = flat_inputs(tmp_path)
    plan = plan_across()
    verdict = judge(inputs, plan)
    bill = money(inputs, plan, verdict)
    assert bill.gpu_usd == pytest.approx(4 * 3.6 / 3600 * verdict.iteration_s)
    sent = 2 * 4 * 2 * (2_000_000 * 4 * 2)  # replicas x microbatches x both ways x bytes; the rings stay inside
    assert bill.egress_usd == pytest.approx(sent / 1e9 * 0.02)


def test_our_simulation_agrees_with_the_judge_where_nothing_can_overlap(tmp_path: Path) -> None:
    inputs = flat_inputs(tmp_path)
    alone = Replica("east-a", "X-40", 1, 1)
    plan = SailorPlan(2, ((0, 1, 2, 3, 4),), ((alone, alone),))
    assert simulated(inputs, plan).iteration_s == pytest.approx(judge(inputs, plan).iteration_s, rel=1e-6)
    across = plan_across()
    assert simulated(inputs, across).iteration_s <= judge(inputs, across).iteration_s


def test_a_long_iteration_is_extrapolated_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = flat_inputs(tmp_path, global_batch=400)
    whole = simulated(inputs, plan_across())
    monkeypatch.setattr("atlas.sailor.events.MAX_EVENTS", 200)
    part = simulated(inputs, plan_across())
    assert part.num_microbatches < whole.num_microbatches == 100
    assert "of 100 microbatches simulated" in part.method
    assert part.iteration_s == pytest.approx(whole.iteration_s, rel=1e-3)
