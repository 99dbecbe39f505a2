"""Trace files: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas.errors import SpecError
from atlas.spec import TraceRow, read_trace


def test_csv_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("time_s, rate, extra_latency_ms\n0, 1, 0\n10, 0.5, 3\n")
    (tmp_path / "a.json").write_text('[{"time_s": 0, "rate": 1}, {"time_s": 10, "rate": 0.5, "extra_latency_ms": 3}]')
    expected = (TraceRow(0, 1, 0), TraceRow(10, 0.5, 3))
    assert read_trace(tmp_path / "a.csv") == read_trace(tmp_path / "a.json") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "list of 1 to 1,000,000 rows"),
        ("time_s,rate\n", "list of 1 to 1,000,000 rows"),
        ("time_s,rate\n1,1\n", "first row must be at time 0"),
        ("time_s,rate\n0,1\n5,1\n5,1\n", "must be after 5.0, the row before"),
        ("time_s,rate\n0,0\n", "row 0.rate"),
        ("time_s,rate\n0,nan\n", "row 0.rate"),
        ("time_s,rate\n0\n", "row 0.rate"),
        ("time_s,rte\n0,1\n", "unknown column"),
        ("time_s,rate\n0,1,2,3\n", "unknown column"),
        ("0,1\n2,3\n", "unknown column"),
        ('time_s,rate\n"0,1\n', "row 0"),
    ],
)
def test_a_wrong_trace_names_its_row(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=words):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"time_s": 0, "rate": "x"}]', '[{"time_s": null}]'])
def test_a_wrong_json_trace_is_one_message(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(SpecError):
        read_trace(path)
