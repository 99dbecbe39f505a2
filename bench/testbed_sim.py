"""The paper's testbed, simulated: three datacenters with one stage each, four pipelines (12 GPUs), 12 microbatches.

Forward, recompute and each half of the backward take 60 ms; a WAN transfer takes four forwards on one node pair's many
connections, and 17.06 times that on one connection (40 ms one way); memory for 3 and for 6 microbatches. Also shows the
parts of the speed-up, and its curves over latency, microbatches and the size of the cell.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.cases import cell, on_one_connection, seconds
from common.report import Report

from atlas.schedules import Setting
from atlas.schedules.search import Family, search
from atlas.view import write_curves

BASELINES = ("gpipe", "1f1b", "varuna")
OUT = Path("out/testbed")


def slower_at(latency_ms: int) -> float:
    """One connection moves one 3 MB window per round trip: half the latency, twice the rate."""
    return max(1.0, 17.06 * latency_ms / 40)


def parts(setting: Setting) -> list[tuple[str, float]]:
    """The steps from Varuna on one connection to Atlas, with the same memory."""
    one = seconds("varuna", on_one_connection(setting))[0]
    many = seconds("varuna", setting)[0]
    order = search(setting, Family(splits=(False,), sharings=(False,)))[-1].makespan_ns / 1e9
    turns = search(setting, Family(splits=(False,), sharings=(True,)))[-1].makespan_ns / 1e9
    split = search(setting, Family(splits=(True,), sharings=(True,)))[-1].makespan_ns / 1e9
    return [
        ("many connections", one / many),
        ("a searched order", many / order),
        ("turns on the WAN", order / turns),
        ("a split backward", turns / split),
    ]


def speedups(setting: Setting, slower: float) -> dict[str, float]:
    ours = seconds("atlas", setting)[0]
    one = on_one_connection(setting, slower)
    return {
        **{f"{name}, one TCP": seconds(name, one)[0] / ours for name in BASELINES},
        **{f"{name}, many TCP": seconds(name, setting)[0] / ours for name in BASELINES},
    }


def curves() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    sweeps = {
        "latency": ("one-way latency, ms", (10, 20, 30, 40), lambda x: (cell(3, 12, 4, 3, latency_ms=x), slower_at(x))),
        "microbatches": ("microbatches", (3, 6, 12, 24, 48), lambda x: (cell(3, x, 4, 3), 17.06)),
        "pipelines": ("pipelines of a cell, C", (1, 2, 4, 8), lambda x: (cell(3, 12, x, 3, wan_forwards=4), 17.06)),
    }
    for name, (label, points, make) in sweeps.items():
        rows = {x: speedups(*make(x)) for x in points}
        series = {key: [(float(x), rows[x][key]) for x in points] for key in rows[points[0]]}
        print(f"  Atlas is faster by, over {label}:")
        for key, values in series.items():
            print(f"    {key:<18}" + "".join(f"{x:>6g}: {y:5.2f}x" for x, y in values))
        write_curves(
            OUT / f"{name}.svg", series, label, "times faster", "Atlas, 12-GPU testbed, memory for 3 (simulated)",
            log_y=True,
        )  # fmt: skip
    print(f"  curves drawn in {OUT}/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no curves")
    quick = parser.parse_args().quick
    report = Report("The paper's testbed (simulated)", "GPipe, 1F1B, Varuna on one and on many TCP connections")
    for in_flight in (3, 6):
        setting = cell(3, 12, 4, in_flight)
        for key, value in speedups(setting, 17.06).items():
            many_bar = 1.25 if in_flight == 6 and key.startswith("varuna") else 1.5
            bar = 15.0 if key.endswith("one TCP") else many_bar
            report.figure(f"memory {in_flight}: Atlas over {key}", value, "x", at_least=bar)
        for idea, gain in parts(setting):
            report.figure(f"memory {in_flight}: of which {idea}", gain, "x")
    if not quick:
        curves()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
