"""Sets of time intervals as arrays: union, length, and how much of a set lies inside windows or another set.

Plain arithmetic in whatever unit the arrays have; knows no events.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Union(NamedTuple):
    """Intervals that do not touch, in order."""

    start: Floats
    end: Floats

    @property
    def length(self) -> float:
        return float((self.end - self.start).sum())

    def before(self, moment: Floats) -> Floats:
        """By moment: the length of the set up to it."""
        total = np.concatenate([[0.0], np.cumsum(self.end - self.start)])
        index = np.searchsorted(self.start, moment, side="right")
        inside = np.zeros_like(moment) if not len(self.end) else np.maximum(self.end[index - 1] - moment, 0.0)
        return np.asarray(np.where(index > 0, total[index] - inside, 0.0), np.float64)

    def within(self, start: Floats, end: Floats) -> Floats:
        """By window: the length of the set inside it."""
        return np.asarray(self.before(end) - self.before(start), np.float64)


def union(start: Floats, end: Floats) -> Union:
    """The union of intervals in any order."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return Union(start, end)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate([[True], start[1:] > end[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return Union(start[opens], end[closes])


def intersection(one: Union, other: Union) -> Union:
    """The part that both sets have."""
    if not len(one.start) or not len(other.start):
        return Union(np.zeros(0), np.zeros(0))
    # Both are open between two moments of all moments where the number of open sets is two.
    moment = np.concatenate([one.start, other.start, one.end, other.end])
    change = np.concatenate([np.ones(len(one.start) + len(other.start)), -np.ones(len(one.end) + len(other.end))])
    order = np.lexsort((change, moment))
    moment, depth = moment[order], np.cumsum(change[order])
    both = np.flatnonzero(depth[:-1] == 2)
    return union(moment[both], moment[both + 1])


def clipped(start: Floats, end: Floats, low: float, high: float) -> tuple[Floats, Floats]:
    """The intervals inside one window."""
    return np.maximum(start, low), np.minimum(end, high)
