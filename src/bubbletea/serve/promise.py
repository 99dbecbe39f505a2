"""The operator's promise to training: with prefill, an iteration is longer by at most `budget`. Watches just that: the
time of iterations with filling against that of iterations without. Says which share of every wait may be used.

Iterations without filling are those that all workers leave alone (`throttle.is_alone`) and those in which nothing was
asked of us. A share is judged by the iterations that had it. Where even the least share breaks the promise, the host is
overcommitted: nothing new is let in for a while, the iterations of that pause are the new baseline, and then filling is
tried again. Knows steps and times; not workers' devices, not requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from statistics import median

from bubbletea.prefill.throttle import is_alone

log = logging.getLogger("bubbletea.serve")
ALONE, FEW_ALONE = 12, 2
"""Iterations without filling that are remembered, and how many of them there must be to judge by."""
FEW, MANY = 4, 12
"""Iterations by which a share is cut when it is clearly too much, and by which it is judged in any case."""
LEAST = 0.15
"""Of a wait: less than this is no use to anybody."""
LOW, AIM = 0.5, 0.7
"""Of the budget: where less than the one is used, more is tried; the other is aimed at."""
CUT, RISE = 0.3, 1.25
"""The most that one judgement changes."""
NOISE = 0.001
"""No iteration's time is known better than to this share."""
PAUSE, LONGEST_PAUSE = 24, 384
"""Iterations without anything new after the host was found overcommitted; doubled each time it still is."""


class Promise:
    """`waited` hears every wait of every worker. `share` is what the workers may use of each wait."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.share = 1.0
        self.slowdown = 0.0
        """Of iterations, by filling, when a share was last judged."""
        self.overcommitted = False
        self.num_overcommitted = 0
        """How often that was found."""
        self._starts: dict[int, tuple[int, int]] = {}
        """By worker: the step that it is in, and when that began."""
        self._lengths: dict[int, list[int]] = {}
        """By step: how long it was, as each worker saw it."""
        self._filled: dict[int, bool] = {}
        self._alone: deque[int] = deque(maxlen=ALONE)
        self._judged: list[int] = []
        self._first = 0
        """The step that training began with, or began again with."""
        self._skip = 1
        """Iterations to come that count for nothing: the share has just changed."""
        self._pause, self._left = PAUSE, 0

    @property
    def iteration_s(self) -> float:
        """As long as they are without filling; 0 where nobody knows."""
        return median(self._alone) / 1e9 if self._alone else 0.0

    @property
    def retry_s(self) -> float:
        """When it is tried again."""
        return max(1.0, self._left * self.iteration_s)

    def waited(self, worker: int, step: int, began_ns: int, filled_ns: int, num_workers: int) -> None:
        """One wait; `num_workers` are there in all."""
        self._filled[step] = self._filled.get(step, False) or filled_ns > 0
        known = self._starts.get(worker)
        if known is not None and step == known[0]:
            return
        self._starts[worker] = (step, began_ns)
        if known is None or step != known[0] + 1:
            self._first = step  # a new life of the worker, and so of all training
            self._lengths.clear()
            return
        lengths = self._lengths.setdefault(known[0], [])
        lengths.append(began_ns - known[1])
        if len(lengths) == num_workers:
            self._iterated(known[0], int(median(lengths)))
            for old in [s for s in (*self._lengths, *self._filled) if s <= known[0]]:
                self._lengths.pop(old, None)
                self._filled.pop(old, None)

    def _iterated(self, step: int, took_ns: int) -> None:
        if step == self._first:
            return  # it has a beginning of its own
        if not self._filled.get(step, False):
            self._left = max(0, self._left - 1)
            # Of several left alone the first still has to do with what came before.
            if not is_alone(step, self._first) or is_alone(step - 1, self._first):
                self._alone.append(took_ns)
            if self.overcommitted and not self._left:
                self._try_again()
            return
        if self.overcommitted:
            self._left = max(1, self._left - 1)  # what was let in before is being finished
        elif self._skip:
            self._skip -= 1
        else:
            self._judged.append(took_ns)
            self._judge()

    def _judge(self) -> None:
        if len(self._judged) < FEW or len(self._alone) < FEW_ALONE:
            return
        base = median(self._alone)
        cost = median(self._judged) / base - 1
        error = (_error(self._judged) ** 2 + _error(self._alone) ** 2) ** 0.5 / base
        if cost - 2 * error > self.budget or (len(self._judged) >= MANY and cost > self.budget):
            self._change(cost, max(CUT, AIM * self.budget / cost))
        elif len(self._judged) >= MANY:
            self._change(cost, RISE if cost < LOW * self.budget else 1.0)

    def _change(self, cost: float, factor: float) -> None:
        self.slowdown = cost
        self._judged.clear()
        if factor < 1 and self.share <= LEAST:
            self._stop(cost)
            return
        before, self.share = self.share, min(1.0, max(LEAST, self.share * factor))
        self._skip = int(self.share != before)
        if factor > 1 and self.share == 1.0:
            self._pause = PAUSE

    def _stop(self, cost: float) -> None:
        if not self.num_overcommitted:
            log.warning(
                "the host is overcommitted: with prefill in %.0f %% of every wait, iterations are %.1f %% longer, and "
                "%.1f %% were promised. New requests are refused for %d iterations. Use a host with more cores, or "
                "raise --slowdown",
                *(100 * LEAST, 100 * cost, 100 * self.budget, self._pause),
            )
        self.overcommitted, self.num_overcommitted = True, self.num_overcommitted + 1
        self._left, self._pause = self._pause, min(LONGEST_PAUSE, 2 * self._pause)

    def _try_again(self) -> None:
        self.overcommitted, self._skip = False, 1


def _error(lengths_ns: Sequence[int]) -> float:
    """Of their median: the standard error, from how far they lie from it; a few may lie close by chance."""
    middle, num = median(lengths_ns), len(lengths_ns)
    spread = 1.48 * median(abs(length - middle) for length in lengths_ns)
    return float(1.25 * max(spread, NOISE * middle) * (1 + 3 / num) / num**0.5)
