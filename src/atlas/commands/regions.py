"""List the cloud regions of the catalogue, or show what is known about some of them and the paths between them.

    atlas regions                                    every region, its place and its GPU prices
    atlas regions aws                                those of one cloud
    atlas regions aws:us-east-1 gcp:europe-west4     prices there, and latency, throughput and egress between them

Every figure is a prior: a list price, an estimate, or a measurement of others. `atlas wan probe` measures your own
links. A figure that no public source has is shown as unknown. docs/regions.md has the sources.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from typing import Any

from atlas.catalogue.priors import Prior, link_priors
from atlas.catalogue.table import CLOUDS, OLD_DAYS, GpuPrice, Region, days_old, gpu_prices, region, regions
from atlas.console import print_json, say, show
from atlas.view.table import folded, plain_table, right, whole_words

SHOWN = ("gpu", "instance", "usd_per_gpu_hour", "usd_per_gpu_hour_spot", "source", "date")
"""Of a GPU's price, as JSON."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("region", nargs="*", metavar="REGION", help="CLOUD:REGION, or a cloud: aws, gcp, azure")
    add("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    if len(args.region) == 1 and args.region[0].lower() in CLOUDS:
        chosen = [one for one in regions().values() if one.cloud == args.region[0].lower()]
        paired = False
    else:
        chosen = list(dict.fromkeys(region(name, "command line") for name in args.region)) or list(regions().values())
        paired = bool(args.region)
    if args.json:
        print_json(_as_dict(chosen, paired))
    elif paired:
        _show_chosen(chosen)
    else:
        _show_all(chosen)
    return 0


def _sold(one: Region) -> list[GpuPrice]:
    return [price for (name, _), price in gpu_prices().items() if name == one.name]


# ---- tables ------------------------------------------------------------------------------------------------
def _show_all(chosen: list[Region]) -> None:
    columns = (*whole_words("region"), *folded("place", ratio=2), *folded("GPUs with a known price", ratio=4))
    caption = "Dollars an hour for one GPU, on demand. All figures are priors (list prices)."
    table = plain_table(*columns, caption=caption)
    for one in chosen:
        sold = ", ".join(f"{price.gpu} {price.usd_per_gpu_hour:.2f}" for price in _sold(one))
        table.add_row(one.name, one.place, sold or "unknown")
    show(table)


def _show_chosen(chosen: list[Region]) -> None:
    columns = (*folded("region"), *whole_words("GPU", "instance"), *right("on demand", "spot", "date"))
    caption = "Prior: list prices of one GPU, dollars an hour, with the date of the list."
    table = plain_table(*columns, caption=caption)
    dates: set[str] = set()
    for one in chosen:
        for price in _sold(one):
            spot = price.usd_per_gpu_hour_spot
            cells = [price.gpu, price.instance.removeprefix("Standard_"), f"{price.usd_per_gpu_hour:.2f}"]
            table.add_row(one.name, *cells, "unknown" if spot is None else f"{spot:.2f}", price.date)
            dates.add(price.date)
        if not _sold(one):
            table.add_row(one.name, "unknown", "", "", "", "")
    where = [f"{one.name}: {one.place} ({one.location[0]:g}, {one.location[1]:g})" for one in chosen]
    show(*where, "", table)
    if len(chosen) > 1:
        show("", *_links(chosen, dates))
    warn_of_old(dates)


def _links(chosen: list[Region], dates: set[str]) -> list[Any]:
    caption = (
        "Prior: throughput is that of one pair of VMs with 64 connections, in the slower direction; egress is the mean "
        "of both directions."
    )
    table = plain_table(*folded("between"), *right("round trip", "Gbit/s", "$/GB"), caption=caption)
    notes = []
    for a, b in combinations(chosen, 2):
        found = link_priors(a, b)
        prices = found.egress_usd_per_gb
        dates |= {price.date for price in found.each_way if price is not None}
        dated = f", lists of {prices.date} or later" if prices.value is not None else ""
        figures = [f"{found.rtt_ms.value:.0f} ms", _text(found.gbps, ".2f"), _text(prices, "g")]
        table.add_row(f"{a.name} - {b.name}", *figures)
        notes += [f"{a.name} - {b.name}:", f"  latency {found.rtt_ms.basis}; throughput {found.gbps.basis};"]
        notes.append(f"  egress {prices.basis}{dated}")
    return [table, *notes]


def _text(prior: Prior, form: str) -> str:
    return "unknown" if prior.value is None else format(prior.value, form)


def warn_of_old(dates: set[str]) -> None:
    """A line on stderr for prices older than a year."""
    old = sorted(stamp for stamp in dates if days_old(stamp) > OLD_DAYS)
    if old:
        say(f"warning: prices of {', '.join(old)} are older than a year; check them before you rely on them")


def _as_dict(chosen: list[Region], paired: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "regions": [
            {
                "region": one.name,
                "place": one.place,
                "location": list(one.location),
                "gpus": [{key: getattr(price, key) for key in SHOWN} for price in _sold(one)],
            }
            for one in chosen
        ]
    }
    if paired:
        found["links"] = [
            {
                "between": [a.name, b.name],
                **{key: vars(getattr(link_priors(a, b), key)) for key in ("rtt_ms", "gbps", "egress_usd_per_gb")},
            }
            for a, b in combinations(chosen, 2)
        ]
    return found
