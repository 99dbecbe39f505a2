"""How much an imperfect forecast slows training: planned slices in periods whose ops take a little more or less time
than planned.

Before each layer a slice checks the forecast, not the true end of the window, so a running layer can delay training.
The delay is added to the op's time and the whole Program is simulated again: the result is the effect on the iteration.
Slices after the true end of a window are cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from atlas.evaluate import Result
from atlas.ir.program import Ints
from atlas.ir.timeline import Timeline
from atlas.sim import SeededNoise
from atlas.sim.lower import Tables, noisy
from atlas.sim.simulate import run, timeline
from atlas.sim.weather import WeatherRuns
from bubbletea.admit.records import Placement
from bubbletea.windows.bubbles import Forecast, Pattern, gaps_of, span

WARM_UP = 16
"""Periods in which windows are learnt before requests are placed."""


@dataclass(frozen=True)
class Slowdown:
    """Over all simulated periods."""

    mean: float
    """Relative increase of the iteration."""
    worst: float
    cut: float
    """The share of planned prefill time that was cut because a window ended early."""


class Noise:
    """One cell's training with random durations, and weather on links that have a model; and its windows."""

    def __init__(self, result: Result, compute: float, wan: float) -> None:
        self._compute, self._wan = compute, wan
        self._program = program = result.single.program
        self._costs = result.costs
        self._draws = WeatherRuns(program, self._costs, 0)
        within = span(result.single)
        gaps = [gaps_of(result.single, worker, within) for worker in range(program.num_workers)]
        self._before = np.concatenate([one.before for one in gaps])
        self._behind = np.concatenate([one.behind for one in gaps])
        self._turned = np.concatenate([one.turned for one in gaps])

    def period(self, k: int) -> tuple[Tables, Timeline]:
        """The `k`-th period's durations and Timeline."""
        tables = noisy(self._draws.drawn(k), SeededNoise(k, self._compute, self._wan), self._program)
        return tables, self._played(tables)

    def windows(self, actual: Timeline) -> tuple[Ints, Ints]:
        """When the windows opened and closed, from the ops before and after them."""
        closed = actual.op_start_ns[self._behind] + np.where(self._turned, actual.makespan_ns, 0)
        return actual.op_end_ns[self._before], closed

    def learnt(self, pattern: Pattern, budget: float, slice_ns: int) -> Forecast:
        """A Forecast of `pattern` (of one cell and one iteration) after some noisy periods."""
        forecast = Forecast(pattern, budget=budget, slice_ns=slice_ns)
        for k in range(WARM_UP):
            _, found = self.period(k)
            forecast.observe(0, *self.windows(found))
        return forecast

    def slowdown(self, forecast: Forecast, placements: Iterable[Placement], periods: int) -> Slowdown:
        """Of placements on one cell by a forecast that starts at 0, period by period."""
        planned = _by_window(forecast, placements, periods)
        ends = forecast.spans()[1] + np.repeat(forecast.pattern.phase_ns, np.diff(forecast.pattern.ptr))
        ratios, cut_ns, total_ns = [], 0, 0
        for k in range(periods):
            tables, found = self.period(WARM_UP + k)
            opened, closed = self.windows(found)
            delays = np.zeros(len(tables.op_ns), np.int64)
            for window, slices in planned[k].items():
                wait_ns, lost_ns = _laid_over(slices, int(opened[window]), int(closed[window]), int(ends[window]))
                delays[self._behind[window]] = max(wait_ns, delays[self._behind[window]])
                cut_ns, total_ns = cut_ns + lost_ns, total_ns + sum(end - start for start, end, _ in slices)
            again = self._played(tables._replace(op_ns=tables.op_ns + delays))
            ratios.append(again.iteration_ns / found.iteration_ns - 1)
        return Slowdown(float(np.mean(ratios)), max(ratios), cut_ns / max(1, total_ns))

    def _played(self, tables: Tables) -> Timeline:
        return timeline(self._program, self._costs, tables, run(tables), {})


Planned = list[tuple[int, int, int]]
"""Start, end and layers of a window's slices, in order, counted from the start of the period."""


def _by_window(forecast: Forecast, placements: Iterable[Placement], periods: int) -> list[dict[int, Planned]]:
    """By period and window."""
    pattern, (starts, _) = forecast.pattern, forecast.spans()
    found: list[dict[int, Planned]] = [{} for _ in range(periods)]
    for placement in placements:
        for piece in placement.slices:
            own = slice(int(pattern.ptr[piece.worker]), int(pattern.ptr[piece.worker + 1]))
            phase = int(pattern.phase_ns[piece.worker])
            turn, at = divmod(piece.start_ns - phase, pattern.period_ns)
            window = own.start + int(np.searchsorted(starts[own], at, side="right")) - 1
            if 0 <= turn < periods:
                base = turn * pattern.period_ns
                layers = max(1, piece.end_layer - piece.first_layer)
                found[turn].setdefault(window, []).append((piece.start_ns - base, piece.end_ns - base, layers))
    for one in found:
        for slices in one.values():
            slices.sort()
    return found


def _laid_over(slices: Planned, opened_ns: int, closed_ns: int, forecast_ns: int) -> tuple[int, int]:
    """(how long training waits for the device, planned time that was cut) in one window."""
    now, lost = opened_ns, 0
    for start, end, layers in slices:
        one, left, now = (end - start) // layers, layers, max(now, start)
        while left and now < closed_ns and now + one <= forecast_ns:
            now, left = now + one, left - 1
        lost += left * one
    return max(0, now - closed_ns), lost
