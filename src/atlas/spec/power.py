"""What a datacenter's fabric needs (ports, transceivers, watts, dollars), and how many nodes its power allows.

The counts of ports are those of the Opus paper. Fibre, NICs, cooling and control are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from atlas.errors import SpecError
from atlas.spec.document import Keys
from atlas.spec.fabric import Fabric, FabricParts, Kind, parts_of
from atlas.spec.gpus import GPUS
from atlas.spec.job import Cluster, DataCenter
from atlas.spec.refusal import Where, bad


@dataclass(frozen=True)
class FabricBill:
    """The network of one datacenter, counted."""

    kind: Kind
    num_gpus: int
    switch_ports: int
    """Ports of electrical switches."""
    optical_ports: int
    """Ports of optical circuit switches."""
    transceivers: int
    watts: float
    usd: float

    @property
    def watts_per_gpu(self) -> float:
        return self.watts / self.num_gpus

    @property
    def usd_per_gpu(self) -> float:
        return self.usd / self.num_gpus


def electrical_ports(kind: Kind, nodes: int, gpus_per_node: int, switch_ports: int) -> int:
    """Switch ports of an electrical fabric for `nodes` servers."""
    num_gpus = nodes * gpus_per_node
    if kind == "fat-tree":
        k = round(math.cbrt(4 * num_gpus))
        return k * (k * k + k * k // 4)
    if kind == "rail":
        k = round(math.sqrt(4 * nodes))
        return k * (gpus_per_node * (nodes // (k // 2) * 2) + gpus_per_node * nodes // k)
    return gpus_per_node * switch_ports  # one whole switch for each rail


def bill(kind: Kind, nodes: int, gpus_per_node: int, parts: FabricParts, ports_per_gpu: int = 2) -> FabricBill:
    """A fabric of this kind. One node needs none."""
    num_gpus = nodes * gpus_per_node
    if nodes == 1:
        return FabricBill(kind, num_gpus, 0, 0, 0, 0.0, 0.0)
    if kind == "photonic":
        optical, switch, transceivers = ports_per_gpu * num_gpus, 0, num_gpus
    else:
        optical, switch = 0, electrical_ports(kind, nodes, gpus_per_node, parts.switch_ports)
        connected = num_gpus if kind == "flat-rail" else switch
        transceivers = num_gpus + (connected if parts.transceiver_at_switch else 0)

    def total(per_switch: float, per_transceiver: float, per_optical_port: float) -> float:
        return switch * per_switch / parts.switch_ports + transceivers * per_transceiver + optical * per_optical_port

    watts = total(parts.switch_watts, parts.transceiver_watts, parts.optical_port_watts)
    usd = total(parts.switch_usd, parts.transceiver_usd, parts.optical_port_usd)
    return FabricBill(kind, num_gpus, switch, optical, transceivers, watts, usd)


# ---- a datacenter --------------------------------------------------------------------------------------------------
def parts_in(cluster: Cluster, dc: DataCenter) -> FabricParts:
    """The parts of a datacenter's fabric, by the network rate of its GPUs."""
    return parts_of(dc.fabric or Fabric(), cluster.node_gbps(dc) / dc.gpus_per_node)


def bill_in(cluster: Cluster, dc: DataCenter, kind: Kind | None = None, nodes: int | None = None) -> FabricBill:
    """The bill of a datacenter's own fabric, or of another kind or number of nodes. Without a `fabric` it is `rail`."""
    fabric = dc.fabric or Fabric()
    return bill(kind or fabric.kind, nodes or dc.nodes, dc.gpus_per_node, parts_in(cluster, dc), fabric.ports_per_gpu)


def keeps_ring(cluster: Cluster) -> bool:
    """Whether a run goes on with the circuits as they are where a switch fails."""
    rails = [dc.fabric for dc in cluster.datacenters if dc.fabric is not None and dc.fabric.kind == "photonic"]
    return all(fabric.fallback == "ring" for fabric in rails)


def server_watts(cluster: Cluster, dc: DataCenter) -> float | None:
    """Of one node without the fabric; None where nothing is known of its GPU type."""
    watts = cluster.gpu_type(dc.gpu).server_watts
    return None if watts is None else watts * dc.gpus_per_node


def it_watts(cluster: Cluster, dc: DataCenter, kind: Kind | None = None, nodes: int | None = None) -> float | None:
    """Servers and fabric of a datacenter."""
    watts = server_watts(cluster, dc)
    return None if watts is None else watts * (nodes or dc.nodes) + bill_in(cluster, dc, kind, nodes).watts


