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
some seconds earlier; throughput is the mean of `--repeats` runs of each sender. A job in which the emulator was late is
repeated, at most three times, and is void otherwise. Jobs run side by side, two cores each. `--quick`: 2 paths, 8 s.

    python bench/weather.py --parallel 8        # 16 cores, root: all bars, about 8 minutes
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from lab.lines import Lines
from lab.senders import Jobs, Sender, random_path, require_kernel, run_senders, shared_path

from atlas.errors import AtlasError
from atlas.wan.emulator.paths import PathSpec
from atlas.weather.draw import drawn_rows
from atlas.weather.fit import learn
from atlas.weather.packets import PacketTable
from atlas.weather.path_model import WINDOW_NS, PathModel

TESTED = ("reno", "bbr")
SEED, REACTIVE_SEED = 1000, 2000
LEAD_S, LEADS_S = 5.0, (5.0, 3.0, 7.0, 4.0, 6.0)
"""How much earlier a competing flow starts: in the recording, and in the runs of a sender. What a sender gets depends
on when the flow had its last loss, so several moments are averaged."""


# ---- models --------------------------------------------------------------------------------------------------------
def path_of(model: PathModel) -> PathSpec:
    """A model as a path of the emulator."""
    replays = model.rivals == 0 and model.cross_bps.any()
    cross = tuple((model.cross_bps / model.capacity_bps).tolist()) if replays else ()
    queue = max(3000, round(model.buffer_bytes))
    return PathSpec(model.rtt_ns / 2e9, None, model.capacity_bps, queue_bytes=queue, cross=cross, rivals=model.rivals)


def replayed(table: PacketTable) -> PathModel:
    """The sender's own rate over time as what the link carries."""
    base = learn(table, "peak").model
    arrived = ~table.lost
    window = (table.sent_ns[arrived] - table.sent_ns[0]) // WINDOW_NS
    rate = np.bincount(window, table.num_bytes[arrived]) * (8e9 / WINDOW_NS)
    cross = np.maximum(0.0, base.capacity_bps - np.maximum(rate, 0.02 * base.capacity_bps))
    return replace(base, cross_bps=cross, known=cross >= 0, method="replay")


def gru_model(table: PacketTable) -> PathModel | None:
    try:
        from atlas.runtime.weather_fit import fit_gru
    except ImportError:
        return None
    return fit_gru(table)


METHODS: dict[str, Callable[[PacketTable], PathModel | None]] = {
    "constant": lambda table: learn(table, "constant").model,
    "replay": replayed,
    "peak": lambda table: learn(table, "peak").model,
    "auto": lambda table: learn(table).model,
    "gru": gru_model,
}


def figures(table: PacketTable, seconds: float) -> dict[str, float]:
    arrived = ~table.lost & (table.sent_ns - table.sent_ns[0] < seconds * 1e9)
    delay = table.rtt_ns[arrived]
    return {
        "mean delay": float(delay.mean()),
        "p95 delay": float(np.percentile(delay, 95)),
        "throughput": float(table.num_bytes[arrived].sum()),
    }


# ---- jobs ----------------------------------------------------------------------------------------------------------
class Recording(NamedTuple):
    """A path to record, and then the models that were fitted."""

    number: int
    path: PathSpec
    seconds: float
    methods: tuple[str, ...]
    models: dict[str, PathSpec] = {}  # noqa: RUF012

    @property
    def lead_s(self) -> float:
        return LEAD_S if self.path.trunk is not None else 0.0


def rivals_of(path: PathSpec, name: str = "rival") -> list[Sender]:
    return [] if path.trunk is None else [Sender(name, path, "cubic", first=True)]


