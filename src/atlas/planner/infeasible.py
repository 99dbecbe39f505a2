"""Why nothing fits, and the nearest change that would make something fit.

Each change is tried, not guessed: the same test that found no candidate is repeated with more memory, more nodes,
recompute, or a path. Knows what fits, not what is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from atlas.cost.cluster_arrays import GIB, ClusterArrays, cluster_arrays
from atlas.cost.compute import model_params
from atlas.errors import InfeasibleError
from atlas.planner.estimated_candidates import depths, worker_setups
from atlas.planner.space import Space, space_of
from atlas.planner.split import split_layers
from atlas.spec import Job, Link

MAX_TRIED_LINKS = 30
"""Missing links that are tried, those between the largest datacenters first."""
TRIED_LATENCY_MS = 50.0
"""One way, of a link that is tried. What fits hardly depends on it."""
MAX_MEMORY_FACTOR, MEMORY_STEPS = 4096, 12
"""The largest memory that is tried, as a multiple of that of the largest GPU, and the bisection steps to the least that
fits: they narrow it down to about the memory of one such GPU."""
MAX_NODES_FACTOR, NODES_STEPS = 256, 20
"""The same for the nodes of the largest datacenter: the steps find the exact number, up to 4,096 nodes."""
MAX_NODES = 1_000_000
"""Nodes that a job file may give a datacenter (`spec.fields.Count`)."""


def feasible(space: Space, cluster: ClusterArrays) -> bool:
    """Whether one replica of anything fits; with ZeRO-1, as many as there are workers for."""
    for setup in worker_setups(space, cluster):
        for depth in depths(space, cluster, setup):
            shapes = setup.shapes.of(depth, 1)
            if not shapes:
                continue
            dc = np.array([[i for i, stages in shape for _ in range(stages)] for shape in shapes], np.int64)
            replicas = [min(int(setup.shapes.workers[i]) // stages for i, stages in shape) for shape in shapes]
            shards = np.array(replicas, np.int64) if space.job.zero else None
            if split_layers(cluster, setup.model, dc, shards).held.any():
                return True
    return False


def explain(space: Space, cluster: ClusterArrays, refusals: Sequence[InfeasibleError]) -> InfeasibleError:
    """The error to raise when a search has found nothing."""
    if refusals and feasible(space, cluster):
        return refusals[0]  # memory suffices: the reason is why the simulator refused it
    job, widest = space.job, int(cluster.gpus_per_node.max())
    if min(space.tps) > widest and not any(cluster.workers(tp).any() for tp in space.tps):
        return InfeasibleError(
            where=job.where,
            key="tp",
            value=min(space.tps),
            rule=f"`atlas train` keeps a tensor-parallel group in one node, and the largest node has {widest} GPUs",
            remedy=f"Use a tp of at most {widest}, or plan for another runtime (runtime: megatron)",
        )
    changes = [text for try_it in (_recompute, _paths, _memory, _nodes) if (text := try_it(space, cluster))]
    model = job.model
    state = job.element_bytes + job.gradient_bytes + job.optimizer_bytes
    need = model_params(model) * state
    have = sum(
        float(cap) * nodes * per
        for cap, nodes, per in zip(
            cluster.cap_bytes, cluster.nodes.tolist(), cluster.gpus_per_node.tolist(), strict=True
        )
    )
    apart = not cluster.joined.any() and cluster.num_dcs > 1
    rule = (
        f"no plan fits: weights, gradients and optimizer alone are {need / GIB:,.0f} GiB ({state} bytes a parameter), "
        f"and the {int((cluster.nodes * cluster.gpus_per_node).sum()):,} GPUs have {have / GIB:,.0f} GiB"
    )
    if apart:
        rule += ", in datacenters that no link joins"
    if refusals:
        rule += f". The nearest attempt: {refusals[0].rule}"
    remedy = "; or ".join(changes) if changes else "Use a smaller model, or more and larger GPUs"
    return InfeasibleError(
        where=job.where, key="cluster", rule=rule, remedy=f"It would fit with this: {remedy}" if changes else remedy
    )


def _fits(job: Job, space: Space) -> bool:
    again = space_of(job, global_batch=space.sequences, tcp=space.tcp)
    return feasible(
        replace(again, tps=space.tps, depths=space.depths, microbatches=space.microbatches), cluster_arrays(job)
    )


def _least(low: float, high: float, fits: Callable[[float], bool], steps: int) -> float | None:
    """The least value between two that fits, found by bisection; None where the highest does not."""
    if not fits(high):
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _recompute(space: Space, cluster: ClusterArrays) -> str | None:
    if space.job.recompute or not _fits(space.job.model_copy(update={"recompute": True}), space):
        return None
    return "recompute: true"


def _paths(space: Space, cluster: ClusterArrays) -> str | None:
    """The one link that is missing."""
    links = space.job.cluster.links
    if links is None:
        return None
    order = np.argsort(-cluster.nodes * cluster.gpus_per_node, kind="stable").tolist()
    pairs = [(a, b) for a in order for b in order if a < b and not cluster.joined[a, b]]
    for a, b in pairs[:MAX_TRIED_LINKS]:
        names = (cluster.names[a], cluster.names[b])
        link = Link(between=names, latency_ms=TRIED_LATENCY_MS)
        joined = space.job.cluster.model_copy(update={"links": (*links, link)})
        if _fits(space.job.model_copy(update={"cluster": joined}), space):
            return f"a link between {names[0]} and {names[1]}"
    return None


def _memory(space: Space, cluster: ClusterArrays) -> str | None:
    """Memory per GPU."""
    now = float(cluster.cap_bytes.max()) / GIB

    def fits(gib: float) -> bool:
        return _fits(space.job.model_copy(update={"memory_gib": gib}), space)

    need = _least(now, MAX_MEMORY_FACTOR * now, fits, MEMORY_STEPS)
    return None if need is None else f"GPUs with {need:,.1f} GiB for the job (the largest now has {now:,.1f})"


def _nodes(space: Space, cluster: ClusterArrays) -> str | None:
    """Nodes in the largest datacenter."""
    described = space.job.cluster
    at = int(np.argmax(cluster.nodes * cluster.gpus_per_node))
    dc = described.datacenters[at]

    def fits(nodes: float) -> bool:
        more = dc.model_copy(update={"nodes": int(nodes)})
        dcs = (*described.datacenters[:at], more, *described.datacenters[at + 1 :])
        changed = described.model_copy(update={"datacenters": dcs})
        return _fits(space.job.model_copy(update={"cluster": changed}), space)

    need = _least(dc.nodes, min(MAX_NODES, MAX_NODES_FACTOR * dc.nodes), fits, NODES_STEPS)
    return None if need is None else f"{int(need):,} nodes in {dc.name} instead of {dc.nodes:,}"
