"""Random clusters of several AWS regions in Sailor's file formats, one per seed.

Inside a region it uses Sailor's measured curves of us-central1-a, -b and -c. Between regions a transfer takes half a
round trip plus its bytes at a rate, fitted in Sailor's form from 1 to 512 MB. Round trips and the rate of one TCP
stream are DT-FM's; the rate of many streams is Skyplane's. It does not use any planner.
"""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

GPU = "A100-40"
COUNTS = ("1", "2", "4")
"""GPUs at an end, as Sailor's bandwidths are keyed."""
ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")
REGIONS = {
    "us-west-2": (45.8, -119.7),
    "us-east-1": (38.9, -77.5),
    "us-east-2": (40.1, -82.8),
    "ap-northeast-1": (35.6, 139.8),
    "ap-northeast-2": (37.5, 126.9),
    "ap-southeast-1": (1.3, 103.8),
    "ap-southeast-2": (-33.9, 151.2),
    "eu-west-2": (51.5, -0.1),
    "eu-central-1": (50.1, 8.7),
    "eu-west-1": (53.3, -6.3),
}
"""The regions of DT-FM's table (latitude, longitude)."""
MEASURED = {
    ("us-west-2", "us-east-1"): (67, 0.79),
    ("us-west-2", "us-east-2"): (49, 1.10),
    ("us-west-2", "ap-northeast-1"): (96, 0.523),
    ("us-west-2", "eu-west-2"): (136, 0.42),
    ("us-east-1", "us-east-2"): (11, 1.12),
    ("us-east-1", "eu-west-2"): (76, 1.16),
    ("us-east-1", "eu-central-1"): (90, 1.02),
    ("us-east-1", "eu-west-1"): (67, 1.05),
    ("us-east-2", "eu-west-1"): (77, 1.14),
    ("ap-northeast-1", "ap-northeast-2"): (34, 1.10),
    ("ap-northeast-1", "ap-southeast-1"): (73, 1.01),
    ("ap-southeast-1", "ap-southeast-2"): (92, 0.816),
    ("eu-west-2", "eu-central-1"): (14, 1.14),
    ("eu-west-2", "eu-west-1"): (12, 1.09),
    ("eu-central-1", "eu-west-1"): (24, 1.08),
}
"""DT-FM's round trip in ms and one TCP stream in Gbit/s. Other pairs use the two linear fits below."""
RTT_MS, RTT_MS_PER_KM = 6.0, 0.0165
STREAM_GBPS, STREAM_GBPS_MS = 1.1, 57.0
WAN_SHARE = {"1": 0.57, "2": 0.81, "4": 1.0}
"""The share of a node pair's rate that 1, 2 and 4 GPUs reach in Sailor's us-central1-a to us-west1-b."""
BAD_RATE, BAD_RTT = 0.1, 2.0
"""A badly connected region has a tenth of the rate and twice the round trip to all others."""
Fit = list[object]


@dataclass(frozen=True)
class Geo:
    """One random cluster."""

    seed: int
    regions: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """GPUs by region and zone."""
    many_streams: bool
    """Whether nodes use many TCP streams (Skyplane's rates) or one for each GPU (DT-FM's)."""
    bad: str | None
    """The badly connected region."""

    def __str__(self) -> str:
        places = " ".join(f"{r}:{'+'.join(map(str, c))}" for r, c in zip(self.regions, self.counts, strict=True))
        return f"seed {self.seed} {'many' if self.many_streams else 'one'} {places}" + f" bad {self.bad}" * bool(
            self.bad
        )


