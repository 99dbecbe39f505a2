"""Atlas compared with GPipe, 1F1B and Varuna on a grid of cells, all with many TCP connections and equal memory.

S stages over three datacenters, M microbatches, C pipelines whose WAN transfer takes C forwards on one node pair,
memory for K microbatches (GPipe ignores it), recompute on every stage but the last, 40 ms one way. Simulated. That no
cell is slower than a baseline holds by construction and is a test; the bars here are the mean gains and the gap to the
lower bound. `--quick` leaves out the cells of 40 stages (about a minute).
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from math import exp, log

from common.cases import cell, seconds
from common.report import Report

from atlas.ir.assemble import check
from atlas.schedules import lower_bound

BASELINES = {"varuna": 1.20, "1f1b": 1.5, "gpipe": 1.4}


def geometric_mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="cells of 6 and 12 stages only")
    depths = (6, 12) if parser.parse_args().quick else (6, 12, 40)
    report = Report(
        f"Atlas on a grid of {8 * len(depths)} cells (simulated)", "GPipe, 1F1B and the strongest Varuna, many TCP"
    )
    speedups: dict[str, list[float]] = {name: [] for name in BASELINES}
    gaps = []
    header = f"{'S':>3} {'M':>4} {'C':>2} {'K':>3}  " + "".join(f"{n:>9}" for n in [*BASELINES, "atlas", "bound"])
    print(f"{header}   gap    bound by (seconds an iteration)")
    for num_stages, times, num_pipelines, memory in product(depths, (2, 4), (2, 4), (1, 2)):
        num_mb, in_flight = times * num_stages, memory * num_stages
        setting = cell(num_stages, num_mb, num_pipelines, in_flight, budget=max(40, 4000 // num_stages**2))
        began = time.process_time()
        ours, program = seconds("atlas", setting)
        check(program)
        took = time.process_time() - began
        assert setting.turns is not None
        bound = lower_bound(setting.turns, num_mb, setting.memory, recompute=True)
        line = ""
        for name in BASELINES:
            theirs, _ = seconds(name, setting)
            speedups[name].append(theirs / ours)
            line += f"{theirs:9.2f}"
        gaps.append(ours / (bound.ns / 1e9))
        print(
            f"{num_stages:3} {num_mb:4} {num_pipelines:2} {in_flight:3}  {line}{ours:9.2f}{bound.ns / 1e9:9.2f} "
            f"{gaps[-1] - 1:6.1%}  {bound.reason} ({took:.1f} s CPU)",
            flush=True,
        )
    for name, bar in BASELINES.items():
        report.figure(f"geometric mean speed-up over {name}", geometric_mean(speedups[name]), "x", at_least=bar)
        report.figure(f"worst cell against {name}", min(speedups[name]), "x")
    report.figure("gap to the lower bound, geometric mean", geometric_mean(gaps), "x", at_most=1.05)
    report.figure("gap to the lower bound, worst cell", max(gaps), "x", at_most=1.15)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
