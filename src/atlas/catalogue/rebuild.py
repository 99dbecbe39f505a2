"""Makes the tables in `data/` from public files: python -m atlas.catalogue.rebuild SOURCES [--out DIR]

SOURCES is a folder with the files that `data/sources.csv` names, each as it is at the commit given there. A figure that
no source has is left out of the tables. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from atlas.catalogue.table import area, table_rows

DATA = Path(__file__).parent / "data"
SOURCES = {row["source"]: row for row in table_rows("sources.csv")}
"""The public files, by name. The catalogue of SkyPilot is not among them: its repository states no licence (read at
commit f2624ac0)."""
AWS_REGIONS = {
    row["region"].removeprefix("aws:"): row for row in table_rows("regions.csv") if row["source"] == "aws-names"
}
"""No public file has their places. They are written in `regions.csv` by hand, and a rebuild keeps them."""
SOUTHERN = ("gcp:africa-south1",)
"""Regions whose source gives a southern latitude without its sign."""

INSTANCES: dict[str, tuple[str, int]] = {
    # AWS
    "p3.16xlarge": ("V100-16", 8),
    "p4d.24xlarge": ("A100-40", 8),
    "p4de.24xlarge": ("A100-80", 8),
    "p5.48xlarge": ("H100", 8),
    "p5en.48xlarge": ("H200", 8),
    "p6-b200.48xlarge": ("B200", 8),
    "g5.48xlarge": ("A10", 8),
    "g6.48xlarge": ("L4", 8),
    "g6e.48xlarge": ("L40S", 8),
    # Google
    "a2-highgpu-8g": ("A100-40", 8),
    "a2-ultragpu-8g": ("A100-80", 8),
    "a3-highgpu-8g": ("H100", 8),
    "g2-standard-96": ("L4", 8),
    # Azure
    "Standard_ND96asr_v4": ("A100-40", 8),
    "Standard_ND96amsr_A100_v4": ("A100-80", 8),
    "Standard_ND96isr_H100_v5": ("H100", 8),
    "Standard_ND96isr_H200_v5": ("H200", 8),
    "Standard_NC24s_v3": ("V100-16", 4),
    "Standard_NV36ads_A10_v5": ("A10", 1),
}
"""The instance type that stands for a GPU type, and its GPUs."""

COLUMNS = ("source", "date", "licence")


def cited(source: str) -> tuple[str, str, str]:
    return (source, SOURCES[source]["date"], SOURCES[source]["licence"])


def _file(folder: Path, source: str) -> Path:
    return folder / SOURCES[source]["file"]


# ---- regions -----------------------------------------------------------------------------------------------
def regions(folder: Path) -> Iterator[tuple[Any, ...]]:
    """(region, place, latitude, longitude, area, source, date, licence)."""
    yield from (tuple(row.values()) for row in AWS_REGIONS.values())
    for row in json.loads(_file(folder, "azure-locations").read_text()):
        found = row.get("metadata", {})
        if found.get("regionType") == "Physical" and found.get("latitude") and not re.search("stg|euap", row["name"]):
            lat, lon = round(float(found["latitude"]), 2), round(float(found["longitude"]), 2)
            place = found.get("physicalLocation") or row["displayName"]
            yield (f"azure:{row['name']}", place, lat, lon, area(lat, lon), *cited("azure-locations"))
    for name, found in json.loads(_file(folder, "region-picker").read_text()).items():
        lat, lon = round(found["latitude"], 2), round(found["longitude"], 2)
        lat = -abs(lat) if f"gcp:{name}" in SOUTHERN else lat
        yield (f"gcp:{name}", found["name"], lat, lon, area(lat, lon), *cited("region-picker"))


# ---- throughput --------------------------------------------------------------------------------------------
def throughput(folder: Path) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Regions, and Gbit/s received by source and destination on the providers' premium network."""
    found: dict[str, dict[str, float]] = {}
    with _file(folder, "skyplane-grid").open() as file:
        for row in csv.DictReader(file):
            if row["src_tier"] == row["dst_tier"] == "PREMIUM":
                a, b = (_region(row[end]) for end in ("src", "dst"))
                if a != b:
                    found.setdefault(a, {})[b] = round(float(row["gbps_received"]), 2)
    return sorted(found), found


def _region(name: str) -> str:
    """Google's are given by zone."""
    return name.rpartition("-")[0] if name.startswith("gcp:") else name


# ---- egress ------------------------------------------------------------------------------------------------
GCP_INSIDE = {"us": 0.01, "northamerica": 0.01, "europe": 0.02, "asia": 0.05, "southamerica": 0.08, "australia": 0.08}
GCP_FAR = ("asia-southeast2", "australia-*")
AZURE_NEAR, AZURE_FAR = ("north-america", "europe"), ("asia", "oceania", "middle-east", "africa")


