"""The cluster as arrays: what every datacenter offers and what lies between each two of them.

Read once per search, so that thousands of candidates are priced without touching the job's objects again. Knows
hardware and money, not what runs on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atlas.cost.arrange import tp_groups
from atlas.cost.compute import ModelTime, model_times
from atlas.cost.memory import cap_bytes
from atlas.cost.tcp import stream_bps
from atlas.cost.wan import share_of_node
from atlas.errors import SpecError
from atlas.spec import Job

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ClusterArrays:
    """Index legend: i, j datacenter in file order."""

    job: Job
    names: tuple[str, ...]
    nodes: Ints
    gpus_per_node: Ints
    net_bps: Floats
    """Of a node, inside the datacenter."""
    net_latency_s: Floats
    peer_bps: Floats
    """From one GPU to the others of its node."""
    usd_per_gpu_s: Floats
    cap_bytes: Floats
    """Memory of one GPU that the job may use."""
    joined: Flags
    """[i, j]: whether there is a path."""
    latency_s: Floats
    pair_bps: Floats
    stream_bps: Floats
    """[i, j]: one connection, without the pair's cap."""
    trunk_bps: Floats
    usd_per_byte: Floats

    @property
    def num_dcs(self) -> int:
        return len(self.names)

    @cached_property
    def kind(self) -> tuple[str, ...]:
        """GPU type by datacenter."""
        return tuple(dc.gpu for dc in self.job.cluster.datacenters)

    def workers(self, tp: int) -> Ints:
        """Tensor-parallel groups each datacenter has room for."""
        if self.job.runtime == "atlas":  # a plan is for `atlas train`, which keeps a group in its node
            return np.asarray(self.nodes * (self.gpus_per_node // tp), np.int64)
        return np.asarray(tp_groups(self.nodes, self.gpus_per_node, tp), np.int64)

    def worker_bps(self, tp: int) -> Floats:
        """A worker's share of its node's network."""
        return np.asarray(share_of_node(tp, self.gpus_per_node, self.net_bps), np.float64)

    @cached_property
    def lanes(self) -> list[list[tuple[float, float]]]:
        """[i][j]: what all nodes of two datacenters reach together, 0 without a path, and the latency; plain."""
        nodes = np.minimum(self.nodes[:, None], self.nodes[None, :])
        bps = np.where(self.joined, np.minimum(nodes * self.pair_bps, self.trunk_bps), 0.0)
        return [list(zip(*pair, strict=True)) for pair in zip(bps.tolist(), self.latency_s.tolist(), strict=True)]

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Datacenters that nothing tells apart have the same number; where links are listed, all are different."""
        return tuple(range(self.num_dcs)) if self.job.cluster.links is not None else self.classes_alone

    @cached_property
    def classes_alone(self) -> tuple[int, ...]:
        """The same, for whoever uses no link."""
        known: dict[object, int] = {}
        plain = [dc.model_copy(update={"name": "-", "location": None}) for dc in self.job.cluster.datacenters]
        return tuple(known.setdefault(dc, len(known)) for dc in plain)


def cluster_arrays(job: Job) -> ClusterArrays:
    """The arrays of a job's cluster."""
    dcs = job.cluster.datacenters
    n = len(dcs)
    joined = np.zeros((n, n), np.bool_)
    latency, pair, stream, trunk, egress = (np.zeros((n, n)) for _ in range(5))
    for i in range(n):
        for j in range(i + 1, n):
            route = job.cluster.route(dcs[i].name, dcs[j].name)
            if route is None:
                continue
            for at in ((i, j), (j, i)):
                joined[at] = True
                latency[at], pair[at] = route.latency_ms / 1e3, route.pair_gbps * 1e9
                stream[at] = stream_bps(route.window_bytes, latency[at])
                trunk[at] = np.inf if route.trunk_gbps is None else route.trunk_gbps * 1e9
                egress[at] = route.egress_usd_per_gb / 1e9
    if n > 1 and job.cluster.links is None and job.cluster.wan.latency_ms is None:
        raise SpecError(
            where=job.where,
            key="cluster.wan.latency_ms",
            value=None,
            rule="is needed to plan over several datacenters",
            remedy="Write it, or list cluster.links",
        )
    caps = [cap_bytes(job, dc.name) for dc in dcs]
    return ClusterArrays(
        job=job,
        names=tuple(dc.name for dc in dcs),
        nodes=np.array([dc.nodes for dc in dcs], np.int64),
        gpus_per_node=np.array([dc.gpus_per_node for dc in dcs], np.int64),
        net_bps=np.array([dc.node_gbps * 1e9 for dc in dcs]),
        peer_bps=np.array([job.cluster.gpu(dc.name).peer_gbps * 1e9 for dc in dcs]),
        net_latency_s=np.array([dc.net_latency_us / 1e6 for dc in dcs]),
        usd_per_gpu_s=np.array([dc.usd_per_gpu_hour / 3600 for dc in dcs]),
        cap_bytes=np.array(caps, np.float64),
        joined=joined,
        latency_s=latency,
        pair_bps=pair,
        stream_bps=stream,
        trunk_bps=trunk,
        usd_per_byte=egress,
    )


@dataclass(frozen=True, eq=False)
class Speeds:
    """Seconds per datacenter's GPU for one microbatch, at one tp and microbatch size. Index legend: i datacenter."""

    forward_s: Floats
    """Of one layer, the mean where layers differ."""
    again_s: Floats
    backward_s: Floats
    update_s: Floats
    first: Floats
    """[4, i]: forward, recompute, backward, update of the embedding."""
    last: Floats
    """[4, i]: of the LM head."""
    usable: Flags
    """Where a tp group fits a node, and a profile has measured it."""


def speeds_of(job: Job, cluster: ClusterArrays, tp: int, microbatch: int) -> Speeds:
    """From the same pieces as `cost.price`."""
    one = job.model_copy(update={"tp": tp, "microbatch": microbatch})
    times, known = model_times(one), dict[tuple[str, bool, float], ModelTime | None]()
    usable = np.zeros(cluster.num_dcs, np.bool_)
    groups = cluster.workers(tp)
    rows = np.full((12, cluster.num_dcs), np.inf)
    for i, name in enumerate(cluster.names):
        wide = bool(cluster.gpus_per_node[i] < tp)
        kind = cluster.kind[i], wide, float(cluster.net_bps[i]) if wide else 0.0
        if kind not in known:
            try:
                known[kind] = times(name)
            except SpecError:
                known[kind] = None  # not in the profile: that type takes no part
        model = known[kind]
        if model is None or not groups[i]:
            continue
        usable[i] = True
        layers = np.mean([(p.forward_s, p.recompute_s, p.backward_s, p.update_s) for p in model.layers], axis=0)
        ends = [(p.forward_s, p.recompute_s, p.backward_s, p.update_s) for p in (model.embedding, model.head)]
        rows[:, i] = np.concatenate([layers, *ends])
    if not job.recompute:
        rows[[1, 5, 9]] = np.where(np.isfinite(rows[[1, 5, 9]]), 0.0, np.inf)
    return Speeds(rows[0], rows[1], rows[2], rows[3], rows[4:8], rows[8:12], usable)
