"""The paper's testbed as an emulated run: predicted and measured iteration times of every schedule on every network.

Three emulated datacenters, one process per worker, paced devices, real sockets and real gradients. The paper's ratios,
with every time divided by three, or by `--scale`. Links are priced by a probe's results, not by the emulator's
settings. Speed-ups compare times in the paper's scale.

    python bench/testbed.py                                     # everything: about half an hour on two cores
    python bench/testbed.py --quick                             # Atlas and Varuna, six workers: two minutes
    python bench/testbed.py --workers 6 --schedules 1f1b --tcp many --device cpu   # unpaced, with the worker's overhead

A run in which the host was busier than 70 %, or the emulator late, is repeated up to three times and then void: neither
it nor any figure that needs it is measured. Only runs of this call count; timelines of earlier ones are removed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import world
from common.report import Report

from atlas.cost.table import Costs
from atlas.ir.analysis import critical_path, path_totals_ns, running_end
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import COLLECTIVES
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import EmulationSettings, emulate
from atlas.schedules import SCHEDULES
from atlas.sim import simulate
from atlas.view import write_page
from atlas.wan.emulator.lateness import WORST_LIMIT_S

OUT = Path("out/testbed")
SCHEDULE_NAMES = ("gpipe", "1f1b", "varuna", "zero-bubble", "atlas")
BASELINES = SCHEDULE_NAMES[:3]
TCP = {"one": 1, "many": 2, "turns": 1}
"""Connections of each kind of network to a peer."""
IN_FLIGHT, STEPS, TRIES = 3, 3, 3
QUICK = {"workers": [6], "schedules": ["varuna", "atlas"], "tcp": ["many", "turns"]}
MAX_BUSY = 0.70
BARS = {"paced": 5.0, "cpu": 10.0}
"""Percent, by device."""
SPEED_UPS = {"one": 15.0, "many": 1.4}
"""Of Atlas over the baselines, twelve workers, by network."""
MEAN_BARS = (4.0, 2.5)
"""Percent: of a few cases, and of twenty or more."""


@dataclass(frozen=True)
class Row:
    """One cell of the table."""

    schedule: str
    tcp: str
    workers: int
    device: str
    scale: int
    predicted_s: float
    measured_s: float
    compute_s: float
    """Measured minus predicted compute on the run's critical path, per iteration; then WAN and the rest."""
    wan_s: float
    dispatch_s: float
    overhead_us: float
    """Median over ops: from when device and input were both ready to the start. A paced device starts by the clock, so
    this is measured on unpaced ones only."""
    busy: float
    late_s: float
    overrun_s: float
    void: str

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Load:
    """How busy the host is, from now until it is read: by the run time of every thread.

    Not by /proc/stat, which charges a whole tick to the thread that runs when the clock ticks: timers fire then, and a
    host that is 9 % busy with timers appears to be 38 % busy.
    """

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), self._ran_ns()

    def busy(self) -> float:
        ran_ns = sum(ran_ns - self._before.get(thread, 0) for thread, ran_ns in self._ran_ns().items())
        return ran_ns / 1e9 / (time.monotonic() - self._began) / (os.cpu_count() or 1)

    @staticmethod
    def _ran_ns() -> dict[Path, int]:
        found = {}
        for file in Path("/proc").glob("[0-9]*/task/[0-9]*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                found[file] = int(file.read_text().split()[0])
        return found


def per_iteration(timeline: Timeline) -> tuple[float, float, float]:
    """Seconds of the critical path: compute, WAN, rest."""
    totals, n = path_totals_ns(critical_path(timeline)), timeline.program.num_iterations * 1e9
    wan = totals["queue"] + totals["wire"] + totals["latency"]
    return totals["compute"] / n, wan / n, (totals["sync"] + totals["wait"]) / n


def overhead_us(timeline: Timeline) -> float:
    """From when the worker and the op's input were both ready to the op's start."""
    program, inputs = timeline.program, timeline.program.op_input
    order = np.lexsort((timeline.op_start_ns, program.op_worker))
    free_ns = running_end(program.op_worker[order].astype(np.int64), timeline.op_end_ns[order], 0)
    arrive_ns = np.where(inputs >= 0, timeline.transfer_arrive_ns[inputs], 0)[order]
    counts = ~np.isin(program.kind[order], np.array(COLLECTIVES, np.int8)) & (free_ns > 0)
    return float(np.median((timeline.op_start_ns[order] - np.maximum(free_ns, arrive_ns))[counts])) / 1e3


def timed(costs: Costs, run: Timeline) -> Costs:
    """The costs with the measured median of each kind of op on each stage."""
    compute_ns, program = costs.compute_ns.copy(), run.program
    length_ns = run.op_end_ns - run.op_start_ns
    for stage in range(program.num_stages):
        for kind in np.unique(program.kind):
            of = (program.stage == stage) & (program.kind == kind)
            compute_ns[:, stage, kind] = round(float(np.median(length_ns[of]))) if of.any() else 0
    return replace(costs, compute_ns=compute_ns)


def one_run(name: str, tcp: str, workers: int, found: world.Found, args: argparse.Namespace) -> Row:
    num_pipelines = workers // world.STAGES
    nominal = world.setting(num_pipelines, IN_FLIGHT, scale_of(workers, tcp, args))
    setting = world.probed(nominal, found, tcp)
    program = replace(with_optimizer(SCHEDULES[name].build(setting, None)), sharing=tcp == "turns")
    costs = setting.costs_of(program)
    steps, device = args.steps, args.device
    load: list[Load] = []
    busy: list[float] = []
    setup = EmulationSettings(
        steps,
        device=device,
        streams=TCP[tcp],
        paths=world.node_paths(program, world.path(nominal, tcp)),
        patience_s=120.0,
        keep_weights=False,
    )
    if device == "cpu":
        costs = timed(costs, emulate(program, costs, world.training(), setup).timeline)
    predicted = simulate(repeated(program, steps), costs)
    run = emulate(
        program,
        costs,
        world.training(),
        setup,
        on_start=lambda _: load.append(Load()),
        on_step=lambda event, timeline: busy.append(load[0].busy()),
    )
    compute_s, wan_s, rest_s = np.array(per_iteration(run.timeline)) - np.array(per_iteration(predicted))
    write_page(
        args.out / f"{workers}-{name}-{tcp}-{device}.html",
        [predicted, run.timeline],
        title=f"{name}, {tcp}, {workers} workers: prediction over measurement",
    )
    return Row(
        name, tcp, workers, device, scale_of(workers, tcp, args),
        predicted.iteration_ns / 1e9, run.timeline.iteration_ns / 1e9, float(compute_s), float(wan_s), float(rest_s),
        overhead_us(run.timeline), busy[-1], run.late_s, run.overrun_s, why_void(busy[-1], run.late_s),
    )  # fmt: skip


def scale_of(workers: int, tcp: str, args: argparse.Namespace) -> int:
    """Two cores are too few for twelve workers with relays at a third of the paper's times."""
    return int(args.scale or (1 if (workers, tcp) == (12, "turns") else 3))


def why_void(busy: float, late_s: float) -> str:
    if busy > MAX_BUSY:
        return f"the host was {busy:.0%} busy"
    return f"the emulator was {late_s * 1e3:.1f} ms late" if late_s > WORST_LIMIT_S else ""


def measure(args: argparse.Namespace) -> list[Row]:
    """The rows of this call; pages of earlier calls are removed."""
    args.out.mkdir(parents=True, exist_ok=True)
    for page in args.out.glob("*.html"):
        page.unlink()
    rows: list[Row] = []
    for workers in args.workers:
        for tcp in args.tcp:
            num_pipelines, scale = workers // world.STAGES, scale_of(workers, tcp, args)
            found = world.probe(world.path(world.setting(num_pipelines, IN_FLIGHT, scale), tcp), tcp, num_pipelines)
            print(
                f"probed {tcp}: {found.transfer_ns / 1e6:.1f} ms a transfer, {found.latency_ns / 1e6:.2f} ms away"
                + (f", {found.lone_ns / 1e6:.1f} ms alone through the cell" if found.lone_ns else "")
            )
            for name in args.schedules:
                rows.append(repeat(name, tcp, workers, found, args))
    return rows


def repeat(name: str, tcp: str, workers: int, found: world.Found, args: argparse.Namespace) -> Row:
    """Repeat until a run counts, at most three times."""
    for _ in range(1 if args.quick else TRIES):
        began = time.monotonic()
        row = one_run(name, tcp, workers, found, args)
        print(f"{describe(row)}; took {time.monotonic() - began:.0f} s", flush=True)
        if not row.void:
            break
    return row


def describe(row: Row) -> str:
    return (
        f"{row.workers} workers ({row.device}), {row.schedule}, {row.tcp}, 1:{row.scale}: "
        f"predicted {row.predicted_s:.3f} s, measured {row.measured_s:.3f} s ({row.error:+.1%}: "
        f"compute {row.compute_s * 1e3:+.0f}, WAN {row.wan_s * 1e3:+.0f}, dispatch {row.dispatch_s * 1e3:+.0f} ms), "
        f"host {row.busy:.0%} busy, emulator {row.late_s * 1e3:.1f} ms late"
        + (f": VOID, {row.void}" if row.void else "")
    )


# ---- the report ------------------------------------------------------------------------------------------------------
def report(rows: list[Row]) -> int:
    figures = Report("The testbed (emulated)", "the simulator, links as probed; Atlas takes turns")
    for row in rows:
        where = f"{row.workers} workers ({row.device}), {row.schedule}, {row.tcp}"
        if row.void:
            figures.void(f"{where}: prediction off by", row.void)
            continue
        figures.figure(f"{where}: prediction off by", 100 * abs(row.error), "%", at_most=BARS[row.device])
        if row.device == "cpu":
            figures.figure(f"{where}: overhead of an op, median", row.overhead_us, "us", at_most=300)
    errors = [100 * row.error for row in rows if row.device == "paced" and not row.void]
    if errors:
        mean, bias = float(np.mean(np.abs(errors))), float(np.mean(errors))
        figures.figure("all paced cases: mean error", mean, "%", at_most=MEAN_BARS[len(errors) >= 20])
        figures.figure("all paced cases: bias", bias, "%")
    for workers in sorted({row.workers for row in rows}, reverse=True):
        speed_ups([row for row in rows if row.workers == workers and row.device == "paced"], figures)
    return figures.finish()


def speed_ups(rows: list[Row], figures: Report) -> None:
    """Speed-ups of Atlas over each baseline, for one number of workers. If one side is void, the ratio is void."""
    ours = next((row for row in rows if (row.schedule, row.tcp) == ("atlas", "turns")), None)
    for row in rows:
        if ours is None or row.schedule not in BASELINES:
            continue
        name = f"{row.workers} workers: Atlas over {row.schedule}, {row.tcp}"
        if why := ours.void or row.void:
            figures.void(name, why)
            continue
        bar = SPEED_UPS.get(row.tcp) if row.workers == 12 else None
        figures.figure(name, row.measured_s * row.scale / (ours.measured_s * ours.scale), "x", at_least=bar)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", choices=(6, 12), default=[12, 6])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULE_NAMES, default=list(SCHEDULE_NAMES))
    parser.add_argument("--tcp", nargs="+", choices=tuple(TCP), default=list(TCP))
    parser.add_argument("--scale", type=int, help="divides all times; 3, but 1 for twelve workers that take turns")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", choices=tuple(BARS), default="paced", help="cpu: as fast as it goes, timed first")
    parser.add_argument("--quick", action="store_true", help="two schedules on six workers, none repeated")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the timelines, as pages")
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK)
    return report(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
