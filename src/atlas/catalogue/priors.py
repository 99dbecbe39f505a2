"""Figures of a pair of regions before anything is measured there: latency, throughput and egress price, each with how
it was found and how far off such figures are.

Latency follows the length of the cables: great circles, over hubs where no cable runs straight (Europe to Asia goes by
Suez or America). Throughput of a pair that is not in the measured grid is that of its nearest neighbours in it.
`bench/regions.py` prints the errors. Knows no job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from atlas.catalogue.table import EgressPrice, Region, area, egress_price, regions, throughput

EARTH_KM = 12_742.0
"""Diameter."""
RTT_MS = 3.5
RTT_MS_PER_KM = 0.0149
"""Round trip = RTT_MS + RTT_MS_PER_KM x cable length. Fitted (least mean log error) on the 55 pairs of 11 regions that
IBM Cloud published for 16 Aug to 14 Sep 2025; 1.5 times light in fibre. Judged on AWS pairs by bench/regions.py."""
RTT_ERROR = 0.25
"""Nine in ten of 210 AWS pairs (cloudping.co) are within this share; half of them within 9 %."""
NEIGHBOURS = 2
"""Regions of the same cloud that stand for one that was not measured: 1 is as good in the median and worse at 90 %."""
THROUGHPUT_ERROR = 0.35
"""Nine in ten pairs of the grid are within this share when their region is left out; half of them within 6 %."""

HUBS: dict[str, tuple[str, float, float]] = {
    "Marseille": ("europe", 43.3, 5.4),
    "Suez": ("suez", 30.0, 32.5),
    "Fujairah": ("middle-east", 25.1, 56.3),
    "Mumbai": ("south-asia", 19.1, 72.9),
    "Singapore": ("east-asia", 1.4, 103.8),
    "Miami": ("north-america", 25.8, -80.2),
    "Virginia": ("north-america", 39.0, -77.5),
    "California": ("north-america", 34.0, -118.2),
}
"""Where cables between parts of the world land."""
CABLES = frozenset(
    frozenset(pair.split(" "))
    for pair in (
        "north-america europe",
        "north-america east-asia",
        "north-america oceania",
        "north-america south-america",
        "europe suez",
        "europe africa",
        "suez middle-east",
        "suez south-asia",
        "suez africa",
        "middle-east south-asia",
        "middle-east africa",
        "south-asia east-asia",
        "east-asia oceania",
    )
)
"""Parts of the world that cables join without passing a third."""
SOUTH_ASIA_DEGREES = 92.0
"""Asia west of this longitude is South Asia."""


@dataclass(frozen=True)
class Prior:
    """One figure that was not measured where it will be used."""

    value: float | None
    """None: no source has it."""
    basis: str
    """`measured in 2022-01`, `from 6,300 km of cable, +-25 %`."""
    date: str = ""
    """Of a price or a measurement."""


@dataclass(frozen=True)
class LinkPriors:
    """What is known of the path between two regions. Directions are combined: a job's links have no direction."""

    rtt_ms: Prior
    gbps: Prior
    """Of one pair of VMs with many connections, the slower direction."""
    egress_usd_per_gb: Prior
    """The mean of both directions: pipelines and rings send as much one way as the other."""
    each_way: tuple[EgressPrice | None, EgressPrice | None]


def link_priors(a: Region, b: Region) -> LinkPriors:
    there, back = gbps(a, b), gbps(b, a)
    slower = min(there, back, key=lambda prior: prior.value or 0.0)
    each_way = (egress_price(a, b), egress_price(b, a))
    return LinkPriors(latency(a, b), slower, _egress(each_way), each_way)


def latency(a: Region, b: Region) -> Prior:
    """The round trip in ms."""
    km = cable_km(a.location, b.location)
    return Prior(
        round(RTT_MS + RTT_MS_PER_KM * km, 1), f"from {km:,.0f} km of cable, +-{100 * RTT_ERROR:.0f} % in 9 of 10 cases"
    )


def gbps(a: Region, b: Region) -> Prior:
    """One way, for one pair of VMs."""
    grid = throughput()
    if b.name in grid.get(a.name, {}):
        return Prior(grid[a.name][b.name], "measured in 2022-01 with 64 connections", "2022-01")
    starts, ends = stand_ins(a, grid), stand_ins(b, grid)
    found = [grid[x][y] for x in starts for y in ends if y in grid[x]]
    if not found:
        return Prior(None, "unknown: no measured pair is near")
    value = math.exp(sum(map(math.log, found)) / len(found))
    near = ", ".join(x for x in dict.fromkeys([*starts, *ends]) if x not in (a.name, b.name))
    return Prior(round(value, 2), f"as {near}, +-{100 * THROUGHPUT_ERROR:.0f} % in 9 of 10 cases", "2022-01")


def stand_ins(a: Region, grid: Mapping[str, object]) -> list[str]:
    """The region itself if it is in the grid of measured ones, else its nearest neighbours of the same cloud."""
    if a.name in grid:
        return [a.name]
    same = [one for one in grid if one.startswith(f"{a.cloud}:")]
    known = regions()
    return sorted(same, key=lambda one: great_circle_km(known[one].location, a.location))[:NEIGHBOURS]


def _egress(each_way: tuple[EgressPrice | None, EgressPrice | None]) -> Prior:
    there, back = each_way
    if there is None or back is None:
        return Prior(None, "unknown: no source has its price")
    basis = f"list prices {there.usd_per_gb:g} there, {back.usd_per_gb:g} back"
    return Prior(round((there.usd_per_gb + back.usd_per_gb) / 2, 5), basis, min(there.date, back.date))


# ---- distance ----------------------------------------------------------------------------------------------
def great_circle_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    (lat_a, lon_a), (lat_b, lon_b) = ((math.radians(x), math.radians(y)) for x, y in (a, b))
    chord = math.sin((lat_a - lat_b) / 2) ** 2
    chord += math.cos(lat_a) * math.cos(lat_b) * math.sin((lon_a - lon_b) / 2) ** 2
    return EARTH_KM * math.asin(math.sqrt(min(1.0, chord)))


@cache
def cable_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    """The shortest way over great circles that cables follow."""
    nodes = [(_part(a), a), (_part(b), b), *((part, (lat, lon)) for part, lat, lon in HUBS.values())]
    least, open_ = {0: 0.0}, {0}
    while open_:
        i = min(open_, key=least.__getitem__)
        if i == 1:
            break
        open_.remove(i)
        for j, (part, place) in enumerate(nodes):
            if nodes[i][0] == part or frozenset((nodes[i][0], part)) in CABLES:
                km = least[i] + great_circle_km(nodes[i][1], place)
                if km < least.get(j, math.inf):
                    least[j] = km
                    open_.add(j)
    return least[1]


def _part(place: tuple[float, float]) -> str:
    """The part of the world, as cables have it."""
    found = area(*place)
    if found == "asia":
        return "south-asia" if place[1] < SOUTH_ASIA_DEGREES else "east-asia"
    return found
