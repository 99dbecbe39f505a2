"""Makes Programs: from one list of ops per worker, or from another Program, with the optimizer's ops or repeated.

`atlas.schedules` orders the ops; `ir.check` checks whether the result can finish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from atlas.errors import ProgramError
from atlas.ir.program import Ints, Kind, Layout, Memory, Op, Program, turn_key


def assemble(
    name: str,
    layout: Layout,
    orders: Sequence[Sequence[Op]],
    *,
    sharing: bool = False,
    turn: Ints | None = None,
    memory: Memory | None = None,
    num_iterations: int = 1,
    recompute_on_arrival: bool = False,
) -> Program:
    """Makes a Program from one list of ops per worker, or per rank if every pipeline does the same.

    `turn` is by transfer; without it the order of the dispatch rule (oldest microbatch first) is used.
    """
    if len(orders) == layout.num_ranks and layout.num_pipelines > 1:
        orders = list(orders) * layout.num_pipelines
    if len(orders) != layout.num_ranks * layout.num_pipelines:
        raise ProgramError(
            f"{len(orders)} lists of ops for {layout.num_pipelines} pipelines of {layout.num_ranks} workers: "
            "give one list per worker, or one per rank"
        )
    num_slots = layout.num_microbatches * num_iterations
    flat = np.array([op for order in orders for op in order], np.int64).reshape(-1, 3)
    if len(flat) and (flat[:, 1].max() >= layout.num_stages or flat[:, 2].max() >= num_slots or flat.min() < 0):
        raise ProgramError(
            f"program {name!r}: an op names a stage or a microbatch outside "
            f"0..{layout.num_stages - 1} / 0..{num_slots - 1}"
        )
    if turn is None:
        turn = default_turns(layout, num_iterations)
    return Program(
        name=name,
        num_pipelines=layout.num_pipelines,
        num_stages=layout.num_stages,
        num_microbatches=layout.num_microbatches,
        num_iterations=num_iterations,
        stage_rank=layout.stage_rank,
        rank_dc=layout.rank_dc,
        worker_ptr=np.concatenate([[0], np.cumsum([len(order) for order in orders])]).astype(np.int64),
        kind=flat[:, 0].astype(np.int8),
        stage=flat[:, 1].astype(np.int32),
        microbatch=flat[:, 2].astype(np.int32),
        turn=turn,
        sharing=sharing,
        recompute_on_arrival=recompute_on_arrival,
        memory=memory,
    )


def default_turns(layout: Layout, num_iterations: int = 1) -> Ints:
    """The dispatch rule's turn of every transfer."""
    num_slots = layout.num_microbatches * num_iterations
    m, c = np.arange(num_slots)[None, :], np.arange(layout.num_pipelines)[:, None]
    keys = np.asarray(turn_key(m, c, layout.num_pipelines), np.int64)  # type: ignore[arg-type]
    shape = (2, layout.num_pipelines, layout.num_stages - 1, num_slots)
    return np.broadcast_to(keys[None, :, None, :], shape).reshape(-1).copy()


def with_optimizer(program: Program, *, norm: bool = False) -> Program:
    """The same Program with SYNC, (NORM,) and STEP at the end of each worker's iteration."""
    if program.num_iterations != 1:
        raise ProgramError(
            f"program {program.name!r} has {program.num_iterations} iterations: add the optimizer first, then repeat"
        )
    closing = [Kind.SYNC, Kind.NORM, Kind.STEP] if norm else [Kind.SYNC, Kind.STEP]
    return _per_worker(program, program.num_iterations, lambda ops: [*ops, *_closing(ops, closing, 0)])


def repeated(program: Program, times: int) -> Program:
    """The same iterations `times` times. Each worker continues as soon as its own work allows."""

    def unroll(ops: list[Op]) -> list[Op]:
        return [
            Op(op.kind, op.stage, op.microbatch + k * (num_slots if op.kind <= Kind.W else num_iterations))
            for k in range(times)
            for op in ops
        ]

    num_slots, num_iterations = program.num_slots, program.num_iterations
    turns = program.turn.reshape(program.transfer_shape)
    later = int(turns.max(initial=0)) + 1
    turn = np.concatenate([turns + k * later for k in range(times)], axis=3).ravel()
    return _per_worker(program, times * num_iterations, unroll, turn)


def _closing(ops: list[Op], kinds: list[Kind], iteration: int) -> list[Op]:
    stage = min(op.stage for op in ops)
    return [Op(kind, stage, iteration) for kind in kinds]


def _per_worker(
    program: Program, num_iterations: int, rewrite: Callable[[list[Op]], list[Op]], turn: Ints | None = None
) -> Program:
    return assemble(
        program.name,
        program.layout,
        [rewrite(program.ops(w)) for w in range(program.num_workers)],
        sharing=program.sharing,
        turn=program.turn if turn is None else turn,
        memory=program.memory,
        num_iterations=num_iterations,
        recompute_on_arrival=program.recompute_on_arrival,
    )
