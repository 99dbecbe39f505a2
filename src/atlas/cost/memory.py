"""Bytes that one GPU of each worker holds, for many pipelines at once, and what they leave for microbatches in flight.

Always there: weights, gradients, optimizer state, what is reserved for others, on the last stage what the loss holds of
one microbatch, and what the runtime holds besides (context, NCCL, temporaries of a backward). Per microbatch: with
recompute the stage's input from its forward on (the stash) and the full activations from the recompute to the end of
the backward; without it the full activations from the forward on. A runtime that recomputes layer by layer keeps every
layer's input and has one layer's activations at a time. A schedule that keeps
`stash held + F + R <= cap` before every forward never runs out of memory.

Our own runtime's context and buffers are not counted; a share of every GPU is kept for them (`usable_share`). To
reserve more, set `memory_gib` or `reserved_gib`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atlas.cost.cluster_arrays import GIB, ClusterArrays, Flags, Floats, Ints
from atlas.cost.model_arrays import ModelArrays
from atlas.cost.runtimes import RUNTIMES
from atlas.errors import InfeasibleError
from atlas.ir.program import NUM_KINDS, Kind, Memory, Program
from atlas.spec.job import Job

if TYPE_CHECKING:
    from atlas.cost.arrange import Arrangement

KIB = 2**10


class StateBytes(NamedTuple):
    """Of parameters at rest: the same count for a plan and for a launcher that is about to start."""

    weights: Any
    gradients: Any
    """The sums, in float32 as a rule."""
    optimizer: Any
    """Moments and master weights."""

    @property
    def total(self) -> Any:
        return self.weights + self.gradients + self.optimizer


def state_bytes(params: Any, element: int, gradient: int, optimizer: int, shards: Any = 1) -> StateBytes:
    """Bytes of this many parameters, from the bytes of each. `shards`: pipelines that divide the optimizer state among
    them (ZeRO-1)."""
    return StateBytes(params * element, params * gradient, np.ceil(params * optimizer / shards))


class WorkerMemory(NamedTuple):
    """Bytes on one GPU of a worker, whole numbers: of one worker, or arrays [n, s] for a batch of n pipelines."""

    weights: Any
    gradients: Any
    optimizer: Any
    logits: Any
    """What the loss holds of one microbatch, on the worker with the LM head."""
    overhead: Any
    """What the runtime holds besides: context, NCCL, temporaries of a backward."""
    reserved: Any
    stash: Any
    """Input of a stage (or of each of its layers), per microbatch; whole on every GPU of a tp group."""
    activations: Any
    """All activations of a stage (the largest one of the worker; or of one layer), per microbatch."""
    kept: Any
    """All activations of a stage that is not recomputed, per microbatch."""
    cap: Any
    """Memory of the GPU that the job may use."""

    @property
    def static(self) -> Any:
        """Bytes that do not depend on microbatches in flight."""
        return self.weights + self.gradients + self.optimizer + self.logits + self.overhead + self.reserved

    @property
    def free(self) -> Any:
        """What is left for microbatches in flight; negative where the rest does not fit."""
        return self.cap - self.static

    def per_microbatch(self, recompute: bool) -> tuple[Any, Any]:
        """Bytes that a forward and a recompute take."""
        return (self.stash, self.activations) if recompute else (self.kept, 0 * self.kept)


def batch_memory(
    cluster: ClusterArrays, model: ModelArrays, dc: Ints, params: Floats, layers: Ints, shards: Ints | int = 1
) -> WorkerMemory:
    """The memory rule, for workers in datacenters `dc` [n, s] that hold `params` parameters over their tp groups and at
    most `layers` layers in one stage. The last column has the LM head. `shards`: pipelines that divide the optimizer
    state among them."""
    job, runtime = model.job, RUNTIMES[model.job.runtime]
    layer = model.layer_bytes[dc]
    head, temporary = np.zeros(dc.shape), np.zeros(dc.shape)
    if runtime.head_copies:
        temporary = runtime.layer_copies * layer
        head[:, -1] = runtime.head_copies * model.head_bytes[dc[:, -1]]
        if job.recompute and runtime.recomputes_by_layer:
            # The loss is done before the first layer is recomputed: its bytes serve that layer.
            head[:, -1] -= np.minimum(head[:, -1], layer[:, -1])
    else:  # the logits and their gradient: every GPU of a tp group gathers them and computes the whole loss
        head[:, -1] = job.microbatch * job.model.seq_len * job.model.vocab * 2 * job.element_bytes
    state = state_bytes(np.ceil(params / job.tp), job.element_bytes, job.gradient_bytes, job.optimizer_bytes, shards)
    layers_kept, layers_at_once = (layers, 1) if runtime.recomputes_by_layer else (np.ones_like(layers), layers)
    return WorkerMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        logits=np.ceil(head),
        # The temporaries of a layer's backward and of the loss exist one after the other.
        overhead=np.ceil(runtime.fixed_bytes + np.maximum(0.0, temporary - head)),
        reserved=np.full(dc.shape, math.ceil(job.reserved_gib * GIB)),
        stash=job.activation_bytes * layers_kept,
        activations=np.ceil(layer * layers_at_once),
        kept=np.ceil(layer * layers),
        cap=cluster.cap_bytes[dc],
    )


def split_memory(
    cluster: ClusterArrays, model: ModelArrays, dc: Ints, start: Ints, end: Ints, shards: Ints | int
) -> WorkerMemory:
    """Of stages in datacenters `dc` [n, s] that hold the layers from `start` to `end`."""
    params = model.stage_params(dc, start, end, one_worker=dc.shape[1] == 1)
    return batch_memory(cluster, model, dc, params, end - start, shards)


def max_layers(cluster: ClusterArrays, model: ModelArrays, dc: Ints, shards: Ints | int = 1) -> Ints:
    """[n, s]: layers that fit one GPU of each stage's tp group beside one microbatch. What a stage needs grows evenly
    with its layers, so it is asked for none and for all."""
    none, num_layers = np.zeros_like(dc), model.job.model.layers
    without, whole = (split_memory(cluster, model, dc, none, np.full_like(dc, end), shards) for end in (0, num_layers))
    fixed, most = (one.static + sum(one.per_microbatch(model.job.recompute)) for one in (without, whole))
    return np.asarray(np.floor((without.cap - fixed) * num_layers / (most - fixed)), np.int64)


class InFlight(NamedTuple):
    """[n], in KiB of the tightest worker of each pipeline."""

    cap: Ints
    forward: Ints
    recompute: Ints
    fits: Flags
    """Whether one microbatch fits on every worker."""

    @property
    def most(self) -> Ints:
        """Microbatches that every worker has room for at once."""
        return np.where(self.fits, (self.cap - self.recompute) // self.forward, 0)


def in_flight(free: Floats, forward: Floats, recompute: Floats) -> InFlight:
    """One rule for all workers of a pipeline, from what each has free and what a microbatch takes there, all [n, s].

    Each worker's needs are scaled by how much room it has compared with the tightest, and the largest counts, rounded
    up: safe everywhere, exact on the worker that decides.
    """
    fits = np.asarray((free - forward - recompute >= 0).all(axis=1))
    tightest = np.maximum(free.min(axis=1), 1)
    scale = tightest[:, None] / np.maximum(free, 1) / KIB
    held, again = (np.ceil((scale * part).max(axis=1)).astype(np.int64) for part in (forward, recompute))
    held = np.maximum(1, held)
    # Rounding up may cost the last KiB; where one microbatch fits, the rule must allow it too.
    return InFlight(np.maximum(tightest.astype(np.int64) // KIB, held + again), held, again, fits)


# ---- of a job ----------------------------------------------------------------------------------------------
def worker_memory(job: Job, arrangement: Arrangement) -> tuple[WorkerMemory, ...]:
    """By rank of a pipeline: the memory rule for a batch of one."""
    stages = [slice(rank, None, job.pp) for rank in range(job.pp)]
    params = np.array([[arrangement.stage_params[own].sum() for own in stages]], np.float64)
    layers = np.array([[max(arrangement.layers_per_stage[own]) for own in stages]])
    dc = arrangement.stage_dc[:, : job.pp]
    shards = job.cells * arrangement.num_pipelines if job.zero else 1
    found = batch_memory(arrangement.cluster, arrangement.model, dc, params, layers, shards)
    return tuple(WorkerMemory._make(int(part[0, rank]) for part in found) for rank in range(job.pp))


def memory_rule(job: Job, arrangement: Arrangement, workers: tuple[WorkerMemory, ...] | None = None) -> Memory:
    """What ops take and give back, in KiB of the tightest worker; raises where not one microbatch fits.

    A forward takes the stash and a recompute the activations (without recompute: the forward all of it); the end of
    the backward, or of its weight half where it is split, gives both back; the input half gives nothing back.
    """
    workers = workers or worker_memory(job, arrangement)
    _require_room(job, arrangement, workers)
    rows = [(worker.free, *worker.per_microbatch(job.recompute)) for worker in workers]
    rule = in_flight(*(np.array([column], np.float64) for column in zip(*rows, strict=True)))
    forward, again = int(rule.forward[0]), int(rule.recompute[0])
    acquire, release = [0] * NUM_KINDS, [0] * NUM_KINDS
    acquire[Kind.F], acquire[Kind.R] = forward, again
    release[Kind.B] = release[Kind.W] = forward + again
    return Memory(cap=int(rule.cap[0]), acquire=tuple(acquire), release=tuple(release))


def peak_memory(job: Job, program: Program, workers: tuple[WorkerMemory, ...]) -> tuple[tuple[WorkerMemory, int], ...]:
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
