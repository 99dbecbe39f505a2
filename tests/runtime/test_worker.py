"""Workers, all in one process on plain CPUs: whatever legal order a Program gives, the model learns the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from atlas.errors import ProgramError, WorkerError
from atlas.ir.ops import NUM_KINDS, Kind, Op
from atlas.ir.program import Layout, Program, assemble, repeated, with_optimizer
from atlas.runtime.device import Cpu
from atlas.runtime.model import TinyGpt, build_stage, stage_layers
from atlas.runtime.reference import Weights, train_alone
from atlas.runtime.worker import GRADIENTS, Record, Training, Worker

torch.set_num_threads(1)
TRAINING = Training(TinyGpt(width=16, length=8, batch=2))


def run_in_threads(program: Program, training: Training) -> tuple[list[Record], list[Worker]]:
    """Every worker of the Program, each in a thread, over direct sockets."""
    costs = np.zeros((program.num_stages, NUM_KINDS), np.int64)
    workers = [Worker(program, w, costs, training, Cpu(), 10.0) for w in range(program.num_workers)]
    ranks = program.num_ranks

    def life(worker: Worker) -> Record:
        c, rank = worker.pipeline, worker.rank
        addresses = {}
        for b in range(program.num_stages - 1):
            left, right = program.worker(c, b), program.worker(c, b + 1)
            for direction, source, target in ((0, left, right), (1, right, left)):
                if source == worker.worker and target != source:
                    addresses[direction, b] = workers[target].listener.address
        for other in range(program.num_pipelines):
            if other != c:
                addresses[GRADIENTS, other] = workers[other * ranks + rank].listener.address
        worker.connect(addresses)
        return worker.run(0)

    try:
        with ThreadPoolExecutor(len(workers)) as pool:
            records = list(pool.map(life, workers))
    finally:
        for worker in workers:
            worker.close()
    return records, workers


def assert_learns_like_one_process(program: Program, training: Training = TRAINING, tolerance: float = 1e-5) -> None:
    _, workers = run_in_threads(program, training)
    losses, weights = train_alone(training, program.num_pipelines, program.num_microbatches, program.num_iterations)
    for pipeline in range(program.num_pipelines):
        mine: Weights = {}
        for worker in workers[pipeline * program.num_ranks : (pipeline + 1) * program.num_ranks]:
            for stage in worker.stages.values():
                mine |= {name: p.detach().numpy() for name, p in stage.module.named_parameters()}
        assert mine.keys() == weights.keys()
        for name, expected in weights.items():
            assert np.linalg.norm(mine[name] - expected) <= tolerance * np.linalg.norm(expected), name
    slots: dict[int, list[float]] = {}
    for worker in workers:
        for stage in worker.stages.values():
            for slot, loss in stage.losses.items():
                slots.setdefault(slot // program.num_microbatches, []).append(loss)
    assert np.allclose([np.mean(slots[k]) for k in sorted(slots)], losses, rtol=1e-5)


def program_of(orders: list[str], num_pipelines: int = 1, num_microbatches: int = 2, iterations: int = 2) -> Program:
    """`["F0 F1 B0 B1", ...]`, one per stage, each on a worker of its own."""
    ops = [
        [Op(Kind["".join(filter(str.isalpha, a))], s, int("".join(filter(str.isdigit, a)))) for a in order.split()]
        for s, order in enumerate(orders)
    ]
    layout = Layout(num_pipelines, len(orders), num_microbatches, tuple(f"dc{s}" for s in range(len(orders))))
    return repeated(with_optimizer(assemble("by hand", layout, ops)), iterations)


@pytest.mark.parametrize(
    "orders",
    [
        ["F0 F1 B0 B1", "F0 F1 B0 B1"],
        ["F0 F1 B0 B1", "F0 B0 F1 B1"],
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
    assert_learns_like_one_process(program_of(["F0 F1 B0 B1", "F0 B0 F1 B1"], num_pipelines=3))


def test_adamw_steps_too() -> None:
    training = Training(TRAINING.gpt, "adamw", 1e-3)
    assert_learns_like_one_process(program_of(["F0 F1 B0 B1", "F0 B0 F1 B1"]), training, tolerance=1e-4)


def test_stages_on_one_worker_hand_over_without_a_socket() -> None:
    layout = Layout(1, 4, 1, ("a", "b"), (0, 1, 1, 0))
    f, b = (lambda s: Op(Kind.F, s, 0)), (lambda s: Op(Kind.B, s, 0))
    orders = [[f(0), f(3), b(3), b(0)], [f(1), f(2), b(2), b(1)]]
    assert_learns_like_one_process(repeated(with_optimizer(assemble("v", layout, orders)), 2))


def test_a_recompute_may_wait_for_its_gradient() -> None:
    layout = Layout(1, 2, 1, ("a", "b"))
    orders = [[Op(Kind.F, 0, 0), Op(Kind.R, 0, 0), Op(Kind.B, 0, 0)], [Op(Kind.F, 1, 0), Op(Kind.B, 1, 0)]]
    program = with_optimizer(assemble("varuna", layout, orders, recompute_on_arrival=True))
    assert_learns_like_one_process(program)
    records, _ = run_in_threads(program, TRAINING)
    assert records[0].arrive_ns[1] <= records[0].op_end_ns[1]


def test_the_record_has_every_op_and_every_transfer() -> None:
    program = program_of(["F0 F1 B0 B1", "F0 B0 F1 B1"], num_pipelines=2)
    records, workers = run_in_threads(program, TRAINING)
    for record, worker in zip(records, workers, strict=True):
        assert len(record.op_start_ns) == len(record.op_end_ns) == len(worker.ops)
        assert record.op_end_ns == sorted(record.op_end_ns)
    for moments in ("ready_ns", "start_ns", "arrive_ns"):
        seen = sorted(t for record in records for t in getattr(record, moments))
        assert seen == list(range(program.num_transfers)), moments


def test_gradients_are_summed_in_ascending_order_to_the_bit() -> None:
    in_order = run_in_threads(program_of(["F0 F1 B0 B1", "F0 F1 B0 B1"]), TRAINING)[1]
    backwards = run_in_threads(program_of(["F0 F1 B1 B0", "F0 F1 B1 B0"]), TRAINING)[1]
    for a, b in zip(in_order, backwards, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters, b.parameters, strict=True))


def test_a_missing_peer_is_named_in_time() -> None:
    program = program_of(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    worker = Worker(program, 1, np.zeros((2, NUM_KINDS), np.int64), TRAINING, Cpu(), 0.2)
    with pytest.raises(WorkerError, match=r"1F0 on p0.s1 \(dc1\) waits for 0SEND_F0 of p0.s0: nothing came"):
        worker.run(0)
    worker.close()


def test_a_step_without_sync_is_refused() -> None:
    layout = Layout(1, 1, 1, ("a",))
    program = assemble("bad", layout, [[Op(Kind.F, 0, 0), Op(Kind.B, 0, 0), Op(Kind.STEP, 0, 0)]])
    with pytest.raises(ProgramError, match=r"0STEP0 on p0.s0 \(a\): no SYNC before it"):
        run_in_threads(program, TRAINING)


def test_layers_are_cut_without_gap_and_seeded_apart_from_the_cut() -> None:
    gpt = TRAINING.gpt
    for num_stages in range(1, gpt.num_layers + 1):
        assert [i for s in range(num_stages) for i in stage_layers(gpt, s, num_stages)] == list(range(gpt.num_layers))
    whole = dict(build_stage(gpt, 0, 1).named_parameters())
    for stage in range(3):
        for name, parameter in build_stage(gpt, stage, 3).named_parameters():
            assert torch.equal(parameter, whole[name])
    with pytest.raises(ProgramError, match="7 stages for 6 layers"):
        stage_layers(gpt, 0, 7)
