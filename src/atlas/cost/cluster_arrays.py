"""The cluster as arrays: the hardware and prices of every datacenter, the links between each two, and how fast bytes go
inside a datacenter, around a gradient ring and over a WAN. Every rule about links is here, once.

Pure functions of `ClusterArrays` and of datacenters' numbers, which may be arrays: a search asks for thousands of
boundaries at once, a job for one. Knows hardware and money, not what runs on it; no order and no nanoseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.cost.circuits import relays_slices, scatter_gbps
from atlas.cost.runtimes import RUNTIMES
from atlas.ir.program import QUANTUM_NS
from atlas.spec.job import Cluster, Job

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

GIB = 2**30


@dataclass(frozen=True, eq=False)
class ClusterArrays:
    """Index legend: i, j datacenter in file order."""

    spec: Cluster
    runtime: str
    names: tuple[str, ...]
    nodes: Ints
    gpus_per_node: Ints
    net_bps: Floats
    """Of a node, inside the datacenter."""
    net_latency_s: Floats
    peer_bps: Floats
    """From one GPU to the others of its node."""
    scatter_bps: Floats
    """Of a node, for slices to its cell peers: its network, or the packet network beside photonic rails."""
    relays: Flags
    """Whether such slices go around a ring of circuits, from node to node."""
    usd_per_gpu_s: Floats
    cap_bytes: Ints
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
    def index(self) -> dict[str, int]:
        """The number of each datacenter, by name."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def gpu_types(self) -> tuple[str, ...]:
        """By datacenter."""
        return tuple(dc.gpu for dc in self.spec.datacenters)

    def workers(self, tp: int) -> Ints:
        """Tensor-parallel groups each datacenter has room for."""
        if self.runtime == "atlas":  # a plan is for `atlas train`, which keeps a group in its node
            return np.asarray(self.nodes * (self.gpus_per_node // tp), np.int64)
        return np.asarray(tp_groups(self.nodes, self.gpus_per_node, tp), np.int64)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Equal datacenters have the same number; where links are listed, all are different."""
        return tuple(range(self.num_dcs)) if self.spec.links is not None else self.classes_alone

    @cached_property
    def classes_alone(self) -> tuple[int, ...]:
        """The same, for pipelines that use no link."""
        known: dict[object, int] = {}
        plain = [dc.model_copy(update={"name": "-", "location": None}) for dc in self.spec.datacenters]
        return tuple(known.setdefault(dc, len(known)) for dc in plain)


def stream_bps(window_bytes: float, latency_s: float) -> float:
    """Rate of one TCP connection: a window every round trip. Latency is one way."""
    return math.inf if latency_s <= 0 else 8.0 * window_bytes / (2.0 * latency_s)


def tp_groups(nodes: Any, gpus_per_node: Any, tp: int) -> Any:
    """Tensor-parallel groups in nodes, numbers or arrays of them: several in a node, or several whole nodes a group."""
    wide = np.where(tp % gpus_per_node == 0, nodes // np.maximum(1, tp // gpus_per_node), 0)
    return np.where(gpus_per_node >= tp, nodes * (gpus_per_node // tp), wide)


def cluster_arrays(job: Job) -> ClusterArrays:
    """The arrays of a job's cluster; the same object for the same cluster."""
    return _arrays_of(job.cluster, job.runtime, job.memory_gib)


@lru_cache(maxsize=32)
def _arrays_of(spec: Cluster, runtime: str, memory_gib: float | None) -> ClusterArrays:
    dcs = spec.datacenters
    gpus = [spec.gpu_type(dc.gpu) for dc in dcs]
    share = RUNTIMES[runtime].usable_share
    joined = np.zeros((len(dcs), len(dcs)), np.bool_)
    latency, pair, stream, trunk, egress = np.zeros((5, len(dcs), len(dcs)))
    for i, j in zip(*np.triu_indices(len(dcs), 1), strict=True):
        if (route := spec.route(dcs[i].name, dcs[j].name)) is None:
            continue
        for at in ((i, j), (j, i)):
            joined[at] = True
            latency[at], pair[at] = route.latency_ms / 1e3, route.pair_gbps * 1e9
            stream[at] = stream_bps(route.window_bytes, latency[at])
            trunk[at] = np.inf if route.trunk_gbps is None else route.trunk_gbps * 1e9
            egress[at] = route.egress_usd_per_gb / 1e9
    return ClusterArrays(
        spec=spec,
        runtime=runtime,
        names=tuple(dc.name for dc in dcs),
        nodes=np.array([dc.nodes for dc in dcs], np.int64),
        gpus_per_node=np.array([dc.gpus_per_node for dc in dcs], np.int64),
        net_bps=np.array([spec.node_gbps(dc) * 1e9 for dc in dcs]),
        net_latency_s=np.array([dc.net_latency_us / 1e6 for dc in dcs]),
        scatter_bps=np.array([(dc.fabric and scatter_gbps(dc)) or spec.node_gbps(dc) for dc in dcs]) * 1e9,
        relays=np.array([dc.fabric is not None and relays_slices(dc) for dc in dcs], np.bool_),
        peer_bps=np.array([gpu.peer_gbps * 1e9 for gpu in gpus]),
        usd_per_gpu_s=np.array([dc.usd_per_gpu_hour / 3600 for dc in dcs]),
        cap_bytes=np.array([math.floor((memory_gib or share * gpu.memory_gib) * GIB) for gpu in gpus], np.int64),
        joined=joined,
        latency_s=latency,
        pair_bps=pair,
        stream_bps=stream,
        trunk_bps=trunk,
        usd_per_byte=egress,
    )


def workers_per_node(tp: int, gpus_per_node: Any) -> Any:
    """Tensor-parallel groups in a node; 1 where a group takes several nodes."""
    return np.maximum(1, gpus_per_node // tp)


# ---- rates ---------------------------------------------------------------------------------------------------------
def share_of_node(tp: int, gpus_per_node: Any, net_bps: Any) -> Any:
    """A worker's share of its node's network; all of it of several nodes, where its tp group fills them."""
    return net_bps * np.maximum(1, tp // gpus_per_node) / np.maximum(1, gpus_per_node // tp)


def worker_bps(cluster: ClusterArrays, tp: int) -> Floats:
    """[i]: what one worker sends to others of its datacenter, over the nodes' network."""
    return np.asarray(share_of_node(tp, cluster.gpus_per_node, cluster.net_bps), np.float64)


def lan_bps(cluster: ClusterArrays, tp: int, dc: Any, workers: Any) -> Any:
    """What one of `workers` workers in datacenter `dc` sends to the next stage there."""
    net_bps = worker_bps(cluster, tp)[dc]
    if not RUNTIMES[cluster.runtime].uses_peer_links:
        return net_bps
    return np.where(workers * tp <= cluster.gpus_per_node[dc], tp * cluster.peer_bps[dc], net_bps)


def path_bps(cluster: ClusterArrays, src: Any, dst: Any, tcp: str, crowd: Any = 1) -> Any:
    """What one of `crowd` workers of a node reaches over the path between two nodes: its part of the pair's cap, and on
    one TCP connection a window every round trip."""
    cap_bps = cluster.pair_bps[src, dst] / crowd
    return np.minimum(cap_bps, cluster.stream_bps[src, dst]) if tcp == "one" else cap_bps


class WanRate(NamedTuple):
    """One boundary between two datacenters, one way; each field a number or an array."""

    pair_bps: Any
    """What one worker reaches over its own node's path."""
    trunk_bps: Any
    """One cell's part of the trunk."""
    rate_bps: Any
    """What one transfer gets, alone on the link."""
    before_s: Any
    """Handing the first chunk to the pipelines that take turns."""
    after_s: Any
    """Collecting the last chunk from them."""


def stage_workers_per_node(cluster: ClusterArrays, tp: int, dc: Any, replicas: Any, stages: Any) -> Any:
    """How many workers of one stage share a node of datacenter `dc`, which holds `stages` workers of each of `replicas`
    pipelines. Workers take the fewest nodes, as many on each, pipeline after pipeline, or stage after stage where the
    runtime packs replicas."""
    workers = stages * replicas
    nodes = -(-workers // workers_per_node(tp, cluster.gpus_per_node[dc]))
    in_node = -(-workers // nodes)
    return np.minimum(replicas, in_node if RUNTIMES[cluster.runtime].packs_replicas else -(-in_node // stages))


def wan_rate(
    cluster: ClusterArrays,
    tp: int,
    src: Any,
    dst: Any,
    bits: Any,
    *,
    replicas: Any,
    stages: tuple[Any, Any],
    cells: Any,
    turns: Any,
    tcp: str,
) -> WanRate:
    """Transfers of `bits` from datacenter `src` to `dst`, which hold `stages` workers of each of `replicas` pipelines.
    These are in `cells` cells, of which `turns` take turns with the paths of all their nodes (1: each has its own).

    D identical cells run the same timeline at the same moment, so each has exactly 1/D of a trunk. Workers of one stage
    that share a node divide its pair cap.
    """
    net_bps = worker_bps(cluster, tp)
    slower_bps = np.minimum(net_bps[src], net_bps[dst])
    ends = zip((src, dst), stages, strict=True)
    crowd = np.maximum(*(stage_workers_per_node(cluster, tp, dc, replicas, held) for dc, held in ends))
    pair_bps = np.minimum(path_bps(cluster, src, dst, tcp, crowd), slower_bps)
    trunk_bps = cluster.trunk_bps[src, dst] / cells
    # The sender keeps its own slice: (C - 1)/C of every byte goes over its network, and comes in likewise.
    slices_bps = np.asarray(share_of_node(tp, cluster.gpus_per_node, cluster.scatter_bps), np.float64)
    slowest_bps = np.minimum(slices_bps[src], slices_bps[dst])
    spread_bps = np.where(turns > 1, slowest_bps * turns / np.maximum(turns - 1, 1), np.inf)
    rate_bps = np.minimum(np.minimum(turns * pair_bps, trunk_bps), spread_bps)
    # Around a ring a slice passes up to half of the peers, over one of the two circuits of each.
    hops = np.maximum(1, np.ceil((turns - 1) / 2))
    relayed = 1 + 2 * (hops - 1) / np.maximum(turns - 1, 1)
    sends = [np.where(cluster.relays[dc], relayed, 1.0) for dc in (src, dst)]
    # A chunk is short for the network inside a datacenter too, or a faster WAN would delay its arrival.
    chunk_bits = np.minimum(rate_bps, spread_bps / sum(sends)) * QUANTUM_NS / 1e9
    slices_bits = np.minimum(bits, chunk_bits) * (turns - 1) / turns
    ends_s = []
    for dc, count in zip((src, dst), sends, strict=True):
        latency_s = cluster.net_latency_s[dc] * np.where(cluster.relays[dc], hops, 1)
        ends_s.append(np.where(turns > 1, count * slices_bits / slices_bps[dc] + latency_s, 0.0))
    return WanRate(pair_bps, trunk_bps, rate_bps, *ends_s)


def ring_bps(
    replicas: Any, stages: Any, tp: int, gpus_per_node: Any, net_bps: Any, peer_bps: Any, *, packed: bool = False
) -> tuple[Any, Any]:
    """(rate of one stage's ring, whether it stays inside one node); numbers or arrays of them.

    Of each of `replicas` pipelines the datacenter holds `stages` workers. They take the fewest nodes, pipeline after
    pipeline, or `packed` stage after stage. Replicas that share a node hand gradients on at the speed of its GPUs and
    leave it once. The rings of a node divide its network. Nodes without workers change nothing.
    """
    per_node = workers_per_node(tp, gpus_per_node)
    groups = -(-stages * replicas // per_node)
    is_inside = replicas <= per_node if packed else groups == 1
    rings = 1 if packed else np.minimum(stages, -(-stages * replicas // groups))
    outside_bps = share_of_node(tp, gpus_per_node, net_bps) * per_node / rings
    return np.minimum(np.where(is_inside, np.inf, outside_bps), tp * peer_bps), is_inside


def stages_beside(dc: Ints) -> Ints:
    """[n, s]: how many stages of a pipeline are in the datacenter of each, itself counted; `dc` [n, s]."""
    stages = np.zeros_like(dc)
    for here in (dc == i for i in np.unique(dc)):
        stages += here * here.sum(axis=-1, keepdims=True)
    return stages


def ring_s(cluster: ClusterArrays, tp: int, dc: Any, replicas: Any, gradient_bytes: Any) -> Any:
    """[n, s]: ring all-reduce of every stage's gradients over its replicas, for pipelines with workers in the
    datacenters `dc` [n, s]."""
    packed, stages = RUNTIMES[cluster.runtime].packs_replicas, stages_beside(dc)
    per_node, net_bps, peer_bps = cluster.gpus_per_node[dc], cluster.net_bps[dc], cluster.peer_bps[dc]
    rate_bps, is_inside = ring_bps(replicas, stages, tp, per_node, net_bps, peer_bps, packed=packed)
    latency_s = np.where(is_inside, 0.0, 2 * (replicas - 1) * cluster.net_latency_s[dc])
    return 2 * (replicas - 1) / replicas * gradient_bytes * 8 / rate_bps + latency_s


def tied_s(cluster: ClusterArrays, tp: int, dc: Ints, replicas: Ints, matrix_bytes: int) -> Floats:
    """[n]: the two ends of a model with tied embeddings exchange that matrix's gradient. Each of `replicas` [n]
    pipelines with workers in the datacenters `dc` [n, s] sends its slice to the other end, along the pipeline's path,
    both ways at once. Replicas in one node share its path."""
    src, dst, stages, count = dc[:, :-1], dc[:, 1:], stages_beside(dc), replicas[:, None]
    crowd = stage_workers_per_node(cluster, tp, dc, count, stages)
    pair_bps = path_bps(cluster, src, dst, "many", np.maximum(crowd[:, :-1], crowd[:, 1:]))
    hop_bps = np.where(src == dst, np.inf, np.minimum(pair_bps, cluster.trunk_bps[src, dst] / count))
    rate_bps = np.minimum(hop_bps.min(axis=1), worker_bps(cluster, tp)[dc].min(axis=1))
    return np.asarray(8 * matrix_bytes / replicas / rate_bps + through_s(cluster, dc))


def through_s(cluster: ClusterArrays, dc: Ints) -> Floats:
    """[n]: one-way latency from the first worker of a pipeline to the last; `dc` [n, s]."""
    src, dst = dc[:, :-1], dc[:, 1:]
    wan_s = np.where(src == dst, 0.0, cluster.latency_s[src, dst])
    return np.asarray(cluster.net_latency_s[dc].sum(axis=1) + wan_s.sum(axis=1))


def all_nodes_bps(cluster: ClusterArrays, src: Any, dst: Any, nodes: Any, tcp: str) -> Any:
    """What `nodes` nodes of each of two datacenters get together, one way; inside one, its own network."""
    slower_bps = np.minimum(cluster.net_bps[src], cluster.net_bps[dst])
    node_bps = np.minimum(path_bps(cluster, src, dst, tcp), slower_bps)
    between_bps = np.minimum(nodes * node_bps, cluster.trunk_bps[src, dst])
    return np.where(np.equal(src, dst), nodes * slower_bps, between_bps)
