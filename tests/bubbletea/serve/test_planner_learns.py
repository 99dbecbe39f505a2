"""The service's windows follow what workers report: also those that go over the end of an iteration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefill_samples import LLAMA

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest
from bubbletea.costs import LayerTime
from bubbletea.prefill.shard import Served
from bubbletea.serve.assemble import ServiceSettings, assemble
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.planner import FEW_POINTS, HALVINGS, Planner
from bubbletea.serve.worker_windows import WorkerWindows, alone, of_training
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
    return windows, assemble(settings, windows, ApiKeys.open_to_all()).dispatcher.planner


def report(planner: Planner, windows: WorkerWindows, step: int, period_ns: int) -> None:
    """One period as planned, but perhaps longer than that; a window that goes over the end of the period before is
    waited through at the first op of this one."""
    pattern = windows.pattern
    for worker, by_op in enumerate(windows.window_of):
        origin_ns = step * period_ns + int(pattern.phase_ns[worker])
        for op, window in by_op.items():
            opened, closed = int(pattern.start_ns[window]), int(pattern.end_ns[window])
            if closed >= pattern.period_ns:
                opened, closed = opened - period_ns, 0
            planner.waited(worker, step, op, origin_ns + opened, origin_ns + closed)


def spans(forecast: Forecast) -> tuple[np.ndarray, np.ndarray]:
    start, end = forecast.spans()
    return start - SWITCH_NS // 2, end + SWITCH_NS // 2


def test_every_window_belongs_to_the_ops_that_wait_through_it() -> None:
    windows, _ = windows_and_planner()
    ends = windows.pattern.end_ns
    first = [by_op.get(0) for by_op in windows.window_of[1:]]
    assert all(window is not None and ends[window] >= windows.pattern.period_ns for window in first)
    for by_op in windows.window_of:
        ops = [op for op, window in by_op.items() if ends[window] >= windows.pattern.period_ns]
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
        for worker, by_op in enumerate(windows.window_of):
            origin_ns = slower * (step * pattern.period_ns + pattern.phase_ns[worker])
            for op, window in by_op.items():
                opened, closed = pattern.start_ns[window], pattern.end_ns[window]
                if closed >= pattern.period_ns:
                    opened, closed = opened - pattern.period_ns, 0
                planner.waited(worker, step, op, int(origin_ns + slower * opened), int(origin_ns + slower * closed))
    found = planner.forecast.pattern
    assert abs(found.period_ns / (slower * pattern.period_ns) - 1) < 0.001
    start, end = spans(planner.forecast)
    assert np.abs(start - slower * pattern.start_ns).max() < 2 * MS
    assert np.abs(end - slower * pattern.end_ns).max() < 2 * MS
    assert abs(planner.periods.slowdown) < 0.001, "against what is now known of it"


def starved(planner: Planner, windows: WorkerWindows, step: int, worker: int) -> None:
    """One period, in which this worker gets no CPU time: its waits are over when they begin."""
    period_ns = windows.pattern.period_ns
    for one in range(windows.pattern.num_workers):
        end_ns = (step + 1) * period_ns
        opened_ns = end_ns if one == worker else step * period_ns + int(windows.pattern.start_ns[one])
        planner.waited(one, step, 0, opened_ns, end_ns)


def alone_planner() -> tuple[WorkerWindows, Planner]:
    """One lane of two workers that do not train."""
    windows = replace(alone(2, 64 << 20, 0.2, 0.3), layer=LayerTime(1.0 * MS, 0.0, 0.0, 0.0))
    settings = ServiceSettings("tiny", Served(LLAMA), split=2, chunk=128, arena_bytes=64 << 20)
    planner = assemble(settings, windows, ApiKeys.open_to_all()).dispatcher.planner
    planner.set_alive((0, 1), 0)
    return windows, planner


@pytest.mark.parametrize("before", [0, 1, 3, 40])
def test_one_period_without_cpu_time_closes_no_lane(before: int) -> None:
    windows, planner = alone_planner()
    for step in range(before):
        starved(planner, windows, step, worker=-1)
    costs, now_ns = planner.costs, 0
    for step in range(before, before + 12):
        starved(planner, windows, step, worker=1 if step == before else -1)
        now_ns = (step + 1) * windows.pattern.period_ns
        request = PrefillRequest(f"r{step}", "", 64, now_ns, now_ns + 2_000 * MS)
        assert isinstance(planner.admit(request, now_ns), Placement), f"in step {step}"
        planner.complete(request.id, now_ns)
    assert planner.costs == costs


def test_a_worker_that_has_no_windows_any_more_is_learnt() -> None:
    windows, planner = alone_planner()
    for step in range(12):
        starved(planner, windows, step, worker=1)
    now_ns = 12 * windows.pattern.period_ns
    costs = planner.costs
    for _ in range(5):
        refusal = planner.admit(PrefillRequest("r", "", 64, now_ns, now_ns + 2_000 * MS), now_ns)
        assert isinstance(refusal, AdmissionRefusal)
        assert (refusal.reason, refusal.retry_at_ns) == ("deadline", now_ns + 1_000 * MS)
    assert planner.costs == costs, "no cost is too high for a window that does not exist"


@pytest.mark.parametrize("closed", [2, 5, 7])
def test_a_busy_host_closes_no_lane_that_still_has_open_windows(closed: int) -> None:
    """In `closed` of eight periods a worker gets no CPU time, for 20 s: requests are admitted, and planned to take
    longer than on an idle host, by the share of windows that are open."""
    windows, planner = alone_planner()
    costs, period_ns, tokens, took = planner.costs, windows.pattern.period_ns, 4096, list[float]()
    for step in range(100):
        starved(planner, windows, step, worker=1 if step % 8 < closed else -1)
        now_ns = (step + 1) * period_ns
        request = PrefillRequest(f"r{step}", "", tokens, now_ns, now_ns + 60_000 * MS)
        found = planner.admit(request, now_ns)
        if step > 8:  # in the first periods, no window was open
            assert isinstance(found, Placement), f"in step {step}"
            took.append((found.delivered_ns - now_ns) / period_ns)
        planner.cancel(request.id, now_ns)
    assert planner.costs == costs, "windows are the reason, not costs"
    assert max(took[16:]) < 2 + 8 / (8 - closed) * min(took), "nor is less planned than the host has left"


@pytest.mark.parametrize("num_closed", [5, 12, 40])
def test_a_lane_is_open_again_with_the_first_open_window(num_closed: int) -> None:
    windows, planner = alone_planner()
    for step in range(100):
        starved(planner, windows, step, worker=1 if 40 <= step < 40 + num_closed else -1)
        now_ns = (step + 1) * windows.pattern.period_ns
        found = planner.admit(PrefillRequest(f"r{step}", "", 64, now_ns, now_ns + 60_000 * MS), now_ns)
        if step > 40 + num_closed:  # a period is learnt when the next one begins
            assert isinstance(found, Placement), f"{step - 40 - num_closed} periods after the host was busy"
        planner.cancel(f"r{step}", now_ns)


def test_costs_of_admitted_requests_recover_after_windows_were_closed() -> None:
    windows, planner = alone_planner()
    costs = planner.costs
    assert isinstance(planner.admit(PrefillRequest("r", "", 64, 0), 0), Placement)
    for step in range(40):
        starved(planner, windows, step, worker=1)
    planner.again("r", 0)
    for second in range(30):  # it waits, and every second costs are tried that are half as high
        planner.advance(second * 1_000 * MS)
        assert planner.costs.layer.floor_ns >= costs.layer.floor_ns / 2**HALVINGS
    for step in range(40, 100):
        starved(planner, windows, step, worker=-1)
    now_ns = 100 * windows.pattern.period_ns
    planner.advance(now_ns)
    assert not planner.is_waiting("r")
    for number in range(FEW_POINTS):
        planner.ran(64, 0, 200 * MS if number == 3 else 2 * MS)
    assert planner.costs.layer(64, 0) == pytest.approx(2 * MS), "the first measured pieces replace a guess, but one"
