"""The memory of a job's workers, by the rule of `memory_rule`: what each rank holds, how many microbatches fit, and the
most that a Program needs at once.
"""

from __future__ import annotations

import numpy as np

from atlas.cost.arrange import Arrangement, arrange
from atlas.cost.cluster_arrays import GIB
from atlas.cost.memory_rule import WorkerMemory, batch_memory, in_flight
from atlas.cost.runtimes import RUNTIMES
from atlas.errors import InfeasibleError
from atlas.ir.program import NUM_KINDS, Kind, Memory, Program
from atlas.spec.job import Job


def worker_memory(job: Job, arrangement: Arrangement | None = None) -> tuple[WorkerMemory, ...]:
    """By rank of a pipeline: the memory rule for a batch of one."""
    arrangement = arrangement or arrange(job)
    stages = [slice(rank, None, job.pp) for rank in range(job.pp)]
    params = np.array([[arrangement.stage_params[own].sum() for own in stages]], np.float64)
    layers = np.array([[max(arrangement.layers_per_stage[own]) for own in stages]])
    dc = arrangement.stage_dc[:, : job.pp]
    shards = job.cells * arrangement.num_pipelines if job.zero else 1
    found = batch_memory(arrangement.cluster, arrangement.model, dc, params, layers, shards)
    return tuple(WorkerMemory._make(int(part[0, rank]) for part in found) for rank in range(job.pp))


def memory_rule(
    job: Job, arrangement: Arrangement | None = None, workers: tuple[WorkerMemory, ...] | None = None
) -> Memory:
    """What ops take and give back, in KiB of the tightest worker; raises where not one microbatch fits.

    A forward takes the stash and a recompute the activations (without recompute: the forward all of it); the end of
    the backward, or of its weight half where it is split, gives both back; the input half gives nothing back.
    """
    arrangement = arrangement or arrange(job)
    workers = workers or worker_memory(job, arrangement)
    _require_room(job, arrangement, workers)
    rows = [(worker.free, *worker.per_microbatch(job.recompute)) for worker in workers]
    rule = in_flight(*(np.array([column], np.float64) for column in zip(*rows, strict=True)))
    forward, again = int(rule.forward[0]), int(rule.recompute[0])
    acquire, release = [0] * NUM_KINDS, [0] * NUM_KINDS
    acquire[Kind.F], acquire[Kind.R] = forward, again
    release[Kind.B] = release[Kind.W] = forward + again
    return Memory(cap=int(rule.cap[0]), acquire=tuple(acquire), release=tuple(release))


def peak_memory(
    job: Job, program: Program, *, workers: tuple[WorkerMemory, ...] | None = None
) -> tuple[tuple[WorkerMemory, int], ...]:
    """By rank: what its workers hold, and the most bytes any of them needs at once while it runs the Program.

    A microbatch that the Program recomputes, or the runtime inside its backward, costs its stash and later its
    activations; one that is not recomputed (on the last stage, as a rule) costs its activations from the forward on.
    """
    in_backward = job.recompute and RUNTIMES[job.runtime].recomputes_in_backward
    recomputed = (program.op_index[Kind.R] >= 0) | in_backward
    pipeline, rank = np.divmod(program.op_worker, program.num_ranks)
    per_microbatch = program.kind <= Kind.W
    slot = np.where(per_microbatch, program.microbatch, 0)
    again = recomputed[pipeline, program.stage, slot] & per_microbatch
    workers = workers or worker_memory(job)
    parts = ("stash", "activations", "kept")
    stash, full, kept = (np.array([getattr(w, part) for w in workers])[rank] for part in parts)
    split = (program.op_index[Kind.W] >= 0)[pipeline, program.stage, slot]
    starts = (program.kind == Kind.I) | ((program.kind == Kind.B) & ~split) if in_backward else program.kind == Kind.R
    takes = np.where(program.kind == Kind.F, np.where(again, stash, kept), np.where(starts, full, 0))
    ends = (program.kind == Kind.W) | ((program.kind == Kind.B) & ~split)
    gives = np.where(ends, np.where(again, stash + full, kept), 0)
    before = np.cumsum(takes - gives) - (takes - gives)  # every worker gives back all it took, so sums start at zero
    needs = before + takes
    return tuple((w, w.static + int(needs[rank == r].max(initial=0))) for r, w in enumerate(workers))


def _require_room(job: Job, arrangement: Arrangement, workers: tuple[WorkerMemory, ...]) -> None:
    """Static bytes and one microbatch, on every worker."""
    for rank, worker in enumerate(workers):
        need = worker.static + sum(worker.per_microbatch(job.recompute))
        if need > worker.cap:
            parts = (
                f"weights {worker.weights / GIB:.1f}, gradients {worker.gradients / GIB:.1f}, "
                f"optimizer {worker.optimizer / GIB:.1f}, logits {worker.logits / GIB:.1f}, "
                f"runtime {worker.overhead / GIB:.1f}, "
                f"reserved {worker.reserved / GIB:.1f}, one microbatch {(need - worker.static) / GIB:.1f}"
            )
            raise InfeasibleError(
                where=job.where,
                key="memory_gib",
                value=round(worker.cap / GIB, 1),
                rule=f"worker {rank} of each pipeline ({arrangement.rank_dc[rank]}) needs {need / GIB:.1f} GiB per GPU"
                f", which has {worker.cap / GIB:.1f} ({parts})",
                remedy=_remedy(job),
            )


def _remedy(job: Job) -> str:
    """The cheapest thing to change."""
    if not job.recompute:
        return "Set recompute: true"
    if job.reserved_gib > 0:
        return "Lower reserved_gib"
    if job.microbatch > 1:
        return "Lower microbatch"
    return "Raise pp or tp, or use GPUs with more memory"
