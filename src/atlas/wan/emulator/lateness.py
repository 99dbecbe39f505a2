"""How late an emulator was: every packet or chunk has a due time, and deliveries after it are counted here.

A measurement made while the emulator was late does not describe the path, so `certify` rejects it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atlas.errors import AtlasError

BIN_NS, NUM_BINS = 50_000, 2000
"""The histogram ends at 100 ms, far beyond any limit. The worst value is kept exactly."""
P99_LIMIT_S, WORST_LIMIT_S = 0.001, 0.025
"""Chosen for round trips of 20 ms and more: 5 % of the shortest at the 99th percentile, and a single stray delivery."""


class EmulatorLateError(AtlasError):
    """The emulator was late: what was measured through it does not count."""


@dataclass(frozen=True)
class Lateness:
    """A summary of lateness, in seconds."""

    num_pieces: int
    p50_s: float
    p99_s: float
    worst_s: float

    def __str__(self) -> str:
        ms = f"median {self.p50_s * 1e3:.2f}, p99 {self.p99_s * 1e3:.2f}, worst {self.worst_s * 1e3:.2f} ms"
        return f"{self.num_pieces} pieces late by {ms}"

    def reason(self, p99_s: float = P99_LIMIT_S, worst_s: float = WORST_LIMIT_S) -> str | None:
        """Why the measurement does not count; None if it counts."""
        if self.num_pieces == 0:
            return "nothing went through the emulator"
        for what, value, limit in (("p99", self.p99_s, p99_s), ("worst", self.worst_s, worst_s)):
            if value > limit:
                return (
                    f"the emulator was late: {what} {value * 1e3:.2f} ms, {limit * 1e3:g} ms allowed "
                    f"({self}). Lower the rates or free a core"
                )
        return None

    def certify(self, p99_s: float = P99_LIMIT_S, worst_s: float = WORST_LIMIT_S) -> None:
        """Raises EmulatorLateError if the measurement does not count."""
        reason = self.reason(p99_s, worst_s)
        if reason is not None:
            raise EmulatorLateError(reason)


class Histogram:
    """Counts lateness in bins. `note` is called for every delivery."""

    __slots__ = ("bins", "worst_ns")

    def __init__(self) -> None:
        self.bins = [0] * NUM_BINS
        self.worst_ns = 0

    def note(self, late_ns: int) -> None:
        late_ns = max(late_ns, 0)
        self.bins[min(late_ns // BIN_NS, NUM_BINS - 1)] += 1
        if late_ns > self.worst_ns:
            self.worst_ns = late_ns


def summarize(bins: Iterable[int], worst_ns: int) -> Lateness:
    """Percentiles are the upper edges of their bins, so they are never too small."""
    counts = [int(n) for n in bins]
    num = sum(counts)

    def percentile(share: float) -> float:
        left = share * num
        for i, count in enumerate(counts):
            left -= count
            if count and left <= 0:
                return min((i + 1) * BIN_NS, worst_ns) / 1e9
        return worst_ns / 1e9

    return Lateness(num, percentile(0.5), percentile(0.99), worst_ns / 1e9)
