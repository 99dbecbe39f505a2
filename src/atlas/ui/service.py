"""The figures of a service beside training, read from its Prometheus metrics. Which series are shown, and how, is
written by the service in the facts of the run (`cards`), so that Atlas knows no service by name.

A card: `label`, `unit`, `kind` (`value`: the sum of a series; `mean`: of a histogram or summary, over the last polls;
`rate`: a counter's growth a second), `series` and `scale`.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)")
"""Series and value in a line of Prometheus text; labels are left out."""
TIMEOUT_S, MAX_BYTES = 2.0, 4 << 20
"""For an answer of the service, and what is read of it."""


class ServiceFollower:
    """`poll` reads the metrics and returns the cards with their values; None where the service does not answer."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.url = str(facts.get("metrics", ""))
        self._cards = [dict(card) for card in facts.get("cards", ()) if isinstance(card, Mapping)]
        self._before: dict[str, float] = {}
        self._before_s = 0.0

    def poll(self) -> list[dict[str, Any]] | None:
        try:
            # The service is on this machine: no proxy.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(self.url, timeout=TIMEOUT_S) as reply:
                text = reply.read(MAX_BYTES).decode(errors="replace")
        except (OSError, ValueError, urllib.error.URLError):
            return None
        return self.cards(text, time.monotonic())

    def cards(self, text: str, now_s: float) -> list[dict[str, Any]]:
        sums = _sums(text)
        found = [
            {"label": card.get("label"), "unit": card.get("unit", ""), "value": self._scaled(card, sums, now_s)}
            for card in self._cards
        ]
        self._before, self._before_s = sums, now_s
        return found

    def _scaled(self, card: Mapping[str, Any], sums: Mapping[str, float], now_s: float) -> float | None:
        value, scale = self._value(card, sums, now_s), card.get("scale", 1)
        return value * scale if value is not None and isinstance(scale, int | float) else value

    def _value(self, card: Mapping[str, Any], sums: Mapping[str, float], now_s: float) -> float | None:
        name, kind = str(card.get("series")), card.get("kind", "value")
        if kind == "value":
            return sums.get(name)
        if kind == "rate":
            span_s = now_s - self._before_s
            known = name in sums and name in self._before and span_s > 0
            return (sums[name] - self._before[name]) / span_s if known else None
        count = sums.get(f"{name}_count", 0.0) - self._before.get(f"{name}_count", 0.0)
        total = sums.get(f"{name}_sum", 0.0) - self._before.get(f"{name}_sum", 0.0)
        if count <= 0:  # nothing since the last poll: the mean of all
            count, total = sums.get(f"{name}_count", 0.0), sums.get(f"{name}_sum", 0.0)
        return total / count if count > 0 else None


def _sums(text: str) -> dict[str, float]:
    """By series: its sum over all labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        found = LINE.match(line)
        if found is None:
            continue
        try:
            value = float(found[2])
        except ValueError:
            continue
        sums[found[1]] = sums.get(found[1], 0.0) + value
    return sums
