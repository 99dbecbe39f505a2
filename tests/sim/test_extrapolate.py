"""Extrapolation over microbatches: exact wherever it is offered, and offered where it should be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.cost.table import Costs, Trace, kind_costs, uniform_costs
from atlas.ir.program import Layout, Program
from atlas.ir.timeline import Timeline
from atlas.schedules import gpipe, one_f_one_b
from atlas.sim import simulate
from atlas.sim.extrapolate import Extrapolated, extrapolate


def extrapolated(build, costs: Costs, num_mb: int) -> Extrapolated:
    found = extrapolate(build, costs, num_mb)
    assert found is not None
    return found


def costs_of(num_pipelines: int, num_stages: int, num_dcs: int, **network: int | bool):
    dcs = Layout.even(num_pipelines, num_stages, 1, num_dcs).rank_dc
    boundaries = tuple(b for b in range(num_stages - 1) if dcs[b] != dcs[b + 1])
    kinds = kind_costs(forward_ns=11, backward_ns=23, recompute_ns=7)
    return uniform_costs(num_pipelines, num_stages, kinds, wan_boundaries=boundaries, **network)


@given(
    num_pipelines=st.sampled_from([1, 2]),
    num_stages=st.sampled_from([1, 2, 4]),
    wan_ns=st.integers(0, 80),
    latency_ns=st.integers(0, 50),
    sharing=st.booleans(),
    quantum_ns=st.sampled_from([0, 5]),
    schedule=st.sampled_from([one_f_one_b, gpipe]),
    num_mb=st.sampled_from([75, 102]),
)
def test_what_is_extrapolated_is_what_a_full_simulation_finds(
    num_pipelines: int, num_stages: int, wan_ns: int, latency_ns: int, sharing: bool, quantum_ns: int, schedule, num_mb
):
    num_dcs = min(2, num_stages)
    costs = costs_of(
        num_pipelines, num_stages, num_dcs, wan_ns=wan_ns, wan_latency_ns=latency_ns, sharing=sharing,
        quantum_ns=quantum_ns,
    )  # fmt: skip

    def build(m: int) -> Program:
        return schedule(Layout.even(num_pipelines, num_stages, m, num_dcs), recompute=True)

    assert extrapolated(build, costs, num_mb).makespan_ns == simulate(build(num_mb), costs).makespan_ns


def test_a_long_1f1b_needs_few_microbatches():
    costs = costs_of(2, 4, 2, wan_ns=40, wan_latency_ns=30, sharing=True)
    found = extrapolated(lambda m: one_f_one_b(Layout.even(2, 4, m, 2)), costs, 10_000)
    assert found.timeline.program.num_microbatches < 100
    assert found.makespan_ns > 10_000 * 34


def test_a_link_that_varies_over_time_is_simulated_in_full():
    costs = costs_of(1, 2, 2, wan_ns=40)
    trace = Trace((0, 500), (1.0, 0.5), (0, 0))
    costs = replace(costs, links=tuple(replace(link, trace=trace) for link in costs.links))
    assert (
        extrapolated(lambda m: one_f_one_b(Layout.even(1, 2, m, 2)), costs, 300).timeline.program.num_microbatches
        == 300
    )


@pytest.mark.parametrize("num_mb", [1, 2, 30])
def test_few_microbatches_are_simulated_in_full(num_mb: int):
    costs = costs_of(1, 4, 2, wan_ns=40)
    assert (
        extrapolated(lambda m: one_f_one_b(Layout.even(1, 4, m, 2)), costs, num_mb).timeline.program.num_microbatches
        == num_mb
    )


def test_what_is_too_long_to_be_simulated_in_full_is_not():
    costs = costs_of(1, 2, 2, wan_ns=40)
    assert extrapolate(lambda m: gpipe(Layout.even(1, 2, m, 2)), costs, 300, in_full=299) is None
    assert extrapolate(lambda m: gpipe(Layout.even(1, 2, m, 2)), costs, 300, in_full=300) is not None


def test_everything_that_ends_a_worker_s_run_is_late_by_the_same():
    costs = costs_of(2, 4, 2, wan_ns=40, wan_latency_ns=30, sharing=True)

    def ends(timeline: Timeline) -> np.ndarray:
        last = np.zeros(timeline.program.num_workers, np.int64)
        np.maximum.at(last, timeline.program.op_worker, timeline.op_end_ns)
        return last

    found = extrapolated(lambda m: one_f_one_b(Layout.even(2, 4, m, 2)), costs, 500)
    full = simulate(one_f_one_b(Layout.even(2, 4, 500, 2)), costs)
    assert (ends(found.timeline) + found.later_ns).tolist() == ends(full).tolist()
