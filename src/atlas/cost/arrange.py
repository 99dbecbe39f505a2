"""What the user left out of a job: which datacenter holds which worker, layers per stage, pipelines per cell.

    workers of a datacenter   nodes x (gpus_per_node // tp), or groups of several whole nodes
    default placement         every datacenter, in file order, in proportion to the stages it has room for
    default split             the slowest stage is as fast as can be, embedding and LM head counted; on mixed GPU types
                              the gradient rings too; within memory, if a split within memory exists
    default C                 round(WAN time of an activation / forward time of a stage): bytes over one node pair's
                              cap, latency left out, on the slowest boundary; over the slowest stage's forward

Knows times and room, not schedules: `planner` finds the fastest choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Floats, Ints, cluster_arrays, ring_s, tp_groups
from atlas.cost.compute import PieceTime
from atlas.cost.memory import max_layers
from atlas.cost.model_arrays import UPDATE, ModelArrays, model_arrays, sums_from_zero
from atlas.cost.runtimes import RUNTIMES
from atlas.errors import InfeasibleError, SpecError
from atlas.spec.job import DataCenter, Job, Route


@dataclass(frozen=True)
class Arrangement:
    """A job with every choice made. Stages are virtual ones: pp x interleave of them."""

    num_pipelines: int
    """Pipelines of one DP-cell (C)."""
    rank_dc: tuple[str, ...]
    """The datacenter of each worker of a pipeline."""
    layers_per_stage: tuple[int, ...]
    stage_times: tuple[PieceTime, ...]
    cluster: ClusterArrays = field(repr=False, compare=False)
    model: ModelArrays = field(repr=False, compare=False)

    @cached_property
    def stage_dc(self) -> Ints:
        """[1, s]: the number of each stage's datacenter."""
        return stage_numbers(self.cluster, self.rank_dc, len(self.layers_per_stage))

    @cached_property
    def stage_params(self) -> Ints:
        """[s]: parameters of each stage, over its whole tp group."""
        end = np.cumsum([self.layers_per_stage], axis=1)
        one_worker = len(self.rank_dc) == 1
        start = end - np.array(self.layers_per_stage)
        found = self.model.stage_params(self.stage_dc, start, end, one_worker=one_worker)
        return np.asarray(np.rint(found[0]), np.int64)


def stage_numbers(cluster: ClusterArrays, rank_dc: tuple[str, ...], num_stages: int) -> Ints:
    """[1, s]: the number of each stage's datacenter; virtual stages go around the workers."""
    return np.resize([cluster.index[name] for name in rank_dc], (1, num_stages))


def arrange(job: Job) -> Arrangement:
    """Make every open choice; InfeasibleError if GPUs or links are missing."""
    if job.pipelines_per_cell is not None:
        return _arranged(job, job.pipelines_per_cell)
    one = _arranged(job, 1)
    num_pipelines = _derived_pipelines(job, one)
    return one if num_pipelines == 1 else _arranged(job, num_pipelines)


def _arranged(job: Job, num_pipelines: int) -> Arrangement:
    rank_dc = _ranks(job, num_pipelines)
    require_paths(job, rank_dc)
    cluster = cluster_arrays(job)
    model = model_arrays(job, cluster, required=rank_dc)
    dc = stage_numbers(cluster, rank_dc, job.num_stages)
    split = job.layers_per_stage or _even(job, rank_dc) or _balanced(job, num_pipelines, cluster, model, dc[0])
    seconds = model.stage_seconds(dc, np.array([split]))[:, 0]
    times = tuple(PieceTime(*column) for column in seconds.T.tolist())
    return Arrangement(num_pipelines, rank_dc, split, times, cluster, model)


# ---- placement ---------------------------------------------------------------------------------------------
def num_workers(job: Job, dc: DataCenter) -> int:
    """Tensor-parallel groups a datacenter has room for."""
    return int(tp_groups(dc.nodes, dc.gpus_per_node, job.tp))


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
        remedy="Use fewer cells, pipelines_per_cell or stages there, or more nodes",
    )


def _too_wide(job: Job, dc: DataCenter) -> InfeasibleError:
    return InfeasibleError(
        where=job.where,
        key="tp",
        value=job.tp,
        rule=f"a tensor-parallel group must fit in one node or fill several whole nodes, and nodes of {dc.name} have "
        f"{dc.gpus_per_node} GPUs",
        remedy=f"Use a tp of at most {dc.gpus_per_node}, or a multiple of it",
    )


def _proportional(job: Job, room: dict[str, int], replicas: int) -> list[tuple[str, int]]:
    """File order, in proportion to room, at least one each; when stages are few, the datacenters with most room."""
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
            f"enough for {sum(room.values())} stages of all replicas",
            remedy="Use fewer cells, pipelines_per_cell or stages, or more nodes",
        )
    largest = sorted((name for name in room if room[name]), key=lambda name: -room[name])[: job.pp]
    names = [name for name in room if name in largest]
    stages = dict.fromkeys(names, 1)
    for _ in range(job.pp - len(names)):
        # The datacenter that would be least full with one more stage; the earlier one if two are equal.
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
            rule=f"is needed: the pipeline goes from {a} to {b}",
            remedy="Write it, or list cluster.links",
        )
    raise InfeasibleError(
        where=job.where,
        key="cluster.links",
        rule=f"the pipeline goes from {a} to {b}, and no link joins them",
        remedy=f"Add {{between: [{a}, {b}], latency_ms: ...}}, or order the placement so that neighbours have a link",
    )


