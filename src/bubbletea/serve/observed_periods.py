"""The periods of training as its workers report them: when each began, and when its windows opened and closed. The
forecast learns from them, and gets a new pattern if the run's periods are longer or shorter than its plan's.

Knows windows and waits; not requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import Ints
from bubbletea.windows.bubbles import Forecast, observed_pattern

PERIODS = 16
"""Number of periods in the measured slowdown of training."""
STEADY, SPREAD, OTHER = 5, 0.05, 0.02
"""A run whose last periods are alike, and differ from the forecast by more than OTHER, has its own pattern."""
RECENT, CLOSED = 8, 0.25
"""A worker that got no CPU time for a while reports a period in which less than the share CLOSED of its windows was
open. Such a period is learnt only if more than half of the worker's last RECENT periods were like that."""


class ObservedPeriods:
    """`window_of[worker][op]` is the window of the Pattern that ends when that op's input arrives."""

    def __init__(self, forecast: Forecast, window_of: Sequence[Mapping[int, int]]) -> None:
        self.forecast, self._window_of = forecast, window_of
        self._open = np.full(len(forecast.pattern.start_ns), -1, np.int64)
        self._closed = self._open.copy()
        self._round = forecast.pattern.end_ns >= forecast.pattern.period_ns
        """Windows that end with the period: the first op of the next period waits in them."""
        self._step = -1
        self._starts: deque[tuple[int, int]] = deque(maxlen=PERIODS)
        """(step, when it began)"""
        self._observed: deque[tuple[int, Ints]] = deque(maxlen=STEADY)
        """The last periods: their length, and when windows opened and closed."""
        self._was_closed: deque[NDArray[np.bool_]] = deque(maxlen=RECENT)
        """The last periods: by worker, whether its windows were closed."""

    @property
    def slowdown(self) -> float:
        """The share by which training's period is longer than planned."""
        pairs = [(b - a, t - s) for (a, s), (b, t) in pairwise(self._starts) if b > a]
        if not pairs:
            return 0.0
        return float(np.median([took / steps for steps, took in pairs]) / self.forecast.period_ns - 1)

    def waited(self, worker: int, step: int, op: int, began_ns: int, ended_ns: int) -> bool:
        """Records one wait of a training worker; a period is evaluated when the next one starts. Returns whether the
        forecast has a new pattern."""
        window = self._window_of[worker].get(op) if worker < len(self._window_of) else None
        if window is None or step < self._step:
            return False
        is_new = False
        if step > self._step:
            is_new = self._learn()
            self._step = step
        first = self._open[window] < 0
        self._open[window] = began_ns if first else min(began_ns, self._open[window])
        self._closed[window] = max(ended_ns, self._closed[window])
        return is_new

    def forget(self) -> None:
        """Restarted workers count their steps from the first."""
        self._step = -1
        self._starts.clear()
        self._observed.clear()
        self._was_closed.clear()
        self._open.fill(-1)
        self._closed.fill(-1)

    def _learn(self) -> bool:
        is_new, start_ns = False, self._period_start()
        if start_ns is not None:
            period_ns = self._last_period_ns(start_ns)
            self._starts.append((self._step, start_ns))
            opened, closed = (
                np.where(self._round & (at >= 0), at + period_ns, at) for at in (self._open, self._closed)
            )
            ignored = self._is_starved(start_ns, opened, closed)
            self.forecast.observe(start_ns, np.where(ignored, -1, opened), np.where(ignored, -1, closed))
            is_new = self._follow_run(start_ns, period_ns, opened, closed)
        self._open.fill(-1)
        self._closed.fill(-1)
        return is_new

    def _is_starved(self, start_ns: int, opened: Ints, closed: Ints) -> NDArray[np.bool_]:
        """By window: whether its worker had no CPU time in this period, so that the next ones will be different."""
        pattern = self.forecast.pattern
        worker = np.repeat(np.arange(pattern.num_workers), np.diff(pattern.ptr))
        begin = start_ns + pattern.phase_ns[worker] + pattern.start_ns
        length = pattern.end_ns - pattern.start_ns
        usable = np.clip(np.minimum(closed, begin + length) - np.maximum(opened, begin), 0, None)
        usable = np.where((opened >= 0) & (closed >= 0), usable, length)
        open_ns, planned_ns = (np.bincount(worker, ns, pattern.num_workers) for ns in (usable, length))
        is_closed: NDArray[np.bool_] = open_ns < CLOSED * planned_ns
        self._was_closed.append(is_closed)
        is_new = 2 * np.sum(self._was_closed, axis=0) <= RECENT
        starved: NDArray[np.bool_] = (is_closed & is_new)[worker]
        return starved

    def _follow_run(self, start_ns: int, period_ns: int, opened: Ints, closed: Ints) -> bool:
        """A run whose iterations are not as long as its plan's has other windows than its plan: those are taken that
        were observed."""
        self._observed.append(
            (period_ns, np.stack([opened - start_ns, closed - start_ns, (opened >= 0) & (closed >= 0)]))
        )
        periods = [period for period, _ in self._observed]
        usual_ns = int(np.median(periods))
        is_steady = len(periods) == STEADY and max(periods) - min(periods) <= SPREAD * usual_ns
        if not is_steady or abs(usual_ns / self.forecast.period_ns - 1) <= OTHER:
            return False
        seen = np.stack([at for _, at in self._observed])
        usual = np.median(seen, axis=0).astype(np.int64)
        pattern = observed_pattern(self.forecast.pattern, usual_ns, usual[0], usual[1], seen[:, 2].min(axis=0) > 0)
        self.forecast.replan(pattern, start_ns)
        self._round = pattern.end_ns >= pattern.period_ns
        return True

    def _period_start(self) -> int | None:
        """The start of the period, from the ends of its windows."""
        known = self._closed >= 0
        if known.sum() * 2 < len(known):
            return None  # incomplete, for example after a (re)start of workers
        pattern = self.forecast.pattern
        phase: Ints = np.repeat(pattern.phase_ns, np.diff(pattern.ptr))
        ends = np.where(self._round, pattern.end_ns - pattern.period_ns, pattern.end_ns)
        return int(np.median((self._closed - ends - phase)[known]))

    def _last_period_ns(self, start_ns: int) -> int:
        """The length of the previous period, or the forecast's."""
        if self._starts and self._starts[-1][0] == self._step - 1:
            return start_ns - self._starts[-1][1]
        return self.forecast.period_ns
