from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trunks import trunk_costs

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.analysis import Cause, bubbles, critical_path, link_utilization, path_totals_ns, summary
from atlas.ir.assemble import assemble, repeated, with_optimizer
from atlas.ir.difference import difference
from atlas.ir.program import Kind, Layout, Op
from atlas.ir.timeline import Timeline
from atlas.schedules.classic import gpipe, one_f_one_b
from atlas.sim import simulate


def two_stages(*, wan_ns: int = 40, latency_ns: int = 5) -> Timeline:
    """0F0 0F1 0B0 0B1 over 1F0 1B0 1F1 1B1, with a datacenter border between the stages."""
    layout = Layout(1, 2, 2, ("a", "b"))
    first = [Op(Kind.F, 0, 0), Op(Kind.F, 0, 1), Op(Kind.B, 0, 0), Op(Kind.B, 0, 1)]
    second = [Op(Kind.F, 1, 0), Op(Kind.B, 1, 0), Op(Kind.F, 1, 1), Op(Kind.B, 1, 1)]
    costs = uniform_costs(
        1,
        2,
        kind_costs(forward_ns=10, backward_ns=20),
        wan_boundaries=(0,),
        wan_ns=wan_ns,
        wan_latency_ns=latency_ns,
    )
    return simulate(assemble("by hand", layout, [first, second]), costs)


@st.composite
def jobs(draw: st.DrawFn) -> Timeline:
    pipelines, stages, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    layout = Layout.even(pipelines, stages, microbatches, draw(st.integers(1, stages)))
    program = draw(st.sampled_from([gpipe, one_f_one_b]))(layout)
    if draw(st.booleans()):
        program = with_optimizer(program, norm=draw(st.booleans()))
    if draw(st.booleans()):
        program = repeated(program, draw(st.integers(1, 3)))
    ns = st.integers(0, 50)
    forward = draw(st.integers(1, 50))
    costs = trunk_costs(
        pipelines,
        stages,
        kind_costs(forward_ns=forward, backward_ns=draw(ns), sync_ns=draw(ns), norm_ns=draw(ns), step_ns=draw(ns)),
        lan_ns=draw(ns),
        lan_latency_ns=draw(ns),
        wan_boundaries=tuple(np.flatnonzero(program.boundary_crosses).tolist()),
        wan_ns=draw(ns),
        wan_latency_ns=draw(ns),
        sharing=(sharing := draw(st.booleans())),
        trunk_pairs=None if sharing else draw(st.sampled_from([None, 1.0])),
    )
    return simulate(replace(program, sharing=sharing), costs)


@given(jobs())
@settings(max_examples=120, deadline=None)
def test_busy_and_bubbles_fill_every_worker_exactly(timeline: Timeline) -> None:
    found = bubbles(timeline)
    workers, makespan = timeline.program.num_workers, timeline.makespan_ns
    assert int(found.busy_ns.sum()) + sum(found.total_ns.values()) == workers * makespan
    assert (found.busy_ns == timeline.busy_ns).all()
    for worker in range(workers):
        mine = found.of(worker)
        assert int(found.busy_ns[worker]) + sum(b.end_ns - b.start_ns for b in mine) == makespan
        assert all(b.start_ns >= a.end_ns for a, b in pairwise(mine))


@given(jobs())
@settings(max_examples=120, deadline=None)
def test_the_critical_path_has_no_gap_and_explains_every_simulated_moment(timeline: Timeline) -> None:
    path = critical_path(timeline)
    assert path[0].start_ns == timeline.op_start_ns.min()
    assert path[-1].end_ns == timeline.op_end_ns.max()
    assert all(a.end_ns == b.start_ns for a, b in pairwise(path))
    totals = path_totals_ns(path)
    assert sum(totals.values()) == timeline.makespan_ns
    assert totals["wait"] == 0


