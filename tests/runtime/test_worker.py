"""Workers, all in one process on plain CPUs: whatever legal order a Program gives, the model learns the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from worker_threads import ThreadedRun, run_in_threads

from atlas.errors import ProgramError, WorkerError
from atlas.ir.assemble import assemble, repeated, with_optimizer
from atlas.ir.program import Kind, Layout, Op, Program
from atlas.ir.text import to_text
from atlas.runtime.assignment import SHIPPED, Assignment, DataChoice, ModelChoice, TrainingSetup, stand_in
from atlas.runtime.device import Cpu
from atlas.runtime.models.config import DecoderConfig, even_layers, gpt
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.reference import train_alone
from atlas.runtime.worker import Worker

torch.set_num_threads(1)
TRAINING = stand_in(width=16, length=8, microbatch=2)
ADAM = OptimizerSettings(LearningRate(1e-3, "cosine", 1, 10))


def assert_learns_like_one_process(
    program: Program,
    training: TrainingSetup = TRAINING,
    num_steps: int = 2,
    tolerance: float = 1e-5,
    num_cells: int = 1,
) -> ThreadedRun:
    trained = run_in_threads(program, training, num_steps, num_cells=num_cells)
    num_steps = program.num_iterations if program.num_iterations > 1 else num_steps
    num_pipelines = program.num_pipelines * num_cells
    losses, weights = train_alone(training, num_pipelines, program.num_microbatches, num_steps)
    for pipeline in range(num_pipelines):
        mine = trained.weights(pipeline)
        assert mine.keys() == weights.keys()
        for name, expected in weights.items():
            assert np.linalg.norm(mine[name] - expected) <= tolerance * np.linalg.norm(expected), name
    assert np.allclose(trained.losses(), losses, rtol=1e-5)
    return trained


def program_of(orders: list[str], num_pipelines: int = 1, num_microbatches: int = 2, *, norm: bool = False) -> Program:
    """`["F0 F1 B0 B1", ...]`, one per stage, each on a worker of its own."""
    ops = [
        [Op(Kind["".join(filter(str.isalpha, a))], s, int("".join(filter(str.isdigit, a)))) for a in order.split()]
        for s, order in enumerate(orders)
    ]
    layout = Layout(num_pipelines, len(orders), num_microbatches, tuple(f"dc{s}" for s in range(len(orders))))
    return with_optimizer(assemble("by hand", layout, ops), norm=norm)


ONE_BY_ONE = ["F0 F1 B0 B1", "F0 B0 F1 B1"]


@pytest.mark.parametrize(
    "orders",
    [
        ["F0 F1 B0 B1", "F0 F1 B0 B1"],
        ONE_BY_ONE,
        ["F0 F1 B1 B0", "F0 F1 B1 B0"],
        ["F0 F1 R0 B0 R1 B1", "F0 B0 F1 R1 B1"],
        ["F0 F1 I0 I1 W1 W0", "F0 I0 F1 I1 W1 W0"],
        ["F0 F1 R0 I0 W0 B1", "F0 F1 R1 R0 I0 I1 W1 W0"],
        ["F0 F1 B0 B1", "F0 B0 F1 B1", "F0 I0 F1 I1 W0 W1"],
    ],
    ids=["gpipe", "1f1b", "out of order", "recompute", "split", "mixed", "three stages"],
)
def test_every_order_learns_like_one_process(orders: list[str]) -> None:
    assert_learns_like_one_process(program_of(orders))


def test_pipelines_agree_on_their_gradients() -> None:
    assert_learns_like_one_process(program_of(ONE_BY_ONE, num_pipelines=3))


def test_cells_agree_on_their_gradients() -> None:
    assert_learns_like_one_process(program_of(ONE_BY_ONE, num_pipelines=2), num_cells=2)


def test_a_program_of_several_iterations_is_run_once() -> None:
    program = program_of(ONE_BY_ONE)
    whole = assert_learns_like_one_process(repeated(program, 3))
    again = run_in_threads(program, TRAINING, 3)
    assert all(np.array_equal(w, again.weights()[name]) for name, w in whole.weights().items())


def test_taking_turns_on_the_wan_changes_no_bit() -> None:
    program = program_of(["F0 F1 B0 B1", "F0 B0 F1 B1", "F0 B0 F1 B1"], num_pipelines=2)
    apart = run_in_threads(program, TRAINING, 2)
    shared = assert_learns_like_one_process(replace(program, sharing=True))
    assert apart.losses() == shared.losses()
    assert all(np.array_equal(w, shared.weights()[name]) for name, w in apart.weights().items())


# ---- models, data, optimizers ------------------------------------------------------------------------------------
QWEN = DecoderConfig(
    "qwen3", num_layers=3, width=16, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=24, vocabulary=256,
    max_length=8, qk_norm=True, tied=True,
)  # fmt: skip


def real(config: DecoderConfig, max_norm: float | None = None, layers: tuple[int, ...] = ()) -> TrainingSetup:
    """On the text that ships."""
    model = ModelChoice(config, seed=3, layers_per_stage=layers)
    return TrainingSetup(model, DataChoice(8, 2, SHIPPED, seed=5), ADAM, max_norm)


def test_tied_ends_on_two_workers_learn_as_one_matrix() -> None:
    program = program_of(["F0 F1 B0 B1", "F0 B0 F1 B1", "F0 B0 F1 B1"], num_pipelines=2)
    assert_learns_like_one_process(program, real(QWEN), tolerance=1e-4)


def test_gradients_are_clipped_by_the_norm_of_the_whole_model() -> None:
    training = real(QWEN, max_norm=0.5, layers=(1, 2))
    trained = assert_learns_like_one_process(program_of(ONE_BY_ONE, 2, norm=True), training, tolerance=1e-4)
    norms = {tuple(norm for record in records for norm in record.norms) for records in trained.records}
    assert len(norms) == 1, "every worker clips by the same number"
    assert all(norm > 0.5 for norm in norms.pop()), "or nothing was clipped"
    with pytest.raises(ProgramError, match="no NORM computes their norm"):
        run_in_threads(program_of(ONE_BY_ONE), training)


def test_dropout_draws_the_same_whatever_the_order() -> None:
    config = gpt(num_layers=3, width=16, num_heads=2, vocabulary=256, max_length=8, dropout=0.2)
    training = real(config)
    crews = [run_in_threads(program_of(orders), training, 2) for orders in (ONE_BY_ONE, ["F0 F1 R0 B0 R1 B1"] * 2)]
    assert crews[0].losses() == crews[1].losses()
    assert_learns_like_one_process(program_of(ONE_BY_ONE), training, tolerance=1e-3)


def test_bf16_crosses_as_bf16() -> None:
    training = replace(TRAINING, model=replace(TRAINING.model, dtype="bf16"))
    trained = run_in_threads(program_of(ONE_BY_ONE), training, 2)
    alone, _ = train_alone(training, 1, 2, 2)
    assert trained.workers[0].transfers.dtype == torch.bfloat16
    assert np.allclose(trained.losses(), alone, rtol=1e-2)


# ---- orders and records ------------------------------------------------------------------------------------------
def test_stages_on_one_worker_hand_over_without_a_socket() -> None:
    layout = Layout(1, 4, 1, ("a", "b"), (0, 1, 1, 0))
    f, b = (lambda s: Op(Kind.F, s, 0)), (lambda s: Op(Kind.B, s, 0))
    orders = [[f(0), f(3), b(3), b(0)], [f(1), f(2), b(2), b(1)]]
    assert_learns_like_one_process(with_optimizer(assemble("v", layout, orders)))


def test_the_record_has_every_op_and_every_transfer() -> None:
    program = program_of(ONE_BY_ONE, num_pipelines=2)
    trained = run_in_threads(program, TRAINING, 2)
    for records, worker in zip(trained.records, trained.workers, strict=True):
        assert [record.first_step for record in records] == [0, 1]
        for record in records:
            assert len(record.op_start_ns) == len(record.op_end_ns) == len(worker.ops)
            assert record.op_end_ns == sorted(record.op_end_ns)
    for number in range(2):
        told = [records[number].to_json() for records in trained.records]
        for moments in ("ready_ns", "start_ns", "arrive_ns"):
            seen = sorted(transfer for step in told for transfer, _ in step[moments])
            assert seen == list(range(program.num_transfers)), moments
    assert sum(record.tokens for records in trained.records for record in records) == 2 * 2 * 2 * 2 * 8


def test_gradients_are_summed_in_ascending_order_to_the_bit() -> None:
    in_order = run_in_threads(program_of(["F0 F1 B0 B1", "F0 F1 B0 B1"]), TRAINING).weights()
    backwards = run_in_threads(program_of(["F0 F1 B1 B0", "F0 F1 B1 B0"]), TRAINING).weights()
    assert all(np.array_equal(in_order[name], backwards[name]) for name in in_order)


def test_a_missing_peer_is_named_in_time() -> None:
    assignment = Assignment(1, to_text(program_of(ONE_BY_ONE)), TRAINING, 1, patience_s=0.2)
    worker = Worker(assignment, Cpu())
    try:
        with pytest.raises(WorkerError, match=r"1F0 on p0.s1 \(dc1\) waits for 0SEND_F0 of p0.s0: not done within"):
            worker.run()
    finally:
        worker.close()


def test_a_step_without_sync_is_refused() -> None:
    layout = Layout(1, 1, 1, ("a",))
    program = assemble("bad", layout, [[Op(Kind.F, 0, 0), Op(Kind.B, 0, 0), Op(Kind.STEP, 0, 0)]])
    with pytest.raises(ProgramError, match=r"0STEP0 on p0.s0 \(a\): no SYNC before it"):
        run_in_threads(program, TRAINING)


def test_turns_with_several_stages_on_a_worker_are_refused() -> None:
    layout = Layout(2, 4, 1, ("a", "b"))
    orders = [[Op(k, s, 0) for k in (Kind.F, Kind.B) for s in stages] for stages in ((0, 2), (1, 3))]
    with pytest.raises(ProgramError, match="turns work only with one stage on each worker"):
        run_in_threads(assemble("v", layout, orders, sharing=True), TRAINING)


def test_layers_are_dealt_evenly_with_embedding_and_head_counted() -> None:
    assert even_layers(4, 1) == (4,)
    assert even_layers(4, 3) == (1, 2, 1)
    assert even_layers(4, 6) == (0, 1, 1, 1, 1, 0)
    with pytest.raises(ProgramError, match="7 stages for 6 layers"):
        even_layers(4, 7)
