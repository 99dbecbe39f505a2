"""Schedules whose order follows from counting: GPipe, 1F1B, interleaved 1F1B.

Each is the order of one pipeline's ranks; with `recompute`, a recompute precedes each backward that does not directly
follow its own forward. They use no costs: the simulator shows the effect of the WAN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atlas.errors import ProgramError
from atlas.ir.assemble import assemble
from atlas.ir.program import Kind, Layout, Memory, Op, Program
from atlas.schedules.setting import Builder


def without_costs(schedule: Callable[..., Program]) -> Builder:
    """A schedule of this module as `SCHEDULES` builds it."""
    return lambda setting, _: schedule(setting.layout, recompute=setting.recompute)


def gpipe(layout: Layout, *, recompute: bool = False) -> Program:
    """All forwards, then all backwards. Holds every microbatch at once."""
    num_mb = layout.num_microbatches
    _require_one_stage_per_worker("gpipe", layout)
    orders = []
    for s in range(layout.num_stages):
        order = [Op(Kind.F, s, m) for m in range(num_mb)]
        order += [Op(Kind.B, s, m) for m in range(num_mb)]
        orders.append(with_recompute(order, layout.num_stages - 1) if recompute else order)
    return assemble("gpipe", layout, orders, memory=Memory(num_mb))


def one_f_one_b(layout: Layout, *, recompute: bool = False) -> Program:
    """Megatron's 1F1B: stage s runs P-1-s forwards ahead, then forwards and backwards in turn, then drains."""
    num_mb, depth = layout.num_microbatches, layout.num_stages
    _require_one_stage_per_worker("1f1b", layout)
    aheads = [min(num_mb, depth - 1 - s) for s in range(depth)]
    return assemble("1f1b", layout, alternating(num_mb, aheads, recompute), memory=Memory(min(num_mb, depth)))


def alternating(num_microbatches: int, aheads: Sequence[int], recompute: bool) -> list[list[Op]]:
    """By stage: this many forwards ahead, then forwards and backwards in turn, then the backwards that are left."""
    orders = []
    for stage, ahead in enumerate(aheads):
        order = [Op(Kind.F, stage, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if ahead + m < num_microbatches:
                order.append(Op(Kind.F, stage, ahead + m))
            order.append(Op(Kind.B, stage, m))
        orders.append(with_recompute(order, len(aheads) - 1) if recompute else order)
    return orders


def interleaved(layout: Layout, *, recompute: bool = False) -> Program:
    """Megatron's interleaved 1F1B: each worker holds several stages, assigned round robin, and runs them in turn."""
    ranks, num_mb = layout.num_ranks, layout.num_microbatches
    chunks = layout.num_stages // ranks
    if chunks < 2:
        raise ProgramError(
            f"interleaved 1F1B needs two or more stages per worker, and there are {layout.num_stages} stages for "
            f"{ranks} workers: set interleave: 2 in the job, or use '1f1b'"
        )
    rounds = max(1, num_mb // ranks)
    if num_mb % rounds:
        raise ProgramError(
            f"interleaved 1F1B runs its microbatches in {rounds} equal rounds of about {ranks}: {num_mb} microbatches "
            f"are not a multiple of {rounds}; use {num_mb - num_mb % ranks} or {num_mb + ranks - num_mb % ranks}"
        )
    per_round, total = num_mb // rounds, num_mb * chunks
    orders = []
    for rank in range(ranks):
        ahead = min(total, (chunks - 1) * per_round + 2 * (ranks - 1 - rank))
        forward = [_visit(k, rank, ranks, chunks, per_round, Kind.F) for k in range(total)]
        backward = [_visit(k, rank, ranks, chunks, per_round, Kind.B) for k in range(total)]
        order = forward[:ahead]
        for k in range(total):
            order += forward[ahead + k : ahead + k + 1]
            order.append(backward[k])
        orders.append(with_recompute(order, layout.num_stages - 1) if recompute else order)
    return assemble("interleaved", layout, orders)


def _visit(k: int, rank: int, ranks: int, chunks: int, per_round: int, kind: Kind) -> Op:
    """The k-th forward (or backward) of a rank: rounds of microbatches, and in a round chunk after chunk."""
    chunk = k // per_round % chunks
    if kind == Kind.B:
        chunk = chunks - 1 - chunk
    microbatch = k // (per_round * chunks) * per_round + k % per_round
    return Op(kind, chunk * ranks + rank, microbatch)


def with_recompute(order: list[Op], last_stage: int) -> list[Op]:
    """A recompute before every backward, except on the last stage straight after the forward: there is no need."""
    result: list[Op] = []
    for op in order:
        still_there = op.stage == last_stage and result and result[-1] == Op(Kind.F, op.stage, op.microbatch)
        if op.kind in (Kind.B, Kind.I) and not still_there:
            result.append(Op(Kind.R, op.stage, op.microbatch))
        result.append(op)
    return result


def _require_one_stage_per_worker(name: str, layout: Layout) -> None:
    if layout.num_stages != layout.num_ranks:
        raise ProgramError(
            f"{name} puts one stage on each worker, but {layout.num_stages} stages are dealt to "
            f"{layout.num_ranks} workers: use the schedule 'interleaved', or set interleave: 1"
        )
