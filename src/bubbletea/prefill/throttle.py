"""Less prefill where it slows training down. A GPU that never rests may have to lower its clock: training's ops take a
few per cent longer although none starts late. Time is no guard against that; this is.

Some steps are left without prefill, to know what training's ops take alone. Where the others are slower by more than
the operator's budget pays for, a smaller share of every wait is used, its beginning, so that the device rests before
the next op. A share is judged by the steps that had it, and by no others: those before would have it cut again and
again for what it no longer does. Knows durations of ops; not pieces.
"""

from __future__ import annotations

from collections import deque
from statistics import median

ALONE_FIRST, ALONE_EVERY, ALONE_TIMES = 3, 512, 2
"""Steps without prefill: the first ones, and then two of so many, one behind the other."""
RECENT = 9
"""Steps without prefill that are remembered."""
JUDGED = 3
"""Steps by which a share is judged."""
LEAST = 0.1
"""However slow training becomes, this share of its waits is used: the service must be seen to live."""
LOW, AIM = 0.7, 0.85
"""Of the budget: where less than the one is used, the other is aimed at."""
CUT, RISE = 0.4, 1.3
"""The most that one judgement changes."""


def is_alone(step: int, first: int, alone_first: int = ALONE_FIRST) -> bool:
    """Whether all workers of a training that began with step `first` leave this one without prefill. They agree because
    they count the same steps; the service does, too (`serve.promise`)."""
    return step - first < alone_first or (step - first) % ALONE_EVERY >= ALONE_EVERY - ALONE_TIMES


class Throttle:
    """`sensitivity`: by how much an iteration becomes longer where all ops of this worker do, each by 1; the simulator
    knows. Little where the WAN binds, 1 where compute does."""

    def __init__(self, budget: float, sensitivity: float = 1.0, alone_first: int = ALONE_FIRST) -> None:
        self.budget, self.sensitivity, self.alone_first = budget, sensitivity, alone_first
        self.share = 1.0
        """Of each wait."""
        self.slowdown = 0.0
        """Of this worker's ops, by prefill, when the share was last judged."""
        self._step = -1
        self._first: int | None = None
        self._num_filled = 0
        """Steps that had prefill since the share was last judged."""
        self._took: dict[bool, dict[int, deque[int]]] = {True: {}, False: {}}
        """By whether the step had prefill, by op."""

    def may_fill(self, step: int) -> bool:
        if self._first is None:
            self._first = step
        return not is_alone(step, self._first, self.alone_first)

    def ran(self, step: int, index: int, took_ns: int) -> None:
        """An op of training has run."""
        if step != self._step:
            self._end_step()
            self._step = step
        self._took[self.may_fill(step)].setdefault(index, deque(maxlen=RECENT)).append(took_ns)

    def _end_step(self) -> None:
        if self._step < 0 or not self.may_fill(self._step):
            return
        self._num_filled += 1
        if self._num_filled >= JUDGED:
            self.slowdown = self._measured()
            self._adjust()
            self._num_filled = 0
            self._took[True].clear()

    def _measured(self) -> float:
        alone, filled = self._took[False], self._took[True]
        both = [index for index in filled if index in alone]
        before = sum(median(alone[index]) for index in both)
        return sum(median(filled[index]) for index in both) / before - 1 if before else 0.0

    def _adjust(self) -> None:
        cost = self.slowdown * self.sensitivity
        if LOW * self.budget <= cost <= self.budget:
            return
        change = AIM * self.budget / cost if cost > 0 else RISE
        self.share = min(1.0, max(LEAST, self.share * min(RISE, max(CUT, change))))
