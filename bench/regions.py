"""How far off the catalogue's priors are, and whether its prices equal their sources.

Latency: the constants were fitted on IBM Cloud's regions; here they are judged on AWS pairs, DT-FM's 15 (common/geo.py)
and, where the folder in CATALOGUE_SOURCES has cloudping.txt (21 x 21 round trips in ms, AWS regions in alphabetical
order), those too. Throughput: every region of the measured grid is left out in turn. Prices: the tables are made again
from CATALOGUE_SOURCES and compared row by row; egress and throughput also from ../shared/data/cloud.

    python bench/regions.py
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import sys
import tempfile
from itertools import combinations
from pathlib import Path

from common.geo import MEASURED
from common.report import Report
from planner_sailor import DATA

from atlas.catalogue.priors import latency, stand_ins
from atlas.catalogue.rebuild import AWS_REGIONS, rebuild
from atlas.catalogue.rebuild import DATA as SHIPPED
from atlas.catalogue.rebuild import throughput as grid_of
from atlas.catalogue.table import egress_price, regions, throughput

CLOUD = DATA.parent / "cloud"
SOURCES = Path(os.environ.get("CATALOGUE_SOURCES", "catalogue-sources"))
OLD_REGIONS = 21
"""AWS regions of the measured table."""


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def latency_errors(rtt_ms: dict[tuple[str, str], float]) -> list[float]:
    known = regions()
    return [abs((latency(known[f"aws:{a}"], known[f"aws:{b}"]).value or 0.0) / ms - 1) for (a, b), ms in rtt_ms.items()]


def cloudping(path: Path) -> dict[tuple[str, str], float]:
    rows = [[float(x) for x in line.split()] for line in path.read_text().splitlines() if line.strip()]
    new = ("ap-south-2", "ap-southeast-3", "ap-southeast-4", "ca-west-1", "eu-central-2", "eu-south-2", "il-central-1")
    names = [name for name in AWS_REGIONS if name not in (*new, "me-central-1")]
    assert len(rows) == len(names) == OLD_REGIONS
    return {(names[i], names[j]): (rows[i][j] + rows[j][i]) / 2 for i, j in combinations(range(len(names)), 2)}


def throughput_errors() -> tuple[list[float], list[float]]:
    """Of the prior and of the mean of all others, each region left out in turn."""
    grid, known = throughput(), regions()
    ours, naive = [], []
    for out in grid:
        rest = [rate for a, row in grid.items() for b, rate in row.items() if out not in (a, b)]
        mean = statistics.mean(rest)
        others = {name: row for name, row in grid.items() if name != out}
        for a, row in grid.items():
            for b, rate in row.items():
                if out in (a, b):
                    starts, ends = (stand_ins(known[one], others) for one in (a, b))
                    near = [grid[x][y] for x in starts for y in ends if y in grid[x]]
                    ours.append(abs(statistics.geometric_mean(near) / rate - 1))
                    naive.append(abs(mean / rate - 1))
    return ours, naive


def rows_apart(folder: Path) -> int:
    """Rows of the shipped tables that a rebuild does not give."""
    with tempfile.TemporaryDirectory() as out:
        rebuild(folder, Path(out))
        return sum(
            len(set((SHIPPED / name).read_text().splitlines()) ^ set((Path(out) / name).read_text().splitlines()))
            for name in ("regions.csv", "throughput.csv", "egress.csv", "prices.csv")
        )


def egress_apart() -> int:
    """AWS prices that differ from the list."""
    known, apart = regions(), 0
    with (CLOUD / "aws_transfer_usd_per_gb.csv").open() as file:
        for row in csv.DictReader(file):
            a, b = known.get(f"aws:{row['src']}"), known.get(f"aws:{row['dst']}")
            if row["dst"] == "internet":
                b = known["gcp:us-central1"]
            if a is not None and b is not None and a != b:
                price = egress_price(a, b)
                apart += price is None or price.usd_per_gb != float(row["cost"])
    return apart


def main() -> int:
    report = Report("The catalogue of regions", "public measurements and price lists")
    errors = latency_errors({pair: ms for pair, (ms, _) in MEASURED.items()})
    report.figure("latency prior, 15 AWS pairs: median error", 100 * statistics.median(errors), "%", at_most=15)
    report.figure("latency prior, 15 AWS pairs: 90 % error", 100 * quantile(errors, 0.9), "%", at_most=40)
    if (SOURCES / "cloudping.txt").is_file():
        errors = latency_errors(cloudping(SOURCES / "cloudping.txt"))
        report.figure("latency prior, 210 AWS pairs: median error", 100 * statistics.median(errors), "%", at_most=15)
        report.figure("latency prior, 210 AWS pairs: 90 % error", 100 * quantile(errors, 0.9), "%", at_most=40)
    else:
        report.void("latency prior, 210 AWS pairs: median error", "CATALOGUE_SOURCES has no cloudping.txt")
    ours, naive = throughput_errors()
    report.figure("throughput prior, region left out: median error", 100 * statistics.median(ours), "%", at_most=30)
    report.figure("throughput prior, region left out: 90 % error", 100 * quantile(ours, 0.9), "%")
    report.figure("mean of the grid instead: median error", 100 * statistics.median(naive), "%")
    if CLOUD.is_dir():
        report.figure("AWS egress prices that differ from the list", egress_apart(), "rows", at_most=0)
        apart = sum(throughput()[a] != row for a, row in grid_of(CLOUD)[1].items())
        report.figure("regions whose measured throughput differs", apart, "rows", at_most=0)
    else:
        report.void("AWS egress prices that differ from the list", f"{CLOUD} is missing")
    if SOURCES.is_dir():
        report.figure("rows that differ from their sources", rows_apart(SOURCES), "rows", at_most=0)
    else:
        report.void("rows that differ from their sources", "no folder CATALOGUE_SOURCES")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
