"""The lower bound is one: no Program that keeps to the rules is faster, however it was made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exact_optimum import optimum
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import costs_for, programs
from trunks import trunk_costs

from atlas.cost.table import Costs, kind_costs, lower_bound, uniform_costs
from atlas.errors import AtlasError
from atlas.ir.program import Kind, Layout, Memory, Program
from atlas.schedules.classic import gpipe, one_f_one_b
from atlas.sim import simulate

COUNTED = Memory(99)
HALVED = Memory(99, (2, 0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 2, 1, 1, 0, 0, 0, 0))
RULES = {"none": None, "a microbatch at a time": COUNTED, "half a microbatch at a time": HALVED}


@given(st.data())
@settings(max_examples=300)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_no_program_is_faster_than_the_bound(rule: Memory | None, data: st.DataObject):
    program: Program = data.draw(programs(max_iterations=1))
    costs: Costs = data.draw(costs_for(program))
    first = [program.stage_rank.index(rank) for rank in program.stage_rank]
    later = [s for s in range(program.num_stages) if first[s] != s]
    # What closes an iteration is charged to a worker's first stage, as `price` does it.
    costs.compute_ns[:, later, Kind.SYNC :] = 0
    recomputed = int((program.kind == Kind.R).sum())
    everywhere = recomputed == program.num_pipelines * program.num_stages * program.num_microbatches
    memory = None if rule is None else replace(rule, cap=program.peak_held(rule))
    closing = bool((program.kind == Kind.STEP).any())
    bound = lower_bound(costs, program.num_microbatches, memory, recompute=everywhere, closing=closing)
    assert bound.ns <= simulate(program, costs).makespan_ns, bound.reason


@pytest.mark.parametrize(("depth", "num_mb"), [(1, 3), (4, 8), (6, 6)])
def test_it_is_met_by_gpipe_where_nothing_can_be_faster(depth: int, num_mb: int):
    costs = uniform_costs(1, depth, kind_costs(forward_ns=7, backward_ns=13))
    # Split backwards would be faster: forbid them by making the halves as long as the whole.
    costs.compute_ns[:, :, Kind.I] = 13
    makespan = simulate(gpipe(Layout.even(1, depth, num_mb, 1)), costs).makespan_ns
    assert lower_bound(costs, num_mb, None, recompute=False).ns == makespan


def test_less_memory_never_lowers_it_and_recomputing_never_does():
    costs = uniform_costs(
        2, 4, kind_costs(forward_ns=60, backward_ns=120, recompute_ns=60), wan_boundaries=(1,), wan_ns=240
    )
    bounds = [lower_bound(costs, 12, Memory(cap), recompute=False).ns for cap in (1, 2, 4, 8, 12)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]
    for cap, bound in zip((1, 2, 4, 8, 12), bounds, strict=True):
        assert lower_bound(costs, 12, Memory(cap), recompute=True).ns >= bound
    near = uniform_costs(2, 4, kind_costs(forward_ns=60, backward_ns=120, recompute_ns=60))
    plain, again = (lower_bound(near, 12, Memory(4), recompute=recompute).ns for recompute in (False, True))
    assert again >= plain + 11 * 60


def test_a_slow_link_is_the_reason_where_it_is():
    costs = uniform_costs(2, 2, kind_costs(forward_ns=1, backward_ns=2), wan_boundaries=(0,), wan_ns=1000)
    bound = lower_bound(costs, 8, None, recompute=False)
    assert "link wan" in bound.reason
    assert bound.ns >= 8 * 1000


# ---- against the exact optimum ------------------------------------------------------------------------------
def small_case(pipelines: int, stages: int, wan_ns: int, *, sharing: bool) -> Costs:
    return uniform_costs(
        pipelines, stages, kind_costs(forward_ns=10, backward_ns=20), lan_ns=0, wan_boundaries=(0,), wan_ns=wan_ns,
        wan_latency_ns=10, sharing=sharing, quantum_ns=0,
    )  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("pipelines", "stages", "num_mb", "cap", "wan_ns"), [(1, 2, 4, 2, 20), (1, 3, 4, 3, 10), (2, 2, 3, 2, 20)]
)
def test_it_is_never_above_the_exact_optimum(
    pipelines: int, stages: int, num_mb: int, cap: int, wan_ns: int, split: bool
):
    pytest.importorskip("ortools")
    costs = small_case(pipelines, stages, wan_ns, sharing=pipelines > 1)
    layout = Layout.even(pipelines, stages, num_mb, stages)
    best = optimum(layout, costs, cap=cap, recompute=False, split=split, seconds=20.0)
    assert best.proven
    bound = lower_bound(costs, num_mb, Memory(cap), recompute=False).ns
    assert bound <= best.makespan_ns
    assert bound >= 0.6 * best.makespan_ns  # and says something


def test_the_exact_optimum_of_one_stage_is_its_work_and_1f1b_is_optimal_without_communication():
    pytest.importorskip("ortools")
    costs = uniform_costs(1, 3, kind_costs(forward_ns=10, backward_ns=20))
    layout = Layout.even(1, 3, 4, 1)
    best = optimum(layout, costs, cap=3, recompute=False, split=False, seconds=20.0)
    assert best.proven
    assert best.makespan_ns == simulate(one_f_one_b(layout), costs).makespan_ns == 180


def test_the_exact_optimum_says_what_is_outside_its_model():
    pytest.importorskip("ortools")
    costs = trunk_costs(2, 2, kind_costs(forward_ns=1, backward_ns=2), wan_boundaries=(0,), wan_ns=4, trunk_pairs=1.0)
    with pytest.raises(AtlasError, match="private and turn-taking links of constant rate only"):
        optimum(Layout.even(2, 2, 2, 2), costs, cap=2, recompute=False, split=False)
