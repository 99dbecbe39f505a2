"""How a path behaves over time, for the simulator: a series of measurements, replayed as it was.

    probe series -> RecordedPath -> rows of a trace file -> `trace:` of a link -> `sim`

`PathModel` is the interface, one method; a learnt model of a path has only to write the same rows. Knows no sockets.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from atlas.errors import AtlasError, SpecError
from atlas.spec.trace import TraceRow

SERIES_COLUMNS = ("time_s", "rtt_ms", "rate_gbps")


class PathModel(Protocol):
    """Anything that can say how a path goes on for a while."""

    def rows(self, duration_s: float) -> tuple[TraceRow, ...]:
        """From time 0 up to `duration_s`, ascending: share of the nominal rate, latency beyond the nominal."""


@dataclass(frozen=True)
class Observation:
    """One probe of a path."""

    time_s: float
    """Ascending; where the series begins does not matter."""
    rtt_ms: float
    rate_gbps: float


@dataclass(frozen=True)
class RecordedPath:
    """Replays a series exactly: each observation holds until the next."""

    observations: tuple[Observation, ...]
    latency_ms: float
    """Nominal one-way latency: what the cluster file says of the link."""
    pair_gbps: float
    """Nominal rate, of which rows are shares."""
    repeat: bool = False
    """Begin anew after the last observation has held as long as those before it did on average."""

    def __post_init__(self) -> None:
        if not self.observations:
            raise AtlasError("a recorded path needs at least one observation: probe it first")
        for before, after in pairwise(self.observations):
            if after.time_s <= before.time_s:
                raise AtlasError(
                    f"observations at {before.time_s} s and {after.time_s} s: times must ascend. Sort them"
                )

    @property
    def period_s(self) -> float:
        first, last, num = self.observations[0].time_s, self.observations[-1].time_s, len(self.observations)
        return (last - first) * num / (num - 1) if num > 1 else math.inf

    def rows(self, duration_s: float = math.inf) -> tuple[TraceRow, ...]:
        found: list[TraceRow] = []
        turn = 0
        while True:
            start_s = self.observations[0].time_s
            shift_s = turn * self.period_s if turn else 0.0
            for seen in self.observations:
                at_s = seen.time_s - start_s + shift_s
                if at_s >= duration_s and found:
                    return tuple(found)
                found.append(self._row(at_s, seen))
            turn += 1
            if not self.repeat or not math.isfinite(self.period_s) or not math.isfinite(duration_s):
                return tuple(found)

    def _row(self, at_s: float, seen: Observation) -> TraceRow:
        extra_ms = max(0.0, seen.rtt_ms / 2 - self.latency_ms)
        return TraceRow(at_s, max(1e-6, seen.rate_gbps / self.pair_gbps), extra_ms)


def recorded(observations: Iterable[Observation], *, repeat: bool = False) -> RecordedPath:
    """With the best of the series as its nominal figures, which then belong in the cluster file."""
    series = tuple(observations)
    if not series:
        raise AtlasError("a recorded path needs at least one observation: probe it first")
    return RecordedPath(series, min(o.rtt_ms for o in series) / 2, max(o.rate_gbps for o in series), repeat)


def write_trace(path: Path, rows: Sequence[TraceRow]) -> None:
    """The CSV that a link's `trace` names. Numbers are written so that they read back bit for bit."""
    _write_csv(path, TraceRow._fields, rows)


def write_series(path: Path, observations: Iterable[Observation]) -> None:
    """What was measured, as it was measured."""
    _write_csv(path, SERIES_COLUMNS, [(o.time_s, o.rtt_ms, o.rate_gbps) for o in observations])


def read_series(path: Path) -> tuple[Observation, ...]:
    """A file of `write_series`."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise _bad(path, "series", None, f"cannot be read ({error.strerror})") from None
    found = []
    for i, row in enumerate(csv.DictReader(lines)):
        try:
            values = [float(row[name]) for name in SERIES_COLUMNS]
        except (KeyError, TypeError, ValueError):
            raise _bad(path, f"row {i}", row, f"needs numbers for {', '.join(SERIES_COLUMNS)}") from None
        if not all(math.isfinite(value) for value in values) or values[1] < 0 or values[2] <= 0:
            raise _bad(path, f"row {i}", values, "round trips are not negative and rates positive")
        found.append(Observation(*values))
    if not found:
        raise _bad(path, "series", None, "holds no observation")
    return tuple(found)


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[float]]) -> None:
    lines = [",".join(header), *(",".join(repr(float(value)) for value in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def _bad(path: Path, key: str, value: object, rule: str) -> SpecError:
    return SpecError(where=str(path), key=key, value=value, rule=rule, remedy="Record it anew with atlas wan probe")
