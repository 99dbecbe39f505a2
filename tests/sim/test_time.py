"""What must hold of any Timeline, whichever Program and costs: nothing is done twice at once, nothing before its time,
and time has no unit of its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import costs_for, programs

from atlas.cost.table import FAIR, PRIVATE, TURNS, Costs, kind_costs, uniform_costs
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Kind, Layout, Program
from atlas.schedules.classic import gpipe, one_f_one_b
from atlas.sim import SeededNoise, lower, simulate
from atlas.sim.lower import Events
from atlas.sim.simulate import reference

ALL = (PRIVATE, FAIR, TURNS)


def run(program: Program, costs: Costs) -> Events:
    return reference(lower(program, costs))


# ---- causality ----------------------------------------------------------------------------------------------
@given(st.data())
@settings(max_examples=100)
def test_a_worker_does_one_op_at_a_time_in_its_order_each_for_its_length(data: st.DataObject):
    program = data.draw(programs())
    costs = data.draw(costs_for(program, ALL))
    events = run(program, costs)
    lengths = costs.compute_ns[program.op_worker // program.num_ranks, program.stage, program.kind]
    np.testing.assert_array_equal(events.op_end_ns - events.op_start_ns, lengths)
    same_worker = program.op_worker[1:] == program.op_worker[:-1]
    assert (events.op_start_ns[1:] >= events.op_end_ns[:-1])[same_worker].all()


@given(st.data())
@settings(max_examples=100)
def test_no_op_starts_before_its_input_and_none_waits_without_a_reason(data: st.DataObject):
    program = data.draw(programs())
    events = run(program, data.draw(costs_for(program, ALL)))
    src, dst = program.transfer_src, program.transfer_dst
    np.testing.assert_array_equal(events.ready_ns, events.op_end_ns[src])
    assert (events.op_start_ns[dst] >= events.arrive_ns).all()
    # An op starts the moment the last thing it waits for is there: no engine may idle on top of the rules.
    due = np.zeros(program.num_ops, np.int64)
    due[1:] = np.where(program.op_worker[1:] == program.op_worker[:-1], events.op_end_ns[:-1], 0)
    np.maximum.at(due, dst, events.arrive_ns)
    alone = ~np.isin(program.kind, [Kind.SYNC, Kind.NORM])
    np.testing.assert_array_equal(events.op_start_ns[alone], due[alone])
    for members in _meetings(program):
        assert set(events.op_start_ns[members].tolist()) == {int(due[members].max())}


def _meetings(program: Program) -> list[np.ndarray]:
    """SYNC: a rank over all pipelines; NORM: everybody; each once an iteration."""
    rank = program.op_worker % program.num_ranks
    found = []
    for iteration in range(program.num_iterations):
        now = program.microbatch == iteration
        found += [np.flatnonzero((program.kind == Kind.SYNC) & now & (rank == r)) for r in range(program.num_ranks)]
        found.append(np.flatnonzero((program.kind == Kind.NORM) & now))
    return [members for members in found if len(members)]


# ---- scale --------------------------------------------------------------------------------------------------
@given(st.data(), st.integers(2, 5))
@settings(max_examples=100)
def test_multiplying_every_duration_multiplies_the_timeline_exactly(data: st.DataObject, factor: int):
    program = data.draw(programs())
    costs = data.draw(costs_for(program, (PRIVATE, TURNS), traces=False))
    for once, scaled in zip(run(program, costs), run(program, costs.scaled(factor)), strict=True):
        np.testing.assert_array_equal(scaled, once * factor)


@given(st.data())
@settings(max_examples=100)
def test_doubling_every_duration_doubles_fair_and_varying_links_up_to_rounding(data: st.DataObject):
    # A fair share of a nanosecond is rounded up: each end may be one off, and passes that on to what follows.
    program = data.draw(programs())
    costs = data.draw(costs_for(program, (FAIR,), longest_ns=(10**9,)))
    slack = 40 * (program.num_transfers + 1)
    for once, twice in zip(run(program, costs), run(program, costs.scaled(2)), strict=True):
        assert np.abs(twice - 2 * once).max(initial=0) <= slack


# ---- monotony -----------------------------------------------------------------------------------------------
@given(st.data())
@settings(max_examples=150)
def test_over_private_links_a_longer_op_or_transfer_never_shortens_anything(data: st.DataObject):
    # Not so where a link chooses: a longer op can let another transfer go first (Graham's anomalies).
    program = data.draw(programs())
    costs = data.draw(costs_for(program, (PRIVATE,), traces=False))
    tables = lower(program, costs)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    longer = tables._replace(
        op_ns=tables.op_ns + rng.integers(0, 3, tables.op_ns.shape) * rng.integers(0, 100),
        transfer_work_ns=tables.transfer_work_ns + rng.integers(0, 3, tables.transfer_work_ns.shape),
    )
    before, after = reference(tables), reference(longer)
    for once, later in zip(before, after, strict=True):
        assert (later >= once).all()


@given(st.data())
@settings(max_examples=60)
def test_a_second_server_never_delays_anything(data: st.DataObject):
    program = data.draw(programs())
    costs = data.draw(costs_for(program, (PRIVATE,), traces=False, max_servers=2))
    more = replace(costs, links=tuple(replace(link, servers=link.servers + 1) for link in costs.links))
    for once, roomier in zip(run(program, costs), run(program, more), strict=True):
        assert (roomier <= once).all()


# ---- jitter -------------------------------------------------------------------------------------------------
def test_jitter_is_seeded_and_leaves_the_median_where_it_was():
    layout = Layout.even(2, 4, 64, 2)
    costs = uniform_costs(2, 4, kind_costs(forward_ns=10**6, backward_ns=2 * 10**6), wan_boundaries=(1,), wan_ns=10**6)
    program = gpipe(layout)
    plain = lower(program, costs)
    one, same, other = (lower(program, costs, SeededNoise(seed, 0.1, 0.3)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.op_ns, same.op_ns)
    assert (one.op_ns != other.op_ns).any()
    assert np.median(one.op_ns / plain.op_ns) == pytest.approx(1.0, abs=0.02)
    assert np.std(np.log(one.op_ns / plain.op_ns)) == pytest.approx(0.1, rel=0.1)
    crossing = plain.transfer_work_ns > 0
    assert np.std(np.log(one.transfer_work_ns[crossing] / 10**6)) == pytest.approx(0.3, rel=0.15)
    np.testing.assert_array_equal(lower(program, costs, SeededNoise(5)).op_ns, plain.op_ns)


# ---- several iterations -------------------------------------------------------------------------------------
def test_the_steady_period_of_a_saturated_pipeline_is_its_work():
    # One stage: every iteration takes exactly its compute, and no fill or drain between two.
    program = repeated(gpipe(Layout.even(1, 1, 4, 1)), 6)
    timeline = simulate(program, uniform_costs(1, 1, kind_costs(forward_ns=3, backward_ns=5)))
    assert timeline.iteration_ns == 32
    assert timeline.makespan_ns == 6 * 32
    assert timeline.utilization == 1.0


def test_an_optimizer_step_closes_every_iteration_before_the_next_begins():
    program = repeated(with_optimizer(one_f_one_b(Layout.even(2, 3, 4, 1)), norm=True), 3)
    costs = uniform_costs(2, 3, kind_costs(forward_ns=3, backward_ns=5, sync_ns=7, norm_ns=2, step_ns=11))
    timeline = simulate(program, costs)
    for worker in range(program.num_workers):
        ops = program.ops(worker)
        steps = [i for i, op in enumerate(ops) if op.kind == Kind.STEP]
        assert [ops[i].microbatch for i in steps] == [0, 1, 2]
        assert [(i + 1) % (len(ops) // 3) for i in steps] == [0, 0, 0]
    # The norm is a meeting of all: every iteration takes what the first one took.
    assert timeline.makespan_ns == 3 * timeline.iteration_ns
