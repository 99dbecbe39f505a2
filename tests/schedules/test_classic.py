"""GPipe, 1F1B and interleaved 1F1B: the orders that torch executes, and the times that arithmetic gives."""

from __future__ import annotations

from unittest import mock

import pytest

from atlas.cost.table import kind_costs, uniform_costs
from atlas.errors import ProgramError
from atlas.ir.assemble import check
from atlas.ir.program import Kind, Layout, Op
from atlas.schedules.classic import gpipe, interleaved, one_f_one_b
from atlas.sim import simulate

SIZES = [(2, 2), (3, 7), (4, 8), (4, 4), (8, 16), (5, 11)]
LOOPED = [(2, 4, 2), (4, 8, 2), (4, 16, 3), (2, 6, 4), (4, 10, 2), (4, 3, 2), (4, 12, 3), (3, 9, 2), (8, 16, 2)]


# ---- torch --------------------------------------------------------------------------------------------------
def torch_orders(schedule: str, ranks: int, num_mb: int, chunks: int | None = None) -> list[list[str]]:
    """What torch's own generator says, computations only."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    actions = visualizer.get_schedule_ops(schedule, ranks, num_mb, chunks)
    wanted = {"F", "B", "I", "W"}
    return [[str(a) for a in rank if a is not None and a.computation_type.value in wanted] for rank in actions]


def torch_executes_1f1b(ranks: int, num_mb: int, rank: int) -> list[str]:
    """What Schedule1F1B does, step by step: its own loop, run on a stage that only writes down what it is told."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stage_class = pytest.importorskip("torch.distributed.pipelining.stage").PipelineStage
    stage = mock.create_autospec(stage_class, instance=True)
    stage.num_stages, stage.group_size, stage.stage_index, stage.group_rank, stage.submod = (
        ranks, ranks, rank, rank, None,
    )  # fmt: skip
    stage.is_first, stage.is_last, stage.has_backward = rank == 0, rank == ranks - 1, True
    done: list[str] = []
    stage.forward_one_chunk.side_effect = lambda m, *a, **kw: done.append(f"{rank}F{m}")
    stage.backward_one_chunk.side_effect = lambda m, *a, **kw: done.append(f"{rank}B{m}")
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ops).return_value = []
    schedule = schedules.Schedule1F1B(stage, num_mb)
    with mock.patch.multiple(
        schedule, _initialize_stage=mock.DEFAULT, _maybe_compute_loss=mock.DEFAULT, _maybe_get_loss=mock.DEFAULT,
        _update_losses=mock.DEFAULT,
    ):  # fmt: skip
        schedule._step_microbatches([()] * num_mb, [{}] * num_mb)
    return done


def our_orders(program) -> list[list[str]]:
    return [[str(op) for op in program.ops(w)] for w in range(program.num_ranks)]


@pytest.mark.parametrize(("ranks", "num_mb"), SIZES)
def test_gpipe_is_torchs_op_by_op(ranks: int, num_mb: int):
    assert our_orders(gpipe(Layout.even(1, ranks, num_mb, 1))) == torch_orders("GPipe", ranks, num_mb)


@pytest.mark.parametrize(("ranks", "num_mb"), SIZES)
def test_1f1b_is_what_torch_executes_op_by_op(ranks: int, num_mb: int):
    ours = our_orders(one_f_one_b(Layout.even(1, ranks, num_mb, 1)))
    assert ours == [torch_executes_1f1b(ranks, num_mb, rank) for rank in range(ranks)]
    # What torch draws is what it does, but for the last rank, whose microbatches it numbers from 1.
    drawn = torch_orders("1F1B", ranks, num_mb)
    assert ours[:-1] == drawn[:-1]


@pytest.mark.parametrize(("ranks", "num_mb", "chunks"), LOOPED)
def test_interleaved_1f1b_is_torchs_op_by_op(ranks: int, num_mb: int, chunks: int):
    program = interleaved(Layout(1, ranks * chunks, num_mb, ("dc",) * ranks))
    check(program)
    assert our_orders(program) == torch_orders("Interleaved1F1B", ranks, num_mb, chunks)


@pytest.mark.parametrize(("ranks", "num_mb"), [(4, 9), (2, 7), (3, 11)])
def test_interleaved_refuses_the_microbatch_counts_that_torch_refuses_and_offers_others(ranks: int, num_mb: int):
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torch_orders("Interleaved1F1B", ranks, num_mb, 2)
    with pytest.raises(ProgramError, match=r"use (\d+) or (\d+)") as raised:
        interleaved(Layout(1, ranks * 2, num_mb, ("dc",) * ranks))
    for offered in str(raised.value).rsplit("use ", 1)[1].split(" or "):
        interleaved(Layout(1, ranks * 2, int(offered), ("dc",) * ranks))


# ---- arithmetic ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("depth", "num_mb"), [(1, 1), (1, 5), (2, 2), (3, 8), (4, 4), (8, 32), (6, 3)])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_without_communication_the_makespan_is_the_closed_form(make, depth: int, num_mb: int):
    forward, backward = 7, 13
    costs = uniform_costs(1, depth, kind_costs(forward_ns=forward, backward_ns=backward))
    program = make(Layout.even(1, depth, num_mb, 1))
    check(program)
    assert simulate(program, costs).makespan_ns == (num_mb + depth - 1) * (forward + backward)


@pytest.mark.parametrize(("depth", "num_mb", "chunks"), [(4, 8, 2), (4, 16, 4), (2, 4, 3)])
def test_interleaving_divides_fill_and_drain_by_the_number_of_chunks(depth: int, num_mb: int, chunks: int):
    costs = uniform_costs(1, depth * chunks, kind_costs(forward_ns=10, backward_ns=20))
    timeline = simulate(interleaved(Layout(1, depth * chunks, num_mb, ("dc",) * depth)), costs)
    assert timeline.makespan_ns == (num_mb * chunks + depth - 1) * 30


@pytest.mark.parametrize(("depth", "num_mb"), [(4, 8), (4, 2), (6, 6)])
def test_peaks_are_m_for_gpipe_and_the_remaining_stages_for_1f1b(depth: int, num_mb: int):
    layout = Layout.even(1, depth, num_mb, 1)
    assert gpipe(layout).peak_in_flight == num_mb
    assert one_f_one_b(layout).peak_in_flight == min(num_mb, depth)


def test_astra_sims_golden_1f1b_time():
    # P=8, M=16, F 10 ms, B 20 ms, transfers 1,862.645 us + 20 us: see the README of the shared measurements.
    costs = uniform_costs(
        1, 8, kind_costs(forward_ns=10_000_000, backward_ns=20_000_000), lan_ns=1_862_645, lan_latency_ns=20_000
    )
    makespan_us = simulate(one_f_one_b(Layout.even(1, 8, 16, 1)), costs).makespan_ns / 1e3
    assert makespan_us == pytest.approx(765_305.8, rel=1e-6)


# ---- recompute ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_every_backward_is_recomputed_except_one_straight_after_its_forward_on_the_last_stage(make):
    program = make(Layout.even(1, 3, 4, 1), recompute=True)
    check(program)
    for w in range(3):
        order = program.ops(w)
        for k, op in enumerate(order):
            if op.kind == Kind.B:
                before = order[k - 1]
                skipped = w == 2 and before == Op(Kind.F, 2, op.microbatch)
                assert skipped or before == Op(Kind.R, op.stage, op.microbatch)
    last = [op.kind for op in program.ops(2)]
    assert (Kind.R in last) == (make is gpipe)