@given(jobs(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_clocks_that_disagree_shift_borders_but_keep_totals(timeline: Timeline, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def shaken(times: np.ndarray) -> np.ndarray:
        return times + rng.integers(-15, 15, len(times))

    start = shaken(timeline.op_start_ns)
    measured = replace(
        timeline,
        source="measured",
        op_start_ns=start,
        op_end_ns=np.maximum(start, shaken(timeline.op_end_ns)),
        transfer_ready_ns=shaken(timeline.transfer_ready_ns),
        transfer_arrive_ns=shaken(timeline.transfer_arrive_ns),
    )
    found, path = bubbles(measured), critical_path(measured)
    assert int(found.busy_ns.sum()) + sum(found.total_ns.values()) == (
        measured.program.num_workers * measured.makespan_ns
    )
    assert sum(path_totals_ns(path).values()) == measured.makespan_ns
    json.dumps(asdict(difference(timeline, measured)))


def test_a_wait_is_split_where_its_input_became_ready() -> None:
    timeline = two_stages()
    # 0F0 0-10, 0F1 10-20; 1F0 arrives 55, ends 65, 1B0 ends 85: ready; 40 on the wire, 5 latency: 0B0 at 130.
    first = [(b.start_ns, b.end_ns, b.cause) for b in bubbles(timeline).of(0)]
    assert first[:2] == [(20, 85, Cause.PEER), (85, 130, Cause.WAN)]
    # The second activation follows the first on the wire: it arrives at 95.
    second = [(b.start_ns, b.end_ns, b.cause) for b in bubbles(timeline).of(1)]
    assert second == [(0, 55, Cause.FILL), (85, 95, Cause.WAN), (125, 190, Cause.DRAIN)]


def test_a_slice_of_prefill_shortens_a_bubble_and_leaves_its_cause() -> None:
    layout = Layout(1, 2, 2, ("a", "b"))
    plain = two_stages()
    orders = [plain.program.ops(w) for w in range(2)]
    orders[0].insert(2, Op(Kind.P, 0, 0))
    start, end = (np.insert(times, 2, at) for times, at in ((plain.op_start_ns, 90), (plain.op_end_ns, 100)))
    filled = replace(plain, program=assemble("filled", layout, orders), op_start_ns=start, op_end_ns=end)
    found = [(b.start_ns, b.end_ns, b.cause) for b in bubbles(filled).of(0)]
    assert found[:3] == [(20, 85, Cause.PEER), (85, 90, Cause.WAN), (100, 130, Cause.WAN)]
    assert {str(filled.program.op(b.op)) for b in bubbles(filled).of(0)[:3]} == {"0B0"}
    assert sum(bubbles(plain).total_ns.values()) - sum(bubbles(filled).total_ns.values()) == 10


def test_inside_one_datacenter_nothing_waits_for_the_wan() -> None:
    program = one_f_one_b(Layout.even(2, 4, 8, 1))
    timeline = simulate(program, uniform_costs(2, 4, kind_costs(forward_ns=10, backward_ns=20), lan_ns=7))
    total = bubbles(timeline).total_ns
    assert total["wan"] == total["sync"] == 0
    assert total["peer"] > 0


def test_collectives_and_the_wait_for_them_are_sync() -> None:
    program = with_optimizer(one_f_one_b(Layout.even(1, 3, 3, 1)), norm=True)
    costs = uniform_costs(1, 3, kind_costs(forward_ns=10, backward_ns=20, sync_ns=30, norm_ns=4, step_ns=5))
    found = bubbles(simulate(program, costs))
    # The last stage is done first: it waits for the norm of all until the first stage's backward has ended.
    assert [b.cause for b in found.of(2)][-3:] == [Cause.SYNC] * 3
    assert found.total_ns["drain"] == 0
    assert found.total_ns["sync"] >= 3 * (30 + 4)


def test_the_critical_path_names_what_the_time_was_spent_on() -> None:
    path = critical_path(two_stages())
    assert [(s.category, s.label, s.length_ns) for s in path] == [
        ("compute", "0F0", 10),
        ("compute", "0F1", 10),
        ("queue", "0SEND_F1", 30),
        ("wire", "0SEND_F1", 40),
        ("latency", "0SEND_F1", 5),
        ("compute", "1F1", 10),
        ("compute", "1B1", 20),
        ("wire", "1SEND_B1", 40),
        ("latency", "1SEND_B1", 5),
        ("compute", "0B1", 20),
    ]
    assert path_totals_ns(path)["latency"] == 10


def test_queueing_on_a_busy_link_shows_on_the_critical_path() -> None:
    # Eight activations leave at once over a slow link: all but the first queue.
    program = gpipe(Layout(1, 2, 8, ("a", "b")))
    costs = uniform_costs(1, 2, kind_costs(forward_ns=10, backward_ns=1), wan_boundaries=(0,), wan_ns=100)
    totals = path_totals_ns(critical_path(simulate(program, costs)))
    assert totals["queue"] == (7 * 100 - 7 * 10) + (7 * 100 - 7 * 1)
    assert totals["wire"] == 2 * 100


def test_a_timeline_does_not_differ_from_itself() -> None:
    same = difference(two_stages(), two_stages())
    assert same.ratio == 1.0
    assert same.num_only == (0, 0)
    assert same.first_divergence is None
    assert all(k.duration_error_worst == 0 and k.start_error_worst_s == 0 for k in same.kinds)
    assert [k.kind for k in same.kinds] == ["F", "B", "SEND_F", "SEND_B"]


def test_the_first_op_that_took_longer_is_named() -> None:
    simulated = two_stages()
    slow = 4  # 1F0
    start, end = simulated.op_start_ns + 1000, simulated.op_end_ns + 1000  # another clock
    end[slow] += 30
    start[slow + 1 :] += 30
    end[slow + 1 :] += 30
    measured = replace(simulated, source="measured", op_start_ns=start, op_end_ns=end)
    found = difference(simulated, measured)
    assert found.first_divergence == "1F0 on p0.s1 (b)"
    forward = next(k for k in found.kinds if k.kind == "F")
    assert forward.worst_duration == "1F0 on p0.s1 (b)"
    assert forward.duration_error_worst == pytest.approx(3.0)
    assert forward.start_error_worst_s == pytest.approx(30e-9)


def test_two_schedules_are_compared_on_the_ops_they_share() -> None:
    layout = Layout.even(2, 3, 4, 3)
    split = [[op for m in range(4) for op in (Op(Kind.F, s, m), Op(Kind.I, s, m), Op(Kind.W, s, m))] for s in range(3)]
    costs = uniform_costs(2, 3, kind_costs(forward_ns=10, backward_ns=20), wan_boundaries=(0, 1), wan_ns=5)
    found = difference(simulate(gpipe(layout), costs), simulate(assemble("split", layout, split), costs))
    assert found.num_common == 24
    assert found.num_only == (24, 48)
    assert [k.kind for k in found.kinds] == ["F", "SEND_F", "SEND_B"]


def test_link_utilization_counts_overlapping_transfers_once() -> None:
    layout = Layout(4, 2, 3, ("a", "b"))
    costs = trunk_costs(
        4, 2, kind_costs(forward_ns=10, backward_ns=20), wan_boundaries=(0,), wan_ns=50, trunk_pairs=1.0
    )
    shares = link_utilization(simulate(gpipe(layout), costs))
    assert list(shares) == ["wan 0>1", "wan 1>0"]
    assert all(0.3 < share <= 1 for share in shares.values())


def test_the_summary_is_json_and_adds_up() -> None:
    timeline = two_stages()
    found = json.loads(json.dumps(summary(timeline)))
    assert found["iteration_s"] == timeline.makespan_ns / 1e9
    assert found["num_events"] == 12
    idle = sum(found["bubbles_s"].values()) / (2 * found["iteration_s"])
    assert found["utilization"] + idle == pytest.approx(1)


def test_a_reference_sized_timeline_is_read_in_well_under_a_second() -> None:
    program = one_f_one_b(Layout.even(4, 32, 128, 4))
    timeline = Timeline(
        program=program,
        source="simulated",
        op_start_ns=np.arange(program.num_ops),
        op_end_ns=np.arange(program.num_ops) + 1,
        transfer_ready_ns=np.zeros(program.num_transfers, np.int64),
        transfer_start_ns=np.zeros(program.num_transfers, np.int64),
        transfer_sent_ns=np.zeros(program.num_transfers, np.int64),
        transfer_arrive_ns=np.zeros(program.num_transfers, np.int64),
        transfer_link=np.zeros(program.num_transfers, np.int32),
        links=("lan",),
    )
    assert sum(bubbles(timeline).total_ns.values()) == 127 * program.num_ops


def test_an_empty_timeline_has_no_bubbles_and_no_path() -> None:
    program = assemble("empty", Layout(1, 2, 1, ("a", "b")), [[], []])
    none = np.zeros(program.num_transfers, np.int64)
    ops = np.zeros(0, np.int64)
    timeline = Timeline(program, "simulated", ops, ops, none, none, none, none, none.astype(np.int32), ("l",))
    assert len(bubbles(timeline)) == 0
    assert critical_path(timeline) == []
    assert difference(timeline, timeline).num_common == 0


def test_a_timeline_is_analysed_once() -> None:
    timeline = two_stages()
    assert bubbles(timeline) is bubbles(timeline)
    assert critical_path(timeline) is critical_path(timeline)
    longer = replace(timeline, op_end_ns=timeline.op_end_ns + 5)
    assert summary(longer)["iteration_s"] != summary(timeline)["iteration_s"]
