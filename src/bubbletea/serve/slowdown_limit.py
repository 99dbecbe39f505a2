"""The operator's limit on the slowdown of training: prefill may make an iteration longer by at most `budget`. This
module compares iterations with prefill to iterations without, and sets the share of every wait that prefill may use.

The baseline is the iterations without prefill: those in which no worker prefills (`throttle.is_alone`), those without
requests, and those of a probe: before a share is cut, the baseline is measured again unless it is recent, because other
load on the host makes iterations longer too. A share is judged by the iterations that used it. If even the smallest
share exceeds the limit, the host is overcommitted: new requests are refused for a while, and then prefill is tried
again. A cut applies to requests admitted after it: those admitted before get the share that admission counted on
(`owe`), or they would miss their deadlines; iterations that used more than the share are not judged. Knows steps and
times; not devices, not requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from bubbletea.prefill.throttle import is_alone

log = logging.getLogger("bubbletea.serve")
MAX_ALONE, MIN_ALONE = 12, 2
"""Iterations without prefill: the most that are kept, and the fewest to judge by."""
FEW, MANY, LONG = 4, 12, 48
"""Iterations with prefill that are judged: a breach by two standard errors needs few, one by one standard error needs
many. After a long series the median alone decides."""
PROBE = 2
"""Iterations of a probe that count. The one before them may still be affected by prefill."""
RECENT, MAX_RECENT = 4, 64
"""Age of the baseline, in iterations with prefill, above which it is measured again before a cut. Doubled by every
probe, so that probes take at most 5 % of the iterations."""
MIN_SHARE = 0.15
"""Of a wait. A smaller share is too short for a piece of prefill."""
LOW, AIM = 0.5, 0.7
"""Of the budget: the share is raised below LOW, and a cut aims at AIM."""
CUT, RISE = 0.3, 1.25
"""The largest change by one judgement."""
IDLE = 24
"""Iterations in a row without any prefill after which a reduced share is raised. It may be too small for any piece, and
then nothing would ever be measured with it."""
SETTLE = 4
"""Iterations with prefill after a restart that do not count."""
NOISE = 0.001
"""Of an iteration's time: the smallest spread that is assumed."""
SIGMA_PER_DEVIATION, MEDIAN_ERROR = 1.48, 1.25
"""Of a normal distribution: its standard deviation in median absolute deviations (1 / 0.6745), and the standard error
of a median in those of a mean (sqrt(pi / 2))."""
PAUSE, LONGEST_PAUSE = 24, 384
"""Iterations without new requests after the host was found overcommitted; doubled each time."""


