"""`make demo`: three emulated datacenters 40 ms apart on this machine.

A small GPT trains on the included text, on paced devices and over real sockets, with Varuna on one TCP connection,
Varuna on many, and Atlas; then with Atlas again while BubbleTea answers prompts in its bubbles. The steps and the
losses are the same each time, to the bit. Needs no root and no network; takes about 75 seconds on two cores.
Writes out/demo/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median

from demo_serving import Client, train_and_serve
from rich.console import Console
from rich.table import Table

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.errors import AtlasError
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout, Memory, Program
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.launch.paths import NodePaths, paths_of
from atlas.launch.report.events import StepEvent
from atlas.runtime.assignment import SHIPPED, DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import gpt
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.schedules import SCHEDULES, Setting
from atlas.sim import simulate
from atlas.view import write_page
from atlas.wan.emulator.lateness import WORST_LIMIT_S
from bubbletea.prefill.throttle import ALONE_FIRST

OUT = Path("out/demo")
MS = 1_000_000
LAYOUT = Layout(2, 3, 8, ("east", "middle", "west"))
FORWARD_NS, WAN_NS, LATENCY_NS = 30 * MS, 60 * MS, 40 * MS
ONE_SLOWER = 17.06
"""One connection moves one window per round trip: 293 Mbit/s at 40 ms, where many reach 5 Gbit/s."""
STEPS, SERVING_STEPS = {("varuna", "one"): 1, ("varuna", "many"): 2, ("atlas", "many"): 3}, 10
"""By schedule and connections. Over one connection a step takes eight times as long."""
MAX_BUSY = 0.70
TRAINING = TrainingSetup(
    ModelChoice(gpt(num_layers=3, width=32, num_heads=2, vocabulary=256, max_length=64), layers_per_stage=(1, 1, 1)),
    DataChoice(64, 8, SHIPPED),
    OptimizerSettings(LearningRate(3e-3)),
)
console = Console(highlight=False)


@dataclass(frozen=True)
class DemoRun:
    """One training of the same steps."""

    title: str
    predicted: Timeline
    run: Emulation
    seconds: list[float]
    """Time of each step."""
    used: list[float]
    """Share of all workers' time in which an accelerator computes, for each step."""
    busy: float
    """Share of the host's cores in use."""

    @property
    def iteration_s(self) -> float:
        return self.run.timeline.iteration_ns / 1e9

    @property
    def utilization(self) -> float:
        """BubbleTea leaves the first steps without prefill; later, two in 512."""
        return mean(self.used[ALONE_FIRST:]) if self.used[ALONE_FIRST:] else self.run.timeline.utilization

    @property
    def flag(self) -> str:
        """Why its figures are unreliable, or empty."""
        if self.busy > MAX_BUSY:
            return f"the machine was {self.busy:.0%} busy"
        return f"the emulator was {self.run.late_s * 1e3:.0f} ms late" if self.run.late_s > WORST_LIMIT_S else ""


@cache
def costs(*, sharing: bool = False, slower: float = 1.0) -> Costs:
    kinds = kind_costs(
        forward_ns=FORWARD_NS, recompute_ns=FORWARD_NS, input_ns=FORWARD_NS, weight_ns=FORWARD_NS,
        sync_ns=5 * MS, step_ns=5 * MS,
    )  # fmt: skip
    return uniform_costs(
        LAYOUT.num_pipelines, LAYOUT.num_stages, kinds, wan_boundaries=(0, 1), wan_ns=round(WAN_NS * slower),
        wan_latency_ns=LATENCY_NS, sharing=sharing,
    )  # fmt: skip


@cache
def program_of(name: str, apart: Costs) -> Program:
    turns = costs(sharing=True) if SCHEDULES[name].shares else None
    setting = Setting(LAYOUT, apart, turns, Memory(3), recompute=True, budget=50)
    return with_optimizer(SCHEDULES[name].build(setting, None))


def windowed(paths: NodePaths) -> NodePaths:
    """The same paths for one connection, which carries one window per round trip."""
    return {
        pair: replace(
            path,
            pair_bps=path.pair_bps * ONE_SLOWER,
            window_bytes=round(path.pair_bps / 8 * 2 * path.latency_s),
        )
        for pair, path in paths.items()
        if path.pair_bps is not None
    }


