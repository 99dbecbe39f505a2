"""Bytes that one GPU of each worker holds, and what they leave for microbatches in flight.

Always there: weights, gradients, optimizer state, what is reserved for others, on the last stage what the loss holds of
one microbatch, and what the runtime holds besides (context, NCCL, temporaries of a backward). Per microbatch: with
recompute the stage's input from its forward on (the stash) and the full activations from the recompute to the end of
the backward; without it the full activations from the forward on. A runtime that recomputes layer by layer keeps every
layer's input and has one layer's activations at a time. Knows no order: a schedule that keeps
`stash held + F + R <= cap` before every forward never runs out.

Our own runtime's context and buffers are not counted; a share of every GPU is kept for them (`usable_share`). Whoever
has measured more writes `memory_gib` or `reserved_gib`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from atlas.cost.arrange import Arrangement, arrange
from atlas.cost.runtimes import RUNTIMES
from atlas.cost.sizes import model_size
from atlas.errors import InfeasibleError
from atlas.ir.ops import NUM_KINDS, Kind
from atlas.ir.program import Memory, Program
from atlas.spec.job import Job

GIB = 2**30
KIB = 2**10


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes on one GPU of one worker (a rank of the pipeline)."""

    dc: str
    weights: int
    gradients: int
    optimizer: int
    logits: int
    """What the loss holds of one microbatch, on the worker with the LM head."""
    overhead: int
    """What the runtime holds besides: context, NCCL, temporaries of a backward."""
    reserved: int
    stash: int
    """Input of a stage (or of each of its layers), per microbatch."""
    activations: int
    """All activations of a stage (the largest one of the worker; or of one layer), per microbatch."""
    kept: int
    """All activations of a stage that is not recomputed, per microbatch."""
    cap: int

    @property
    def static(self) -> int:
        """What is there whatever is in flight."""
        return self.weights + self.gradients + self.optimizer + self.logits + self.overhead + self.reserved

    @property
    def free(self) -> int:
        """What is left for microbatches in flight; negative where the rest does not fit."""
        return self.cap - self.static

    def per_microbatch(self, recompute: bool) -> tuple[int, int]:
        """Bytes that a forward and a recompute take."""
        return (self.stash, self.activations) if recompute else (self.kept, 0)


def stage_params(job: Job, arrangement: Arrangement, stage: int) -> int:
    """Parameters of one stage, over its whole tp group."""
    size = model_size(job, job.cluster.dc(arrangement.stage_dc(stage)).gpu)
    first, last = sum(arrangement.layers_per_stage[:stage]), job.num_stages - 1
    params = sum(piece.params for piece in size.layers[first : first + arrangement.layers_per_stage[stage]])
    params += size.embedding.params if stage == 0 else 0
    params += size.head.params if stage == last else 0
    if job.model.tied_embeddings and job.pp == 1 and stage == last and job.profile is None:
        params -= job.model.vocab * job.model.hidden  # both ends on one worker: the matrix is there once
    return round(params)


def worker_memory(job: Job, arrangement: Arrangement | None = None) -> tuple[WorkerMemory, ...]:
    """By rank of a pipeline."""
    arrangement = arrangement or arrange(job)
    return tuple(_worker(job, arrangement, rank) for rank in range(job.pp))


def cap_bytes(job: Job, dc: str) -> int:
    """Memory of one GPU that the job may use."""
    share = RUNTIMES[job.runtime].usable_share
    return math.floor((job.memory_gib or share * job.cluster.gpu(dc).memory_gib) * GIB)


def _worker(job: Job, arrangement: Arrangement, rank: int) -> WorkerMemory:
    stages = range(rank, job.num_stages, job.pp)
    params = math.ceil(sum(stage_params(job, arrangement, s) for s in stages) / job.tp)
    dc = arrangement.rank_dc[rank]
    layer, temporary, head = activation_parts(job, job.cluster.dc(dc).gpu)
    layers = max(arrangement.layers_per_stage[s] for s in stages)
    by_layer = RUNTIMES[job.runtime].recomputes_by_layer
    logits = head if rank == job.pp - 1 else 0.0
    return WorkerMemory(
        dc=dc,
        weights=params * job.element_bytes,
        gradients=params * job.gradient_bytes,
        optimizer=params * job.optimizer_bytes,
        logits=math.ceil(logits),
        # The temporaries of a layer's backward and of the loss exist one after the other.
        overhead=math.ceil(RUNTIMES[job.runtime].fixed_bytes + max(0.0, temporary - logits)),
        reserved=math.ceil(job.reserved_gib * GIB),
        stash=math.ceil(stash_bytes(job) * (layers if by_layer else 1)),
        activations=math.ceil(layer * (1 if by_layer else layers)),
        kept=math.ceil(layer * layers),
        cap=cap_bytes(job, dc),
    )


