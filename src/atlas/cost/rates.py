"""How fast bytes go: inside a datacenter, around a gradient ring, over a WAN. Every rule about links is here, once.

Pure functions of `ClusterArrays` and of datacenters' numbers, which may be arrays: a search asks for thousands of
boundaries at once, a job for one. Knows no order and no nanoseconds (`wan`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Floats
from atlas.cost.runtimes import RUNTIMES
from atlas.ir.program import QUANTUM_NS


def share_of_node(tp: int, gpus_per_node: Any, net_bps: Any) -> Any:
    """A worker's share of its node's network; all of it of several nodes, where its tp group fills them."""
    return net_bps * np.maximum(1, tp // gpus_per_node) / np.maximum(1, gpus_per_node // tp)


def worker_bps(cluster: ClusterArrays, tp: int) -> Floats:
    """[i]: what one worker sends to others of its datacenter, over the nodes' network."""
    return np.asarray(share_of_node(tp, cluster.gpus_per_node, cluster.net_bps), np.float64)


def lan_bps(cluster: ClusterArrays, tp: int) -> Floats:
    """[i]: what one worker sends to the next stage in its datacenter."""
    net_bps = worker_bps(cluster, tp)
    if RUNTIMES[cluster.runtime].uses_peer_links:
        return np.where(cluster.nodes == 1, tp * cluster.peer_bps, net_bps)
    return net_bps


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


def wan_rate(
    cluster: ClusterArrays, tp: int, src: Any, dst: Any, bits: Any, *, replicas: Any, cells: Any, turns: Any, tcp: str
) -> WanRate:
    """Transfers of `bits` from datacenter `src` to `dst`, for `replicas` pipelines in `cells` cells, of which `turns`
    take turns with the paths of all their nodes (1: each has its own).

    D identical cells run the same timeline at the same moment, so each has exactly 1/D of a trunk. Where a boundary has
    more workers than nodes, they divide their node's pair cap.
    """
    net_bps = worker_bps(cluster, tp)
    slower_bps = np.minimum(net_bps[src], net_bps[dst])
    crowd = np.ceil(replicas / np.minimum(cluster.nodes[src], cluster.nodes[dst]))
    pair_bps = np.minimum(path_bps(cluster, src, dst, tcp, crowd), slower_bps)
    trunk_bps = cluster.trunk_bps[src, dst] / cells
    # The sender keeps its own slice: (C - 1)/C of every byte goes over its network, and comes in likewise.
    spread_bps = np.where(turns > 1, slower_bps * turns / np.maximum(turns - 1, 1), np.inf)
    rate_bps = np.minimum(np.minimum(turns * pair_bps, trunk_bps), spread_bps)
    slices_bits = np.minimum(bits, rate_bps * QUANTUM_NS / 1e9) * (turns - 1) / turns
    ends_s = [np.where(turns > 1, slices_bits / net_bps[dc] + cluster.net_latency_s[dc], 0.0) for dc in (src, dst)]
    return WanRate(pair_bps, trunk_bps, rate_bps, *ends_s)


def ring_bps(
    replicas: Any, tp: int, nodes: Any, gpus_per_node: Any, net_bps: Any, peer_bps: Any, *, packed: bool = False
) -> tuple[Any, Any]:
    """(rate of one stage's ring, whether it stays inside one node); numbers or arrays of them.

    Replicas are spread over all nodes, or `packed` node after node. Those that share a node hand gradients on at the
    speed of its GPUs and leave it once, so together they have the shares of the node's network that each of them has.
    """
    per_node = np.maximum(1, gpus_per_node // tp)
    together = np.minimum(replicas if packed else -(-replicas // nodes), per_node)
    is_inside = together >= replicas
    outside_bps = together * share_of_node(tp, gpus_per_node, net_bps)
    return np.minimum(np.where(is_inside, np.inf, outside_bps), tp * peer_bps), is_inside


def ring_s(cluster: ClusterArrays, tp: int, dc: Any, replicas: Any, gradient_bytes: Any) -> Any:
    """Ring all-reduce of a stage's gradients over its replicas in datacenter `dc`."""
    packed = RUNTIMES[cluster.runtime].packs_replicas
    nodes, per_node, net_bps = cluster.nodes[dc], cluster.gpus_per_node[dc], cluster.net_bps[dc]
    rate_bps, is_inside = ring_bps(replicas, tp, nodes, per_node, net_bps, cluster.peer_bps[dc], packed=packed)
    latency_s = np.where(is_inside, 0.0, 2 * (replicas - 1) * cluster.net_latency_s[dc])
    return 2 * (replicas - 1) / replicas * gradient_bytes * 8 / rate_bps + latency_s


def all_nodes_bps(cluster: ClusterArrays, src: Any, dst: Any, nodes: Any, tcp: str) -> Any:
    """What `nodes` nodes of each of two datacenters get together, one way; inside one, its own network."""
    slower_bps = np.minimum(cluster.net_bps[src], cluster.net_bps[dst])
    node_bps = np.minimum(path_bps(cluster, src, dst, tcp), slower_bps)
    between_bps = np.minimum(nodes * node_bps, cluster.trunk_bps[src, dst])
    return np.where(np.equal(src, dst), nodes * slower_bps, between_bps)