def recorded(one: Recording) -> Recording | None:
    senders = [Sender("cubic", one.path, "cubic"), *rivals_of(one.path)]
    found = run_senders(senders, one.seconds, one.lead_s)
    if found is None:
        return None
    fitted = {name: model for name in one.methods if (model := METHODS[name](found["cubic"])) is not None}
    for name, model in fitted.items():
        share = f"{100 * model.mean_share:.0f} %"
        said = f"{model.capacity_bps / 1e6:.4g} Mbit/s, {model.rtt_ns / 1e6:.4g} ms, {model.buffer_bytes / 1e3:.4g} KB"
        print(
            f"# path {one.number}, {name} ({model.method}): {said}, cross {share}, flows {model.rivals}",
            file=sys.stderr,
            flush=True,
        )
    return one._replace(models={name: path_of(model) for name, model in fitted.items()})


class Test(NamedTuple):
    """Senders of one net."""

    one: Recording
    controls: tuple[str, ...]
    lead_s: float = 0.0
    twice: bool = False


Found = dict[str, dict[str, dict[str, float]]]
"""By congestion control and name of the model, and `true` (and `again`): figures of a sender."""


def tested(test: Test) -> Found | None:
    """Equal models share a run."""
    one = test.one
    ahead = (0.0,) * round(test.lead_s * 10)
    runs = {path: name for name, path in reversed(one.models.items())}
    senders = []
    for control in test.controls:
        path = one.path if one.path.trunk is None else replace(one.path, trunk=replace(one.path.trunk, name=control))
        senders += [Sender(f"{control} true", path, control), *rivals_of(path, f"{control} rival")]
        senders += [Sender(f"{control} again", path, control)] if test.twice else []
        for model, name in runs.items():
            cross = model.cross and (*ahead, *model.cross)
            senders.append(Sender(f"{control} {name}", replace(model, cross=cross), control))
    tables = run_senders(senders, one.seconds, test.lead_s)
    if tables is None:
        return None
    found: Found = {control: {} for control in test.controls}
    for key, table in tables.items():
        control, name = key.split()
        if name != "rival":
            found[control][name] = figures(table, one.seconds)
    for got in found.values():
        got |= {name: got[runs[path]] for name, path in one.models.items()}
    return found


# ---- the lines -----------------------------------------------------------------------------------------------------
BARS = {"mean delay": 0.06, "p95 delay": 0.08, "throughput": 0.05}


def held_out_senders(lines: Lines, jobs: Jobs, num_paths: int, seconds: float, methods: list[str]) -> None:
    paths = [random_path(random.Random(SEED + number), seconds) for number in range(num_paths)]
    todo = [Recording(number, path, seconds, tuple(methods)) for number, path in enumerate(paths)]
    ready = [one for one in jobs.run(recorded, todo) if one is not None]
    tests = [Test(one, (control,), twice=True) for one in ready for control in TESTED]
    errors: dict[tuple[str, str], list[float]] = {}
    worse, cells, equal = 0, 0, 0
    for test, found in zip(tests, jobs.run(tested, tests), strict=True):
        if found is None:
            continue
        ((control, got),) = found.items()
        true = got.pop("true")
        off = {name: {key: abs(value / true[key] - 1) for key, value in one.items()} for name, one in got.items()}
        for name, one in off.items():
            for key, value in one.items():
                errors.setdefault((name, key), []).append(value)
        cells, equal = cells + len(BARS), equal + len(BARS) * (test.one.models["auto"] == test.one.models["peak"])
        worse += sum(off["auto"][key] > off["peak"][key] for key in BARS)
        print(f"# path {test.one.number} {control}: " + "; ".join(f"{n} {_said(o)}" for n, o in off.items()))
    if not errors:
        raise AtlasError("every batch was void: the emulator was late")
    middle = {key: statistics.median(values) for key, values in errors.items()}
    num_runs, names = cells // len(BARS), dict.fromkeys(name for name, _ in errors)
    for key, bar in BARS.items():
        beside = ", ".join(f"{name} {100 * middle[name, key]:.2f} %" for name in names)
        note = f"medians of {num_runs} runs of {seconds:g} s: {beside}; {len(TESTED) * num_paths - num_runs} runs void"
        line = f"fitted on cubic, judged on reno and bbr: {key}"
        lines.at_most(line, 100 * middle["auto", key], "%", 100 * bar, note=note)
    gain = middle["constant", "mean delay"] / max(1e-9, middle["auto", "mean delay"])
    lines.at_least("mean delay: error of a constant rate over that of the model", gain, "x", 3.0)
    note = f"in {equal} both are the same model"
    lines.at_most(f"cells of {cells} in which the default is worse than iBoxNet-like", worse, "cells", 0, note=note)


