"""How a path behaved over time, for the simulator: a series of probes becomes the rows of a trace file.

    probe series -> `trace_rows` -> CSV -> `trace:` of a link -> `sim`

Another model of a path, for example a learned one, has to write the same rows. Knows no sockets and no cluster files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from atlas.errors import AtlasError

MIN_RATE_SHARE = 1e-6
"""A rate of zero is written as this share of the nominal rate: a link of rate zero never delivers."""


class Observation(NamedTuple):
    """One probe of a path. The fields are the columns of a series file."""

    time_s: float
    rtt_ms: float
    rate_gbps: float


def trace_rows(series: Sequence[Observation]) -> list[tuple[float, float, float]]:
    """Rows of seconds since the first probe, share of the best rate, milliseconds beyond the best one-way latency.

    Each holds until the next. The best latency and rate of the series are the nominal ones, for the cluster file.
    """
    if not series:
        raise AtlasError("a trace needs at least one observation: probe the path first")
    for before, after in pairwise(series):
        if after.time_s <= before.time_s:
            raise AtlasError(f"observations at {before.time_s} s and {after.time_s} s: times must ascend. Sort them")
    latency_ms, rate_gbps = min(o.rtt_ms for o in series) / 2, max(o.rate_gbps for o in series)
    return [
        (o.time_s - series[0].time_s, max(MIN_RATE_SHARE, o.rate_gbps / rate_gbps), o.rtt_ms / 2 - latency_ms)
        for o in series
    ]


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[float]]) -> None:
    """Numbers are written so that reading them gives the same bits."""
    lines = [",".join(header), *(",".join(repr(float(value)) for value in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