# ---- layers per stage --------------------------------------------------------------------------------------
def _even(job: Job, rank_dc: tuple[str, ...]) -> tuple[int, ...] | None:
    """Equal stages, where the runtime has them, the layers divide and all GPUs are alike: on mixed types an equal split
    is as slow as the slowest type alone."""
    gpu_types = {job.cluster.dc(name).gpu for name in rank_dc}
    if not RUNTIMES[job.runtime].splits_evenly or job.model.layers % job.num_stages or len(gpu_types) > 1:
        return None
    return (job.model.layers // job.num_stages,) * job.num_stages


def _balanced(job: Job, num_pipelines: int, cluster: ClusterArrays, model: ModelArrays, dc: Ints) -> tuple[int, ...]:
    """By the seconds of one microbatch on each stage's GPUs. On mixed GPU types, by those of all microbatches and
    of the gradients: if the fast type holds most layers, its gradient ring takes longest."""
    pieces = (
        (model.layers_s, model.layers_params),
        (model.first_s, model.first_params),
        (model.last_s, model.last_params),
    )
    layers_s, first_s, last_s = (model.microbatch_s(seconds)[dc] for seconds, _ in pieces)
    if len({cluster.gpu_types[i] for i in dc}) > 1:
        ranks, replicas = dc[: job.pp], num_pipelines * job.cells
        closing = []
        for seconds, params in pieces:
            rings_s = ring_s(cluster, job.tp, ranks, replicas, params[ranks].T * job.gradient_bytes).T
            closing.append(np.resize(rings_s + seconds[UPDATE][ranks], (len(dc), *rings_s.shape[1:])))
        every = zip((layers_s, first_s, last_s), closing, strict=True)
        layers_s, first_s, last_s = (job.num_microbatches * busy_s + closing_s for busy_s, closing_s in every)
    fixed_s = np.zeros(len(dc))
    fixed_s[0] += first_s[0]
    fixed_s[-1] += last_s[-1]
    return balanced_split(sums_from_zero(layers_s), fixed_s, _max_layers(job, num_pipelines, cluster, model, dc))


def _max_layers(job: Job, num_pipelines: int, cluster: ClusterArrays, model: ModelArrays, dc: Ints) -> Ints:
    """[s]: the most layers that fit on each stage. Without a limit if no split fits, so that the error names the
    fastest one, and if a worker has several virtual stages."""
    anything = np.full(len(dc), job.model.layers)
    if job.interleave > 1:
        return anything
    found = max_layers(cluster, model, dc[None], num_pipelines * job.cells if job.zero else 1)[0]
    return found if found.min() >= 1 and found.sum() >= job.model.layers else anything


def balanced_split(layer_sums_s: Floats, fixed_s: Floats, most: Ints) -> tuple[int, ...]:
    """Layers of each stage, at most `most` [s], such that the slowest stage is fastest, and among those splits the most
    even one.

    `layer_sums_s` [s, L + 1] is what the first 0, 1, ... layers take on each stage's GPUs, `fixed_s` [s] what the stage
    has to do besides. Two passes of the same dynamic programme: the least possible maximum, then the least sum of
    squares under it.
    """
    num_layers = layer_sums_s.shape[1] - 1
    count = np.arange(num_layers + 1)
    # [s, i, j]: of a stage that holds layers i to j - 1; infinite where it holds none.
    costs = layer_sums_s[:, None, :] - layer_sums_s[:, :, None] + fixed_s[:, None, None]
    costs[:, *np.tril_indices(num_layers + 1)] = np.inf
    costs[count - count[:, None] > most[:, None, None]] = np.inf
    slowest = np.concatenate([[0.0], np.full(num_layers, np.inf)])
    for cost in costs:
        slowest = np.maximum(slowest[:, None], cost).min(axis=0)
    limit = slowest[-1] * (1 + 1e-9)
    best = np.concatenate([[0.0], np.full(num_layers, np.inf)])
    choices = []
    for cost in costs:
        with np.errstate(over="ignore"):  # `to_ns` reports absurdly long times
            sums = best[:, None] + np.where(cost <= limit, cost, np.inf) ** 2
        choices.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    end, split = num_layers, []
    for choice in reversed(choices):
        split.append(end - int(choice[end]))
        end = int(choice[end])
    return tuple(reversed(split))


# ---- pipelines per cell ------------------------------------------------------------------------------------
def _derived_pipelines(job: Job, one: Arrangement) -> int:
    """C as defined at the top of this module, reduced until the GPUs suffice."""
    forward_s = max(time.forward_s for time in one.stage_times)
    hops = {(a, b) for a, b in pairwise(one.rank_dc) if a != b}
    wan_s = max((job.activation_bytes * 8 / (route_between(job, a, b).pair_gbps * 1e9) for a, b in hops), default=0.0)
    wanted = min(4096, max(1, round(wan_s / forward_s))) if forward_s > 0 else 1
    for num_pipelines in range(wanted, 1, -1):
        try:
            _ranks(job, num_pipelines)
        except InfeasibleError:
            continue
        return num_pipelines
    return 1
