"""Photonic rails: which datacenters have too few circuits for all that a job does, and so must change them; and how the
slices of WAN turns reach the cell peers.

Counts of replicas and stages are numbers or arrays of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.spec.job import DataCenter

RING, RING_AND_HOPS = 2, 4
"""Circuits of a GPU: a ring, also of two GPUs, takes two; the hops to the previous and the next stage take two as
well."""


def is_photonic(dc: DataCenter) -> bool:
    return dc.fabric is not None and dc.fabric.kind == "photonic"


def switches_circuits(dc: DataCenter, tp: int, replicas: Any, stages: Any) -> Any:
    """Whether a GPU's circuits change between pipeline hops and gradient rings: it has fewer than both need, and fewer
    than one for each other node that the plan uses: the fewest that hold `stages` workers of each of `replicas`
    pipelines. In one node, rings need none."""
    if dc.fabric is None or not is_photonic(dc):
        return np.zeros(np.broadcast(replicas, stages).shape, np.bool_)
    in_node = max(1, dc.gpus_per_node // tp)
    nodes = -(-stages * replicas // in_node) * max(1, tp // dc.gpus_per_node)
    return (replicas > 1) & (dc.fabric.ports_per_gpu < np.minimum(RING_AND_HOPS, nodes - 1))


def scatter_gbps(dc: DataCenter) -> float:
    """The packet network beside photonic rails, Gbit/s of a node; 0 where there is none."""
    return dc.fabric.electrical_gbps if dc.fabric is not None and is_photonic(dc) else 0.0


def relays_slices(dc: DataCenter) -> bool:
    """Whether slices for the WAN go from node to node, around the ring of a stage's replicas."""
    return is_photonic(dc) and not scatter_gbps(dc) and dc.nodes > 2


def scatter_change_s(dc: DataCenter, tp: int, replicas: Any, stages: Any, *, has_hops: Any) -> Any:
    """Seconds to change circuits to the ring before slices can go around it. A stage that sends over the WAN and also
    has a hop inside its datacenter needs circuits for a ring and one hop, or changes them in every round of turns."""
    changes = has_hops & switches_circuits(dc, tp, replicas, stages)
    if dc.fabric is None or not relays_slices(dc) or dc.fabric.ports_per_gpu >= RING + 1:
        return np.zeros(np.shape(changes))
    return np.where(changes, dc.fabric.reconfigure_ms / 1e3, 0.0)
