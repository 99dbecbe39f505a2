"""The simulator replays a recorded series: the same rates and delays at the same times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas.cost.price import trace_of
from atlas.cost.table import Costs, Trace, kind_costs, uniform_costs
from atlas.errors import AtlasError
from atlas.ir.program import Layout
from atlas.schedules.classic import gpipe
from atlas.sim import simulate
from atlas.spec.job import Route
from atlas.spec.trace import TraceRow, read_trace
from atlas.wan.probe.recorded_path import Observation, trace_rows, write_csv

MS = 1_000_000
SERIES = (
    Observation(100.0, 40.0, 2.0),
    Observation(100.1, 46.0, 1.0),
    Observation(100.37, 40.5, 0.7),
    Observation(101.0, 40.0, 2.0),
)


def test_the_best_of_a_series_is_nominal_and_rows_begin_at_zero() -> None:
    rows = [TraceRow(*row) for row in trace_rows(SERIES)]
    assert rows[0] == TraceRow(0.0, 1.0, 0.0)
    assert [row.rate for row in rows] == [1.0, 0.5, 0.35, 1.0]
    assert [row.extra_latency_ms for row in rows] == [0.0, 3.0, 0.25, 0.0]


def test_a_trace_file_reads_back_bit_for_bit(tmp_path: Path) -> None:
    rows = trace_rows(SERIES)
    write_csv(tmp_path / "t.csv", TraceRow._fields, rows)
    assert list(read_trace(tmp_path / "t.csv")) == rows


def test_a_recorded_series_replays_exactly(tmp_path: Path) -> None:
    """Every transfer takes the time that is computed here from the series alone."""
    file = tmp_path / "east-west.csv"
    write_csv(file, TraceRow._fields, trace_rows(SERIES))
    route = Route(
        latency_ms=20.0, pair_gbps=2.0, window_bytes=1, trunk_gbps=None, egress_usd_per_gb=0.0, trace=str(file)
    )
    trace = trace_of(route)
    assert trace is not None
    costs = _over(trace)
    timeline = simulate(gpipe(Layout(1, 2, 12, ("east", "west"))), costs)
    assert len(timeline.transfer_start_ns) >= 24
    slowed = 0
    for start, sent, arrive in zip(
        timeline.transfer_start_ns, timeline.transfer_sent_ns, timeline.transfer_arrive_ns, strict=True
    ):
        assert sent - start == pytest.approx(_work_ns(int(start), 50 * MS), abs=2)
        assert arrive - sent == 20 * MS + round(_extra_ms(int(start)) * MS)
        slowed += sent - start > 50 * MS
    assert slowed >= 4, "the series was felt"
    again = simulate(gpipe(Layout(1, 2, 12, ("east", "west"))), costs)
    assert np.array_equal(timeline.transfer_arrive_ns, again.transfer_arrive_ns)


def _over(trace: Trace) -> Costs:
    costs = uniform_costs(
        1,
        2,
        kind_costs(forward_ns=20 * MS, backward_ns=40 * MS),
        wan_boundaries=(0,),
        wan_ns=50 * MS,
        wan_latency_ns=20 * MS,
    )
    return replace(costs, links=tuple(replace(link, trace=trace) for link in costs.links))


def _at(ns: int) -> Observation:
    return [o for o in SERIES if round((o.time_s - 100) * 1e9) <= ns][-1]


def _extra_ms(start_ns: int) -> float:
    return _at(start_ns).rtt_ms / 2 - 20


def _work_ns(start_ns: int, work_ns: float) -> float:
    """Time until `work_ns` of nominal work is done, span by span."""
    edges = [round((o.time_s - 100) * 1e9) for o in SERIES] + [10**15]
    now, left = float(start_ns), float(work_ns)
    while left > 1e-9:
        rate = _at(int(now)).rate_gbps / 2.0
        end = next(edge for edge in edges if edge > now)
        done = min(left, (end - now) * rate)
        now, left = now + done / rate, left - done
    return now - start_ns


def test_times_that_do_not_ascend_are_rejected() -> None:
    with pytest.raises(AtlasError, match="must ascend"):
        trace_rows((SERIES[1], SERIES[0]))
    with pytest.raises(AtlasError, match="at least one"):
        trace_rows(())
