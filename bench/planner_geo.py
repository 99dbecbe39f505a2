"""Plans on random clusters of 2 to 8 AWS regions (common/geo.py): CPU seconds and quality.

Each case is a fresh process with cold caches, as in planner_sailor.py. `geo_plans.json` has the iteration times of the
plans of seeds 0 to 59 when the bounds were last changed: a plan may not be worse. Reads ../shared/data; without it
nothing is measured.

    python bench/planner_geo.py            60 clusters, both models
    python bench/planner_geo.py --quick    6 clusters
    python bench/planner_geo.py --seeds 60 80
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from common.geo import random_geo, write_geo
from common.report import Report, not_measured
from planner_sailor import DATA, measure

CLOUD = DATA.parent / "cloud"
MODELS = ("OPT-350", "GPT-Neo-2.7")
KNOWN_S: dict[str, float] = json.loads((Path(__file__).parent / "geo_plans.json").read_text())
WORSE = 1.0005


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 clusters")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs=2,
        default=(0, 60),
        metavar=("FIRST", "END"),
        help="END is excluded",
    )
    args = parser.parse_args()
    if not DATA.is_dir() or not CLOUD.is_dir():
        return not_measured(
            "planner_geo", f"{DATA} or {CLOUD} is missing; the clusters are built from these measurements"
        )
    seeds = range(0, 60, 10) if args.quick else range(*args.seeds)
    report = Report("Plans on random geo clusters", "Sailor's own planner: 6 to 10 s CPU on such clusters")
    cpu_s = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            geo = random_geo(seed)
            trace = write_geo(geo, Path(folder) / str(seed), DATA, CLOUD)
            for model in MODELS:
                ours = measure(trace.parent, trace, model, Path(folder))
                cpu_s.append(ours["cpu_s"])
                known = KNOWN_S.get(f"{seed} {model}")
                bar = None if known is None else known * WORSE
                report.figure(f"{model} seed {seed}", ours["seconds"], "s", at_most=bar)
                report.figure(f"{model} seed {seed} CPU", ours["cpu_s"], "s CPU", at_most=5.0)
    report.figure("CPU, 95th percentile", float(np.percentile(cpu_s, 95)), "s CPU", at_most=3.0)
    report.figure("CPU, median", float(np.median(cpu_s)), "s CPU")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
