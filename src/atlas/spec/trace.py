"""Trace files: how the rate and the latency of a link change over time.

CSV with the header `time_s,rate,extra_latency_ms`, or JSON: a list of objects with those keys. `rate` is the share of
the nominal rate; `extra_latency_ms` is optional.
"""

from __future__ import annotations

import csv
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from atlas.spec.document import dotted, read_json, read_text, wrong

MAX_ROWS, MAX_FILE_BYTES = 1_000_000, 64 << 20
MAX_VALUE = 1e9
"""Of any column: seconds, shares and milliseconds beyond it are mistakes."""


class TraceRow(NamedTuple):
    """From `time_s` on, until the next row."""

    time_s: float
    rate: float
    extra_latency_ms: float


def read_trace(path: Path, key: str = "trace") -> tuple[TraceRow, ...]:
    """The rows of a trace file, the first at time 0, times ascending, rates positive."""
    raw = read_json(path, key=key) if path.suffix.lower() == ".json" else _csv_rows(path, key)
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_ROWS:
        raise wrong(path, key, f"a trace is a list of 1 to {MAX_ROWS:,} rows", "Write time_s, rate in each row", raw)
    rows = tuple(_row(path, i, item) for i, item in enumerate(raw))
    if rows[0].time_s != 0:
        raise wrong(path, "row 0.time_s", "the first row must be at time 0", "Add a row for time 0", rows[0].time_s)
    for i, (before, after) in enumerate(pairwise(rows)):
        if after.time_s <= before.time_s:
            rule = f"must be after {before.time_s}, the row before"
            raise wrong(path, f"row {i + 1}.time_s", rule, "Sort the rows", after.time_s)
    return rows


def _csv_rows(path: Path, key: str) -> list[dict[str, Any]]:
    lines = read_text(path, key=key, max_bytes=MAX_FILE_BYTES).splitlines()
    try:
        return [dict(row) for row in csv.DictReader(lines, skipinitialspace=True)]
    except csv.Error as error:
        raise wrong(path, key, f"is not CSV ({error})", "Write time_s,rate,extra_latency_ms") from None


def _row(path: Path, index: int, item: Any) -> TraceRow:
    if not isinstance(item, dict):
        raise wrong(path, f"row {index}", "a row must be an object", "Write time_s, rate, extra_latency_ms", item)
    unknown = [k for k in item if k not in TraceRow._fields]
    if unknown:
        known = ", ".join(TraceRow._fields)
        raise wrong(path, f"row {index}.{dotted((str(unknown[0]),))}", "unknown column", f"Columns are {known}")
    return TraceRow(
        _number(path, index, item, "time_s", minimum=0.0),
        _number(path, index, item, "rate", minimum=1e-6),
        _number(path, index, {"extra_latency_ms": 0, **item}, "extra_latency_ms", minimum=0.0),
    )


def _number(path: Path, index: int, item: dict[str, Any], column: str, minimum: float) -> float:
    try:
        value = float(item.get(column))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not minimum <= value <= MAX_VALUE:
        rule = f"must be a number from {minimum:g} to {MAX_VALUE:g}"
        raise wrong(path, f"row {index}.{column}", rule, "Fix this row", item.get(column))
    return value
