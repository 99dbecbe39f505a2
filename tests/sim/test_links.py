"""What a link may and may not do, each policy held against a plain model of it that knows nothing of the engine.

The models are told when every transfer came (ready + before) and say when it must have started and been sent.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_jobs import costs_for, programs

from atlas.cost.table import FAIR, PRIVATE, TURNS, Costs, LinkCost, Trace, kind_costs, uniform_costs
from atlas.ir.assemble import assemble
from atlas.ir.program import Kind, Layout, Op, Program
from atlas.schedules.classic import gpipe
from atlas.sim import Tables, lower
from atlas.sim.lower import Events
from atlas.sim.simulate import reference

LONG = (10**9,)
"""Durations so long that two events of a random run never fall on the same nanosecond."""


@st.composite
def runs(draw: st.DrawFn, policy: int, **costs_kw) -> tuple[Program, Costs, Tables, Events]:
    program = draw(programs())
    costs = draw(costs_for(program, (policy,), **costs_kw))
    tables = lower(program, costs)
    return program, costs, tables, reference(tables)


def members(tables: Tables, link: int) -> list[int]:
    """The transfers of a link."""
    return np.flatnonzero(tables.channel_link[tables.transfer_channel] == link).tolist()


def came_at(tables: Tables, events: Events) -> np.ndarray:
    return events.ready_ns + tables.transfer_before_ns


# ---- all of them --------------------------------------------------------------------------------------------
@given(st.data(), st.sampled_from([PRIVATE, FAIR, TURNS]))
@settings(max_examples=100)
def test_bytes_move_only_after_they_exist_and_arrive_only_after_they_were_sent(data: st.DataObject, policy: int):
    _, _, tables, events = data.draw(runs(policy, traces=False))
    assert (events.ready_ns >= 0).all()
    assert (events.start_ns >= came_at(tables, events)).all()
    assert (events.sent_ns - events.start_ns >= tables.transfer_work_ns).all()
    assert (events.arrive_ns == events.sent_ns + tables.transfer_latency_ns).all()


# ---- PRIVATE ------------------------------------------------------------------------------------------------
@given(runs(PRIVATE, traces=False))
@settings(max_examples=100)
def test_a_private_link_serves_first_come_first_served_with_so_many_servers(run):
    program, costs, tables, events = run
    for link, cost in enumerate(costs.links):
        # In the order of the sender's ops: with zero durations several come in the same nanosecond.
        queue = sorted(members(tables, link), key=lambda t: program.transfer_src[t])
        free = [0] * cost.servers
        for t in queue:
            start = max(int(came_at(tables, events)[t]), min(free))
            assert events.start_ns[t] == start
            free[free.index(min(free))] = start + int(tables.transfer_work_ns[t])
            assert events.sent_ns[t] == start + tables.transfer_work_ns[t]


# ---- TURNS --------------------------------------------------------------------------------------------------
def turns_model(
    came: dict[int, int], work: dict[int, int], turn: dict[int, int], quantum: int
) -> dict[int, tuple[int, int]]:
    """Chunk by chunk: at every boundary the smallest turn of what is there. {transfer: (start, sent)}."""
    left, start, times = dict(work), {}, {}
    now, serving = 0, None
    while left:
        here = [t for t in left if came[t] <= now]
        if not here:
            now, serving = min(came[t] for t in left), None
            continue
        if serving not in here or quantum:
            serving = min(here, key=lambda t: (turn[t], t != serving, t))  # an equal turn does not interrupt
        start.setdefault(serving, now)
        chunk = min(left[serving], quantum) if quantum else left[serving]
        now += chunk
        left[serving] -= chunk
        if not left[serving]:
            times[serving] = (start[serving], now)
            del left[serving]
            serving = None
    return times


@given(runs(TURNS, traces=False, longest_ns=LONG))
@settings(max_examples=150)
def test_a_turn_taking_link_serves_the_smallest_turn_at_every_chunk_boundary_and_never_idles(run):
    _, costs, tables, events = run
    came = came_at(tables, events)
    for link, cost in enumerate(costs.links):
        mine = members(tables, link)
        assume(len(set(came[mine].tolist())) == len(mine))  # else it is the tie-break that is tested
        if cost.quantum_ns == 1:
            continue  # a boundary every nanosecond: the model would walk them one by one
        expected = turns_model(
            {t: int(came[t]) for t in mine},
            {t: int(tables.transfer_work_ns[t]) for t in mine},
            {t: int(tables.transfer_turn[t]) for t in mine},
            cost.quantum_ns,
        )
        assert {t: (int(events.start_ns[t]), int(events.sent_ns[t])) for t in mine} == expected


@given(runs(TURNS, traces=False))
@settings(max_examples=100)
def test_a_turn_taking_link_does_all_its_work_without_a_pause_and_never_two_at_once(run):
    _, costs, tables, events = run
    came = came_at(tables, events)
    for link in range(len(costs.links)):
        # With something there from `came` on, a server that never idles and never doubles is done at a time that
        # does not depend on the order: the end of the busy period.
        mine = sorted(members(tables, link), key=lambda t: int(came[t]))
        ends, now = [], 0
        for t in mine:
            if came[t] > now:
                ends.append(now)
                now = int(came[t])
            now += int(tables.transfer_work_ns[t])
        ends.append(now)
        sent = set(events.sent_ns[mine].tolist())
        assert max(sent, default=0) == (now if mine else 0)
        assert all(end in sent for end in ends if end)


def one_link(policy: int, came_ns: list[int], work_ns: int, **link_kw) -> tuple[Program, Costs]:
    """Pipelines of two stages, a microbatch each, whose activations come to one link at the given times."""
    num = len(came_ns)
    layout = Layout(num, 2, 1, ("a", "b"))
    program = assemble("by hand", layout, [[Op(Kind.F, s, 0), Op(Kind.B, s, 0)] for s in (0, 1)])
    compute = np.zeros((num, 2, len(Kind)), np.int64)
    compute[:, 0, Kind.F] = came_ns
    shape = (2, num, 1)
    work = np.zeros(shape, np.int64)
    work[0] = work_ns
    own = [LinkCost(f"back p{c}", PRIVATE) for c in range(num)]
    channel = np.zeros(shape, np.int32)
    channel[1, :, 0] = np.arange(1, num + 1)
    zero = np.zeros(shape, np.int64)
    return program, Costs(compute, (LinkCost("there", policy, **link_kw), *own), channel, work, zero, zero)


def test_an_urgent_turn_takes_over_at_the_next_chunk_boundary_and_not_before():
    # Pipeline 1 (turn 1) comes first, pipeline 0 (turn 0) at 25: the chunk of 10 that began at 20 is finished first.
    program, costs = one_link(TURNS, [25, 0], 100, quantum_ns=10)
    events = reference(lower(program, costs))
    assert events.start_ns[:2].tolist() == [30, 0]
    assert events.sent_ns[:2].tolist() == [130, 200]


def test_without_a_quantum_a_transfer_is_never_interrupted():
    program, costs = one_link(TURNS, [25, 0], 100, quantum_ns=0)
    events = reference(lower(program, costs))
    assert events.sent_ns[:2].tolist() == [200, 100]


def test_a_later_turn_never_interrupts_an_earlier_one():
    program, costs = one_link(TURNS, [0, 25], 100, quantum_ns=10)
    assert reference(lower(program, costs)).sent_ns[:2].tolist() == [100, 200]


def test_of_transfers_that_come_together_the_smallest_turn_goes_first():
    program, costs = one_link(TURNS, [7, 7, 7], 10, quantum_ns=5)
    assert reference(lower(program, costs)).sent_ns[:3].tolist() == [17, 27, 37]


# ---- FAIR ---------------------------------------------------------------------------------------------------
def fair_model(came: dict[int, int], work: dict[int, int], channel: dict[int, int], order: list[int], capacity: float):
    """The fluid limit in exact fractions: one transfer of each channel at a time. {transfer: (start, sent)}."""
    waiting = {c: [t for t in order if channel[t] == c] for c in set(channel.values())}
    left = {t: Fraction(work[t]) for t in order}
    start: dict[int, Fraction] = {}
    times: dict[int, tuple[Fraction, Fraction]] = {}
    now = Fraction(0)
    while any(waiting.values()):
        heads = [queue[0] for queue in waiting.values() if queue]
        active = [t for t in heads if came[t] <= now]
        for t in active:
            start.setdefault(t, now)
        later = [Fraction(came[t]) for t in heads if came[t] > now]
        if not active:
            now = min(later)
            continue
        share = min(Fraction(1), Fraction(capacity) / len(active))
        step = min([left[t] / share for t in active] + [at - now for at in later])
        for t in active:
            left[t] -= step * share
        now += step
        for t in active:
            if not left[t]:
                times[t] = (start[t], now)
                waiting[channel[t]].pop(0)
    return times


@given(runs(FAIR, traces=False))
@settings(max_examples=100)
def test_a_fair_link_follows_the_fluid_limit_to_the_nanosecond(run):
    program, costs, tables, events = run
    came = came_at(tables, events)
    for link, cost in enumerate(costs.links):
        mine = members(tables, link)
        expected = fair_model(
            {t: int(came[t]) for t in mine},
            {t: int(tables.transfer_work_ns[t]) for t in mine},
            {t: int(tables.transfer_channel[t]) for t in mine},
            sorted(mine, key=lambda t: program.transfer_src[t]),
            cost.capacity,
        )
        for t in mine:
            # Each end is rounded up to a whole nanosecond, and what follows on the channel starts there.
            slack = 1 + len(mine) / min(1.0, cost.capacity) + 1e-6 * float(expected[t][1])
            assert abs(events.start_ns[t] - expected[t][0]) <= slack
            assert abs(events.sent_ns[t] - expected[t][1]) <= slack


@given(runs(FAIR, traces=False))
@settings(max_examples=100)
def test_a_fair_link_never_carries_more_than_its_capacity(run):
    _, costs, tables, events = run
    for link, cost in enumerate(costs.links):
        mine = members(tables, link)
        edges = sorted({*events.start_ns[mine].tolist(), *events.sent_ns[mine].tolist()})
        for begin in edges:
            # What lies wholly inside a window was carried inside it.
            for end in edges[-1:]:
                inside = [t for t in mine if events.start_ns[t] >= begin and events.sent_ns[t] <= end]
                work = int(tables.transfer_work_ns[inside].sum())
                assert work <= cost.capacity * (end - begin) * (1 + 1e-9) + len(mine)


@pytest.mark.parametrize(("capacity", "sent"), [(3.0, 100), (1.5, 200), (0.5, 600)])
def test_beyond_its_capacity_a_fair_link_slows_all_members_alike(capacity: float, sent: int):
    program, costs = one_link(FAIR, [0, 0, 0], 100, capacity=capacity)
    assert reference(lower(program, costs)).sent_ns[:3].tolist() == [sent] * 3


def test_a_fair_link_with_room_for_all_equals_private_links():
    layout = Layout.even(3, 4, 6, 2)
    per_kind = kind_costs(forward_ns=70, backward_ns=130)
    apart = uniform_costs(3, 4, per_kind, wan_boundaries=(1,), wan_ns=400, wan_latency_ns=9)
    roomy = Costs(
        apart.compute_ns,
        (*apart.links, LinkCost("trunk there", FAIR, capacity=3.0), LinkCost("trunk back", FAIR, capacity=8.0)),
        apart.channel_link.copy(),
        apart.work_ns,
        apart.before_ns,
        apart.latency_ns,
    )
    roomy.channel_link[0, :, 1], roomy.channel_link[1, :, 1] = len(apart.links), len(apart.links) + 1
    program = gpipe(layout)
    for one, other in zip(reference(lower(program, apart)), reference(lower(program, roomy)), strict=True):
        np.testing.assert_array_equal(one, other)


# ---- traces -------------------------------------------------------------------------------------------------
def test_a_trace_slows_the_part_of_a_transfer_that_falls_into_it_and_adds_its_latency():
    # 100 of work from 0: 30 at full rate until 30, then half rate: 70 more take 140.
    trace = Trace((0, 30), (1.0, 0.5), (5, 11))
    for policy in (PRIVATE, FAIR, TURNS):
        program, costs = one_link(policy, [0], 100, trace=trace)
        events = reference(lower(program, costs))
        assert events.sent_ns[0] == 170
        assert events.arrive_ns[0] in (175, 181), "the latency of the span in which it starts, or is sent"


@pytest.mark.parametrize("policy", [PRIVATE, FAIR, TURNS])
def test_latency_is_that_of_the_span_in_which_a_transfer_starts(policy: int):
    trace = Trace((0, 30), (1.0, 1.0), (5, 11))
    program, costs = one_link(policy, [0], 100, trace=trace)
    assert reference(lower(program, costs)).arrive_ns[0] == 105


@given(st.data())
@settings(max_examples=60)
def test_a_trace_that_changes_nothing_changes_nothing(data: st.DataObject):
    program = data.draw(programs())
    costs = data.draw(costs_for(program, (PRIVATE, TURNS), traces=False))
    flat = Trace((0, 5, 2000), (1.0, 1.0, 1.0), (0, 0, 0))
    traced = Costs(
        costs.compute_ns,
        tuple(LinkCost(k.name, k.policy, k.servers, k.capacity, k.quantum_ns, flat) for k in costs.links),
        costs.channel_link,
        costs.work_ns,
        costs.before_ns,
        costs.latency_ns,
    )
    for one, other in zip(reference(lower(program, costs)), reference(lower(program, traced)), strict=True):
        np.testing.assert_array_equal(one, other)
