"""Reduces prefill where it slows training's ops. A GPU that never idles may lower its clock: ops then take a few per
cent longer although none starts late, which the guard cannot see.

Some steps are left without prefill to measure training's ops alone. If ops in other steps are slower by more than the
operator's budget, only the first part of every wait is used, so that the device idles before the next op. A share is
judged only by the steps that used it. Knows durations of ops; not pieces.
"""

from __future__ import annotations

from collections import deque
from statistics import median

ALONE_FIRST, ALONE_EVERY, ALONE_TIMES = 3, 512, 2
"""Steps without prefill: the first three, and then two in a row of every 512."""
RECENT = 9
"""Steps without prefill whose durations are kept."""
JUDGED = 3
"""Steps by which a share is judged."""
LEAST = 0.1
"""Smallest share of a wait: the service always makes some progress."""
LOW, AIM = 0.7, 0.85
"""Of the budget: below LOW the share is raised; changes aim at AIM."""
CUT, RISE = 0.4, 1.3
"""The largest change by one judgement."""


def is_alone(step: int, first: int, alone_first: int = ALONE_FIRST) -> bool:
    """Whether all workers of a training that started with step `first`, or was joined there, leave this step without
    prefill. Workers and service (`serve.slowdown_limit`) agree because they count the same steps."""
    return step - first < alone_first or step % ALONE_EVERY >= ALONE_EVERY - ALONE_TIMES


class Throttle:
    """`sensitivity`: relative increase of an iteration per relative increase of this worker's ops, from the simulator:
    near 0 if the WAN is the bottleneck, 1 if compute is."""

    def __init__(self, budget: float, sensitivity: float = 1.0, alone_first: int = ALONE_FIRST) -> None:
        self.budget, self.sensitivity, self.alone_first = budget, sensitivity, alone_first
        self.share = 1.0
        """The share of each wait that is used."""
        self.slowdown = 0.0
        """Of this worker's ops by prefill, at the last judgement."""
        self._step = -1
        self._first: int | None = None
        self._num_filled = 0
        """Steps with prefill since the last judgement."""
        self._took: dict[bool, dict[int, deque[int]]] = {True: {}, False: {}}
        """Durations: whether the step had prefill -> op -> recent ones."""

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
