"""The windows of a Forecast, one by one, for tests that check what was placed in them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from bubbletea.windows.bubbles import Forecast


class BubbleWindow(NamedTuple):
    start_ns: int
    end_ns: int


def ahead(forecast: Forecast, worker: int, now_ns: int, until_ns: int) -> Iterator[BubbleWindow]:
    """A worker's windows that end after `now_ns` and start before `until_ns`, in order."""
    start, end = forecast.spans()
    pattern, period_ns = forecast.pattern, forecast.period_ns
    own = slice(int(pattern.ptr[worker]), int(pattern.ptr[worker + 1]))
    origin = forecast.anchor_ns + int(pattern.phase_ns[worker])
    for k in range(math.floor((now_ns - origin) / period_ns), math.ceil((until_ns - origin) / period_ns)):
        for a, b in zip(start[own].tolist(), end[own].tolist(), strict=True):
            window = BubbleWindow(origin + k * period_ns + a, origin + k * period_ns + b)
            if a < b and window.end_ns > now_ns and window.start_ns < until_ns:
                yield window
