"""A faster link never makes an answer worse, and `atlas` is never slower than what fits the same memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.program import Layout, Memory
from atlas.schedules import SCHEDULES
from atlas.schedules.eager import warm_ups
from atlas.schedules.grid import references
from atlas.schedules.setting import Setting

MS = 1_000_000


def setting_of(latency_ms: float, wan_ms: float, seed: int = 0, budget: int = 150) -> Setting:
    rng = np.random.default_rng(seed)
    stages, pipelines = int(rng.integers(3, 6)), int(rng.integers(1, 4))
    num_mb, cap = int(rng.choice([6, 8])), int(rng.integers(stages, 2 * stages))
    layout = Layout.even(pipelines, stages, num_mb, 3)
    crossings = tuple(b for b in range(stages - 1) if layout.rank_dc[b] != layout.rank_dc[b + 1])
    kinds = kind_costs(forward_ns=53 * MS, input_ns=47 * MS, weight_ns=41 * MS, recompute_ns=53 * MS, sync_ns=9 * MS)
    apart, turns = (
        uniform_costs(
            pipelines, stages, kinds, wan_boundaries=crossings, wan_ns=round(wan_ms * MS),
            wan_latency_ns=round(latency_ms * MS), sharing=sharing,
        )
        for sharing in (False, True)
    )  # fmt: skip
    return Setting(layout, apart, turns if pipelines > 1 else None, Memory(cap), recompute=True, budget=budget)


def seconds_of(name: str, setting: Setting) -> float:
    return setting.simulated_ns(SCHEDULES[name].build(setting, None)) / 1e9


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["1f1b-eager", "zero-bubble", "atlas"])
def test_lower_latency_and_more_bandwidth_are_never_worse(name: str, seed: int) -> None:
    by_latency = [seconds_of(name, setting_of(latency, 60, seed)) for latency in (5, 10, 13, 20, 40, 90)]
    by_rate = [seconds_of(name, setting_of(20, wan, seed)) for wan in (20, 50, 60, 110, 250)]
    for found in (by_latency, by_rate):
        assert all(better <= 1.001 * worse for k, worse in enumerate(found) for better in found[:k]), found


@pytest.mark.parametrize("seed", range(3, 6))
def test_atlas_is_never_slower_than_a_schedule_that_fits_the_same_memory(seed: int) -> None:
    for latency in (5, 30):
        setting = setting_of(latency, 80, seed)
        ours = seconds_of("atlas", setting)
        for name in ("gpipe", "1f1b", "1f1b-eager", "varuna", "zero-bubble"):
            program = SCHEDULES[name].build(setting, None)
            if program.peak_held(setting.memory) <= setting.memory.cap:
                assert ours <= setting.simulated_ns(program) / 1e9, name


def test_what_is_searched_for_a_worse_link_is_searched_for_a_better_one() -> None:
    def latencies(latency_ms: float) -> list[int]:
        points = references(setting_of(latency_ms, 60, 2, 900), 900)
        return sorted({int(point.apart.latency_ns.max()) for point in points})

    assert latencies(42) == latencies(43)
    worse = latencies(42 * 1.35)
    assert worse != latencies(42)
    assert set(worse[:4]) < set(latencies(42)), "its own grid cell and the next three"


def test_turns_and_no_turns_are_on_one_scale() -> None:
    """Two scales would cross their grid lines one after the other: a point that no better link uses."""
    loads = [
        {(int(p.apart.work_ns.max()), int(p.turns.work_ns.max())) for p in references(setting, 900) if p.turns}
        for setting in (setting_of(20, wan, 2, 900) for wan in np.linspace(60, 75, 16))
    ]
    assert len(set().union(*loads)) == len(loads[0] | loads[-1])


def test_every_fast_link_uses_the_same_slow_reference_points() -> None:
    def loads(wan_ms: float) -> set[int]:
        return {int(point.apart.work_ns.max()) for point in references(setting_of(20, wan_ms, 2, 900), 900)}

    slow = sorted(loads(1))[-3:]
    assert slow == sorted(loads(4))[-3:]
    assert slow[0] > 40 * MS


def test_warm_ups_do_not_depend_on_the_links() -> None:
    fast, slow = (warm_ups(setting_of(latency, wan)) for latency, wan in ((1, 5), (90, 200)))
    assert len(fast) == len(slow) > 2
    for one, other in zip(fast, slow, strict=True):
        assert replace(one, memory=None).ops(0) == replace(other, memory=None).ops(0)
