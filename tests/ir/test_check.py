"""The checker accepts exactly the Programs that the engine finishes, and names the fault of the others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import any_order, costs_for, dependencies, layouts, programs, with_orders

from atlas.cost.table import kind_costs, uniform_costs
from atlas.errors import ProgramError
from atlas.ir.assemble import assemble, check, repeated, with_optimizer
from atlas.ir.program import Kind, Layout, Memory, Op, Program
from atlas.schedules.classic import gpipe, interleaved, one_f_one_b
from atlas.sim import lower
from atlas.sim.simulate import reference


def orders_of(program: Program) -> list[list[Op]]:
    return [program.ops(w) for w in range(program.num_workers)]


def ops(text: str) -> list[Op]:
    """`0F0 0B0` -> ops, for lists written by hand (one digit each)."""
    return [Op(Kind[word[1:-1]], int(word[0]), int(word[-1])) for word in text.split()]


def two_stages(first: str, second: str, num_microbatches: int = 2, **kw) -> Program:
    return assemble("by hand", Layout(1, 2, num_microbatches, ("a", "b")), [ops(first), ops(second)], **kw)


def finishes(program: Program) -> bool:
    costs = uniform_costs(program.num_pipelines, program.num_stages, kind_costs(forward_ns=1, backward_ns=2))
    try:
        reference(lower(program, costs))
    except ProgramError:
        return False
    return True


def accepts(program: Program) -> bool:
    try:
        check(program)
    except ProgramError:
        return False
    return True


# ---- exactly what the engine finishes -----------------------------------------------------------------------
@given(programs())
@settings(max_examples=100)
def test_it_accepts_every_order_made_of_ready_ops(program: Program):
    check(program)
    assert finishes(program)


@given(programs(max_iterations=1), st.data())
@settings(max_examples=40)
def test_acceptance_does_not_depend_on_costs(program: Program, data: st.DataObject):
    reference(lower(program, data.draw(costs_for(program))))
    check(program)


@st.composite
def locally_ordered(draw: st.DrawFn) -> Program:
    """Every worker in an order it could follow alone, with no regard for the others: many wait in a circle."""
    layout = draw(layouts())
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    needs = dependencies(layout, rng, split=draw(st.sampled_from([0.0, 0.5, 1.0])), recompute=draw(st.booleans()))
    alone = {
        (c, op): [(d, source) for d, source in sources if source.stage == op.stage]
        for (c, op), sources in needs.items()
    }
    orders = any_order(layout, alone, rng)
    # Near the diagonal, so that about half of them can run.
    if draw(st.booleans()):
        orders = [sorted(order, key=lambda op: (op.microbatch, op.kind)) for order in orders]
        for order in orders:
            for _ in range(draw(st.integers(0, 2))):
                k = rng.randrange(max(1, len(order) - 1))
                order[k : k + 2] = order[k : k + 2][::-1]
    if draw(st.booleans()):
        for order in orders:
            stage = min(op.stage for op in order)
            for kind in (Kind.SYNC, Kind.NORM):
                order.insert(rng.randint(max(0, len(order) - 2), len(order)), Op(kind, stage, 0))
    return assemble("random", layout, orders)


@given(locally_ordered())
@settings(max_examples=250)
def test_a_complete_program_is_a_deadlock_to_the_checker_if_and_only_if_the_engine_never_finishes(program: Program):
    try:
        check(program)
    except ProgramError as error:
        if "deadlock" in str(error):
            assert not finishes(program)
        else:  # swapped too far: the checker is stricter than the engine about what a worker's own order means
            assert "comes before" in str(error)  # noqa: PT017
    else:
        assert finishes(program)


def test_the_random_orders_include_deadlocks_and_runnable_programs():
    seen = {True: 0, False: 0}

    @given(locally_ordered())
    @settings(max_examples=100)
    def count(program: Program) -> None:
        seen[finishes(program)] += 1

    count()
    assert min(seen.values()) >= 15, seen


@given(programs(max_iterations=2), st.data())
@settings(max_examples=100)
def test_a_program_that_lacks_an_op_is_rejected(program: Program, data: st.DataObject):
    orders = orders_of(program)
    worker = data.draw(st.integers(0, len(orders) - 1))
    lost = orders[worker].pop(data.draw(st.integers(0, len(orders[worker]) - 1)))
    broken = with_orders(program, orders)
    if lost.kind in (Kind.R, Kind.STEP):
        return  # a recompute may be left out, and so may an optimizer
    lonely = lost.kind == Kind.SYNC and program.num_pipelines == 1
    lonely |= lost.kind == Kind.NORM and program.num_workers == 1
    assert accepts(broken) == lonely


@given(programs(max_iterations=2), st.data())
@settings(max_examples=100)
def test_a_program_that_does_an_op_twice_is_rejected(program: Program, data: st.DataObject):
    orders = orders_of(program)
    order = orders[data.draw(st.integers(0, len(orders) - 1))]
    twice = order[data.draw(st.integers(0, len(order) - 1))]
    order.insert(data.draw(st.integers(0, len(order))), twice)
    with pytest.raises(ProgramError, match="more than once"):
        check(with_orders(program, orders))


# ---- each fault by its name ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0F0 0F1 0B0 0B1", "1F0 1B0 1B1", "microbatch 1 on stage 1 of p0.s1 needs a forward"),
        ("0F0 0F1 0B0", "1F0 1B0 1F1 1B1", r"microbatch 1 on stage 0 of p0.s0 needs a backward"),
        ("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1", "microbatch 0 on stage 1 of p0.s1 needs a W for every I"),
        ("0F0 0F1 0B0 0B1 0W1", "1F0 1B0 1F1 1B1", "microbatch 1 on stage 0 of p0.s0 needs either B, or I and W"),
        ("0F0 0F1 0B0 0B1 0F1", "1F0 1B0 1F1 1B1", r"0F1 on p0.s0 \(a\) occurs more than once"),
        ("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1", r"1F0 on p0.s0 \(a\) is on the wrong worker"),
        ("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1", r"1B0 on p0.s1 \(b\) comes before 1F0, which it needs"),
        ("0F0 0R0 0F1 0R1 0B0 0B1", "1F0 1F1 1B1 1B0", r"1B1 on p0.s1 \(b\) comes before 1B0: weight gradients are"),
        ("0F0 0F1 0I0 0B1 0W0", "1F0 1F1 1B0 1B1", r"0B1 on p0.s0 \(a\) comes before 0W0: weight gradients are added"),
        ("0F0 0F1 0W0 0I0 0B1", "1F0 1F1 1B0 1B1", r"0W0 on p0.s0 \(a\) comes before 0I0"),
        ("0F0 0F1 0B0 0R0 0B1", "1F0 1F1 1B0 1B1", r"0B0 on p0.s0 \(a\) comes before 0R0"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_op_its_worker_and_the_rule(first: str, second: str, message: str):
    with pytest.raises(ProgramError, match=message):
        check(two_stages(first, second))


def test_a_deadlock_names_the_circle():
    program = two_stages("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(ProgramError, match="deadlock") as raised:
        check(program)
    for op in ("0B0 on p0.s0 (a)", "0F1 on p0.s0 (a)", "1F1 on p0.s1 (b)", "1B0 on p0.s1 (b)"):
        assert op in str(raised.value)
    assert not finishes(program)


def test_a_collective_that_one_member_never_joins_is_rejected():
    program = with_optimizer(one_f_one_b(Layout.even(2, 2, 2, 1)), norm=True)
    check(program)
    for kind, worker in ((Kind.SYNC, 3), (Kind.NORM, 0)):
        orders = orders_of(program)
        orders[worker] = [op for op in orders[worker] if op.kind != kind]
        with pytest.raises(ProgramError, match=rf"{kind.name}.*{program.worker_name(worker)}"):
            check(with_orders(program, orders))


def test_collectives_in_opposite_orders_deadlock():
    layout = Layout(2, 1, 1, ("a",))
    body = ops("0F0 0B0")
    sync, norm = Op(Kind.SYNC, 0, 0), Op(Kind.NORM, 0, 0)
    check(assemble("agreed", layout, [[*body, sync, norm], [*body, sync, norm]]))
    crossed = assemble("crossed", layout, [[*body, sync, norm], [*body, norm, sync]])
    with pytest.raises(ProgramError, match="deadlock"):
        check(crossed)
    assert not finishes(crossed)


# ---- memory -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "peak"), [(gpipe, 8), (one_f_one_b, 4), (lambda layout: one_f_one_b(layout, recompute=True), 4)]
)
def test_the_cap_of_memory_is_the_peak_and_not_one_less(make, peak: int):
    program = make(Layout.even(2, 4, 8, 1))
    assert program.peak_in_flight == peak
    assert program.peak_held(Memory(99)) == peak
    check(replace(program, memory=Memory(peak)))
    with pytest.raises(ProgramError, match=f"makes its worker hold {peak} units of memory, but the cap is {peak - 1}"):
        check(replace(program, memory=Memory(peak - 1)))


def held_by_hand(program: Program, memory: Memory) -> int:
    """The peak, counted op by op."""
    most = 0
    for order in orders_of(program):
        held = 0
        for op in order:
            held += memory.acquire[op.kind]
            most = max(most, held)
            held -= memory.release[op.kind]
    return most


@given(programs(), st.data())
@settings(max_examples=80)
def test_memory_is_taken_at_the_start_of_an_op_and_given_back_at_its_end(program: Program, data: st.DataObject):
    split = (program.kind == Kind.I).any()
    half = Memory(99, (2, 0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 2, 1, 1, 0, 0, 0, 0))
    # The backward also takes memory while it runs: its microbatch and its workspace are held at once.
    roomy = Memory(99, (1, 0, 3, 2, 0, 0, 0, 0, 0), (0, 0, 4, 2, 1, 0, 0, 0, 0))
    for memory in (Memory(99), half, roomy):
        peak = held_by_hand(program, memory)
        assert program.peak_held(memory) == peak
        check(replace(program, memory=replace(memory, cap=peak)))
        assert not accepts(replace(program, memory=replace(memory, cap=peak - 1)))
    assert program.peak_in_flight == held_by_hand(program, Memory(99))
    assert split or program.peak_held(half) == 2 * program.peak_in_flight


def test_a_backward_without_recompute_needs_the_recomputes_memory():
    # Where some recompute, a stage that does not keeps its activations from the forward on.
    memory = Memory(99, (1, 5, 0, 0, 0, 0, 0, 0, 0), (0, 0, 6, 0, 0, 0, 0, 0, 0))
    program = two_stages("0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1B0 1F1 1B1")
    assert program.peak_held(memory) == 7  # two stashed inputs and one recompute
    program = two_stages("0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1F1 1B0 1B1")
    assert program.peak_held(memory) == 12  # two of everything


def test_interleaved_and_repeated_programs_pass():
    check(interleaved(Layout(2, 8, 8, ("a", "a", "b", "b"))))
    check(repeated(with_optimizer(gpipe(Layout.even(2, 3, 4, 3)), norm=True), 3))
