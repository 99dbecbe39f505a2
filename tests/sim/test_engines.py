"""Two engines, one truth: whatever the Program, whatever the costs, event for event."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import costs_for, programs, with_orders
from trunks import trunk_costs

from atlas.cost.table import FAIR, PRIVATE, TURNS, kind_costs
from atlas.errors import ProgramError
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout
from atlas.schedules.classic import one_f_one_b
from atlas.sim import SeededNoise, Tables, compiled, lower
from atlas.sim.lower import Events
from atlas.sim.simulate import reference


def assert_equal_event_for_event(tables: Tables) -> Events:
    plain, fast = reference(tables), compiled.run(tables)
    for name, expected, found in zip(Events._fields, plain, fast, strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)
    return plain


@given(st.data(), st.sampled_from([(PRIVATE,), (FAIR,), (TURNS,), (PRIVATE, FAIR, TURNS)]))
@settings(max_examples=300)
def test_the_compiled_engine_equals_the_reference_event_for_event(data: st.DataObject, policies: tuple[int, ...]):
    program = data.draw(programs())
    costs = data.draw(costs_for(program, policies))
    jitter = data.draw(st.sampled_from([None, SeededNoise(7, 0.3, 0.3)]))
    events = assert_equal_event_for_event(lower(program, costs, jitter))
    assert all((times >= 0).all() for times in events)  # nothing was left out


def test_engines_agree_on_a_cell_of_four_pipelines_over_four_datacenters():
    layout = Layout.even(4, 16, 48, 4)
    program = repeated(with_optimizer(one_f_one_b(layout, recompute=True), norm=True), 2)
    per_kind = kind_costs(
        forward_ns=10_000_000, backward_ns=20_000_000, recompute_ns=9_999_999, sync_ns=50_000_000, step_ns=7
    )
    for sharing, pairs in ((True, None), (False, None), (False, 2.5)):
        costs = trunk_costs(
            4, 16, per_kind, lan_ns=300_000, wan_boundaries=(3, 7, 11), wan_ns=40_000_000,
            wan_latency_ns=20_000_000, sharing=sharing, trunk_pairs=pairs,
        )  # fmt: skip
        events = assert_equal_event_for_event(lower(program, costs, SeededNoise(1, 0.05, 0.2)))
        assert len(events.op_end_ns) + len(events.sent_ns) == program.num_events > 29_000


@given(st.data())
@settings(max_examples=60)
def test_the_same_tables_give_the_same_events(data: st.DataObject):
    program = data.draw(programs())
    costs = data.draw(costs_for(program))
    first, second = (lower(program, costs, SeededNoise(3, 0.2, 0.2)) for _ in range(2))
    for engine in (reference, compiled.run):
        for one, other in zip(engine(first), engine(second), strict=True):
            np.testing.assert_array_equal(one, other)


@given(st.data(), st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_engines_find_the_same_workers_stuck(data: st.DataObject, rng):
    program = data.draw(programs(max_iterations=1))
    orders = [program.ops(w) for w in range(program.num_workers)]
    worker = rng.randrange(len(orders))
    rng.shuffle(orders[worker])
    tables = lower(with_orders(program, orders), data.draw(costs_for(program)))
    messages = []
    for engine in (reference, compiled.run):
        try:
            engine(tables)
            messages.append("finished")
        except ProgramError as error:
            messages.append(str(error))
    assert messages[0] == messages[1]
