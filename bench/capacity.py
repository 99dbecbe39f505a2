"""The load that an operator can promise for the bubbles of each case of docs/bubbletea.md, and whether `bubbletea
simulate` at that load gives the same figures (all simulated).

    python bench/capacity.py [--quick] [--case NAME ...]

Runs `bubbletea simulate ... --capacity` with Azure's conversation trace, then `bubbletea simulate` with the flags that
it prints. The bar: p50, p95 and refusals are the same, to the last digit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bubbletea_sim import TRACE
from common.report import Report, not_measured

ROOT = Path(__file__).parents[1]
FIVE = ("examples/paper-5-dcs.yaml", "--periods", "1")
LATE = ("--split", "4", "--chunk", "4096", "--chunk", "1024", "--chunk", "512", "--late", "0.045", "--cells", "2")
WIDE = ("--split", "1", "--split", "4", "--chunk", "2048", "--chunk", "1024", "--cells", "2")
CASES = {
    "12 GPUs": ("examples/testbed/gpt-a-40ms.yaml", "--split", "2"),
    "5 DCs, C = 2": (*FIVE, "--set", "reserved_gib=6", "--split", "4"),
    "5 DCs, C = 2, 4.5 % late": (*FIVE, "--set", "reserved_gib=6", *LATE),
    "5 DCs, C = 4 (one layer), 4.5 % late": (*FIVE, "--set", "model.layers=60", "--set", "reserved_gib=6", *LATE),
    "5 DCs, C = 4 (2.9 Gbit/s), 4.5 % late": (
        *FIVE, "--set", "cluster.wan.pair_gbps=2.9", "--set", "reserved_gib=6", *LATE,
    ),
    "5 DCs, C = 4 (one layer, 5.86 Gbit/s), 4.5 % late": (
        *FIVE, "--set", "model.layers=60", "--set", "cluster.wan.pair_gbps=5.86", "--set", "reserved_gib=6", *LATE,
    ),
    "5 DCs, 1.6 Gbit/s": (*FIVE, "--set", "cluster.wan.pair_gbps=1.6", "--set", "reserved_gib=20", *WIDE),
    "5 DCs, 1F1B": (*FIVE, "--schedule", "1f1b", *WIDE),
}  # fmt: skip
QUICK = ("12 GPUs",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the 12 GPUs")
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    args = parser.parse_args()
    if not TRACE.exists():
        return not_measured("capacity", f"{TRACE} is not there: set BUBBLETEA_TRACE to Azure's conversation trace")
    report = Report("The load that can be promised (simulated)", "as many dedicated accelerators at the same load")
    for name in args.case or (QUICK if args.quick else CASES):
        measure(report, name, CASES[name])
    return report.finish()


def measure(report: Report, name: str, flags: tuple[str, ...]) -> None:
    found = simulated(*flags, "--capacity")
    best, worse = found["best"], found["worse"]
    report.figure(f"{name}: load that can be promised", best["load"] if best else 0.0, "")
    one = best or worse
    shown = name if best else f"{name}, at {one['load']:g}"
    report.figure(f"{shown}: p50", one["p50_s"] or 0.0, "s", at_most=one["p50_limit_s"] if best else None)
    report.figure(f"{shown}: p50 limit", one["p50_limit_s"], "s")
    report.figure(f"{shown}: p95", one["p95_s"] or 0.0, "s", at_most=one["p95_limit_s"] if best else None)
    report.figure(f"{shown}: p95 limit", one["p95_limit_s"], "s")
    report.figure(f"{shown}: refused", one["refused"], "", at_most=0.05 if best else None)
    if best and worse:
        report.figure(f"{name}: next load, which breaks the promise", worse["load"], "")
        report.figure(f"{name}: p50 there", worse["p50_s"] or 0.0, "s")
        report.figure(f"{name}: refused there", worse["refused"], "")
    goal = ("--goal", repr(one["p50_limit_s"])) if "--late" in flags else ()
    again = ("--load", str(one["load"]), "--patience", repr(one["p95_limit_s"]), *goal)
    row = simulated(*flags, *again, "--policy", "ours")["rows"][0]
    same = all(row[key] == one[mine] for key, mine in (("ttft_p50_s", "p50_s"), ("ttft_p95_s", "p95_s")))
    same = same and row["refused"] == one["refused"]
    report.figure(f"{name}: reproduced by simulate at that load (1: yes)", float(same), "", at_least=1)


def simulated(*flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bubbletea.cli", "simulate", *flags, "--requests", str(TRACE), "--json"]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(ran.stdout))


if __name__ == "__main__":
    sys.exit(main())