def activation_parts(job: Job, gpu: str) -> tuple[float, float, float]:
    """Bytes on one GPU, of one microbatch: a layer's activations, a backward's temporaries, what the loss holds."""
    runtime, size = RUNTIMES[job.runtime], model_size(job, gpu)
    layer = sum(piece.activation_bytes for piece in size.layers) / len(size.layers)
    if runtime.head_copies:
        head = runtime.head_copies * size.head.activation_bytes
        # The loss is done before the first layer is recomputed: its bytes serve that layer.
        head -= min(head, layer) if job.recompute and runtime.recomputes_by_layer else 0.0
        return layer, runtime.layer_copies * layer, head
    logits = job.microbatch * job.model.seq_len * job.model.vocab * (job.element_bytes + 4) / job.tp
    return layer, 0.0, logits


def stash_bytes(job: Job) -> float:
    """Input of a stage or a layer on one GPU, per microbatch."""
    return job.activation_bytes / (job.tp if RUNTIMES[job.runtime].sequence_parallel else 1)


def in_flight_cap(job: Job, *, recompute: bool | None = None, arrangement: Arrangement | None = None) -> int:
    """How many microbatches every worker has room for at once, as `memory_rule` counts; raises where not one fits."""
    rule = memory_rule(job, recompute=recompute, arrangement=arrangement)
    return (rule.cap - rule.acquire[Kind.R]) // rule.acquire[Kind.F]


def memory_rule(job: Job, *, recompute: bool | None = None, arrangement: Arrangement | None = None) -> Memory:
    """What ops take and give back, in KiB of the tightest worker; raises where not one microbatch fits.

    One rule holds for all workers, so each one's needs are scaled by how much room it has compared with the
    tightest, and the largest counts, rounded up: safe everywhere, exact on the worker that decides. A forward takes
    the stash and a recompute the activations (without recompute: the forward all of it); the end of the backward,
    or of its weight half where it is split, gives both back; the input half gives nothing back.
    """
    with_recompute = job.recompute if recompute is None else recompute
    workers = worker_memory(job, arrangement)
    _require_room(job, workers, with_recompute)
    cap_bytes = min(worker.free for worker in workers)
    needs = [(cap_bytes / w.free / KIB, *w.per_microbatch(with_recompute)) for w in workers]
    forward = max(1, math.ceil(max(scale * stash for scale, stash, _ in needs)))
    again = math.ceil(max(scale * activations for scale, _, activations in needs))
    acquire, release = [0] * NUM_KINDS, [0] * NUM_KINDS
    acquire[Kind.F], acquire[Kind.R] = forward, again
    release[Kind.B] = release[Kind.W] = forward + again
    # Rounding up may cost the last KiB; one microbatch was shown to fit above, so the rule must allow it too.
    cap = max(cap_bytes // KIB, forward + again)
    return Memory(cap=cap, acquire=tuple(acquire), release=tuple(release))


def peak_memory(
    job: Job, program: Program, *, arrangement: Arrangement | None = None
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
    workers = worker_memory(job, arrangement)
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


def require_fits(job: Job, program: Program | None = None, *, arrangement: Arrangement | None = None) -> None:
    """Raises InfeasibleError where the model and one microbatch do not fit, or a Program holds more than there is."""
    if program is None:
        _require_room(job, worker_memory(job, arrangement), job.recompute)
        return
    for rank, (worker, need) in enumerate(peak_memory(job, program, arrangement=arrangement)):
        if need > worker.cap:
            holds = f"schedule {program.name!r} holds up to {program.peak_in_flight} microbatches in flight"
            remedy = _remedy(job, bool((program.kind == Kind.R).any()))
            raise _too_big(job, rank, worker, need, holds, f"Choose a schedule that respects memory, or {remedy}")


def _require_room(job: Job, workers: tuple[WorkerMemory, ...], recompute: bool) -> None:
    """Static bytes and one microbatch, on every worker."""
    for rank, worker in enumerate(workers):
        need = worker.static + sum(worker.per_microbatch(recompute))
        if need > worker.cap:
            parts = (
                f"weights {worker.weights / GIB:.1f}, gradients {worker.gradients / GIB:.1f}, "
                f"optimizer {worker.optimizer / GIB:.1f}, logits {worker.logits / GIB:.1f}, "
                f"runtime {worker.overhead / GIB:.1f}, "
                f"reserved {worker.reserved / GIB:.1f}, one microbatch {(need - worker.static) / GIB:.1f}"
            )
            remedy = _remedy(job, recompute)
            raise _too_big(job, rank, worker, need, parts, remedy[0].upper() + remedy[1:])


def _too_big(job: Job, rank: int, worker: WorkerMemory, need: int, why: str, remedy: str) -> InfeasibleError:
    return InfeasibleError(
        where=job.where,
        key="memory_gib",
        value=round(worker.cap / GIB, 1),
        rule=f"worker {rank} of each pipeline ({worker.dc}) needs {need / GIB:.1f} GiB per GPU "
        f"of {worker.cap / GIB:.1f} ({why})",
        remedy=remedy,
    )


def _remedy(job: Job, recompute: bool) -> str:
    """The cheapest thing to change."""
    if not recompute:
        return "set recompute: true"
    if job.reserved_gib > 0:
        return "lower reserved_gib"
    if job.microbatch > 1:
        return "lower microbatch"
    return "raise pp or tp, or use GPUs with more memory"
