"""Predicts how long a wait of training lasts, learnt op by op, so that prefill does not delay training.

A piece may start only if its predicted end plus a margin is before the predicted end of the wait: a short one among the
last waits of the same op. Waits are measured in two ways: from their own start, and from the arrival of the previous
input. Where the WAN is the bottleneck, inputs arrive at fixed times and the wait is shorter when earlier ops were
slower, so the second is more exact. The one that would have wasted less time is used.

For an op with few observations the prediction is the shortest of its waits and the schedule's value, less a tenth. If
waits suddenly become shorter, older ones are dropped at once. A wait whose input was there when it began counts only
until FEW others were observed: nothing can run in it, so it says nothing about waits in which something can, and on a
busy host many waits are like that. Knows waits; not pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

RECENT, FEW = 24, 3
"""Observed waits of an op: the most that are kept, and the fewest to predict by."""
DOUBT = 0.9
"""Share of the schedule's value, and of the first waits, that is used until FEW waits were observed."""


class _Anchor(NamedTuple):
    """The last input that training waited for."""

    op: int
    at_ns: int


class _Wait(NamedTuple):
    waited_ns: int
    anchor: int
    """The op of the previous input."""
    apart_ns: int
    """From that input to this one; 0 if training did not wait for this one, so that its arrival is unknown."""


class Guard:
    """`risk`: the share of waits that may be shorter than predicted."""

    def __init__(self, risk: float, expected_ns: Mapping[int, int] | None = None) -> None:
        self.risk = risk
        self._expected_ns = dict(expected_ns or {})
        self._seen: dict[int, deque[_Wait]] = {}
        self._anchor = _Anchor(-1, 0)

    def expect(self, risk: float, expected_ns: Mapping[int, int]) -> None:
        """Sets the risk and the waits of the schedule, for another service. Observed waits are kept."""
        self.risk, self._expected_ns = risk, dict(expected_ns)

    def wait_ns(self, index: int, began_ns: int) -> int:
        """The predicted length of the wait of op `index` that started at `began_ns`."""
        seen = self._seen.get(index) or deque[_Wait]()
        if len(seen) < FEW:
            expected = [self._expected_ns[index]] if index in self._expected_ns else []
            return int(min([*expected, *(wait.waited_ns for wait in seen)], default=0) * DOUBT)
        short_ns, waste_ns = self._short(wait.waited_ns for wait in seen)
        apart = [wait.apart_ns for wait in seen if wait.anchor == self._anchor.op]
        if len(apart) >= FEW:
            apart_ns, apart_waste_ns = self._short(apart)
            if apart_waste_ns < waste_ns:
                return max(0, self._anchor.at_ns + apart_ns - began_ns)
        return short_ns

    def observe(self, index: int, began_ns: int, ended_ns: int) -> None:
        """Records a wait; its length is 0 if the input was there."""
        seen = self._seen.setdefault(index, deque(maxlen=RECENT))
        waited_ns = ended_ns - began_ns
        if not waited_ns and len(seen) >= FEW and all(wait.waited_ns for wait in seen):
            return
        if len(seen) >= FEW and waited_ns < self.wait_ns(index, began_ns) * DOUBT:
            seen.clear()  # a new plan or a new rhythm: earlier waits do not apply
        seen.append(_Wait(waited_ns, self._anchor.op, ended_ns - self._anchor.at_ns if waited_ns else 0))
        real = [wait for wait in seen if wait.waited_ns]
        if FEW <= len(real) < len(seen):
            self._seen[index] = seen = deque(real, maxlen=RECENT)
        lately = list(seen)[-FEW:]
        if len(seen) > FEW and min(wait.waited_ns for wait in lately) * DOUBT > self.wait_ns(index, began_ns):
            self._seen[index] = deque(lately, maxlen=RECENT)  # likewise if several waits in a row are longer
        if waited_ns:
            self._anchor = _Anchor(index, ended_ns)

    def _short(self, lengths_ns: Iterable[int]) -> tuple[int, int]:
        """The length that only the share `risk` falls below, and how much longer the median is."""
        ordered = sorted(lengths_ns)
        short_ns = ordered[int(self.risk * len(ordered))]
        return short_ns, ordered[len(ordered) // 2] - short_ns
