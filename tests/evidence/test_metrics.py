"""CCL-Bench's metrics against a slow reading of their definitions, and ours against hand-made traces."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import slow_metrics
from slow_metrics import length
from trace_samples import CARD, allreduce, kernel, memory, random_events, step, write

from atlas.evidence.card import Card
from atlas.evidence.ccl import ccl_metrics, rank_figures, sampled
from atlas.evidence.data_point import read_data_point
from atlas.evidence.intervals import intersection, union
from atlas.evidence.metric import CCL_DEFINITIONS
from atlas.evidence.own import OWN_DEFINITIONS, gpu_name, own_figures
from atlas.evidence.rank_trace import read_rank

SLOW = (
    "communication_fraction",
    "total_communication_time",
    "compute_comm_overlap",
    "memory_transfer_overhead",
    "mean_sm_coverage",
    "collective_vol_allreduce_gb",
)


@pytest.mark.parametrize("seed", range(12))
def test_metrics_equal_their_definitions_read_aloud(seed: int, tmp_path: Path) -> None:
    events = random_events(seed)
    path = write(tmp_path / "rank0_trace.json", events)
    found = {metric.name: metric.value for metric in ccl_metrics([rank_figures(read_rank(path))], None)}
    for name in SLOW:
        assert found[name] == pytest.approx(getattr(slow_metrics, name)(events), rel=1e-9, abs=1e-12), name


def test_all_names_are_defined_and_a_missing_value_has_a_reason(tmp_path: Path) -> None:
    write(tmp_path / "rank0_trace.json", [kernel("gemm", 0, 5)])
    point = read_data_point(tmp_path)
    assert [metric.name for metric in point.ccl] == list(CCL_DEFINITIONS)
    assert len(CCL_DEFINITIONS) == 25
    assert [metric.name for metric in point.own] == list(OWN_DEFINITIONS)
    assert all((metric.value is None) == bool(metric.reason) for metric in (*point.ccl, *point.own))


def test_mfu_is_the_formula_on_the_card(tmp_path: Path) -> None:
    write(tmp_path / "rank0_trace.json", [step(k, k * 1e6, 1e6) for k in range(4)])
    point = read_data_point(tmp_path)
    figures = ccl_metrics(point.ranks, Card(tmp_path, CARD))
    flops = 6 * (1_200_000_000 - 65_536_000) + 12 * 16 * 128 * 16 * 2048
    mfu = next(metric.value for metric in figures if metric.name == "mfu")
    assert mfu == pytest.approx(100 * flops * 8 * 2048 / 1.0 / (2 * 312e12), abs=5e-5)


def test_ranks_are_combined(tmp_path: Path) -> None:
    for rank in range(3):
        events = [kernel("gemm", 0, 100 * (rank + 1)), allreduce(1000, 10 * (rank + 1))]
        write(tmp_path / f"rank{rank}_trace.json", [*events, step(0, 0, 2000 + rank)])
    point = read_data_point(tmp_path)
    assert point.value("load_imbalance_ratio") == pytest.approx(330 / 110)
    assert point.value("straggler") == pytest.approx((30 - 10) / 30)
    assert point.value("avg_step_time") == pytest.approx(2001e-6)
    assert point.value("compute_imbalance_ratio") == pytest.approx(3)
    assert point.value("bandwidth_utilization_allreduce_group_6") == pytest.approx(4 / 1024 * 1.5 / 10e-6)


def test_exposed_communication_lies_outside_compute(tmp_path: Path) -> None:
    events = [step(k, 1000 * k, 1000) for k in range(3)]
    events += [kernel("gemm", 1100, 400), allreduce(1400, 300, elements=1000), kernel("gemm", 5, 100)]
    found = own_figures(read_rank(write(tmp_path / "t.json", events)))
    assert (found.step_s, found.compute_s, found.exposed_s) == pytest.approx((1e-3, 4e-4, 2e-4))
    assert found.idle_s == pytest.approx(4e-4)
    assert found.volume_bytes["allreduce"] == 4000


def test_fills_and_copies_inside_the_device_are_compute_and_transfers_are_not(tmp_path: Path) -> None:
    events = [step(k, 1000 * k, 1000) for k in range(3)]
    events += [kernel("gemm", 1100, 400)]
    events += [memory("gpu_memset", "Memset (Device)", 1500, 50), memory("gpu_memcpy", "Memcpy DtoD", 1450, 200)]
    events += [memory("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1700, 90)]
    found = own_figures(read_rank(write(tmp_path / "t.json", events)))
    assert (found.compute_s, found.exposed_s, found.idle_s) == pytest.approx((550e-6, 0, 450e-6))


def test_many_ranks_are_sampled_as_ccl_bench_samples_them() -> None:
    names = [f"rank{k}_trace.json" for k in range(40)]
    assert len(sampled(names)) == 16
    assert sampled(names) == sorted(random.Random(42).sample(sorted(names), 16))
    assert sampled(names[:16]) == sorted(names[:16])


@pytest.mark.parametrize("seed", range(20))
def test_unions_and_intersections_have_the_right_length(seed: int) -> None:
    draw = np.random.default_rng(seed)
    start = draw.integers(0, 60, (2, 15)).astype(float)
    end = start + draw.integers(0, 12, (2, 15))
    one, other = (list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in zip(start, end, strict=True))
    a, b = union(start[0], end[0]), union(start[1], end[1])
    assert a.length == pytest.approx(length(one))
    assert intersection(a, b).length == pytest.approx(length(one) + length(other) - length(one + other))
    low, high = np.array([5.0, 0.0, 71.0]), np.array([40.0, 72.0, 80.0])
    for window, found in zip(zip(low, high, strict=True), a.within(low, high), strict=True):
        assert found == pytest.approx(length(slow_metrics.cut(one, *window)))


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ("nvidia_a100", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA H200", "H200"),
        ("nvidia_gh200", "GH200-96"),
        ("tpu_v6e", None),
        ("", None),
        ("Tesla V100-SXM2-32GB", "V100-16"),
    ],
)
def test_device_names_are_recognised(said: str, ours: str | None) -> None:
    assert gpu_name(said) == ours
