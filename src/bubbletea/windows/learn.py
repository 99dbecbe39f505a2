"""Observed windows, one by one: quantiles over the last periods, and detection of a changed job.

Each window of a worker within the period keeps its last deviations from the forecast (how late it opened, how early it
closed); margins are their quantiles. When most windows are outside their whole history for three
periods in a row, the job has changed and the history is dropped. Knows neither workers nor prefill.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import Ints

HISTORY = 32
"""Periods in a quantile."""
DRIFT_PERIODS = 3
DRIFT_SHARE = 0.5
"""The job has changed if this share of the windows is outside its history for this many periods in a row."""
DRIFT_NS = 2_000_000
"""Smaller changes of a window are ignored."""


class Learner:
    """Deviations of every window over the last periods."""

    def __init__(self, num_windows: int) -> None:
        self._late: NDArray[np.float64] = np.full((num_windows, HISTORY), np.nan)
        self._early = self._late.copy()
        self.seen = 0
        """Periods since the last change of the job."""
        self._outside = 0
        self.drifts = 0
        """How often the history was dropped."""

    def observe(self, late_ns: Ints, early_ns: Ints, known: NDArray[np.bool_]) -> None:
        """One period: how much later each window opened, and how much later (negative: earlier) it closed."""
        self._outside = self._outside + 1 if self._is_outside(late_ns, early_ns, known) else 0
        if self._outside >= DRIFT_PERIODS:
            keep = [(self.seen - back) % HISTORY for back in range(1, DRIFT_PERIODS)]
            for held in (self._late, self._early):
                recent = held[:, keep].copy()
                held[:] = np.nan
                held[:, : len(keep)] = recent
            self.seen, self._outside, self.drifts = len(keep), 0, self.drifts + 1
        column = self.seen % HISTORY
        self._late[:, column] = np.where(known, late_ns, np.nan)
        self._early[:, column] = np.where(known, early_ns, np.nan)
        self.seen += 1

    def margins(self, risk: float) -> tuple[Ints, Ints]:
        """By window: nanoseconds to add to its start and to its end, each exceeded with chance `risk` at most."""
        count = min(self.seen, HISTORY)
        if not count:
            return np.zeros(len(self._late), np.int64), np.zeros(len(self._late), np.int64)
        rank = math.ceil((1 - risk) * count) - 1
        late = np.sort(np.where(np.isnan(self._late), -np.inf, self._late), axis=1)[:, HISTORY - count :]
        early = np.sort(np.where(np.isnan(self._early), np.inf, self._early), axis=1)[:, :count]
        return _whole(late[:, rank]), _whole(early[:, count - 1 - rank])

    def averages(self) -> tuple[Ints, Ints]:
        """By window: the average deviations of its start and of its end."""
        counts = np.maximum(1, np.sum(~np.isnan(self._late), axis=1))
        return _whole(np.nansum(self._late, axis=1) / counts), _whole(np.nansum(self._early, axis=1) / counts)

    def _is_outside(self, late_ns: Ints, early_ns: Ints, known: NDArray[np.bool_]) -> bool:
        """Whether most windows are outside their history; the suspected periods are not part of it."""
        count = min(self.seen, HISTORY)
        columns = [(self.seen - 1 - back) % HISTORY for back in range(count)][self._outside :]
        if len(columns) < 2 * DRIFT_PERIODS or not known.any():
            return False
        outside = np.zeros(len(known), np.bool_)
        for held, now in ((self._late, late_ns), (self._early, early_ns)):
            past = held[:, columns]
            low = np.where(np.isnan(past), np.inf, past).min(axis=1) - DRIFT_NS
            high = np.where(np.isnan(past), -np.inf, past).max(axis=1) + DRIFT_NS
            outside |= (now < low) | (now > high)
        return float(outside[known].mean()) > DRIFT_SHARE


def _whole(values: NDArray[np.float64]) -> Ints:
    return np.where(np.isfinite(values), values, 0.0).astype(np.int64)
