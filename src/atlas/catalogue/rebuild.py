"""Makes the tables in `data/` from public files: python -m atlas.catalogue.rebuild SOURCES [--out DIR]

SOURCES is a folder with the files that `SOURCES` below names, each as it is at the commit given there. A figure that no
source has is left out of the tables. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atlas.catalogue.table import area

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Source:
    """A public file that rows were taken from."""

    file: str
    """Its name in the folder of sources."""
    url: str
    commit: str
    date: str
    """Of the figures, as the file states it; of the measurement for measurements."""
    licence: str


SOURCES = {
    "skyplane-grid": Source(
        "skyplane_throughput.csv",
        "github.com/skyplane-project/skyplane, profiles/throughput.csv (columns reduced)",
        "",
        "2022-01",
        "Apache-2.0",
    ),
    "skyplane-aws-egress": Source(
        "aws_transfer_usd_per_gb.csv",
        "github.com/skyplane-project/skyplane, skyplane/data/aws_transfer_costs.csv",
        "4602d9cec2083142831f7f208b413ca2bf091bd8",
        "2022-11",
        "Apache-2.0",
    ),
    "skyplane-egress-rules": Source(
        "",
        "github.com/skyplane-project/skyplane, skyplane/compute/{gcp/gcp_pricing,azure/azure_cloud_provider}.py",
        "4602d9cec2083142831f7f208b413ca2bf091bd8",
        "2024-01",
        "Apache-2.0",
    ),
    "gcosts": Source(
        "gcp_pricing.yml",
        "github.com/Cyclenerd/google-cloud-pricing-cost-calculator, pricing.yml",
        "fd66b26ff84fee5cdd94f341ea89206e76c06b99",
        "2026-07-30",
        "Apache-2.0",
    ),
    "karpenter-aws": Source(
        "aws_pricing.go",
        "github.com/aws/karpenter-provider-aws, pkg/providers/pricing/zz_generated.pricing_aws.go",
        "1d927085dd81a9df9301e613f371dac5b4d16bfe",
        "2026-07-20",
        "Apache-2.0",
    ),
    "aws-gpu": Source(
        "aws-gpu",
        "github.com/tsaol/aws-gpu, data/*_instances.js (from instances.vantage.sh)",
        "77fcd9fe1d0652fd07b830e5ed030d61da87923e",
        "2026-01-21",
        "MIT (stated in its README)",
    ),
    "karpenter-azure": Source(
        "azure_pricing.go",
        "github.com/Azure/karpenter-provider-azure, pkg/providers/pricing/zz_generated.pricing.go",
        "352646f599290c3a6d2f9710fb535a7b288f88ed",
        "2026-06-18",
        "Apache-2.0",
    ),
    "azure-locations": Source(
        "azure_locations.json",
        "github.com/Azure/karpenter-provider-azure, pkg/fake/locations.json",
        "352646f599290c3a6d2f9710fb535a7b288f88ed",
        "2026-08-21",
        "Apache-2.0",
    ),
    "region-picker": Source(
        "gcp_regions.json",
        "github.com/GoogleCloudPlatform/region-picker, data/regions.json",
        "565d8fa976d01f8dc626102ed2f5466e8f60aa4f",
        "2025-08-11",
        "Apache-2.0",
    ),
    "aws-names": Source(
        "",
        "the city that AWS names for the region, to a tenth of a degree",
        "",
        "2026-11-16",
        "Apache-2.0 (this project)",
    ),
}
"""The catalogue of SkyPilot is not among them: its repository states no licence (read at commit f2624ac0)."""

AWS_PLACES: dict[str, tuple[str, float, float]] = {
    "af-south-1": ("Cape Town", -33.9, 18.4),
    "ap-east-1": ("Hong Kong", 22.3, 114.2),
    "ap-northeast-1": ("Tokyo", 35.7, 139.7),
    "ap-northeast-2": ("Seoul", 37.6, 127.0),
    "ap-northeast-3": ("Osaka", 34.7, 135.5),
    "ap-south-1": ("Mumbai", 19.1, 72.9),
    "ap-south-2": ("Hyderabad", 17.4, 78.5),
    "ap-southeast-1": ("Singapore", 1.4, 103.8),
    "ap-southeast-2": ("Sydney", -33.9, 151.2),
    "ap-southeast-3": ("Jakarta", -6.2, 106.8),
    "ap-southeast-4": ("Melbourne", -37.8, 145.0),
    "ca-central-1": ("Montreal", 45.5, -73.6),
    "ca-west-1": ("Calgary", 51.0, -114.1),
    "eu-central-1": ("Frankfurt", 50.1, 8.7),
    "eu-central-2": ("Zurich", 47.4, 8.5),
    "eu-north-1": ("Stockholm", 59.3, 18.1),
    "eu-south-1": ("Milan", 45.5, 9.2),
    "eu-south-2": ("Zaragoza", 41.6, -0.9),
    "eu-west-1": ("Dublin", 53.3, -6.3),
    "eu-west-2": ("London", 51.5, -0.1),
    "eu-west-3": ("Paris", 48.9, 2.4),
    "il-central-1": ("Tel Aviv", 32.1, 34.8),
    "me-central-1": ("Dubai", 25.2, 55.3),
    "me-south-1": ("Bahrain", 26.1, 50.6),
    "sa-east-1": ("Sao Paulo", -23.6, -46.6),
    "us-east-1": ("Northern Virginia", 39.0, -77.5),
    "us-east-2": ("Ohio", 40.0, -83.0),
    "us-west-1": ("Northern California", 37.4, -122.0),
    "us-west-2": ("Oregon", 45.8, -119.7),
}
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
    return (source, SOURCES[source].date, SOURCES[source].licence)


# ---- regions -----------------------------------------------------------------------------------------------
def regions(folder: Path) -> Iterator[tuple[Any, ...]]:
    """(region, place, latitude, longitude, area, source, date, licence)."""
    for name, (place, lat, lon) in AWS_PLACES.items():
        yield (f"aws:{name}", place, lat, lon, area(lat, lon), *cited("aws-names"))
    for row in json.loads((folder / SOURCES["azure-locations"].file).read_text()):
        found = row.get("metadata", {})
        if found.get("regionType") == "Physical" and found.get("latitude") and not re.search("stg|euap", row["name"]):
            lat, lon = round(float(found["latitude"]), 2), round(float(found["longitude"]), 2)
            place = found.get("physicalLocation") or row["displayName"]
            yield (f"azure:{row['name']}", place, lat, lon, area(lat, lon), *cited("azure-locations"))
    for name, found in json.loads((folder / SOURCES["region-picker"].file).read_text()).items():
        lat, lon = round(found["latitude"], 2), round(found["longitude"], 2)
        lat = -abs(lat) if f"gcp:{name}" in SOUTHERN else lat
        yield (f"gcp:{name}", found["name"], lat, lon, area(lat, lon), *cited("region-picker"))


# ---- throughput --------------------------------------------------------------------------------------------
def throughput(folder: Path) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Regions, and Gbit/s received by source and destination on the providers' premium network."""
    found: dict[str, dict[str, float]] = {}
    with (folder / SOURCES["skyplane-grid"].file).open() as file:
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
    with (folder / SOURCES["skyplane-aws-egress"].file).open() as file:
        for row in csv.DictReader(file):
            if row["src"] in AWS_PLACES and row["dst"] in (*AWS_PLACES, "internet") and row["src"] != row["dst"]:
                dst = row["dst"] if row["dst"] == "internet" else f"aws:{row['dst']}"
                yield (f"aws:{row['src']}", dst, float(row["cost"]), *cited("skyplane-aws-egress"))
    yield from ((*row, *cited("skyplane-egress-rules")) for row in _rules())
    traffic = yaml.load((folder / SOURCES["gcosts"].file).read_text(), Loader=yaml.CSafeLoader)
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
    newest = dict(_go_prices((folder / SOURCES["karpenter-aws"].file).read_text()))
    for name, price in newest.items():
        yield _price("aws:us-east-1", name, price, "", "karpenter-aws")
    for path in sorted((folder / SOURCES["aws-gpu"].file).glob("*_instances.js")):
        for row in json.loads(path.read_text().partition("=")[2].rstrip().rstrip(";")):
            for region, price in row["pricing"].items():
                if row["name"] in INSTANCES and region in AWS_PLACES and region != "us-east-1" and "onDemand" in price:
                    yield _price(f"aws:{region}", row["name"], price["onDemand"], "", "aws-gpu")
    for text in (folder / SOURCES["karpenter-azure"].file).read_text().split("initialOnDemandPrices[")[1:]:
        region = text.partition('"')[2].partition('"')[0]
        for name, price in _go_prices(text):
            yield _price(f"azure:{region}", name, price, "", "karpenter-azure")
    machines = yaml.load((folder / SOURCES["gcosts"].file).read_text(), Loader=yaml.CSafeLoader)["compute"]["instance"]
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
    rows = ((name, one.url, one.commit, one.date, one.licence) for name, one in SOURCES.items())
    write(out / "sources.csv", ("source", "url", "commit", "date", "licence"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, metavar="SOURCES", help="folder with the public files")
    parser.add_argument("--out", type=Path, default=DATA, metavar="DIR", help="where the tables go (default: data/)")
    args = parser.parse_args()
    rebuild(args.sources, args.out)


if __name__ == "__main__":
    main()
