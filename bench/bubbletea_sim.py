"""BubbleTea in the bubbles of the 12-GPU testbed and of the five datacenters, Azure's conversation trace (simulated).

Saturated: utilization, and tokens against a packing without a gap and against the paper's rule at its own p95. At 60 %
of that: TTFT against as many accelerators that only prefill, with training by Atlas (whose bubbles lie at the ends of
the iteration) and by 1F1B (which is as busy as the paper reports, 45 %). Where a bar is missed, the bound says how
much of the work no policy could have done in time.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common.report import Report

from bubbletea.bubbles import Forecast
from bubbletea.sim.noise import Noise
from bubbletea.sim.replay import Ours, Played, play
from bubbletea.sim.rivals import Paper
from bubbletea.sim.scene import Scene, dedicated, scene_of
from bubbletea.traces import Trace, load_trace

DATA = Path(__file__).parents[2] / "shared" / "data" / "requests" / "AzureLLMInferenceTrace_conv.csv"
TRACE = Path(os.environ.get("BUBBLETEA_TRACE", DATA))
CHUNK = 4096


@dataclass(frozen=True)
class Case:
    name: str
    job: str
    schedule: str
    split: tuple[int, ...]
    changes: tuple[str, ...] = ()
    chunks: tuple[int, ...] = (CHUNK,)
    cells: int = 1
    periods: float = 4.0
    """Whole ones count: bubbles are not spread evenly over an iteration."""
    warm_up: float = 1.0


TESTBED = Case("12 GPUs", "examples/testbed/gpt-a-40ms.yaml", "atlas", (2,), periods=30.0, warm_up=10.0)
FIVE = Case("5 DCs", "examples/paper-5-dcs.yaml", "atlas", (4,), ("reserved_gib=6",), periods=3.0)
FIVE_45 = Case(
    "5 DCs, 1F1B", "examples/paper-5-dcs.yaml", "1f1b", (1, 4), chunks=(2048, 1024), cells=12, periods=1.0, warm_up=0.25
)


def played(
    scene: Scene, case: Case, trace: Trace, load: float, *, policy: str = "ours", patience_s: float | None = None
) -> Played:
    """One replay; without patience everything is offline work."""
    stage = dedicated(scene) if policy == "dedicated" else scene
    split = (1,) if policy == "dedicated" else case.split[-1:] if policy == "paper" else case.split
    chunks = case.chunks if policy == "ours" else (CHUNK,)  # the others at what is best for them
    state = stage.state(Forecast(stage.pattern), stage.lanes(split, max(chunks)), chunks)
    return play(
        stage,
        Paper(state) if policy == "paper" else Ours(state),
        policy,
        trace,
        tokens_per_s=load * scene.capacity_tokens_per_s(trace),
        periods=case.periods,
        warm_up=case.warm_up,
        kind="online" if patience_s is not None else "offline",
        patience_s=patience_s,
    )


def saturated(report: Report, case: Case, scene: Scene, trace: Trace) -> None:
    full = played(scene, case, trace, 1.4)
    figures = full.figures()
    report.figure(f"{case.name}: busy, training alone", 1 - scene.idle_share, "")
    report.figure(f"{case.name}: busy, saturated", figures["utilization"], "", at_least=0.94)
    report.figure(f"{case.name}: of what was filled, delivered", figures["useful"], "")
    packed = filled_tokens(full) / (scene.capacity_tokens_per_s(trace) * (full.until_ns - full.from_ns) / 1e9)
    report.figure(f"{case.name}: tokens over a packing without a gap", packed, "", at_least=0.95)
    patience_s = max(5.0, 1.5 * scene.pattern.period_ns / 1e9)
    rule = played(scene, case, trace, 2.0, policy="paper", patience_s=patience_s).figures()
    ours = played(scene, case, trace, 2.0, patience_s=rule["ttft_p95_s"]).figures()
    report.figure(f"{case.name}: p95 of the paper's rule", rule["ttft_p95_s"], "s")
    report.figure(
        f"{case.name}: tokens over the paper's rule at its p95", ours["tokens_per_s"] / rule["tokens_per_s"], "x",
        at_least=1.0,
    )  # fmt: skip


def filled_tokens(found: Played) -> float:
    """Prompt tokens by the share of their work that falls into the time that counts."""
    total = 0.0
    for one in found.placed.values():
        inside = sum(max(0, min(s.end_ns, found.until_ns) - max(s.start_ns, found.from_ns)) for s in one.slices)
        whole = sum(s.end_ns - s.start_ns for s in one.slices)
        total += (one.request.prompt_tokens - one.cached_tokens) * inside / whole
    return total


def relaxed(report: Report, case: Case, scene: Scene, trace: Trace, *, bars: bool) -> None:
    """At 60 % of the load that saturates, i.e. of what is packed."""
    ours = played(scene, case, trace, 0.6, patience_s=20.0).figures()
    theirs = played(scene, case, trace, 0.6, policy="dedicated", patience_s=20.0).figures()
    limit_s = theirs["ttft_p95_s"] + scene.longest_op_ns / 1e9
    wait_s = limit_s - theirs["ttft_p50_s"]
    report.figure(f"{case.name}, 60 %: dedicated p50", theirs["ttft_p50_s"], "s")
    report.figure(
        f"{case.name}, 60 %: p50", ours["ttft_p50_s"], "s", at_most=1.1 * theirs["ttft_p50_s"] if bars else None
    )
    report.figure(f"{case.name}, 60 %: dedicated p95", theirs["ttft_p95_s"], "s")
    report.figure(f"{case.name}, 60 %: p95", ours["ttft_p95_s"], "s", at_most=limit_s if bars else None)
    report.figure(f"{case.name}, 60 %: refused", ours["refused"], "", at_most=0.05 if bars else None)
    report.figure(f"{case.name}, 60 %: work that no policy serves in that time", unavoidable(scene, 0.6, wait_s), "")


def unavoidable(scene: Scene, load: float, wait_s: float) -> float:
    """The least share of a steady load (of its work, not of its requests) that no policy serves within `wait_s`: what
    arrives between two moments and is served in time needs the windows from the first moment until that wait after
    the second."""
    pattern = scene.pattern
    grid = np.linspace(0, pattern.period_ns, 400)
    phase = np.repeat(pattern.phase_ns, np.diff(pattern.ptr))
    capacity = np.zeros(len(grid))
    for shift in (0, -pattern.period_ns):  # a window may go over the end of the period
        start, end = pattern.start_ns + phase + shift, pattern.end_ns + phase + shift
        capacity += (np.clip(grid[:, None], start, end) - np.clip(0, start, end)).sum(axis=1)
    whole = capacity[-1]
    arrived = load * whole * grid / pattern.period_ns
    wait_ns, worst = wait_s * 1e9, 0.0
    for a in range(len(grid)):
        turns, later = np.divmod(grid + wait_ns, pattern.period_ns)
        served = turns * whole + np.interp(later, grid, capacity) - capacity[a]
        late = arrived - arrived[a] - served
        worst = max(worst, float(late[a:].max()))
    return worst / (load * whole)


def slowed(report: Report, trace: Trace) -> None:
    """Ops and transfers spread by 2 %, learnt over 16 iterations, bubbles saturated."""
    scene = scene_of(Path(TESTBED.job), schedule="atlas", steady=False)
    assert scene.result is not None
    noise = Noise(scene.result, 0.02, 0.02)
    slice_ns = scene.some_costs.layer(CHUNK, 0)
    forecast = noise.learnt(scene.pattern, 0.005, slice_ns)
    state = scene.state(forecast, scene.lanes((2,), CHUNK), (CHUNK,))
    rate = 1.4 * scene.capacity_tokens_per_s(trace)
    found = play(scene, Ours(state), "ours", trace, tokens_per_s=rate, periods=20, warm_up=4, kind="offline")
    cost: Any = noise.slowdown(forecast, found.placed.values(), 24)
    report.figure("12 GPUs, 2 % jitter: training slower by", cost.mean, "", at_most=0.005)
    report.figure("12 GPUs, 2 % jitter: planned prefill cut", cost.cut, "")
    report.figure("12 GPUs, 2 % jitter: busy", found.figures()["utilization"], "")


def main() -> int:
    if not TRACE.exists():
        print(f"{TRACE} is not there: name Azure's conversation trace in BUBBLETEA_TRACE")
        return 0
    trace = load_trace(TRACE)
    report = Report("BubbleTea (simulated)", "a packing without a gap; the paper's rule; dedicated prefill GPUs")
    for case in (TESTBED, FIVE):
        scene = scene_of(Path(case.job), schedule=case.schedule, changes=case.changes, cells=case.cells)
        saturated(report, case, scene, trace)
        relaxed(report, case, scene, trace, bars=case is FIVE)
    scene = scene_of(Path(FIVE_45.job), schedule=FIVE_45.schedule, cells=FIVE_45.cells)
    relaxed(report, FIVE_45, scene, trace, bars=True)
    slowed(report, trace)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