def random_geo(seed: int) -> Geo:
    """2 to 8 regions of 1 to 3 zones; 8 to 128 GPUs a zone in half of the clusters, a region in the others."""
    draw = random.Random(seed)
    regions = tuple(draw.sample(sorted(REGIONS), draw.randint(2, 8)))
    by_zone, step = draw.random() < 0.5, 4 if draw.random() < 0.8 else 1
    counts = []
    for _ in regions:
        zones = draw.randint(1, 3)
        sizes = [round(2 ** draw.uniform(3, 7) / step) * step for _ in range(zones)]
        counts.append(tuple(sizes if by_zone else (max(step, size // zones // step * step) for size in sizes)))
    many = draw.random() < 0.5
    return Geo(seed, regions, tuple(counts), many, draw.choice(regions) if draw.random() < 0.4 else None)


def write_geo(geo: Geo, folder: Path, sailor: Path, cloud: Path) -> Path:
    """Write the cluster's files to a folder (profiles and jobs are links to Sailor's); the path of the trace."""
    folder.mkdir(parents=True)
    for name in ("profiles_tmp.json", "llm_info.json", "basic_cluster_config.json"):
        (folder / name).symlink_to(sailor.resolve() / name)
    for path in sailor.glob("training_config_*.json"):
        (folder / path.name).symlink_to(path.resolve())
    zones = [(f"{r}{'abc'[k]}", r, k, n) for r, c in zip(geo.regions, geo.counts, strict=True) for k, n in enumerate(c)]
    inside = json.loads((sailor / "multizone_bandwidths_het.json").read_text())
    rates = _skyplane_gbps(cloud)
    wan = {(a, b, n): _wan_fit(geo, rates, a, b, n) for a in geo.regions for b in geo.regions if a != b for n in COUNTS}

    def fit(a: tuple[str, str, int, int], b: tuple[str, str, int, int], n: str, m: str) -> Fit:
        if a[1] == b[1]:
            found: Fit = inside[ZONES[a[2]]][GPU][n][ZONES[b[2]]][GPU][m]
            return found
        return wan[a[1], b[1], min(n, m)]

    table = {
        a[0]: {GPU: {n: {b[0]: {GPU: {m: fit(a, b, n, m) for m in COUNTS}} for b in zones} for n in COUNTS}}
        for a in zones
    }
    usd = _aws_usd(cloud)
    prices = {a[0]: {b[0]: 0.0 if a == b else usd.get((a[1], b[1]), 0.01) for b in zones} for a in zones}
    (folder / "multizone_bandwidths_het.json").write_text(json.dumps(table))
    (folder / "egress_usd_per_gb.json").write_text(json.dumps(prices))
    trace = folder / "trace.csv"
    header = ",".join(["", "Timestamp", *(f"{GPU}_{zone[0]}" for zone in zones)])
    trace.write_text(f"{header}\n0,0.0,{','.join(str(zone[3]) for zone in zones)}\n")
    return trace


def _wan_fit(geo: Geo, rates: dict[tuple[str, str], float], a: str, b: str, count: str) -> Fit:
    rtt_ms, stream_gbps = _measured(a, b)
    gbps = rates[a, b] * WAN_SHARE[count] if geo.many_streams else stream_gbps * int(count)
    if geo.bad in (a, b):
        rtt_ms, gbps = rtt_ms * BAD_RTT, gbps * BAD_RATE
    megabytes = 2.0 ** np.arange(10)
    gb_per_s = megabytes / 1e3 / (rtt_ms / 2e3 + megabytes / 1e3 * 8 / gbps)
    return [[float(x) for x in np.polyfit(np.log2(megabytes), gb_per_s, 2)], float(gb_per_s.max() * 1e9)]


def _measured(a: str, b: str) -> tuple[float, float]:
    """Round trip in ms and one stream in Gbit/s."""
    found = MEASURED.get((a, b)) or MEASURED.get((b, a))
    if found:
        return found
    (lat_a, lon_a), (lat_b, lon_b) = ((math.radians(x), math.radians(y)) for x, y in (REGIONS[a], REGIONS[b]))
    chord = math.sin((lat_a - lat_b) / 2) ** 2
    chord += math.cos(lat_a) * math.cos(lat_b) * math.sin((lon_a - lon_b) / 2) ** 2
    rtt_ms = RTT_MS + RTT_MS_PER_KM * 2 * 6371 * math.asin(math.sqrt(chord))
    return rtt_ms, min(STREAM_GBPS, STREAM_GBPS_MS / rtt_ms)


def _skyplane_gbps(cloud: Path) -> dict[tuple[str, str], float]:
    """Measured rates by pair of regions; an unmeasured pair gets the slowest of its source."""
    found: dict[tuple[str, str], float] = {}
    with (cloud / "skyplane_throughput.csv").open() as file:
        for row in csv.DictReader(file):
            a, b = (row[end].removeprefix("aws:") for end in ("src", "dst"))
            if a in REGIONS and b in REGIONS:
                found[a, b] = float(row["gbps_received"])
    for a, b in combinations(REGIONS, 2):
        for pair in ((a, b), (b, a)):
            found.setdefault(pair, min(rate for (source, _), rate in found.items() if source == pair[0]))
    return found


def _aws_usd(cloud: Path) -> dict[tuple[str, str], float]:
    """USD a GB by pair of regions."""
    with (cloud / "aws_transfer_usd_per_gb.csv").open() as file:
        return {(row["src"], row["dst"]): float(row["cost"]) for row in csv.DictReader(file)}