class SlowdownLimit:
    """Call `waited` for every wait of every worker; workers may use `allowed` of each wait."""

    def __init__(self, budget: float, on_iteration: Callable[[float], None] = lambda seconds: None) -> None:
        self.budget, self.on_iteration = budget, on_iteration
        self.share = 1.0
        self.slowdown = 0.0
        """Of iterations by prefill, when a share was last judged."""
        self.overcommitted = False
        self.num_overcommitted = 0
        self._starts: dict[int, tuple[int, int]] = {}
        """By worker: its current step, and when that began."""
        self._lengths: dict[int, list[int]] = {}
        """By step: its length as measured by each worker."""
        self._filled: dict[int, bool] = {}
        self._alone: deque[int] = deque(maxlen=MAX_ALONE)
        self._judged: deque[int] = deque(maxlen=LONG)
        self._first = 0
        """The first step since training started or restarted."""
        self._skip = 1
        """Iterations that do not count because the share has just changed."""
        self._pause, self._left = PAUSE, 0
        self._age, self._recent = 0, RECENT
        """Iterations with prefill since the baseline was measured; from which age on a cut needs a probe."""
        self._probed: list[int] | None = None
        """Iterations of the probe so far; None outside a probe."""
        self._was_filled = False
        """The iteration before."""
        self._owed = 0.0
        self._num_idle = 0
        """Iterations without prefill since the last one with it."""

    @property
    def allowed(self) -> float:
        """The share of each wait that may be used now: none during a probe."""
        return max(self.share, self._owed) if self._probed is None else 0.0

    def owe(self, share: float) -> None:
        """The largest share that open online requests were admitted with."""
        self._owed = share
        if share > self.share:
            self._skip = max(self._skip, 1)

    @property
    def iteration_s(self) -> float:
        """Without prefill; 0 if it was not measured yet."""
        return median(self._alone) / 1e9 if self._alone else 0.0

    @property
    def retry_s(self) -> float:
        """Until prefill is tried again."""
        return max(1.0, self._left * self.iteration_s)

    def waited(self, worker: int, step: int, began_ns: int, filled_ns: int, num_workers: int) -> None:
        """One wait of one of `num_workers` workers."""
        self._filled[step] = self._filled.get(step, False) or filled_ns > 0
        known = self._starts.get(worker)
        if known is not None and step == known[0]:
            return
        self._starts[worker] = (step, began_ns)
        if known is None or step != known[0] + 1:
            self._restarted(step)  # the worker, and with it all training
            return
        lengths = self._lengths.setdefault(known[0], [])
        lengths.append(began_ns - known[1])
        if len(lengths) == num_workers:
            self._iterated(known[0], int(median(lengths)))
            for old in [s for s in (*self._lengths, *self._filled) if s <= known[0]]:
                self._lengths.pop(old, None)
                self._filled.pop(old, None)

    def _restarted(self, step: int) -> None:
        """The first iterations are slow whatever prefill does, and the baseline is of other processes: a cut needs a
        new one."""
        self._first = step
        self._lengths.clear()
        if self._alone:
            self._judged.clear()
            self._skip, self._age = max(self._skip, SETTLE), self._recent + 1

    def _iterated(self, step: int, took_ns: int) -> None:
        if step == self._first:
            return  # the first step includes the start
        self.on_iteration(took_ns / 1e9)
        filled, was_filled = self._filled.get(step, False), self._was_filled
        self._was_filled = filled
        if not filled:
            self._left = max(0, self._left - 1)
            if not was_filled or not (self._probed is not None or is_alone(step, self._first)):
                self._measured_alone(took_ns)
            if self.overcommitted and not self._left:
                self.overcommitted, self._skip = False, 1
            self._num_idle = 0 if self.overcommitted else self._num_idle + 1
            if self._num_idle == IDLE:
                self._num_idle, self.share = 0, min(1.0, self.share * RISE)
            return
        self._num_idle = 0
        self._age += 1
        if self.overcommitted:
            self._left = max(1, self._left - 1)  # requests admitted before are being finished
        elif self._skip:
            self._skip -= 1
        elif self._probed is None:
            self._judged.append(took_ns)
            self._judge()

    def _measured_alone(self, took_ns: int) -> None:
        self._age = 0
        if self._probed is None:
            self._alone.append(took_ns)
            return
        self._probed.append(took_ns)
        if len(self._probed) < PROBE:
            return
        probed, self._probed, self._recent = self._probed, None, min(MAX_RECENT, 2 * self._recent)
        if abs(median(probed) - median(self._alone)) > 2 * (_error(probed) ** 2 + _error(self._alone) ** 2) ** 0.5:
            self._alone.clear()  # the host is busier or less busy than before
        self._alone.extend(probed)
        self._judge()
        if len(self._alone) == PROBE:
            self._judged.clear()
        self._skip = 1

    def _judge(self) -> None:
        num = len(self._judged)
        if num < FEW or len(self._alone) < MIN_ALONE:
            return
        base = median(self._alone)
        cost = median(self._judged) / base - 1
        error = (_error(self._judged) ** 2 + _error(self._alone) ** 2) ** 0.5 / base
        if cost - (1 if num >= MANY else 2) * error > self.budget or (num >= LONG and cost > self.budget):
            if self._age > self._recent:
                self._probed = []
            else:
                self._change(cost, max(CUT, AIM * self.budget / cost))
        elif num >= MANY and cost <= self.budget:
            self._change(cost, RISE if cost < LOW * self.budget else 1.0)

    def _change(self, cost: float, factor: float) -> None:
        self.slowdown = cost
        self._judged.clear()
        if factor < 1 and self.share <= MIN_SHARE:
            self._stop(cost)
            return
        before, self.share = self.share, min(1.0, max(MIN_SHARE, self.share * factor))
        self._skip = int(self.share != before)
        if factor > 1 and self.share == 1.0:
            self._pause = PAUSE

    def _stop(self, cost: float) -> None:
        if not self.num_overcommitted:
            log.warning(
                "the host is overcommitted: with prefill in %.0f %% of every wait, iterations are %.1f %% longer; the "
                "limit is %.1f %%. New requests are refused for %d iterations. Use a host with more cores, or raise "
                "--slowdown",
                *(100 * MIN_SHARE, 100 * cost, 100 * self.budget, self._pause),
            )
        self.overcommitted, self.num_overcommitted = True, self.num_overcommitted + 1
        self._left, self._pause = self._pause, min(LONGEST_PAUSE, 2 * self._pause)


def _error(lengths_ns: Sequence[int]) -> float:
    """The standard error of their median, from the median deviation; larger for few, which may agree by chance."""
    middle, num = median(lengths_ns), len(lengths_ns)
    spread = SIGMA_PER_DEVIATION * median(abs(length - middle) for length in lengths_ns)
    return float(MEDIAN_ERROR * max(spread, NOISE * middle) * (1 + 3 / num) / num**0.5)
