"""How long a wait of training lasts, learnt op by op: the guard that keeps prefill out of training's way.

A piece may start only if its predicted end plus a margin lies before the end that this believes in: of the last waits
of the same op, a short one. Waits are measured by two rulers. One starts with the wait itself; but where the WAN sets
the pace an input comes when it comes, and the wait is shorter by whatever the ops before it were slower. The other
starts when the input before came. Of the two, the one that would have wasted less is believed.

An op that has hardly been seen is believed to wait as long as the schedule says and as it was seen to, less a tenth;
one whose waits suddenly become shorter is believed at once. Knows waits; not pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

RECENT = 24
FEW = 3
DOUBT = 0.9
"""What the schedule promises, and the first waits, are believed to this share until a few waits were seen."""


class _Anchor(NamedTuple):
    """The last input that was waited for."""

    op: int
    at_ns: int


class _Wait(NamedTuple):
    waited_ns: int
    anchor: int
    """The op whose input came before."""
    apart_ns: int
    """From that input to this one; 0 where this one did not have to be waited for, and nobody knows."""


class Guard:
    """`risk`: the share of waits that may turn out shorter than believed."""

    def __init__(self, risk: float, expected_ns: Mapping[int, int] | None = None) -> None:
        self.risk = risk
        self._expected_ns = dict(expected_ns or {})
        self._seen: dict[int, deque[_Wait]] = {}
        self._anchor = _Anchor(-1, 0)

    def wait_ns(self, index: int, began_ns: int) -> int:
        """How long the wait of op `index` that began then may be counted on to last."""
        seen = self._seen.get(index) or deque[_Wait]()
        if len(seen) < FEW:
            promised = [self._expected_ns[index]] if index in self._expected_ns else []
            return int(min([*promised, *(wait.waited_ns for wait in seen)], default=0) * DOUBT)
        short_ns, waste_ns = self._short(wait.waited_ns for wait in seen)
        apart = [wait.apart_ns for wait in seen if wait.anchor == self._anchor.op]
        if len(apart) >= FEW:
            apart_ns, apart_waste_ns = self._short(apart)
            if apart_waste_ns < waste_ns:
                return max(0, self._anchor.at_ns + apart_ns - began_ns)
        return short_ns

    def observe(self, index: int, began_ns: int, ended_ns: int) -> None:
        """A wait; one of no length where the input was there."""
        seen = self._seen.setdefault(index, deque(maxlen=RECENT))
        waited_ns = ended_ns - began_ns
        if len(seen) >= FEW and waited_ns < self.wait_ns(index, began_ns) * DOUBT:
            seen.clear()  # a new plan, or a new rhythm: what came before says nothing of what comes
        seen.append(_Wait(waited_ns, self._anchor.op, ended_ns - self._anchor.at_ns if waited_ns else 0))
        lately = list(seen)[-FEW:]
        if len(seen) > FEW and min(wait.waited_ns for wait in lately) * DOUBT > self.wait_ns(index, began_ns):
            self._seen[index] = deque(lately, maxlen=RECENT)  # the same the other way: longer ones, time after time
        if waited_ns:
            self._anchor = _Anchor(index, ended_ns)

    def _short(self, lengths_ns: Iterable[int]) -> tuple[int, int]:
        """One that only the share `risk` falls short of, and by how much most are longer."""
        ordered = sorted(lengths_ns)
        short_ns = ordered[int(self.risk * len(ordered))]
        return short_ns, ordered[len(ordered) // 2] - short_ns
