"""How long a wait of training lasts, learnt op by op: the guard that keeps prefill out of training's way.

A piece may start only if its predicted end plus a margin lies before the end that this believes in: of the last waits
of the same op, a short one. An op that has hardly been seen is believed to wait as long as the schedule says and as it
was seen to, less a tenth; one whose waits suddenly become shorter is believed at once. Knows waits; not pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

RECENT = 24
FEW = 3
DOUBT = 0.9
"""What the schedule promises, and the first waits, are believed to this share until a few waits were seen."""


class Guard:
    def __init__(self, risk: float, expected_ns: Mapping[int, int] | None = None) -> None:
        self.risk = risk
        self._expected_ns = dict(expected_ns or {})
        self._seen: dict[int, deque[int]] = {}

    def wait_ns(self, index: int) -> int:
        """How long the op `index` may be counted on to wait."""
        seen = self._seen.get(index) or deque[int]()
        if len(seen) < FEW:
            promised = [self._expected_ns[index]] if index in self._expected_ns else []
            return int(min([*promised, *seen], default=0) * DOUBT)
        ordered = sorted(seen)
        return ordered[int(self.risk * len(ordered))]

    def observe(self, index: int, waited_ns: int) -> None:
        seen = self._seen.setdefault(index, deque(maxlen=RECENT))
        if len(seen) >= FEW and waited_ns < self.wait_ns(index) * DOUBT:
            seen.clear()  # a new plan, or a new rhythm: what came before says nothing of what comes
        seen.append(waited_ns)
        lately = list(seen)[-FEW:]
        if len(seen) > FEW and min(lately) * DOUBT > self.wait_ns(index):
            self._seen[index] = deque(lately, maxlen=RECENT)  # the same the other way: longer ones, time after time
