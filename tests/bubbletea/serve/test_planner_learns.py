"""The service's windows follow what workers report: also those that go over the end of an iteration."""

from __future__ import annotations

import numpy as np
from prefill_samples import LLAMA

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from bubbletea.costs import LayerTime
from bubbletea.prefill.shard import Served
from bubbletea.serve.assemble import ServiceSettings, assemble
from bubbletea.serve.auth import Keys
from bubbletea.serve.planner import Planner
from bubbletea.serve.worker_windows import WorkerWindows, of_training
from bubbletea.windows.bubbles import SWITCH_NS, Forecast

MS = 1_000_000
PROGRAM = with_optimizer(one_f_one_b(Layout(1, 3, 4, ("a", "b", "c"))))
COSTS = uniform_costs(
    1, 3, kind_costs(forward_ns=60 * MS, backward_ns=120 * MS, sync_ns=10 * MS, step_ns=20 * MS),
    wan_boundaries=(0, 1), wan_ns=150 * MS, wan_latency_ns=20 * MS,
)  # fmt: skip


def windows_and_planner() -> tuple[WorkerWindows, Planner]:
    pace = LayerTime(10.0 * MS, 0.0, 0.0, 0.0)
    windows = of_training(simulate(repeated(PROGRAM, 4), COSTS), 64 << 20, pace, 10 * MS)
    settings = ServiceSettings("tiny", Served(LLAMA), split=1, chunk=128, arena_bytes=64 << 20, budget=0.01)
    return windows, assemble(settings, windows, Keys.open_to_all()).dispatcher.planner


def report(planner: Planner, windows: WorkerWindows, step: int, period_ns: int) -> None:
    """One period as planned, but perhaps longer than that; a window that goes over the end of the period before is
    waited through at the first op of this one."""
    pattern = windows.pattern
    for worker, slots in enumerate(windows.slots):
        origin_ns = step * period_ns + int(pattern.phase_ns[worker])
        for op, slot in slots.items():
            opened, closed = int(pattern.start_ns[slot]), int(pattern.end_ns[slot])
            if closed >= pattern.period_ns:
                opened, closed = opened - period_ns, 0
            planner.waited(worker, step, op, origin_ns + opened, origin_ns + closed)


def spans(forecast: Forecast) -> tuple[np.ndarray, np.ndarray]:
    start, end = forecast.spans()
    return start - SWITCH_NS // 2, end + SWITCH_NS // 2


def test_every_window_belongs_to_the_ops_that_wait_through_it() -> None:
    windows, _ = windows_and_planner()
    ends = windows.pattern.end_ns
    first = [slots.get(0) for slots in windows.slots[1:]]
    assert all(slot is not None and ends[slot] >= windows.pattern.period_ns for slot in first)
    for slots in windows.slots:
        ops = [op for op, slot in slots.items() if ends[slot] >= windows.pattern.period_ns]
        assert ops in ([], [0]), "no other op of the iteration waits through the window before its first"


def test_windows_across_the_period_end_are_learnt_correctly() -> None:
    windows, planner = windows_and_planner()
    period_ns = windows.pattern.period_ns
    for step in range(8):
        report(planner, windows, step, period_ns)
    start, end = spans(planner.forecast)
    assert np.abs(start - windows.pattern.start_ns).max() < MS
    assert np.abs(end - windows.pattern.end_ns).max() < MS
    assert planner.forecast.anchor_ns == 6 * period_ns
    assert planner.periods.slowdown == 0.0


def test_a_longer_period_moves_no_window_before_it_opens() -> None:
    windows, planner = windows_and_planner()
    period_ns = windows.pattern.period_ns + 20 * MS
    for step in range(8):
        report(planner, windows, step, period_ns)
    start, _ = spans(planner.forecast)
    assert np.abs(start - windows.pattern.start_ns).max() < MS
    assert 0.005 < planner.periods.slowdown < 0.01


def test_the_windows_of_a_run_that_is_slower_than_its_plan_are_its_own() -> None:
    windows, planner = windows_and_planner()
    slower, pattern = 1.7, windows.pattern
    for step in range(8):
        for worker, slots in enumerate(windows.slots):
            origin_ns = slower * (step * pattern.period_ns + pattern.phase_ns[worker])
            for op, slot in slots.items():
                opened, closed = pattern.start_ns[slot], pattern.end_ns[slot]
                if closed >= pattern.period_ns:
                    opened, closed = opened - pattern.period_ns, 0
                planner.waited(worker, step, op, int(origin_ns + slower * opened), int(origin_ns + slower * closed))
    found = planner.forecast.pattern
    assert abs(found.period_ns / (slower * pattern.period_ns) - 1) < 0.001
    start, end = spans(planner.forecast)
    assert np.abs(start - slower * pattern.start_ns).max() < 2 * MS
    assert np.abs(end - slower * pattern.end_ns).max() < 2 * MS
    assert abs(planner.periods.slowdown) < 0.001, "against what is now known of it"
