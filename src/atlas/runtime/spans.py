"""The union of spans: how much of an interval at least one of them covers. Knows moments only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from atlas.ir.program import Ints
from atlas.runtime.device import Span


class SpanUnion:
    """Overlapping spans count once."""

    def __init__(self, spans: Iterable[Span]) -> None:
        joined: list[tuple[int, int]] = []
        for start_ns, end_ns in sorted(spans):
            if joined and start_ns <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end_ns))
            else:
                joined.append((start_ns, end_ns))
        self._joined: Ints = np.array(joined, np.int64).reshape(-1, 2)

    def within_ns(self, span: Span) -> int:
        """How much of this span is covered."""
        first = np.searchsorted(self._joined[:, 1], span.start_ns)
        last = np.searchsorted(self._joined[:, 0], span.end_ns)
        inside = np.clip(self._joined[first:last], span.start_ns, span.end_ns)
        return int((inside[:, 1] - inside[:, 0]).sum())