def host_ticks() -> tuple[int, int]:
    """(all, idle) ticks of the host's cores since boot; zeros if /proc/stat is missing."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks), ticks[3] + ticks[4]


def train_once(title: str, name: str, tcp: str, client: Client | None = None) -> DemoRun:
    """Simulate, then run."""
    console.print(f"\n[bold]{title}[/bold]")
    apart = costs(slower=ONE_SLOWER if tcp == "one" else 1.0)
    program = program_of(name, apart)
    used = costs(sharing=True) if program.sharing else apart
    steps = STEPS[name, tcp] if client is None else SERVING_STEPS
    predicted = simulate(repeated(program, steps), used)
    paths = paths_of(program, used, TRAINING.activation_bytes)
    setup = EmulationSettings(
        steps,
        streams=1 if tcp == "one" or program.sharing else 2,
        paths=windowed(paths) if tcp == "one" else paths,
        patience_s=30 + 2 * predicted.iteration_ns / 1e9,
        keep_weights=False,
        predicted_s=predicted.iteration_ns / 1e9,
    )
    seconds, busy_shares, before = list[float](), list[float](), list[tuple[int, int]]()

    def on_step(event: StepEvent, timeline: Timeline) -> None:
        seconds.append(event["iteration_s"])
        busy_shares.append(int(timeline.busy_ns.sum()) / (event["iteration_s"] * 1e9 * program.num_workers))
        line = (
            f"  step {event['step']}/{steps}  loss {event['loss']:.4f}  {event['iteration_s']:6.2f} s "
            f"(predicted {predicted.iteration_ns / 1e9:.2f})  WAN {(event['wan_gbit_s'] or 0) * 1e3:.1f} Mbit/s"
        )
        if client is None:
            console.print(line)
        else:
            client.say(line, console)

    def train(setup: EmulationSettings) -> Emulation:
        return emulate(program, used, TRAINING, setup, on_start=lambda _: before.append(host_ticks()), on_step=on_step)

    run = train(setup) if client is None else train_and_serve(client, program, used, setup, train, console)
    after = host_ticks()
    busy = 1 - (after[1] - before[0][1]) / max(1, after[0] - before[0][0]) if after[0] else 0.0
    return DemoRun(title, predicted, run, seconds, busy_shares, busy)


def table(runs: list[DemoRun]) -> Table:
    shown = Table(title="The same training under emulation; losses are compared bit by bit", title_justify="left")
    for heading in ("", "iteration", "speed-up", "busy", "predicted", "off by", "losses"):
        shown.add_column(heading, justify="left" if not heading else "right")
    for one in runs:
        shown.add_row(
            one.title,
            f"{one.iteration_s:.2f} s" + (" *" if one.flag else ""),
            f"{runs[0].iteration_s / one.iteration_s:.1f}x",
            f"{one.utilization:.0%}",
            f"{one.predicted.iteration_ns / 1e9:.2f} s",
            f"{one.predicted.iteration_ns / one.run.timeline.iteration_ns - 1:+.1%}",
            "equal" if has_same_losses(one, runs[2]) else "DIFFER",
        )
    return shown


def has_same_losses(one: DemoRun, other: DemoRun) -> bool:
    """In the steps that both have."""
    return all(a == b for a, b in zip(one.run.losses, other.run.losses, strict=False))


def prefill_summary(plain: DemoRun, filled: DemoRun, client: Client) -> str:
    # The first steps with BubbleTea are left without prefill: they are a baseline measured in the same run.
    without = [*plain.seconds[1:], *filled.seconds[1:ALONE_FIRST]]
    slower = median(filled.seconds[ALONE_FIRST:]) / median(without) - 1
    first = (
        f"first token after {median(client.first_s):.2f} s (median)"
        if client.first_s
        else "no prompt was answered in time"
    )
    return (
        f"BubbleTea: utilization {plain.utilization:.0%} without, {filled.utilization:.0%} with (from step "
        f"{ALONE_FIRST + 1} on); {first}; iteration time {slower:+.1%}"
    )


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    console.print("Three emulated datacenters, 40 ms apart; two pipelines, one stage per datacenter; 8 microbatches")
    runs = [
        train_once("Varuna, one TCP", "varuna", "one"),
        train_once("Varuna, many TCP", "varuna", "many"),
        train_once("Atlas (turns)", "atlas", "many"),
    ]
    client = Client()
    runs.append(train_once("Atlas, BubbleTea", "atlas", "many", client))
    console.print()
    console.print(table(runs))
    console.print(prefill_summary(runs[2], runs[3], client), soft_wrap=True)
    for one in runs:
        if one.flag:
            console.print(f"Timings marked * are unreliable: {one.flag}. Run again on an idle machine", soft_wrap=True)
            break
    page = OUT / "prediction-over-measurement.html"
    write_page(page, [runs[2].predicted, runs[2].run.timeline], title="Atlas: prediction over measurement")
    filled = OUT / "bubbletea.html"
    write_page(filled, [runs[3].run.timeline], title="Atlas with BubbleTea, as it ran")
    console.print(f"Timelines: {page.absolute().as_uri()}\n           {filled.absolute().as_uri()}", soft_wrap=True)
    return 0 if all(has_same_losses(one, runs[2]) for one in runs) else 1


def guarded(run: Callable[[], int]) -> int:
    try:
        return run()
    except AtlasError as error:
        print(f"atlas: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; all processes have ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(guarded(main))