def nodes_allowed(cluster: Cluster, dc: DataCenter, kind: Kind | None = None) -> int:
    """The most nodes that fit in the datacenter's power, servers and fabric together; at least 0."""
    watts = server_watts(cluster, dc)
    assert dc.power_kw is not None
    assert watts is not None
    budget = dc.power_kw * 1e3
    chosen = kind or (dc.fabric or Fabric()).kind
    most = min(1_000_000, int(budget // watts))
    if chosen == "flat-rail":
        most = min(most, parts_in(cluster, dc).switch_ports)
    # The fabric's watts jump where another layer of switches begins, so the sum is not monotone: count down.
    floor = int(most * watts // (watts + 4 * bill_in(cluster, dc, chosen, max(2, most)).watts / max(2, most)))
    for nodes in range(most, max(0, floor - 64), -1):
        if (it_watts(cluster, dc, chosen, nodes) or 0.0) <= budget:
            return nodes
    return 0


# ---- rules ---------------------------------------------------------------------------------------------------------
def power_rules(cluster: Cluster, where: Where, at: Keys, powered: tuple[str, ...]) -> Iterator[SpecError]:
    """What is wrong with power and fabrics. `powered` names the datacenters whose `nodes` come from their power."""
    for i, dc in enumerate(cluster.datacenters):
        if dc.gpu not in GPUS and dc.gpu not in cluster.gpus:
            continue
        key: Keys = (*at, "datacenters", i)
        if dc.power_kw is not None:
            yield from _power(cluster, dc, where, key, dc.name in powered)
        if dc.fabric is not None:
            yield from _fabric(cluster, dc, dc.fabric, where, key)


def _power(cluster: Cluster, dc: DataCenter, where: Where, key: Keys, derived: bool) -> Iterator[SpecError]:
    one = server_watts(cluster, dc)
    if one is None:
        rule = f"the power of a {dc.gpu} server is not known"
        remedy = f"Write server_watts (watts of a server / its GPUs) for {dc.gpu} under cluster.gpus"
        yield bad(where, (*key, "power_kw"), dc.power_kw, rule, remedy)
        return
    fit = nodes_allowed(cluster, dc)
    if not fit:
        rule = f"one node of {dc.gpus_per_node} {dc.gpu} needs {one / 1e3:.1f} kW"
        yield bad(where, (*key, "power_kw"), dc.power_kw, rule, "Give more power, or fewer gpus_per_node")
    elif not derived and (it_watts(cluster, dc) or 0.0) > (dc.power_kw or 0.0) * 1e3:
        needs = (it_watts(cluster, dc) or 0.0) / 1e3
        rule = (
            f"{dc.nodes * dc.gpus_per_node:,} GPUs need {needs:,.0f} kW with their fabric; {dc.power_kw:,g} kW are "
            f"enough for {fit:,} node{'s' * (fit > 1)} ({fit * dc.gpus_per_node:,} GPUs)"
        )
        yield bad(where, (*key, "nodes"), dc.nodes, rule, f"Write at most {fit}, or leave nodes out")


def _fabric(cluster: Cluster, dc: DataCenter, fabric: Fabric, where: Where, key: Keys) -> Iterator[SpecError]:
    parts = parts_in(cluster, dc)
    if fabric.kind == "flat-rail" and dc.nodes > parts.switch_ports:
        rule = f"it has one switch per rail, with {parts.switch_ports} ports, and there are {dc.nodes:,} nodes"
        yield bad(where, (*key, "fabric", "kind"), fabric.kind, rule, "Use rail or fat-tree, or fewer nodes")
    if fabric.kind != "photonic":
        return
    ports, most = fabric.ports_per_gpu, parts.optical_switch_ports
    if most is not None and dc.nodes * ports > most:
        rule = f"the optical switch of a rail has {most} ports, and {dc.nodes:,} nodes need {dc.nodes * ports:,}"
        yield bad(
            where, (*key, "fabric"), None, rule, f"Use at most {most // ports} nodes, or more optical_switch_ports"
        )
    if fabric.traffic == "all-to-all" and dc.nodes - 1 > ports:
        rule = f"needs {dc.nodes - 1:,} circuits for each GPU with {dc.nodes:,} nodes, and each GPU has {ports}"
        remedy = "Use kind: rail, or traffic: ring"
        yield bad(where, (*key, "fabric", "traffic"), fabric.traffic, rule, remedy)
    elif ports == 1 and dc.nodes > 2:
        rule = f"a ring over {dc.nodes:,} nodes needs 2 circuits for each GPU"
        yield bad(where, (*key, "fabric", "ports_per_gpu"), ports, rule, "Write at least 2, or use at most 2 nodes")
