"""What the user left out of a job: which datacenter holds which worker, layers per stage, pipelines per cell.

    workers of a datacenter   nodes x (gpus_per_node // tp), or groups of several whole nodes
    default placement         every datacenter, in file order, in proportion to the stages it has room for
    default split             the slowest stage is as fast as can be, embedding and LM head counted
    default C                 round(WAN time of an activation / forward time of a stage): bytes over one node pair's
                              cap, latency left out, on the slowest boundary; over the slowest stage's forward

Knows times and room, not schedules: which of these choices trains fastest is for `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.cost.compute import ModelTime, PieceTime, model_times, total
from atlas.cost.runtimes import RUNTIMES
from atlas.errors import InfeasibleError, SpecError
from atlas.spec.cluster import DataCenter, Route
from atlas.spec.job import Job


@dataclass(frozen=True)
class Arrangement:
    """A job with nothing left open. Stages are virtual ones: pp x interleave of them."""

    num_pipelines: int
    """Pipelines of one DP-cell (C)."""
    rank_dc: tuple[str, ...]
    """The datacenter of each worker of a pipeline."""
    layers_per_stage: tuple[int, ...]
    stage_times: tuple[PieceTime, ...]

    def stage_dc(self, stage: int) -> str:
        return self.rank_dc[stage % len(self.rank_dc)]


def arrange(job: Job) -> Arrangement:
    """Every open choice made, or InfeasibleError with what is short."""
    rank_dc = _ranks(job, job.pipelines_per_cell or 1)
    require_paths(job, rank_dc)
    split, times = _split(job, rank_dc)
    num_pipelines = job.pipelines_per_cell
    if num_pipelines is None:
        num_pipelines = _derived_pipelines(job, rank_dc, times)
        rank_dc = _ranks(job, num_pipelines)
        require_paths(job, rank_dc)
        split, times = _split(job, rank_dc)
    return Arrangement(num_pipelines, rank_dc, split, times)


# ---- placement ---------------------------------------------------------------------------------------------
def num_workers(job: Job, dc: DataCenter) -> int:
    """Tensor-parallel groups a datacenter has room for."""
    return int(tp_groups(dc.nodes, dc.gpus_per_node, job.tp))


def tp_groups(nodes: Any, gpus_per_node: Any, tp: int) -> Any:
    """Groups in nodes, numbers or arrays of them: several in a node, or several whole nodes a group."""
    wide = np.where(tp % gpus_per_node == 0, nodes // np.maximum(1, tp // gpus_per_node), 0)
    return np.where(gpus_per_node >= tp, nodes * (gpus_per_node // tp), wide)


def _ranks(job: Job, num_pipelines: int) -> tuple[str, ...]:
    """The datacenter of each worker of a pipeline, checked against the room there is."""
    replicas = num_pipelines * job.cells
    room = {dc.name: num_workers(job, dc) // replicas for dc in job.cluster.datacenters}
    if job.placement is not None:
        runs = [(place.dc, place.stages) for place in job.placement]
    else:
        runs = _proportional(job, room, replicas)
    used: dict[str, int] = {}
    for name, stages in runs:
        used[name] = used.get(name, 0) + stages
    for name, stages in used.items():
        if stages > room[name]:
            raise _too_few_gpus(job, job.cluster.dc(name), stages, num_pipelines)
    return tuple(name for name, stages in runs for _ in range(stages))


def _too_few_gpus(job: Job, dc: DataCenter, stages: int, num_pipelines: int) -> InfeasibleError:
    if dc.gpus_per_node < job.tp and job.tp % dc.gpus_per_node:
        return _too_wide(job, dc)
    need = stages * num_pipelines * job.cells * job.tp
    have = num_workers(job, dc) * job.tp
    return InfeasibleError(
        where=job.where,
        key=f"cluster.datacenters.{dc.name}.nodes",
        value=dc.nodes,
        rule=f"{stages} stages x {num_pipelines} pipelines x {job.cells} cells x tp {job.tp} need {need} GPUs, "
        f"{dc.name} has {have} that a tp group can use",
        remedy="Fewer cells, pipelines_per_cell or stages there, or more nodes",
    )


def _too_wide(job: Job, dc: DataCenter) -> InfeasibleError:
    return InfeasibleError(
        where=job.where,
        key="tp",
        value=job.tp,
        rule=f"a tensor-parallel group fills a node's part or several whole nodes, and nodes of {dc.name} have "
        f"{dc.gpus_per_node} GPUs",
        remedy=f"tp of at most {dc.gpus_per_node}, or a multiple of it",
    )


def _proportional(job: Job, room: dict[str, int], replicas: int) -> list[tuple[str, int]]:
    """File order, in proportion to room, at least one each; when stages are few, the roomiest datacenters."""
    widest = max(job.cluster.datacenters, key=lambda dc: dc.gpus_per_node)
    if all(dc.gpus_per_node < job.tp and job.tp % dc.gpus_per_node for dc in job.cluster.datacenters):
        raise _too_wide(job, widest)
    if sum(room.values()) < job.pp:
        need, have = job.pp * replicas * job.tp, sum(num_workers(job, dc) * job.tp for dc in job.cluster.datacenters)
        raise InfeasibleError(
            where=job.where,
            key="pp",
            value=job.pp,
            rule=f"{job.pp} stages x {replicas} replicas x tp {job.tp} need {need} GPUs; the datacenters have {have}, "
            f"in which {sum(room.values())} stages find room",
            remedy="Fewer cells, pipelines_per_cell or stages, or more nodes",
        )
    roomiest = sorted((name for name in room if room[name]), key=lambda name: -room[name])[: job.pp]
    names = [name for name in room if name in roomiest]
    stages = dict.fromkeys(names, 1)
    for _ in range(job.pp - len(names)):
        # Whoever would be least full with one stage more takes it; ties go to the earlier one.
        name = min((n for n in names if stages[n] < room[n]), key=lambda n: ((stages[n] + 1) / room[n], names.index(n)))
        stages[name] += 1
    return list(stages.items())


def require_paths(job: Job, rank_dc: tuple[str, ...]) -> None:
    """Neighbours in the pipeline need a path; an interleaved pipeline also goes from its last worker to the first."""
    hops = list(pairwise(rank_dc))
    if job.interleave > 1:
        hops.append((rank_dc[-1], rank_dc[0]))
    for a, b in hops:
        if a != b:
            route_between(job, a, b)


def route_between(job: Job, a: str, b: str) -> Route:
    """The path between two datacenters, or the error that there is none."""
    route = job.cluster.route(a, b)
    if route is not None:
        return route
    if job.cluster.links is None:
        raise SpecError(
            where=job.where,
            key="cluster.wan.latency_ms",
            value=None,
            rule=f"is needed: the pipeline goes from {a} to {b}",
            remedy="Write it, or list cluster.links",
        )
    raise InfeasibleError(
        where=job.where,
        key="cluster.links",
        value=None,
        rule=f"the pipeline goes from {a} to {b}, and no link joins them",
        remedy=f"Add {{between: [{a}, {b}], latency_ms: ...}}, or order the placement along the links there are",
    )


# ---- layers per stage --------------------------------------------------------------------------------------
def _split(job: Job, rank_dc: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[PieceTime, ...]]:
    of_dc = model_times(job)
    models = [of_dc(rank_dc[s % len(rank_dc)]) for s in range(job.num_stages)]
    split = job.layers_per_stage or _even(job) or balanced_split(models)
    first = np.concatenate([[0], np.cumsum(split)])
    last = job.num_stages - 1
    times = []
    for s, model in enumerate(models):
        pieces = [*model.layers[first[s] : first[s + 1]]]
        pieces += [model.embedding] if s == 0 else []
        pieces += [model.head] if s == last else []
        times.append(total(pieces))
    return split, tuple(times)


def _even(job: Job) -> tuple[int, ...] | None:
    """Equal stages, where the runtime wants them and the layers allow them."""
    if not RUNTIMES[job.runtime].splits_evenly or job.model.layers % job.num_stages:
        return None
    return (job.model.layers // job.num_stages,) * job.num_stages


def balanced_split(models: list[ModelTime]) -> tuple[int, ...]:
    """Layers of each stage such that the slowest stage is fastest, and among those splits the most even one.

    `models` is by stage, because stages may run on different GPUs. Two passes of the same dynamic programme: the
    least possible maximum, then the least sum of squares under it.
    """
    num_layers = len(models[0].layers)
    slowest = np.concatenate([[0.0], np.full(num_layers, np.inf)])
    for stage in range(len(models)):
        slowest = np.maximum(slowest[:, None], _run_costs(models, stage)).min(axis=0)
    limit = slowest[-1] * (1 + 1e-9)
    best = np.concatenate([[0.0], np.full(num_layers, np.inf)])
    choices = []
    for stage in range(len(models)):
        cost = _run_costs(models, stage)
        with np.errstate(over="ignore"):  # seconds beyond all reason: whoever prices them says so
            sums = best[:, None] + np.where(cost <= limit, cost, np.inf) ** 2
        choices.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    end, split = num_layers, []
    for choice in reversed(choices):
        split.append(end - int(choice[end]))
        end = int(choice[end])
    return tuple(reversed(split))


def _run_costs(models: list[ModelTime], stage: int) -> NDArray[np.float64]:
    """[i, j]: seconds per microbatch of a stage that holds layers i to j - 1; infinite where it holds none."""
    model = models[stage]
    prefix = np.concatenate([[0.0], np.cumsum([layer.microbatch_s for layer in model.layers])])
    cost = np.asarray(prefix[None, :] - prefix[:, None], np.float64)
    if stage == 0:
        cost += model.embedding.microbatch_s
    if stage == len(models) - 1:
        cost += model.head.microbatch_s
    cost[np.tril_indices(len(prefix))] = np.inf
    return cost


# ---- pipelines per cell ------------------------------------------------------------------------------------
def _derived_pipelines(job: Job, rank_dc: tuple[str, ...], times: tuple[PieceTime, ...]) -> int:
    """C by its definition at the top, then less until the GPUs suffice."""
    forward_s = max(time.forward_s for time in times)
    hops = {(a, b) for a, b in pairwise(rank_dc) if a != b}
    wan_s = max((job.activation_bytes * 8 / (route_between(job, a, b).pair_gbps * 1e9) for a, b in hops), default=0.0)
    wanted = min(4096, max(1, round(wan_s / forward_s))) if forward_s > 0 else 1
    for num_pipelines in range(wanted, 1, -1):
        try:
            _ranks(job, num_pipelines)
        except InfeasibleError:
            continue
        return num_pipelines
    return 1
