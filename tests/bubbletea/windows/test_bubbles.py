"""Windows from Timelines, ahead of now, and what is learnt of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from forecast_windows import ahead

from atlas.errors import AtlasError
from atlas.evaluate import Result, evaluate
from atlas.ir.analysis import Cause, bubbles
from atlas.ir.timeline import Timeline
from atlas.spec import load_job
from bubbletea.windows.bubbles import SWITCH_NS, Forecast, Pattern, pattern_of
from bubbletea.windows.free_network import residual_of
from bubbletea.windows.learn import DRIFT_PERIODS, Learner

MS = 1_000_000


@pytest.fixture(scope="module")
def found() -> Result:
    return evaluate(load_job("examples/tiny.yaml"), "1f1b", iterations=3)


@pytest.fixture(scope="module")
def timeline(found: Result) -> Timeline:
    return found.single


def test_windows_and_training_fill_the_period(timeline: Timeline) -> None:
    pattern = pattern_of(timeline)
    assert pattern.period_ns == timeline.makespan_ns
    assert int(pattern.idle_ns.sum()) + pattern.busy_ns == pattern.period_ns * pattern.num_workers
    found = bubbles(timeline)
    assert int(pattern.idle_ns.sum()) == int((found.end_ns - found.start_ns).sum())


def test_waits_for_circuits_are_windows_too() -> None:
    rails = [f"cluster.datacenters.{dc}.fabric={{kind: photonic, reconfigure_ms: 200}}" for dc in ("east", "west")]
    found = evaluate(load_job("examples/tiny.yaml", rails), "1f1b").single
    waits = bubbles(found)
    assert (waits.cause == Cause.FABRIC).any()
    assert int(pattern_of(found).idle_ns.sum()) == int((waits.end_ns - waits.start_ns).sum())


def test_windows_of_a_worker_do_not_overlap_and_stay_in_the_period(timeline: Timeline) -> None:
    pattern = pattern_of(timeline)
    for w in range(pattern.num_workers):
        own = slice(int(pattern.ptr[w]), int(pattern.ptr[w + 1]))
        start, end = pattern.start_ns[own], pattern.end_ns[own]
        assert (start < end).all()
        assert (end[:-1] < start[1:]).all()
        assert start[0] >= 0
        assert end[-1] <= pattern.period_ns


def test_the_last_iteration_of_several_is_the_steady_state(found: Result) -> None:
    pattern = pattern_of(found.timeline)
    assert pattern.period_ns == found.timeline.iteration_ns
    assert int(pattern.idle_ns.sum()) + pattern.busy_ns == pattern.period_ns * pattern.num_workers


def test_replicas_have_the_same_windows(timeline: Timeline) -> None:
    one = pattern_of(timeline)
    three = one.replicated(3)
    assert three.num_workers == 3 * one.num_workers
    assert three.idle_ns.tolist() == one.idle_ns.tolist() * 3


def test_the_forecast_repeats_the_pattern(timeline: Timeline) -> None:
    pattern = pattern_of(timeline)
    found = list(ahead(Forecast(pattern, anchor_ns=7), 0, 0, 3 * pattern.period_ns))
    assert all(a.end_ns < b.start_ns for a, b in itertools.pairwise(found))
    starts = {(w.start_ns - 7) % pattern.period_ns for w in found}
    own = (pattern.start_ns[pattern.ptr[0] : pattern.ptr[1]] + pattern.phase_ns[0] + SWITCH_NS // 2) % pattern.period_ns
    assert starts == set(own.tolist())


def test_a_budget_outside_0_to_1_is_refused(timeline: Timeline) -> None:
    with pytest.raises(AtlasError, match="slow-down budget"):
        Forecast(pattern_of(timeline), budget=0.0)


def test_windows_that_close_early_get_margins(timeline: Timeline) -> None:
    pattern = pattern_of(timeline)
    forecast = Forecast(pattern, budget=0.005, slice_ns=5 * MS)
    origin = np.repeat(pattern.phase_ns, np.diff(pattern.ptr))
    for early in (0, 3 * MS, 1 * MS, 2 * MS):
        forecast.observe(0, origin + pattern.start_ns, origin + pattern.end_ns - early)
    long = pattern.end_ns - pattern.start_ns > 10 * MS
    cut = (pattern.end_ns - forecast.spans()[1])[long] - SWITCH_NS // 2
    assert 2 * MS <= cut.min() <= cut.max() <= 3 * MS
    assert forecast.version == 4


@pytest.mark.parametrize(("guarded", "left_ns"), [(False, 0), (True, 25 * MS)])
def test_a_worker_without_a_sure_window_has_its_average_one_if_it_guards_itself(guarded: bool, left_ns: int) -> None:
    pattern = Pattern.of_windows([[(0, 100 * MS)], [(0, 100 * MS)]], 100 * MS, ["here"] * 2, 0)
    forecast = Forecast(pattern, guarded=guarded)
    for period in range(8):
        opened, closed = np.array([0, 0 if period % 4 == 0 else 100 * MS]), np.full(2, 100 * MS)
        forecast.observe(0, opened, closed)
    start, end = forecast.spans()
    assert (end - start + SWITCH_NS * (end > start)).tolist() == [100 * MS, left_ns]


def test_a_larger_budget_takes_smaller_margins() -> None:
    learner = Learner(1)
    for k in range(20):
        learner.observe(np.array([k * MS]), np.array([-k * MS]), np.array([True]))
    late_careful, early_careful = learner.margins(0.01)
    late_bold, early_bold = learner.margins(0.25)
    assert (late_careful[0], early_careful[0]) == (19 * MS, -19 * MS)
    assert 0 < late_bold[0] < late_careful[0]
    assert early_careful[0] < early_bold[0] < 0


def test_a_change_of_the_job_is_noticed_and_one_odd_period_is_not() -> None:
    learner, known = Learner(10), np.ones(10, np.bool_)
    zero = np.zeros(10, np.int64)
    for _ in range(10):
        learner.observe(zero, zero, known)
    learner.observe(zero + 50 * MS, zero, known)
    learner.observe(zero, zero, known)
    assert learner.drifts == 0
    for _ in range(DRIFT_PERIODS):
        learner.observe(zero + 50 * MS, zero + 50 * MS, known)
    assert learner.drifts == 1
    late, early = learner.margins(0.01)
    assert late.tolist() == early.tolist() == [50 * MS] * 10


def test_training_leaves_kv_less_than_the_whole_network(found: Result) -> None:
    residual = residual_of(found.timeline, found.case.job, found.case.arrangement)
    left = np.diff(residual.bytes)
    assert (left[np.diff(residual.at_ns) > 0] >= 0).all()
    rate = found.case.job.cluster.datacenters[0].net_gbps * 1e9 / 8
    assert 0 < residual.share(rate) < 1