def reactive(lines: Lines, jobs: Jobs, num_paths: int, seconds: float, repeats: int) -> None:
    """A competing cubic flow in the same queue in place of fixed cross traffic: it yields to a sender that takes
    more."""
    names = ("auto", "replay")
    paths = [shared_path(random.Random(REACTIVE_SEED + number)) for number in range(num_paths)]
    todo = [Recording(number, path, seconds, names) for number, path in enumerate(paths)]
    ready = [one for one in jobs.run(recorded, todo) if one is not None]
    tests = [Test(one, TESTED, lead_s) for one in ready for lead_s in LEADS_S[:repeats]]
    got: dict[tuple[int, str], list[dict[str, float]]] = {}
    for test, found in zip(tests, jobs.run(tested, tests), strict=True):
        for control, each in (found or {}).items():
            one = {name: value["throughput"] for name, value in each.items()}
            got.setdefault((test.one.number, control), []).append(one)
    if not got:
        raise AtlasError("every batch was void: the emulator was late")
    off: dict[str, list[float]] = {name: [] for name in names}
    spread = []
    for (number, control), runs in got.items():
        true = statistics.fmean(one["true"] for one in runs)
        for name in names:
            off[name].append(abs(statistics.fmean(one[name] for one in runs) / true - 1))
        spread += [abs(one["true"] / true - 1) for one in runs]
        said = ", ".join(f"{name} {100 * values[-1]:.1f} %" for name, values in off.items())
        each = ", ".join(f"{8e-6 * one['true'] / seconds:.3g}/{8e-6 * one['auto'] / seconds:.3g}" for one in runs)
        print(f"# path {number} {control}, reactive: {said}; true/auto in Mbit/s: {each}", flush=True)
    ours, replay = (100 * statistics.median(values) for values in off.values())
    with_flows = sum(one.models["auto"].rivals > 0 for one in ready)
    void = len(TESTED) * num_paths * repeats - sum(map(len, got.values()))
    note = (
        f"median of {len(got)} senders, each the mean of {repeats} runs; replay {replay:.1f} %; a single run is "
        f"{100 * statistics.fmean(spread):.1f} % from the mean of its path; competing flows found on {with_flows} of "
        f"{len(ready)} paths; {void} runs void"
    )
    lines.at_most("reactive cross traffic: throughput off by", ours, "%", 12, note=note)
    lines.at_least("the same: error of replay over that of the model", replay / max(1e-9, ours), "x", 1.5)


def _said(one: dict[str, float]) -> str:
    return "/".join(f"{100 * value:.1f}" for value in one.values())


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--paths", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of each sender beside a competing flow (default 2)"
    )
    parser.add_argument("--parallel", type=int, metavar="N", help="jobs at a time (default: one per two cores)")
    parser.add_argument("--without-gru", action="store_true", help="do not fit the network")
    parser.add_argument("--part", action="append", choices=("speed", "senders", "reactive"))
    args = parser.parse_args()
    num_paths, seconds = (2, 8.0) if args.quick else (args.paths, args.seconds)
    methods = [name for name in METHODS if name != "gru" or not args.without_gru]
    lines, parts = Lines(), args.part or ["speed", "senders", "reactive"]
    if "speed" in parts:
        speed(lines)
    if set(parts) - {"speed"}:
        require_kernel(("cubic", *TESTED))
        began = time.monotonic()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with Jobs(args.parallel) as jobs:
            if "senders" in parts:
                held_out_senders(lines, jobs, num_paths, seconds, methods)
            if "reactive" in parts:
                reactive(lines, jobs, num_paths, seconds, 1 if args.quick else args.repeats)
        print(f"# {time.monotonic() - began:.0f} s, {jobs.parallel} jobs at a time", flush=True)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
