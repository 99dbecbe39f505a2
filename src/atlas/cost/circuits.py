"""Photonic rails: which datacenters have too few circuits for all that a job does, and so must change them; and how the
slices of WAN turns reach the cell peers."""

from __future__ import annotations

from atlas.spec.job import DataCenter

RING, RING_AND_HOPS = 2, 4
"""Circuits of a GPU: a ring, also of two GPUs, takes two; the hops to the previous and the next stage take two as
well."""


def switches_circuits(dc: DataCenter, tp: int, replicas: int, stages: int) -> bool:
    """Whether a GPU's circuits change between pipeline hops and gradient rings: it has fewer than both need, and fewer
    than one for each other node that the plan uses: the fewest that hold `stages` workers of each of `replicas`
    pipelines. In one node, rings need none."""
    if dc.fabric is None or dc.fabric.kind != "photonic" or replicas == 1:
        return False
    in_node = max(1, dc.gpus_per_node // tp)
    nodes = -(-stages * replicas // in_node) * max(1, tp // dc.gpus_per_node)
    return dc.fabric.ports_per_gpu < min(RING_AND_HOPS, nodes - 1)


def scatter_gbps(dc: DataCenter) -> float:
    """The packet network beside photonic rails, Gbit/s of a node; 0 where there is none."""
    return dc.fabric.electrical_gbps if dc.fabric is not None and dc.fabric.kind == "photonic" else 0.0


def relays_slices(dc: DataCenter) -> bool:
    """Whether slices for the WAN go from node to node, around the ring of a stage's replicas."""
    return dc.fabric is not None and dc.fabric.kind == "photonic" and not scatter_gbps(dc) and dc.nodes > 2


def scatter_change_s(dc: DataCenter, tp: int, replicas: int, stages: int, *, has_hops: bool) -> float:
    """Seconds to change circuits to the ring before slices can go around it. A stage that sends over the WAN and also
    has a hop inside its datacenter needs circuits for a ring and one hop, or changes them in every round of turns."""
    if not has_hops or not relays_slices(dc) or not switches_circuits(dc, tp, replicas, stages):
        return 0.0
    assert dc.fabric is not None
    return dc.fabric.reconfigure_ms / 1e3 if dc.fabric.ports_per_gpu < RING + 1 else 0.0
