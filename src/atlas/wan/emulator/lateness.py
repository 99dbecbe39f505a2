"""How late an emulator was: each piece that it delivers has a due time, and what comes after it is counted here.

A run in which the emulator was late says nothing about the path, so `certify` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atlas.errors import AtlasError

BIN_NS = 50_000
NUM_BINS = 2000
"""Lateness beyond 100 ms is all the same: ruinous. The worst is kept exactly."""
P99_LIMIT_S, WORST_LIMIT_S = 0.001, 0.025


class EmulatorLateError(AtlasError):
    """The emulator could not keep up: what was measured through it does not count."""


@dataclass(frozen=True)
class Lateness:
    """A summary, in seconds."""

    num_pieces: int
    mean_s: float
    p50_s: float
    p99_s: float
    worst_s: float

    def __str__(self) -> str:
        ms = f"median {self.p50_s * 1e3:.2f}, p99 {self.p99_s * 1e3:.2f}, worst {self.worst_s * 1e3:.2f} ms"
        return f"{self.num_pieces} pieces late by {ms}"

    def reason(self, p99_s: float = P99_LIMIT_S, worst_s: float = WORST_LIMIT_S) -> str | None:
        """Why the run does not count, or None."""
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
        """Raises EmulatorLateError where the run does not count."""
        reason = self.reason(p99_s, worst_s)
        if reason is not None:
            raise EmulatorLateError(reason)


class Histogram:
    """Counts of lateness in bins; the hot path is `note`."""

    __slots__ = ("bins", "total_ns", "worst_ns")

    def __init__(self) -> None:
        self.bins = [0] * NUM_BINS
        self.total_ns = self.worst_ns = 0

    def note(self, late_ns: int) -> None:
        late_ns = max(late_ns, 0)
        self.bins[min(late_ns // BIN_NS, NUM_BINS - 1)] += 1
        self.total_ns += late_ns
        if late_ns > self.worst_ns:
            self.worst_ns = late_ns

    def summary(self) -> Lateness:
        return summarize(self.bins, self.total_ns, self.worst_ns)


def summarize(bins: Iterable[int], total_ns: int, worst_ns: int) -> Lateness:
    """Percentiles are the upper edges of their bins, never better than the truth."""
    counts = [int(n) for n in bins]
    num = sum(counts)

    def percentile(share: float) -> float:
        left = share * num
        for i, count in enumerate(counts):
            left -= count
            if count and left <= 0:
                return min((i + 1) * BIN_NS, worst_ns) / 1e9
        return worst_ns / 1e9

    mean_s = total_ns / num / 1e9 if num else 0.0
    return Lateness(num, mean_s, percentile(0.5), percentile(0.99), worst_ns / 1e9)
