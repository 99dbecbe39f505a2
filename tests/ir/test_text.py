"""The text form of a Program: exact in both directions, readable, with clear errors."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.errors import ProgramError
from atlas.ir.assemble import assemble, default_turns, repeated, with_optimizer
from atlas.ir.program import NUM_KINDS, Kind, Layout, Memory, Op, Program
from atlas.ir.text import from_text, to_text, to_torch_csv


def two_stages(num_pipelines: int = 2) -> Program:
    layout = Layout(num_pipelines, 2, 2, ("us-east", "us-west"))
    first = [Op(Kind.F, 0, 0), Op(Kind.F, 0, 1), Op(Kind.B, 0, 0), Op(Kind.B, 0, 1)]
    second = [Op(Kind.F, 1, 0), Op(Kind.B, 1, 0), Op(Kind.F, 1, 1), Op(Kind.B, 1, 1)]
    return assemble("1f1b", layout, [first, second], memory=Memory(2))


def assert_same(a: Program, b: Program) -> None:
    for field in dataclasses.fields(Program):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert np.array_equal(left, right), field.name
        else:
            assert left == right, field.name


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any Program that `assemble` takes, sensible or not: the text form does not judge."""
    ranks, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    stages = ranks * chunks
    names = st.one_of(st.sampled_from(["us-east", "eu_1"]), st.text(max_size=6))
    layout = Layout(
        draw(st.integers(1, 3)),
        stages,
        draw(st.integers(1, 3)),
        tuple(draw(st.lists(names, min_size=ranks, max_size=ranks))),
        tuple(draw(st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages)))
        if draw(st.booleans())
        else (),
    )
    iterations = draw(st.integers(1, 2))
    slots = layout.num_microbatches * iterations
    op = st.builds(Op, st.sampled_from(Kind), st.integers(0, stages - 1), st.integers(0, slots - 1))
    order = st.lists(op, max_size=6)
    many = draw(st.booleans())
    count = ranks * (layout.num_pipelines if many else 1)
    turn = default_turns(layout, iterations)
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 9)))
        turn = np.where(rng.random(turn.shape) < 0.3, rng.integers(-9, 99, turn.shape), turn)
    amounts = st.lists(st.integers(0, 9), min_size=NUM_KINDS, max_size=NUM_KINDS).map(tuple)
    return assemble(
        draw(names),
        layout,
        draw(st.lists(order, min_size=count, max_size=count)),
        sharing=draw(st.booleans()),
        turn=turn,
        memory=draw(st.none() | st.builds(Memory, st.integers(0, 99), amounts, amounts)),
        num_iterations=iterations,
    )


@given(programs())
@settings(max_examples=150, deadline=None)
def test_round_trip_is_exact(program: Program) -> None:
    text = to_text(program)
    assert_same(from_text(text), program)
    assert to_text(from_text(text)) == text


