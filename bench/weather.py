"""How well a learnt path predicts senders that it was not learnt from.

Real kernel TCP between network namespaces (needs root). Random paths from a seed: 20 to 100 Mbit/s, round trips of 20
to 80 ms, buffers of 0.25 to 2 bandwidth-delay products; cross traffic on and off, ramps or bursts. A model is fitted on
cubic; then reno and bbr run over the true path and over each model, at the same time, over the same cross traffic.

    constant   one rate: cubic's mean throughput
    replay     cubic's own throughput over time as the rate of the link
    peak       iBoxNet-like: least delay, peak rate, cross traffic by conservation
    auto       the default of `atlas wan learn`: peak, or the capacity of packet pairs and competing flows where found
    gru        the network (torch)

Models that are equal share one run. Figures are medians of the absolute relative error over paths and senders; the true
path runs twice, which shows how much two runs differ. `reactive` has a competing cubic flow in the queue that started
5 s earlier, in the recording and in the runs. The first run of each sender is judged; `--repeats` adds runs in which
the flow starts at other moments, whose means are reported beside it. A job in which the emulator was late is repeated,
at most three times, and is void otherwise. Jobs run side by side, two cores each. `--quick`: 2 paths, 8 s. Errors
beside a competing flow differ by tens of percent between runs, so their bars are judged from 12 runs on; the short form
has 4 and reports them without a bar.

    python bench/weather.py --parallel 8        # 16 cores, root: all bars, about 7 minutes
    python bench/weather.py --paths 0-3 --save a.jsonl      # or in pieces,
    python bench/weather.py --merge a.jsonl b.jsonl c.jsonl # and one verdict for all of them
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from lab.lines import Lines
from lab.sender_runs import METHODS, Recording, Row, RowFile, Test, read_rows, run_all
from lab.senders import Jobs, random_path, require_kernel, shared_path

from atlas.errors import AtlasError
from atlas.weather.draw import drawn_rows
from atlas.weather.fit import learn
from atlas.weather.packets import PacketTable

TESTED = ("reno", "bbr")
SEED, REACTIVE_SEED = 1000, 2000
LEADS_S = (5.0, 3.0, 7.0, 4.0, 6.0)
"""How much earlier a competing flow starts than the sender: in the recording and in the run that is judged, and in
further runs. What a sender gets depends on when the flow had its last loss."""
REACTIVE_METHODS = ("replay", "peak", "auto")
REACTIVE_RUNS = 12
"""Fewer runs beside a competing flow are reported without a bar: reno is off by 23 % and bbr by 5 % in the median of 24
runs, so the median of a few is a matter of chance."""
BARS = {"mean delay": 0.06, "p95 delay": 0.08, "throughput": 0.05}
CLAIMED = {
    "senders": "fitted on cubic, judged on reno and bbr",
    "reactive": "the same: error of replay over that of the model",
}
"""The lines of a part that docs/claims.md names."""


# ---- the runs ------------------------------------------------------------------------------------------------------
def recordings(parts: list[str], numbers: range, seconds: float, methods: list[str]) -> list[Recording]:
    found = []
    if "senders" in parts:
        paths = {number: random_path(random.Random(SEED + number), seconds) for number in numbers}
        found += [Recording("senders", number, path, seconds, tuple(methods)) for number, path in paths.items()]
    if "reactive" in parts:
        paths = {number: shared_path(random.Random(REACTIVE_SEED + number)) for number in numbers}
        names = REACTIVE_METHODS
        found += [Recording("reactive", number, path, seconds, names, LEADS_S[0]) for number, path in paths.items()]
    return found


def tests_of(one: Recording, repeats: int) -> list[Test]:
    """Two senders beside a flow share a net; those beside fixed cross traffic have more models to run over."""
    if one.part == "reactive":
        return [Test(one, TESTED, lead_s) for lead_s in LEADS_S[:repeats]]
    return [Test(one, (control,), twice=True) for control in TESTED]


# ---- the lines -----------------------------------------------------------------------------------------------------
def verdict(lines: Lines, rows: Iterable[Row]) -> None:
    """Lines of whatever was measured."""
    for part, judge in (("senders", held_out_senders), ("reactive", reactive)):
        mine = [row for row in rows if row["part"] == part]
        if mine and all(row["figures"] is None for row in mine):
            lines.skip(CLAIMED[part], f"{len(mine)} of {len(mine)} runs void: the emulator was late")
        elif mine:
            judge(lines, mine)


def held_out_senders(lines: Lines, rows: list[Row]) -> None:
    measured = [row for row in rows if row["figures"] is not None]
    errors: dict[tuple[str, str], list[float]] = {}
    worse = equal = 0
    for row in measured:
        off = {(name, key): _off(row, name, key) for name in row["figures"] if name != "true" for key in BARS}
        for what, value in off.items():
            errors.setdefault(what, []).append(value)
        equal += len(BARS) * row["auto_is_peak"]
        worse += sum(off["auto", key] > off["peak", key] for key in BARS)
    middle = {what: statistics.median(values) for what, values in errors.items()}
    names = dict.fromkeys(name for name, _ in errors)
    about = f"medians of {len(measured)} runs of {_seconds(rows)} s, {len(rows) - len(measured)} void"
    for key, bar in BARS.items():
        beside = ", ".join(f"{name} {100 * middle[name, key]:.2f} %" for name in names)
        line = f"{CLAIMED['senders']}: {key}"
        lines.at_most(line, 100 * middle["auto", key], "%", 100 * bar, note=f"{about}: {beside}")
    gain = middle["constant", "mean delay"] / max(1e-9, middle["auto", "mean delay"])
    lines.at_least("mean delay: error of a constant rate over that of the model", gain, "x", 3.0)
    gain = middle["constant", "p95 delay"] / max(1e-9, middle["auto", "p95 delay"])
    lines.at_least("p95 delay: error of a constant rate over that of the model", gain, "x", 3.0)
    cells, note = len(BARS) * len(measured), f"in {equal} both are the same model"
    lines.at_most(f"cells of {cells} in which the default is worse than iBoxNet-like", worse, "cells", 0, note=note)


def reactive(lines: Lines, rows: list[Row]) -> None:
    """A competing cubic flow in the same queue in place of fixed cross traffic: it yields to a sender that takes
    more."""
    measured = [row for row in rows if row["figures"] is not None]
    judged = [row for row in measured if row["lead_s"] == LEADS_S[0]]
    middle = {name: _middle([[row] for row in judged], name) for name in REACTIVE_METHODS}
    found = {row["path"]: row["rivals"] > 0 for row in measured}
    note = (
        f"median of {len(judged)} runs of {_seconds(rows)} s, {len(rows) - len(measured)} of {len(rows)} void; replay "
        f"{middle['replay']:.1f} %, iBoxNet-like {middle['peak']:.1f} %; competing flows found on "
        f"{sum(found.values())} of {len(found)} paths"
    )
    off, gain = middle["auto"], middle["replay"] / max(1e-9, middle["auto"])
    bars = (("<= 12", off <= 12), (">= 1.5", gain >= 1.5)) if len(judged) >= REACTIVE_RUNS else (("", None),) * 2
    lines.add("reactive cross traffic: throughput off by", off, "%", *bars[0], note=note)
    lines.add(CLAIMED["reactive"], gain, "x", *bars[1])
    for control in TESTED:
        of = [[row] for row in judged if row["control"] == control]
        note = ", ".join(f"{name} {_middle(of, name):.1f} %" for name in REACTIVE_METHODS)
        lines.add(f"the same, {control} alone", _middle(of, "auto"), "%", "", None, note=note)
    if len(measured) > len(judged):
        keys = dict.fromkeys((row["path"], row["control"]) for row in measured)
        of = [[row for row in measured if (row["path"], row["control"]) == key] for key in keys]
        note = ", ".join(f"{name} {_middle(of, name):.1f} %" for name in REACTIVE_METHODS)
        lines.add("the same, means of runs with several starts", _middle(of, "auto"), "%", "", None, note=note)


def _middle(groups: list[list[Row]], name: str) -> float:
    """In percent: the median, over groups of runs, of how far the mean throughput is off."""
    mean = [
        [statistics.fmean(row["figures"][n]["throughput"] for row in rows) for n in (name, "true")] for rows in groups
    ]
    return 100 * statistics.median(abs(ours / true - 1) for ours, true in mean)


def _off(row: Row, name: str, key: str) -> float:
    return abs(float(row["figures"][name][key] / row["figures"]["true"][key]) - 1)


def _seconds(rows: list[Row]) -> str:
    return " and ".join(f"{seconds:g}" for seconds in sorted({row["seconds"] for row in rows}))


def speed(lines: Lines) -> None:
    """The fit of 250,000 packets, and an hour of rows."""
    rng = np.random.default_rng(0)
    sent = np.cumsum(rng.integers(50_000, 200_000, 250_000)) + 10**18
    # A queue that grows and is emptied again every second.
    rtt = 40_000_000 + (sent - sent[0]) % 10**9 // 50
    began = time.process_time()
    model = learn(PacketTable("t", sent, np.full(250_000, 1448), rtt, 250_000)).model
    lines.at_most("fit of 250,000 packets", time.process_time() - began, "s of CPU", 60)
    began = time.process_time()
    drawn_rows(model, 0, (), 36_000)
    lines.at_most("rows for one hour", time.process_time() - began, "s of CPU", 1)


# ---- the command ---------------------------------------------------------------------------------------------------
def numbers(text: str) -> range:
    """`12`: paths 0 to 11. `3-5`: paths 3, 4 and 5."""
    first, dash, last = text.partition("-")
    found = range(int(first), int(last) + 1) if dash else range(int(first))
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: no paths. Give a count (12) or a range (3-5)")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--paths", type=numbers, default=range(12), metavar="N|A-B", help="how many or which paths")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each sender beside a competing flow (default 1)"
    )
    parser.add_argument("--parallel", type=int, metavar="N", help="jobs at a time (default: one per two cores)")
    parser.add_argument("--without-gru", action="store_true", help="do not fit the network")
    parser.add_argument("--part", action="append", choices=("speed", "senders", "reactive"))
    parser.add_argument("--limit", type=float, metavar="S", help="start no run after so many seconds; the rest is void")
    parser.add_argument("--save", type=Path, metavar="FILE", help="append the figures of each run to a file")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing; judge the runs of files")
    return parser.parse_args()


def main() -> int:
    args, lines = arguments(), Lines()
    if args.merge:
        verdict(lines, read_rows(args.merge))
        return lines.table()
    paths, seconds = (range(2), 8.0) if args.quick else (args.paths, args.seconds)
    methods = [name for name in METHODS if name != "gru" or not args.without_gru]
    parts = args.part or ["speed", "senders", "reactive"]
    if "speed" in parts:
        speed(lines)
    if set(parts) - {"speed"}:
        try:
            require_kernel(("cubic", *TESTED))
        except AtlasError as error:
            for part in set(parts) & set(CLAIMED):
                lines.skip(CLAIMED[part], str(error))
            return lines.table()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        began, file = time.monotonic(), RowFile(args.save)
        until_s = None if args.limit is None else began + args.limit
        with Jobs(args.parallel) as jobs:
            todo = [one._replace(until_s=until_s) for one in recordings(parts, paths, seconds, methods)]
            run_all(jobs, todo, lambda one: tests_of(one, 1 if args.quick else args.repeats), file.keep)
        print(f"# {time.monotonic() - began:.0f} s, {jobs.parallel} jobs at a time", flush=True)
        verdict(lines, file.rows)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
