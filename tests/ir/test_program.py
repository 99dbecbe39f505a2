"""The Program: ops per worker, transfers between them, and repeated iterations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from random_jobs import programs

from atlas.errors import ProgramError
from atlas.ir.assemble import assemble, default_turns, repeated, with_optimizer
from atlas.ir.program import BACKWARD, FORWARD, Kind, Layout, Op, Program, parse_action, turn_key
from atlas.ir.text import to_text
from atlas.schedules.classic import gpipe, interleaved, one_f_one_b


def test_ops_are_kept_worker_by_worker_in_the_order_given():
    layout = Layout(2, 2, 1, ("east", "west"))
    orders = [[Op(Kind.F, s, 0), Op(Kind.B, s, 0)] for s in (0, 1)]
    program = assemble("tiny", layout, orders)
    assert [program.ops(w) for w in range(4)] == orders * 2
    assert [program.worker_name(w) for w in range(4)] == ["p0.s0", "p0.s1", "p1.s0", "p1.s1"]
    assert program.describe(7) == "1B0 on p1.s1 (west)"
    assert program.num_events == 8 + 4


@given(programs())
@settings(max_examples=60)
def test_every_transfer_joins_the_two_ops_that_its_name_says(program: Program):
    kind_of = {FORWARD: (Kind.F, Kind.F), BACKWARD: (Kind.I, Kind.R)}
    for t in range(program.num_transfers):
        direction, c, boundary, slot = program.transfer(t)
        src, dst = program.op(int(program.transfer_src[t])), program.op(int(program.transfer_dst[t]))
        assert src.microbatch == dst.microbatch == slot
        assert (src.stage, dst.stage) == (
            (boundary, boundary + 1) if direction == FORWARD else (boundary + 1, boundary)
        )
        assert program.op_worker[program.transfer_src[t]] == program.worker(c, src.stage)
        assert program.op_worker[program.transfer_dst[t]] == program.worker(c, dst.stage)
        assert src.kind == kind_of[direction][0] or (direction == BACKWARD and src.kind == Kind.B)
        if direction == BACKWARD:
            assert dst.kind in (Kind.B, Kind.I)
    # Every op that has a peer has exactly one transfer from it.
    for s, received in ((0, 0), (program.num_stages - 1, program.num_stages > 1)):
        forwards = np.flatnonzero((program.kind == Kind.F) & (program.stage == s))
        assert np.isin(program.transfer_dst, forwards).sum() == len(forwards) * bool(received)


def test_a_boundary_crosses_the_wan_where_the_datacenter_changes():
    program = gpipe(Layout(1, 4, 2, ("a", "a", "b", "c")))
    assert program.boundary_crosses.tolist() == [False, True, True]
    assert program.transfer_crosses.tolist() == [False] * 2 + [True] * 4 + [False] * 2 + [True] * 4
    # Interleaved over two datacenters every boundary crosses, also the one from the last worker to the first.
    looped = interleaved(Layout(1, 4, 2, ("a", "b")))
    assert looped.boundary_crosses.tolist() == [True, True, True]


def test_turns_follow_the_dispatch_rule_oldest_microbatch_first():
    turns = default_turns(Layout.even(3, 3, 4, 3)).reshape(2, 3, 2, 4)
    for c in range(3):
        for m in range(4):
            assert (turns[:, c, :, m] == turn_key(m, c, 3)).all()
    assert sorted(turns[0, :, 0].ravel().tolist()) == list(range(12))


def test_repeating_shifts_microbatches_and_iterations_and_keeps_earlier_turns_first():
    once = with_optimizer(one_f_one_b(Layout.even(2, 2, 3, 2)), norm=True)
    thrice = repeated(once, 3)
    assert thrice.num_iterations == 3
    assert thrice.num_slots == 9
    for w in range(once.num_workers):
        ops, length = thrice.ops(w), len(once.ops(w))
        for k in range(3):
            for before, after in zip(once.ops(w), ops[k * length : (k + 1) * length], strict=True):
                shift = k * 3 if before.kind <= Kind.W else k
                assert after == Op(before.kind, before.stage, before.microbatch + shift)
    turns = thrice.turn.reshape(2, 2, 1, 9)
    assert turns[..., :3].max() < turns[..., 3:6].min()
    assert turns[..., 3:6].max() < turns[..., 6:].min()
    assert to_text(repeated(thrice, 2)) == to_text(repeated(once, 6))


def test_an_optimizer_closes_one_iteration_and_is_repeated_with_it():
    plain = gpipe(Layout.even(1, 2, 2, 1))
    closed = with_optimizer(plain)
    assert [str(op) for op in closed.ops(1)[-2:]] == ["1SYNC0", "1STEP0"]
    with pytest.raises(ProgramError, match="iterations"):
        with_optimizer(repeated(plain, 2))


def test_interleaved_workers_join_a_collective_once():
    program = with_optimizer(interleaved(Layout(1, 4, 2, ("a", "b"))))
    for w in (0, 1):
        assert [str(op) for op in program.ops(w) if op.kind == Kind.SYNC] == [f"{w}SYNC0"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(1, 5, 1, ("a", "b")), "5 stages cannot be distributed evenly over 2 workers"),
        (lambda: assemble("x", Layout(2, 2, 1, ("a", "b")), [[]] * 3), "3 lists of ops for 2 pipelines of 2 workers"),
        (lambda: assemble("x", Layout(1, 1, 1, ("a",)), [[Op(Kind.F, 1, 0)]]), "outside"),
        (lambda: assemble("x", Layout(1, 1, 1, ("a",)), [[Op(Kind.F, 0, 1)]]), "outside"),
        (lambda: assemble("x", Layout(1, 1, 1, ("a",)), [[Op(Kind.F, 0, -1)]]), "outside"),
        (lambda: parse_action("3Q17"), "'3Q17' is not an op"),
        (lambda: gpipe(Layout(1, 4, 2, ("a", "b"))), "use the schedule 'interleaved'"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_rule(make, message: str):
    with pytest.raises(ProgramError, match=message):
        make()
