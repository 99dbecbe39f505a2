"""The shipped tables: regions, measured throughput, egress prices and GPU prices, each row with its source and date.

Only looks things up; values for pairs without a measurement are in `priors`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from atlas.errors import SpecError

CLOUDS = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure"}
OLD_DAYS = 365
"""A price older than this gets a warning."""


@dataclass(frozen=True)
class Region:
    """One region of a cloud."""

    name: str
    """`aws:us-east-1`."""
    place: str
    location: tuple[float, float]
    """Latitude and longitude, degrees."""
    area: str
    source: str

    @property
    def cloud(self) -> str:
        return self.name.partition(":")[0]

    @property
    def short(self) -> str:
        return self.name.partition(":")[2]


@dataclass(frozen=True)
class GpuPrice:
    """What an instance with one type of GPU costs in a region."""

    region: str
    gpu: str
    instance: str
    gpus: int
    usd_per_hour: float
    """Of the whole instance, on demand."""
    usd_per_hour_spot: float | None
    """None: unknown."""
    source: str
    date: str

    @property
    def usd_per_gpu_hour(self) -> float:
        return self.usd_per_hour / self.gpus

    @property
    def usd_per_gpu_hour_spot(self) -> float | None:
        return None if self.usd_per_hour_spot is None else self.usd_per_hour_spot / self.gpus


@dataclass(frozen=True)
class EgressPrice:
    """A price of 10^9 bytes from one region to another."""

    usd_per_gb: float
    source: str
    date: str


def table_rows(name: str) -> Iterator[dict[str, str]]:
    """Of a file in `data/`, by column."""
    yield from csv.DictReader(files("atlas.catalogue").joinpath("data", name).read_text().splitlines())


@cache
def regions() -> dict[str, Region]:
    """By name, `aws:us-east-1`."""
    return {
        row["region"]: Region(
            row["region"], row["place"], (float(row["latitude"]), float(row["longitude"])), row["area"], row["source"]
        )
        for row in table_rows("regions.csv")
    }


@cache
def throughput() -> dict[str, dict[str, float]]:
    """Measured Gbit/s between one pair of VMs with 64 connections, by source and destination."""
    skipped = ("from", "source", "date", "licence")
    return {
        row["from"]: {to: float(value) for to, value in row.items() if value and to not in skipped}
        for row in table_rows("throughput.csv")
    }


@cache
def gpu_prices() -> dict[tuple[str, str], GpuPrice]:
    """By region and GPU type; the cheapest instance."""
    found: dict[tuple[str, str], GpuPrice] = {}
    for row in table_rows("prices.csv"):
        spot = float(row["usd_per_hour_spot"]) if row["usd_per_hour_spot"] else None
        price = GpuPrice(
            row["region"],
            row["gpu"],
            row["instance"],
            int(row["gpus"]),
            float(row["usd_per_hour"]),
            spot,
            row["source"],
            row["date"],
        )
        old = found.get((price.region, price.gpu))
        if old is None or price.usd_per_gpu_hour < old.usd_per_gpu_hour:
            found[price.region, price.gpu] = price
    return found


@cache
def _egress_rows() -> tuple[tuple[str, str, EgressPrice], ...]:
    return tuple(
        (row["from"], row["to"], EgressPrice(float(row["usd_per_gb"]), row["source"], row["date"]))
        for row in table_rows("egress.csv")
    )


def egress_price(a: Region, b: Region) -> EgressPrice | None:
    """From one region to another; None where no source has it."""
    ends = [b.name, f"{b.cloud}@{b.area}"] if a.cloud == b.cloud else [f"internet@{b.area}", "internet"]
    starts = [a.name, f"{a.cloud}@{a.area}"]

    def fits(pattern: str, names: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in names)

    return next((price for src, dst, price in _egress_rows() if fits(src, starts) and fits(dst, ends)), None)


def area(lat: float, lon: float) -> str:
    """The part of the world that cables and price lists go by."""
    if lon < -30:
        return "north-america" if lat > 12 else "south-america"
    if lat > 35 and lon < 45:
        return "europe"
    if 34 <= lon < 60 and lat > 12:
        return "middle-east"
    if lon < 55:
        return "africa"
    return "oceania" if lat < -10 and lon > 92 else "asia"


def today() -> date:
    """What the age of a price is counted from."""
    return date.today()


def days_old(stamp: str) -> int:
    """Of a date such as 2026-07-20 or 2022-11."""
    year, month, day = ([*map(int, stamp.split("-")), 1, 1])[:3]
    return (today() - date(year, month, day)).days


def region(name: str, where: str) -> Region:
    """A region by its name, or by its short name where one cloud has it. SpecError with the nearest names otherwise."""
    known = regions()
    cloud, colon, short = name.strip().lower().partition(":")
    if not colon:
        found = [one for one in known if one.partition(":")[2] == cloud]
        if len(found) == 1:
            return known[found[0]]
        rule, near = "is not CLOUD:REGION, such as aws:us-east-1", _near_regions(cloud, list(known))
    elif cloud not in CLOUDS:
        rule = f"no cloud {cloud!r} in the catalogue"
        near = get_close_matches(cloud, CLOUDS, n=1, cutoff=0.4) or list(CLOUDS)
        near = [f"{one}:{short}" for one in near if f"{one}:{short}" in known] or _near_regions(short, list(known))
    elif name.strip().lower() in known:
        return known[name.strip().lower()]
    else:
        rule = f"no such region of {CLOUDS[cloud]}"
        near = _near_regions(short, [one for one in known if one.startswith(f"{cloud}:")])
    hint = f"Did you mean {' or '.join(near[:3])}?" if near else "Write it like aws:us-east-1;"
    remedy = f"{hint} `atlas regions` lists all"
    raise SpecError(where=where, key="region", value=name, rule=rule, remedy=remedy)


def _near_regions(word: str, names: list[str]) -> list[str]:
    """The most similar names: by the region's name, then by its place."""
    by_short = {one.partition(":")[2]: one for one in names}
    by_place = {regions()[one].place.lower(): one for one in names}
    close = [by_short[one] for one in get_close_matches(word, by_short, n=3, cutoff=0.5)]
    close += [by_place[place] for place in by_place if (len(word) > 2 and word in place) or place in word]
    return list(dict.fromkeys(close))
