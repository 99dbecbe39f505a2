"""10,000 random rollouts, eight at once, with and without a cache: outputs and final states must be equal.

Reads, mutations, repeats, volatile tools, failures half way, errors that are values, outputs that are not, random
budgets and policies of snapshots, failing copies, audits (tests/tvcache/histories.py). A tenth goes through a server.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tvcache"))
from common.report import Report
from histories import check_group, random_group
from servers import Served

from tvcache.client import Client


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="400 rollouts")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # copies fail on purpose
    groups = 50 if args.quick else 1250
    report = Report("Random rollouts", "the same rollouts without a cache")
    wrong = hits = calls = 0
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "a.log") as served:
        for seed in range(groups):
            store = Client(served.url) if seed % 10 == 0 else None
            try:
                cache = check_group(random_group(random.Random(seed)), seed, store, f"group {seed}")
            except AssertionError as error:
                wrong += 1
                print(error, file=sys.stderr)
                continue
            counted = cache.counters
            hits += counted.hits
            calls += counted.hits + counted.misses + counted.private
            cache.close()
    report.figure("rollouts", 8 * groups, "")
    report.figure("groups of eight with a wrong output or state", wrong, "", at_most=0)
    report.figure("hits", hits / calls, "of calls", at_least=0.3)
    report.figure("wall time", time.perf_counter() - began_s, "s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