def egress(folder: Path) -> Iterator[tuple[Any, ...]]:
    """(src, dst, usd_per_gb, source, date, licence); the first row that fits a pair holds. `internet` is every other
    cloud; `azure@europe` is every region of an area."""
    with _file(folder, "skyplane-aws-egress").open() as file:
        for row in csv.DictReader(file):
            if row["src"] in AWS_REGIONS and row["dst"] in (*AWS_REGIONS, "internet") and row["src"] != row["dst"]:
                dst = row["dst"] if row["dst"] == "internet" else f"aws:{row['dst']}"
                yield (f"aws:{row['src']}", dst, float(row["cost"]), *cited("skyplane-aws-egress"))
    yield from ((*row, *cited("skyplane-egress-rules")) for row in _rules())
    traffic = yaml.load(_file(folder, "gcosts").read_text(), Loader=yaml.CSafeLoader)
    internet = traffic["compute"]["network"]["traffic"]["egress"]["internet"]
    for name, price in internet["australia"]["cost"]["10n"].items():
        yield (f"gcp:{name}", "internet@oceania", price["month"], *cited("gcosts"))
    for name, price in internet["cost"]["10n"].items():
        yield (f"gcp:{name}", "internet", price["month"], *cited("gcosts"))


def _rules() -> Iterator[tuple[str, str, float]]:
    for name, price in GCP_INSIDE.items():
        yield (f"gcp:{name}-*", f"gcp:{name}-*", price)
    known = [f"gcp:{name}-*" for name in GCP_INSIDE]
    yield from ((f"gcp:{far}", other, 0.15) for far in GCP_FAR for other in known)
    yield from ((other, f"gcp:{far}", 0.15) for far in GCP_FAR for other in known)
    yield from ((a, b, 0.08) for a in known for b in known if a != b)
    for one in AZURE_NEAR:
        yield (f"azure@{one}", f"azure@{one}", 0.02)
        yield (f"azure@{one}", "azure:*", 0.05)
        yield (f"azure@{one}", "internet", 0.0875)
    for one in AZURE_FAR:
        yield (f"azure@{one}", "azure:*", 0.08)
        yield (f"azure@{one}", "internet", 0.12)
    yield ("azure@south-america", "azure@south-america", 0.181)
    yield ("azure@south-america", "azure:*", 0.16)
    yield ("azure@south-america", "internet", 0.181)


# ---- prices ------------------------------------------------------------------------------------------------
def prices(folder: Path) -> Iterator[tuple[Any, ...]]:
    """(region, gpu, instance, gpus, usd_per_hour, usd_per_hour_spot, source, date, licence), of a whole instance."""
    newest = dict(_go_prices(_file(folder, "karpenter-aws").read_text()))
    for name, price in newest.items():
        yield _price("aws:us-east-1", name, price, "", "karpenter-aws")
    for path in sorted(_file(folder, "aws-gpu").glob("*_instances.js")):
        for row in json.loads(path.read_text().partition("=")[2].rstrip().rstrip(";")):
            for region, price in row["pricing"].items():
                if row["name"] in INSTANCES and region in AWS_REGIONS and region != "us-east-1" and "onDemand" in price:
                    yield _price(f"aws:{region}", row["name"], price["onDemand"], "", "aws-gpu")
    for text in _file(folder, "karpenter-azure").read_text().split("initialOnDemandPrices[")[1:]:
        region = text.partition('"')[2].partition('"')[0]
        for name, price in _go_prices(text):
            yield _price(f"azure:{region}", name, price, "", "karpenter-azure")
    machines = yaml.load(_file(folder, "gcosts").read_text(), Loader=yaml.CSafeLoader)["compute"]["instance"]
    for name in (name for name in INSTANCES if name in machines):
        for region, cost in machines[name]["cost"].items():
            spot = f"{cost['hour_spot']:.6f}" if "hour_spot" in cost else ""
            yield _price(f"gcp:{region}", name, cost["hour"], spot, "gcosts")


def _go_prices(text: str) -> Iterator[tuple[str, float]]:
    for name, price in re.findall(r'"([\w.-]+)":\s+([0-9.]+),', text):
        if name in INSTANCES:
            yield name, float(price)


def _price(region: str, instance: str, usd: float, spot: str, source: str) -> tuple[Any, ...]:
    return (region, *(INSTANCES[instance][0], instance, INSTANCES[instance][1]), f"{usd:.6f}", spot, *cited(source))


# ---- files -------------------------------------------------------------------------------------------------
def write(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def rebuild(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    located = sorted(regions(folder))
    names = {row[0] for row in located}
    write(out / "regions.csv", ("region", "place", "latitude", "longitude", "area", *COLUMNS), located)
    ends, found = throughput(folder)
    grid = ([a, *cited("skyplane-grid"), *(found[a].get(b, "") for b in ends)] for a in ends)
    write(out / "throughput.csv", ("from", *COLUMNS, *ends), grid)
    write(out / "egress.csv", ("from", "to", "usd_per_gb", *COLUMNS), egress(folder))
    sold = sorted(row for row in prices(folder) if row[0] in names)
    header = ("region", "gpu", "instance", "gpus", "usd_per_hour", "usd_per_hour_spot", *COLUMNS)
    write(out / "prices.csv", header, sold)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, metavar="SOURCES", help="folder with the public files")
    parser.add_argument("--out", type=Path, default=DATA, metavar="DIR", help="where the tables go (default: data/)")
    args = parser.parse_args()
    rebuild(args.sources, args.out)


if __name__ == "__main__":
    main()
