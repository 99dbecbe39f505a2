"""Atlas: never slower than what it is compared with, never faster than the bound, within memory, the same every time;
and it gains from taking turns where caps are per node pair, and nothing where the trunk binds.
"""

from __future__ import annotations

from math import prod

import pytest
from exact_optimum import optimum
from trunks import trunk_costs

from atlas.cost.table import kind_costs, lower_bound, uniform_costs
from atlas.ir.assemble import check
from atlas.ir.program import Layout, Memory
from atlas.ir.text import to_text
from atlas.schedules.atlas import atlas
from atlas.schedules.classic import gpipe, one_f_one_b
from atlas.schedules.search import Family, search
from atlas.schedules.setting import Setting
from atlas.schedules.varuna import varuna
from atlas.sim import simulate

MS = 1_000_000
GRID = [(s, times * s, c, cap * s) for s in (3, 6) for times in (2, 4) for c in (2, 4) for cap in (1, 2)]


def setting_of(
    num_stages: int, num_mb: int, num_pipelines: int, cap: int, *, wan: float = 4.0, recompute: bool = True,
    trunk_pairs: float | None = None, budget: int = 200,
) -> Setting:  # fmt: skip
    """Three datacenters, forward 60 ms, backward 60 + 60, a transfer of `wan` forwards, 40 ms away."""
    per_kind = kind_costs(forward_ns=60 * MS, input_ns=60 * MS, weight_ns=60 * MS, recompute_ns=60 * MS * recompute)
    crossings = (num_stages // 3 - 1, 2 * num_stages // 3 - 1)
    apart, turns = (
        trunk_costs(
            num_pipelines, num_stages, per_kind, lan_ns=MS, wan_boundaries=crossings, wan_ns=round(wan * 60 * MS),
            wan_latency_ns=40 * MS, sharing=sharing, trunk_pairs=trunk_pairs,
        )
        for sharing in (False, True)
    )  # fmt: skip
    layout = Layout.even(num_pipelines, num_stages, num_mb, 3)
    return Setting(layout, apart, turns, Memory(cap), recompute=recompute, budget=budget)


def time_of(setting: Setting, program) -> int:
    return simulate(program, setting.costs_of(program)).makespan_ns


def test_it_is_never_slower_than_a_baseline_nor_faster_than_the_bound_and_keeps_to_its_memory():
    gains: dict[str, list[float]] = {"gpipe": [], "1f1b": [], "varuna": []}
    for cell in GRID:
        setting = setting_of(*cell)
        program = atlas(setting)
        check(program)
        assert program.memory == setting.memory
        assert program.peak_held(setting.memory) <= setting.memory.cap
        ours = time_of(setting, program)
        bound = lower_bound(setting.costs_of(program), cell[1], setting.memory, recompute=True)
        assert bound.ns <= ours, (cell, bound)
        layout = setting.layout
        for other in (gpipe(layout, recompute=True), one_f_one_b(layout, recompute=True), varuna(setting)):
            theirs = time_of(setting, other)
            assert ours <= theirs, (cell, other.name)
            gains[other.name].append(theirs / ours)
    means = {name: prod(ratios) ** (1 / len(ratios)) for name, ratios in gains.items()}
    # The bar of the issue is set for a larger grid (see bench/); here it must be in sight.
    assert means["varuna"] >= 1.15, means
    assert means["1f1b"] >= 1.4, means
    assert means["gpipe"] >= 1.3, means


@pytest.mark.parametrize("recompute", [False, True])
def test_the_same_setting_gives_the_same_text(recompute: bool):
    texts = {to_text(atlas(setting_of(3, 6, 2, 3, recompute=recompute))) for _ in range(2)}
    assert len(texts) == 1


def test_a_larger_budget_is_never_worse():
    times = [time_of(s, atlas(s)) for s in (setting_of(6, 12, 2, 6, budget=b) for b in (40, 600))]
    assert times[1] <= times[0]


def test_the_search_finds_orders_that_no_fixed_priority_gives():
    setting = setting_of(3, 12, 2, 3, budget=2000)
    rules_only = search(setting, Family(splits=(True, False), sharings=(True, False)), stop_ns=10**18)[-1]
    assert time_of(setting, atlas(setting)) < rules_only.makespan_ns


def test_without_turns_on_offer_it_takes_none():
    setting = setting_of(3, 6, 2, 3)
    alone = Setting(setting.layout, setting.apart, None, setting.memory, recompute=True)
    program = atlas(alone)
    check(program)
    assert not program.sharing


def test_it_counts_its_tries_and_reports_them():
    seen: list[tuple[int, int]] = []
    atlas(setting_of(3, 6, 2, 3, budget=50), progress=lambda done, allowed: seen.append((done, allowed)))
    assert seen
    assert all(done <= allowed == 50 for done, allowed in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# ---- against the exact optimum ------------------------------------------------------------------------------
SMALL = [
    # pipelines, stages, microbatches, cap, transfer in forwards, recompute
    (1, 2, 4, 2, 1, False), (1, 2, 6, 3, 2, False), (1, 3, 4, 3, 1, False), (1, 3, 5, 2, 0, True),
    (1, 4, 4, 4, 1, False), (2, 2, 3, 2, 2, False), (2, 2, 4, 3, 4, False), (2, 2, 3, 2, 2, True),
    (2, 3, 3, 3, 2, False), (1, 4, 6, 4, 0, False),
    (1, 4, 5, 4, 0, True), (1, 3, 6, 3, 1, True),  # here the fixed priorities alone end 4 per cent above
]  # fmt: skip


def test_it_is_within_three_per_cent_of_the_exact_optimum():
    """The search at the setting itself is in every case; Atlas, whose orders come from other settings, on average."""
    pytest.importorskip("ortools")
    ratios = [against_the_optimum(*case) for case in SMALL]
    assert max(searched for searched, _ in ratios) <= 1.03
    assert sum(ours for _, ours in ratios) / len(ratios) <= 1.03


def against_the_optimum(
    pipelines: int, stages: int, num_mb: int, cap: int, wan: int, recompute: bool
) -> tuple[float, float]:
    """(search / optimum, Atlas / optimum)"""
    per_kind = kind_costs(forward_ns=10, input_ns=10, weight_ns=10, recompute_ns=10 * recompute)
    turns = uniform_costs(
        pipelines, stages, per_kind, wan_boundaries=(stages // 2 - 1,), wan_ns=10 * wan, wan_latency_ns=10,
        sharing=True, quantum_ns=0,
    )  # fmt: skip
    layout = Layout.even(pipelines, stages, num_mb, 2)
    # With one way only to use the links both sides face the same problem: turns, never interrupted.
    setting = Setting(layout, turns, turns, Memory(cap), recompute=recompute, budget=600)
    ours = time_of(setting, atlas(setting))
    searched = search(setting, Family(splits=(True, False), sharings=(True, False)))[-1].makespan_ns
    solved = [
        optimum(layout, turns, cap=cap, recompute=recompute, split=split, seconds=20.0, upper_ns=2 * ours)
        for split in (True, False)
    ]
    assert all(found.proven for found in solved)
    best = min(found.makespan_ns for found in solved)
    bound = lower_bound(turns, num_mb, Memory(cap), recompute=recompute).ns
    assert bound <= best
    return searched / best, ours / best


# ---- what turn-taking may and may not gain -------------------------------------------------------------------
def link_limited(num_pipelines: int, *, sharing: bool, trunk_pairs: float | None) -> int:
    """Time for GPipe's forwards and backwards over a link so slow that only its bandwidth counts."""
    layout = Layout.even(num_pipelines, 2, 48, 2)
    costs = trunk_costs(
        num_pipelines, 2, kind_costs(forward_ns=MS, backward_ns=2 * MS), wan_boundaries=(0,), wan_ns=400 * MS,
        sharing=sharing, trunk_pairs=trunk_pairs,
    )  # fmt: skip
    return simulate(gpipe(layout), costs).makespan_ns


@pytest.mark.parametrize("trunk_pairs", [1.0, 2.0])
@pytest.mark.parametrize("num_pipelines", [2, 4])
def test_where_the_trunk_binds_turns_bring_no_bandwidth(num_pipelines: int, trunk_pairs: float):
    together = link_limited(num_pipelines, sharing=False, trunk_pairs=trunk_pairs)
    in_turn = link_limited(num_pipelines, sharing=True, trunk_pairs=trunk_pairs)
    assert in_turn == pytest.approx(together, rel=0.01)
    # Both carry what the trunk can: every transfer of every pipeline, first there, then back.
    carried = 2 * 48 * num_pipelines * 400 * MS / min(trunk_pairs, num_pipelines)
    assert in_turn == pytest.approx(carried, rel=0.01)


def test_where_caps_are_per_pair_a_saturated_link_gains_nothing_but_a_lone_transfer_gains_it_all():
    assert link_limited(4, sharing=True, trunk_pairs=None) == pytest.approx(
        link_limited(4, sharing=False, trunk_pairs=None), rel=0.02
    )
    setting = setting_of(3, 12, 4, 3)
    boundary = setting.layout.num_stages // 3 - 1
    assert setting.turns is not None
    assert setting.turns.work_ns[0, 0, boundary] * 4 == setting.apart.work_ns[0, 0, boundary]


def test_where_caps_are_per_pair_turns_show_their_gain_and_where_the_trunk_binds_they_do_not():
    free, bound = setting_of(3, 12, 4, 3), setting_of(3, 12, 4, 3, trunk_pairs=1.0)
    gains = []
    for setting in (free, bound):
        alone = Setting(setting.layout, setting.apart, None, setting.memory, recompute=True)
        gains.append(time_of(alone, atlas(alone)) / time_of(setting, atlas(setting)))
    assert gains[0] >= 1.25
    assert gains[1] >= 1.0  # what is left is order: earlier first instead of all late together
    assert gains[1] < gains[0]