@given(programs(), st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_text_is_refused_or_read_but_never_crashes(program: Program, data: st.DataObject) -> None:
    text = to_text(program)
    at = data.draw(st.integers(0, len(text)))
    junk = data.draw(st.text(max_size=3) | st.sampled_from(["9", "\n", ":", '"', "999999999", "0F0 ", "@"]))
    damaged = text[:at] + junk + text[at + data.draw(st.integers(0, 3)) :]
    with contextlib.suppress(ProgramError):
        from_text(damaged)


def test_looks_like_torch_actions_with_sends_after_producers() -> None:
    lines = to_text(two_stages()).splitlines()
    assert lines[0] == "# atlas program 1"
    assert "p0-p1.s0 @us-east: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1" in lines
    assert "p0-p1.s1 @us-west: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1" in lines
    assert "memory: 2 acquire F=1 release B=1 W=1" in lines
    assert not any(line.startswith(("turn", "stage_rank")) for line in lines)


def test_pipelines_that_differ_have_their_own_lines() -> None:
    program = two_stages(1)
    other = [*program.ops(0)[2:], *program.ops(0)[:2]]
    layout = Layout(3, 2, 2, program.rank_dc)
    mixed = assemble("mixed", layout, [program.ops(0), program.ops(1)] * 2 + [other, program.ops(1)])
    heads = [line.split(" ")[0] for line in to_text(mixed).splitlines() if line.startswith("p") and "@" in line]
    assert heads == ["p0-p1.s0", "p0-p1.s1", "p2.s0", "p2.s1"]


def test_compute_only_lines_are_enough() -> None:
    program = two_stages()
    bare = "\n".join(
        " ".join(word for word in line.split(" ") if "SEND" not in word and "RECV" not in word)
        for line in to_text(program).splitlines()
    )
    assert_same(from_text(bare), program)


def test_turns_appear_only_where_they_differ() -> None:
    program = two_stages()
    turn = program.turn.copy()
    turn[0] = 7
    text = to_text(dataclasses.replace(program, turn=turn))
    assert [line for line in text.splitlines() if line.startswith("turn")] == ["turn p0 0SEND_F: 7 2"]
    assert "turn" not in to_text(repeated(with_optimizer(program), 3))


def test_stages_on_one_worker_need_no_send() -> None:
    layout = Layout(1, 4, 1, ("a", "b"), (0, 1, 1, 0))
    orders = [[Op(Kind.F, 0, 0), Op(Kind.F, 3, 0)], [Op(Kind.F, 1, 0), Op(Kind.F, 2, 0)]]
    text = to_text(assemble("v", layout, orders))
    assert "stage_rank: 0 1 1 0" in text
    assert "p0.s1 @b: 1RECV_F0 1F0 2F0 2SEND_F0" in text


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("0F1", "0X1", "line 11: '0X1' is not an op"),
        ("0F1", "0F9", "line 11: got '0F9', expected stages 0..1 and microbatches 0..1"),
        ("0SEND_F0", "0SEND_F1", "line 11: got '0SEND_F1', expected 0SEND_F0 after 0F0"),
        (" 1SEND_B1", "", "line 12: got 'the end of the line', expected 1SEND_B1 after 1B1"),
        ("@us-west", "@us-wset", "line 12: got '@us-wset', expected @us-west"),
        ("p0-p1.s1", "p0.s1", "there is no line for p1.s1"),
        ("p0-p1.s1 @us-west", "p0-p1.s0 @us-east", "line 12: got '1F0'|each worker once"),
        ("p0-p1.s1", "p0-p7.s1", "line 12: got 'p0-p7.s1', expected pipelines p0..p1"),
        ("pipelines: 2", "pipelines: two", "line 3: got 'pipelines: two', expected a whole number"),
        ("pipelines: 2", "pipelnes: 2", "line 3: .*did you mean 'pipelines'"),
        ("pipelines: 2", "", "the header has no 'pipelines'"),
        ("stages: 2", "stages: 3", "3 stages cannot be distributed evenly"),
        ("sharing: no", "sharing: maybe", "line 8: got 'sharing: maybe', expected yes or no"),
        ("acquire F=1", "acquire Q=1", "line 9: got 'Q=1', expected a kind"),
        ("memory: 2", "memory: lots", "line 9: got 'lots acquire"),
        ("microbatches: 2", "microbatches: 999999999", "at most"),
        ("name: 1f1b", "name: 1f1b twice", "line 2: got '1f1b twice', expected one name"),
    ],
)
def test_errors_name_line_given_and_expected(old: str, new: str, says: str) -> None:
    text = to_text(two_stages())
    assert old in text
    with pytest.raises(ProgramError, match=says):
        from_text(text.replace(old, new, 1))


def test_torch_csv_is_compute_only() -> None:
    assert to_torch_csv(with_optimizer(two_stages())) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    with pytest.raises(ProgramError, match="has 2 iterations"):
        to_torch_csv(repeated(two_stages(), 2))


def test_torch_reads_our_csv() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = to_torch_csv(two_stages()).splitlines()
    actions = [[str(schedules._Action.from_str(cell)) for cell in row.split(",")] for row in rows]
    assert [",".join(row) for row in actions] == rows
