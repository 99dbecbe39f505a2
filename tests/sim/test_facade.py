"""The one call from a Program to a Timeline, and the dispatcher that plays an order and freezes it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trunks import trunk_costs

from atlas.cost.table import MAX_NS, Trace, kind_costs, uniform_costs
from atlas.errors import AtlasError, ProgramError
from atlas.ir.assemble import assemble, check, default_turns
from atlas.ir.program import Kind, Layout, Memory, Op
from atlas.schedules.classic import gpipe, one_f_one_b
from atlas.sim import SeededNoise, compiled, lower, simulate
from atlas.sim.policy import Rule, freeze, play
from atlas.sim.simulate import SMALL, Engine, compiled_engine, reference

PER_KIND = kind_costs(forward_ns=60, input_ns=61, weight_ns=59, recompute_ns=57)


def over_the_wan(num_pipelines: int, num_stages: int, **kw):
    return uniform_costs(
        num_pipelines, num_stages, PER_KIND, wan_boundaries=(0,), wan_ns=240, wan_latency_ns=40, quantum_ns=50, **kw
    )


def test_a_timeline_says_where_it_comes_from_and_on_which_link_everything_went():
    program, costs = gpipe(Layout.even(2, 2, 3, 2)), over_the_wan(2, 2)
    timeline = simulate(program, costs)
    assert timeline.program is program
    assert timeline.source == "simulated"
    assert timeline.links == tuple(link.name for link in costs.links)
    assert [timeline.links[k] for k in timeline.transfer_link[:6]] == ["wan 0>1 p0"] * 3 + ["wan 0>1 p1"] * 3
    assert timeline.meta["engine_s"] >= 0
    json.dumps(timeline.meta)


def test_turns_are_taken_by_the_costs_that_say_so():
    program = replace(gpipe(Layout.even(2, 2, 3, 2)), sharing=True)
    timeline = simulate(program, over_the_wan(2, 2, sharing=True))
    assert set(timeline.links) == {"wan 0>1", "wan 1>0"}
    # Two pipelines, both ready at 60, each alone 240 over one pair: in turn 120 each with both pairs.
    assert timeline.transfer_start_ns.reshape(2, 2, 3)[0, :, 0].tolist() == [60, 180]
    assert timeline.transfer_sent_ns.reshape(2, 2, 3)[0, :, 0].tolist() == [180, 300]


def test_small_programs_do_not_load_the_compiled_engine_but_use_it_once_it_is_loaded(monkeypatch):
    used: list[str] = []
    compiled_engine.cache_clear()
    for home, name in ((Engine, "reference"), (compiled, "compiled")):
        run = home.run
        monkeypatch.setattr(home, "run", lambda given, run=run, name=name: (used.append(name), run(given))[1])
    small, large = gpipe(Layout.even(1, 2, 3, 1)), gpipe(Layout.even(2, 8, 1500, 1))
    assert small.num_events < 100
    assert large.num_events > SMALL
    costs = {program: uniform_costs(program.num_pipelines, program.num_stages, PER_KIND) for program in (small, large)}
    times = []
    for program, engine in ((small, "auto"), (large, "auto"), (small, "auto"), (small, "reference")):
        times.append(simulate(program, costs[program], engine=engine).makespan_ns)
    # The first compiled run is the warm-up of loading.
    assert used == ["reference", "compiled", "compiled", "compiled", "reference"]
    assert times[0] == times[2] == times[3]


def test_an_engine_that_does_not_exist_is_refused():
    program = gpipe(Layout.even(1, 2, 3, 1))
    with pytest.raises(AtlasError, match="refrence"):
        simulate(program, uniform_costs(1, 2, PER_KIND), engine="refrence")


def test_a_run_that_no_clock_counts_is_refused_whichever_engine_would_play_it():
    program, costs = gpipe(Layout.even(1, 2, 100, 2)), over_the_wan(1, 2)
    stuck = Trace((0, 10), (1.0, 1e-6), (0, 0))
    slow = replace(
        costs, work_ns=costs.work_ns * 10**9, links=tuple(replace(link, trace=stuck) for link in costs.links)
    )
    for engine in ("reference", "compiled"):
        with pytest.raises(AtlasError, match="check the units"):
            simulate(program, slow, engine=engine)
    over = Trace((0, 10, 20), (1.0, 1e-6, 1.0), (0, 0, 0))  # a link that is cut for a moment is no such thing
    simulate(program, replace(slow, links=tuple(replace(link, trace=over) for link in costs.links)))


def test_no_draw_is_longer_than_an_op_may_be():
    program, costs = gpipe(Layout.even(1, 2, 100, 2)), over_the_wan(1, 2).scaled(10**10)
    assert lower(program, costs, SeededNoise(0, 3.0, 3.0)).op_ns.max() == MAX_NS


def test_jitter_changes_the_times_and_never_the_order():
    program, costs = one_f_one_b(Layout.even(2, 3, 6, 2)), over_the_wan(2, 3)
    plain = simulate(program, costs)
    noisy, again = (simulate(program, costs, jitter=SeededNoise(4, 0.2, 0.2)) for _ in range(2))
    assert noisy.makespan_ns != plain.makespan_ns
    np.testing.assert_array_equal(noisy.op_start_ns, again.op_start_ns)
    same_worker = np.diff(program.op_worker) == 0
    assert (np.diff(noisy.op_start_ns) >= 0)[same_worker].all()


def test_costs_of_another_layout_are_refused():
    with pytest.raises(ProgramError, match="2 pipelines of 2 stages, but the costs are for 1 of 3"):
        simulate(gpipe(Layout.even(2, 2, 3, 1)), uniform_costs(1, 3, PER_KIND))


def test_a_program_with_a_hole_is_refused_by_name():
    program = assemble("holey", Layout(1, 2, 1, ("a", "b")), [[Op(Kind.F, 0, 0), Op(Kind.B, 0, 0)], [Op(Kind.F, 1, 0)]])
    with pytest.raises(ProgramError, match="has no sender"):
        simulate(program, uniform_costs(1, 2, PER_KIND))


@pytest.mark.parametrize("engine", [reference, compiled.run])
def test_a_deadlock_is_an_error_that_points_to_the_checker(engine):
    orders = [[Op(Kind.F, 0, 0), Op(Kind.B, 0, 0), Op(Kind.F, 0, 1), Op(Kind.B, 0, 1)]]
    orders.append([Op(Kind.F, 1, 0), Op(Kind.F, 1, 1), Op(Kind.B, 1, 0), Op(Kind.B, 1, 1)])
    program = assemble("stuck", Layout(1, 2, 2, ("a", "b")), orders)
    with pytest.raises(ProgramError, match=r"deadlocks: 2 workers never finish.*atlas.ir.assemble.check"):
        engine(lower(program, uniform_costs(1, 2, PER_KIND)))


def test_the_simulator_is_imported_without_numba():
    code = "import sys, atlas.sim, atlas.schedules; assert 'numba' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def memories(rule: Rule, num_mb: int) -> list[Memory]:
    """Counted in microbatches; in halves, where backwards are split; with room for activations, where recomputed."""
    caps = range(1, num_mb + 1)
    found = [Memory(cap) for cap in caps]
    if rule.split:
        found += [Memory(2 * cap, (2, 0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 2, 1, 1, 0, 0, 0, 0)) for cap in caps]
    if rule.recompute:
        found += [Memory(3 + cap, (1, 3, 0, 0, 0, 0, 0, 0, 0), (0, 0, 4, 0, 4, 0, 0, 0, 0)) for cap in caps]
    return found


# ---- the dispatcher -----------------------------------------------------------------------------------------
@given(st.data())
@settings(max_examples=120)
def test_an_order_that_was_played_runs_in_the_time_it_was_played_in_and_within_its_memory(data: st.DataObject):
    pipelines, stages, num_mb = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    layout = Layout.even(pipelines, stages, num_mb, min(2, stages))
    rule = Rule(recompute=data.draw(st.booleans()), split=data.draw(st.booleans()))
    sharing = data.draw(st.booleans())
    costs = trunk_costs(
        pipelines, stages, PER_KIND, lan_ns=int(rng.integers(0, 50)), wan_boundaries=(0,) if stages > 1 else (),
        wan_ns=int(rng.integers(1, 500)), wan_latency_ns=int(rng.integers(0, 100)), sharing=sharing,
        trunk_pairs=None if sharing else data.draw(st.sampled_from([None, 1.5])),
        quantum_ns=data.draw(st.sampled_from([0, 30, 10**6])),
    )  # fmt: skip
    # Every op its own length: who is served must not hang on two events of the same nanosecond.
    costs.compute_ns[:] = rng.integers(1, 10**6, costs.compute_ns.shape)
    memory = data.draw(st.sampled_from(memories(rule, num_mb)))
    keys = rng.integers(0, 1000, (pipelines * stages, 4, num_mb))
    turn = rng.permutation(default_turns(layout))
    played = play(layout, costs, rule, memory, keys, turn)
    program = freeze("played", layout, rule, played, memory=memory, turn=turn, sharing=sharing)
    check(program)
    assert program.peak_held(memory) <= memory.cap
    timeline = simulate(program, costs)
    assert timeline.makespan_ns == played.makespan_ns
    np.testing.assert_array_equal(timeline.transfer_start_ns, played.transfer_start_ns)


def test_the_dispatcher_never_idles_while_something_is_ready():
    # One stage, room for all: whatever the keys, compute without a pause.
    layout = Layout.even(1, 1, 5, 1)
    costs = uniform_costs(1, 1, PER_KIND)
    keys = np.random.default_rng(0).integers(0, 99, (1, 4, 5))
    for rule in (Rule(), Rule(split=True), Rule(recompute=True)):
        backward = 61 + 59 if rule.split else PER_KIND[Kind.B]
        played = play(layout, costs, rule, Memory(5), keys, default_turns(layout))
        assert played.makespan_ns == 5 * (60 + backward)


def test_memory_for_less_than_one_microbatch_is_refused_with_the_remedy():
    layout = Layout.even(1, 2, 2, 1)
    memory = Memory(2, (1, 3, 0, 0, 0, 0, 0, 0, 0), (0, 0, 4, 0, 0, 0, 0, 0, 0))
    with pytest.raises(ProgramError, match="raise the memory cap"):
        play(layout, uniform_costs(1, 2, PER_KIND), Rule(recompute=True), memory, np.zeros((2, 4, 2), np.int64),
             default_turns(layout))  # fmt: skip
