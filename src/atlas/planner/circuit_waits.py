"""What pipelines on photonic rails wait for while circuits change, for many pipelines at once: at the start of an
iteration for the hops inside a datacenter, at its end for the gradient rings. For one Program `sim.gates` has it.

`estimate` and `floor` add these waits. Which circuits change, `cost.circuits` decides. Knows no order of ops.

Index legend: v variant, s stage, b boundary between s = b and s = b + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas.cost.circuits import is_photonic, scatter_change_s, switches_circuits
from atlas.cost.cluster_arrays import ClusterArrays, Flags, Floats, Ints


@dataclass(frozen=True, eq=False)
class CircuitWaits:
    """Of the variants of one batch."""

    is_hop: Flags
    """[v, b]: hops over circuits that change."""
    change_s: Floats
    """[v, s]: of a stage's circuits; 0 where they do not change."""
    on_demand: Flags
    """[v, s]: a change begins when it is needed; otherwise as soon as the old circuits are free."""
    hop_ready_s: Floats
    """[v, b]: when a hop is there at the earliest. Its change may begin before the iteration, in the optimizer step."""

    @property
    def late_s(self) -> Floats:
        """[v, s]: from the last backward to the ring at least, where its change is asked for then."""
        return np.where(self.on_demand, self.change_s, 0.0)

    def heads_s(self, v: Ints, forward_s: Floats, way_s: Floats) -> Floats:
        """[., s]: when a stage can start at the earliest. The first transfer over a hop waits for its circuits."""
        asked_s = np.where(self.is_hop & self.on_demand[:, 1:], self.change_s[:, 1:], 0.0)[v]
        head_s, ready_s = np.zeros_like(forward_s), self.hop_ready_s[v]
        for b in range(forward_s.shape[1] - 1):
            there_s = head_s[:, b] + forward_s[:, b] + asked_s[:, b] + way_s[:, b]
            head_s[:, b + 1] = np.maximum(there_s, ready_s[:, b])
        return head_s

    def rings_s(self, v: Ints, left_s: Floats, way_s: Floats) -> Floats:
        """[., s]: when the gradient sum of a stage can start at the earliest, but for `late_s`. `left_s`: when the last
        gradient has left a stage; on its arrival the hop's circuits are free."""
        hop = self.is_hop[v]
        arrived_s = np.where(hop, left_s[:, 1:] + way_s, -np.inf)
        free_s = np.full(left_s.shape, -np.inf)
        free_s[:, 1:] = arrived_s
        free_s[:, :-1] = np.maximum(free_s[:, :-1], arrived_s)
        return np.asarray(free_s + (self.change_s - self.late_s)[v])


def circuit_waits(
    cluster: ClusterArrays, tp: int, dc: Ints, replicas: Ints, stages: Ints, step_s: Floats | None
) -> CircuitWaits | None:
    """For pipelines in datacenters `dc` [v, s], which hold `stages` [v, s] of each of `replicas` [v] pipelines; None
    where no circuits change. `step_s` [v, s]: the optimizer, if it leaves the ring to the hops."""
    if not any(map(is_photonic, cluster.spec.datacenters)):
        return None
    change_s, on_demand = np.zeros(dc.shape), np.zeros(dc.shape, np.bool_)
    for i, one in enumerate(cluster.spec.datacenters):
        if one.fabric is not None and is_photonic(one):
            at = (dc == i) & switches_circuits(one, tp, replicas[:, None], stages)
            change_s[at], on_demand[at] = one.fabric.reconfigure_ms / 1e3, not one.fabric.provision
    is_hop = (dc[:, :-1] == dc[:, 1:]) & (change_s[:, 1:] > 0)
    if not is_hop.any():
        return None
    used = np.zeros(dc.shape, np.bool_)
    used[:, :-1] |= is_hop
    used[:, 1:] |= is_hop
    hidden_s: Floats | float = 0.0 if step_s is None else np.minimum(step_s[:, :-1], step_s[:, 1:])
    ready_s = np.where(is_hop, change_s[:, 1:] - hidden_s, 0.0)
    return CircuitWaits(is_hop, np.where(used, change_s, 0.0), on_demand & used, ready_s)


def turn_changes_s(cluster: ClusterArrays, tp: int, dc: Ints, replicas: Ints, stages: Ints, has_hops: Flags) -> Floats:
    """[.]: seconds to change circuits before slices of WAN turns can go around a ring, at one end of boundaries."""
    found = np.zeros(len(dc))
    for i in np.flatnonzero(cluster.relays).tolist():
        at = dc == i
        one = cluster.spec.datacenters[i]
        found[at] = scatter_change_s(one, tp, replicas[at], stages[at], has_hops=has_hops[at])
    return found
