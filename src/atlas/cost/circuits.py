"""Photonic rails: which datacenters have too few circuits for all that a job does, and so must change them."""

from __future__ import annotations

from atlas.spec.job import DataCenter

RING, RING_AND_HOPS = 2, 4
"""Circuits of a GPU: a ring, also of two GPUs, takes two, and so do the hops to the stages before and behind."""


def switches_circuits(dc: DataCenter, tp: int, replicas: int) -> bool:
    """Whether a GPU's circuits change between pipeline hops and gradient rings: it has fewer than both need, and fewer
    than one for each other node of its rail. A ring inside one node needs none."""
    if dc.fabric is None or dc.fabric.kind != "photonic":
        return False
    ports = dc.fabric.ports_per_gpu
    in_node = max(1, dc.gpus_per_node // tp)
    return replicas > in_node and ports < min(RING_AND_HOPS, dc.nodes - 1)
