"""The cluster as arrays: the hardware and prices of every datacenter, and the links between each two.

One job and a batch of ten thousand candidates are priced from the same arrays (`rates`, `memory`). Knows hardware and
money, not what runs on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.cost.runtimes import RUNTIMES
from atlas.spec.cluster import Cluster
from atlas.spec.job import Job

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
