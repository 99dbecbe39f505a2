"""Photonic rails in the simulator: both engines agree, circuits are one-to-one, and nothing is cut off."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import costs_for, programs

from atlas.cost.table import FAIR, PRIVATE, TURNS, Circuits, Costs, kind_costs, uniform_costs
from atlas.errors import ProgramError
from atlas.ir.analysis import bubbles, summary
from atlas.ir.assemble import assemble, check, repeated, with_optimizer
from atlas.ir.program import Kind, Layout, Op, Program
from atlas.schedules.classic import one_f_one_b
from atlas.sim import SeededNoise, compiled, lower, simulate
from atlas.sim.lower import Events, Tables
from atlas.sim.phases import fabric_rows, reconfigurations
from atlas.sim.simulate import reference

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from common.opus import LLAMA_128, LLAMA_128_ON_DEMAND, LLAMA_128_PROVISIONED, SMOKE, SMOKE_PROVISIONED, OpusCase

MS = 1_000_000


def circuits(num_ranks: int, delay_ns: int, *, provision: bool) -> Circuits:
    return Circuits((True,) * num_ranks, (delay_ns,) * num_ranks, (provision,) * num_ranks)


def checked(tables: Tables) -> Events:
    """The events, the same from both engines."""
    plain, fast = reference(tables), compiled.run(tables)
    for name, expected, found in zip(Events._fields, plain, fast, strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)
    return plain


def require_physical(program: Program, costs: Costs, events: Events) -> None:
    """No byte on circuits that change, and each worker has hops or ring, never both."""
    assert costs.circuits is not None
    arrive, start = (a.reshape(program.transfer_shape) for a in (events.arrive_ns, events.start_ns))
    sync = (program.kind == Kind.SYNC) & (program.op_worker >= 0)
    rank = program.op_worker % program.num_ranks
    for row in fabric_rows(program, costs.circuits, events.gate_ns):
        ranks, i = row["ranks"], row["iteration"]
        slots = slice(i * program.num_microbatches, (i + 1) * program.num_microbatches)
        if row["to"] == "hop":
            mine = [
                b
                for b in range(program.num_stages - 1)
                if sorted((program.stage_rank[b], program.stage_rank[b + 1])) == ranks
            ]
            assert (start[:, row["pipeline"], mine, slots] >= row["end_ns"]).all()
            before = sync & (program.microbatch == i - 1) & np.isin(rank, ranks)
            assert (events.op_end_ns[before] <= row["start_ns"]).all()
        else:
            mine = [
                b
                for b in range(program.num_stages - 1)
                if ranks[0] in (program.stage_rank[b], program.stage_rank[b + 1])
                and program.stage_rank[b] != program.stage_rank[b + 1]
                and not program.boundary_crosses[b]
            ]
            assert (arrive[:, :, mine, slots] <= row["start_ns"]).all()
            now = sync & (program.microbatch == i) & (rank == ranks[0])
            assert (events.op_start_ns[now] >= row["end_ns"]).all()


@given(
    st.data(),
    st.sampled_from([(PRIVATE,), (PRIVATE, FAIR, TURNS)]),
    st.sampled_from([0, 1, 17, 1000, 10**6]),
    st.booleans(),
)
@settings(max_examples=150)
def test_engines_agree_and_circuits_are_one_to_one(
    data: st.DataObject, policies: tuple[int, ...], delay_ns: int, provision: bool
) -> None:
    program = data.draw(programs())
    costs = data.draw(costs_for(program, policies))
    costs = replace(costs, circuits=circuits(program.num_ranks, delay_ns, provision=provision))
    jitter = data.draw(st.sampled_from([None, SeededNoise(7, 0.3, 0.3)]))
    events = checked(lower(program, costs, jitter))
    require_disjoint(program, costs, events)
    assert all((times >= 0).all() for times in events[:6])  # everything has happened
    require_physical(program, costs, events)


def require_disjoint(program: Program, costs: Costs, events: Events, *, ring: tuple[Kind, ...] = (Kind.SYNC,)) -> None:
    """Seen from each rank alone: its hops and its ring are never in use at once, and a change lies between them."""
    assert costs.circuits is not None
    start, arrive = (a.reshape(program.transfer_shape) for a in (events.start_ns, events.arrive_ns))
    rank = program.op_worker % program.num_ranks
    for own in range(program.num_ranks):
        ends = [(program.stage_rank[b], program.stage_rank[b + 1]) for b in range(program.num_stages - 1)]
        touching = [b for b, (x, y) in enumerate(ends) if own in (x, y) and x != y and not program.boundary_crosses[b]]
        sums = np.isin(program.kind, ring) & (rank == own)
        uses = [
            (t, e, "hop") for t, e in zip(start[:, :, touching].ravel(), arrive[:, :, touching].ravel(), strict=True)
        ]
        uses += [(t, e, "ring") for t, e in zip(events.op_start_ns[sums], events.op_end_ns[sums], strict=True)]
        until = {"hop": -(10**18), "ring": -(10**18)}
        for begin, end, what in sorted(uses):
            other = "ring" if what == "hop" else "hop"
            assert not touching or begin >= until[other] + costs.circuits.delay_ns[own]
            until[what] = max(until[what], end)


@given(st.data(), st.sampled_from([0, 1, 17, 1000, 10**6]), st.booleans(), st.integers(1, 3))
@settings(max_examples=60)
def test_sums_of_each_stage_change_circuits_within_an_iteration(
    data: st.DataObject, delay_ns: int, provision: bool, iterations: int
) -> None:
    dp, pp = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    case = OpusCase(dp, pp, 1, pp * data.draw(st.integers(1, 4)), 1.0, 1.0, 1.0)
    program = repeated(case.program(), iterations)
    check(program)
    costs = data.draw(costs_for(program, (PRIVATE,)))
    costs = replace(costs, circuits=circuits(pp, delay_ns, provision=provision))
    events = checked(lower(program, costs))
    require_disjoint(program, costs, events)
    if pp > 2:  # ring, hop, ring in each iteration of a rank in the middle
        middle = [one for one in reconfigurations(program, costs.circuits) if one.to == "ring" and one.ranks == (1,)]
        assert len(middle) == iterations


@given(st.data(), st.sampled_from([0, 17, 10**6]), st.booleans())
@settings(max_examples=60)
def test_with_zero_1_the_ring_stays_until_the_weights_are_exchanged(
    data: st.DataObject, delay_ns: int, provision: bool
) -> None:
    program = data.draw(programs())
    costs = data.draw(costs_for(program, (PRIVATE, FAIR)))
    switching = replace(circuits(program.num_ranks, delay_ns, provision=provision), until_step=True)
    events = checked(lower(program, replace(costs, circuits=switching)))
    if (program.kind == Kind.SYNC).any():
        require_disjoint(program, replace(costs, circuits=switching), events, ring=(Kind.SYNC, Kind.STEP))


def test_a_zero_1_step_delays_the_next_hops() -> None:
    program, costs = two_stages(50, provision=True, iterations=3)
    assert costs.circuits is not None
    longer = replace(costs, compute_ns=costs.compute_ns.copy())
    longer.compute_ns[:, :, Kind.STEP] = 30 * MS
    sharded = replace(longer, circuits=replace(costs.circuits, until_step=True))
    assert makespan_ns(program, sharded) == makespan_ns(program, longer) + 3 * 30 * MS  # STEP hides no change


def test_pipelines_that_sum_in_different_orders_are_refused() -> None:
    layout = Layout(2, 4, 1, ("dc", "dc"), (0, 1, 0, 1))
    forward = [[Op(Kind.F, s, 0) for s in (r, r + 2)] + [Op(Kind.B, s, 0) for s in (r + 2, r)] for r in range(2)]
    sums = [[Op(Kind.SYNC, s, 0) for s in (r, r + 2)] for r in range(2)]
    orders = [forward[r] + (sums[r] if c else sums[r][::-1]) for c in range(2) for r in range(2)]
    program = assemble("mixed", layout, orders)
    with pytest.raises(ProgramError, match=r"rank 0 in different orders.*same order"):
        reconfigurations(program, circuits(2, MS, provision=True))


# ---- the cases of Opus: bench/common/opus.py -------------------------------------------------------------------------
@pytest.mark.parametrize("delay_ms", [1, 10, 50])
def test_opus_smoke_case_on_demand_waits_for_two_changes(delay_ms: int) -> None:
    added_s = SMOKE.photonic_s(delay_ms, provision=False) - SMOKE.photonic_s(0, provision=False)
    assert added_s * 1e3 == pytest.approx(2 * delay_ms, rel=0.01)


@pytest.mark.parametrize(("delay_ms", "added_ms"), SMOKE_PROVISIONED.items())
def test_opus_smoke_case_provisioned(delay_ms: int, added_ms: float) -> None:
    added_s = SMOKE.photonic_s(delay_ms, provision=True) - SMOKE.photonic_s(0, provision=True)
    assert added_s * 1e3 == pytest.approx(added_ms, abs=2)


@pytest.mark.parametrize(("provision", "published"), [(False, LLAMA_128_ON_DEMAND), (True, LLAMA_128_PROVISIONED)])
def test_opus_llama_case_on_128_h200(provision: bool, published: dict[int, float]) -> None:
    for delay_ms, percent in published.items():
        assert 100 * LLAMA_128.overhead(delay_ms, provision=provision) == pytest.approx(percent, abs=1.5)


# ---- two pipelines of two stages -----------------------------------------------------------------------------------
def two_stages(delay_ms: float, *, provision: bool, iterations: int = 1) -> tuple[Program, Costs]:
    """From the end of the gradient ring to the first activation are 1.1 ms."""
    program = repeated(with_optimizer(one_f_one_b(Layout.even(2, 2, 8, 1))), iterations)
    per_kind = kind_costs(forward_ns=MS, backward_ns=7690 * MS, sync_ns=700 * MS, step_ns=MS // 10)
    costs = uniform_costs(2, 2, per_kind, lan_ns=2 * MS, lan_latency_ns=MS // 50)
    return program, replace(costs, circuits=circuits(2, round(delay_ms * MS), provision=provision))


def makespan_ns(program: Program, costs: Costs) -> int:
    events = checked(lower(program, costs))
    return int(events.op_end_ns.max())


@pytest.mark.parametrize("delay_ms", [1, 10, 50])
def test_on_demand_two_reconfigurations_an_iteration_are_waited_for(delay_ms: int) -> None:
    program, costs = two_stages(delay_ms, provision=False)
    plain = makespan_ns(program, replace(costs, circuits=None))
    assert makespan_ns(program, costs) - plain == pytest.approx(2 * delay_ms * MS, rel=0.01)
    assert len({(row.to, row.iteration) for row in reconfigurations(program, costs.circuits)}) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(("delay_ms", "added_ms"), [(1, 0.0), (10, 8.9), (50, 48.9)])
def test_provisioned_reconfigurations_hide_behind_compute(delay_ms: int, added_ms: float) -> None:
    program, costs = two_stages(delay_ms, provision=True)
    plain = makespan_ns(program, replace(costs, circuits=None))
    assert (makespan_ns(program, costs) - plain) / MS == pytest.approx(added_ms, abs=0.1)


def test_waits_for_circuits_are_bubbles_of_their_own() -> None:
    program, costs = two_stages(50, provision=False)
    timeline = simulate(program, costs)
    found = bubbles(timeline)
    assert int(found.busy_ns.sum() + (found.end_ns - found.start_ns).sum()) == timeline.makespan_ns * 4
    assert summary(timeline)["bubbles_s"]["fabric"] == pytest.approx(
        6 * 0.05, rel=0.02
    )  # two receivers, four in the ring
    electrical = simulate(program, replace(costs, circuits=None))
    assert "fabric" not in summary(electrical)["bubbles_s"]


def test_enough_ports_are_the_electrical_network_to_the_nanosecond() -> None:
    program, costs = two_stages(50, provision=True, iterations=3)
    still = replace(costs, circuits=replace(costs.circuits, switches=(False, False)))  # type: ignore[type-var]
    electrical = checked(lower(program, replace(costs, circuits=None)))
    for one, other in zip(checked(lower(program, still)), electrical, strict=True):
        np.testing.assert_array_equal(one, other)
