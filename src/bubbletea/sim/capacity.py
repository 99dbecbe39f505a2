"""The load that an operator can promise: the largest at which prefill in bubbles is nearly as fast as on dedicated
accelerators. Found by bisection; knows how to judge a load, not how it is simulated.

The promise, against as many dedicated accelerators at the same load: p50 at most 1.10x, p95 at most one training op
more, at most 5 % refused. The deadline of every request is that p95.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

P50_RATIO, MAX_REFUSED = 1.10, 0.05
LEAST, TENTH, STEP = 0.01, 0.1, 0.01
"""Loads that are tried, as a share of what fills the bubbles; the answer is a multiple of STEP."""


@dataclass(frozen=True)
class JudgedLoad:
    """TTFT in seconds, and the limits that follow from dedicated accelerators at this load."""

    load: float
    p50_s: float | None
    p95_s: float | None
    refused: float
    p50_limit_s: float
    p95_limit_s: float

    @property
    def misses(self) -> list[str]:
        """Which parts of the promise it breaks. Without a served request it has no p50."""
        found = {
            "p50": self.p50_s is None or self.p50_s > self.p50_limit_s,
            "p95": self.p95_s is None or self.p95_s > self.p95_limit_s,
            "refused": self.refused > MAX_REFUSED,
        }
        return [name for name, missed in found.items() if missed]


@dataclass(frozen=True)
class Capacity:
    """`best`: the largest load that holds; None: none does. `worse`: the next one, which does not, if there is one."""

    best: JudgedLoad | None
    worse: JudgedLoad | None


def find_capacity(judge: Callable[[float], JudgedLoad]) -> Capacity:
    """From the largest load down in tenths to the first that holds, then bisection above it. Smaller loads need not
    hold: dedicated accelerators are faster there too, and so the limits are tighter."""
    worse: JudgedLoad | None = None
    for load in (*(round(tenths * TENTH, 9) for tenths in range(10, 0, -1)), LEAST):
        found = judge(load)
        if not found.misses:
            return _bisected(judge, found, worse)
        worse = found
    return Capacity(None, worse)


def _bisected(judge: Callable[[float], JudgedLoad], best: JudgedLoad, worse: JudgedLoad | None) -> Capacity:
    while worse is not None and worse.load - best.load > 1.5 * STEP:
        middle = judge(round((best.load + worse.load) / 2 / STEP) * STEP)
        best, worse = (best, middle) if middle.misses else (middle, worse)
    return Capacity(best, worse)
