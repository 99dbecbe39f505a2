"""A cell whose datacenters have a trunk that caps all of their traffic together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from atlas.cost.table import FAIR, Costs, LinkCost, uniform_costs
from atlas.ir.program import Ints


def trunk_costs(
    num_pipelines: int, num_stages: int, per_kind_ns: Ints, *, trunk_pairs: float | None, wan_ns: int, **other: Any
) -> Costs:
    """`uniform_costs` with a trunk that carries as much as `trunk_pairs` node pairs; None: no trunk."""
    if trunk_pairs is None or trunk_pairs >= num_pipelines:
        return uniform_costs(num_pipelines, num_stages, per_kind_ns, wan_ns=wan_ns, **other)
    if other.get("sharing"):
        in_turn_ns = round(wan_ns / trunk_pairs * num_pipelines)
        return uniform_costs(num_pipelines, num_stages, per_kind_ns, wan_ns=in_turn_ns, **other)
    apart = uniform_costs(num_pipelines, num_stages, per_kind_ns, wan_ns=wan_ns, **other)
    links: list[LinkCost] = []
    channel = np.zeros_like(apart.channel_link)
    for direction, boundary in np.ndindex(2, num_stages - 1):
        own = [apart.links[link] for link in apart.channel_link[direction, :, boundary]]
        crosses = boundary in other["wan_boundaries"]
        channel[direction, :, boundary] = len(links) + (0 if crosses else np.arange(num_pipelines))
        links += [LinkCost(own[0].name.removesuffix(" p0"), FAIR, capacity=trunk_pairs)] if crosses else own
    return replace(apart, links=tuple(links), channel_link=channel)
