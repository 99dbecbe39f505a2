from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from view_samples import job

from atlas.ir.analysis import summary
from atlas.ir.difference import difference
from atlas.view.table import compare_table, results_table, seconds


def printed(table: Table, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def test_results_fit_eighty_columns_and_show_every_figure() -> None:
    rows = [
        {**summary(job()), "tcp": "many", "speedup": 1.0, "lower_bound_s": 1.25, "gap": 2.5},
        {**summary(job(sharing=True, name="atlas")), "tcp": "many", "speedup": 1.43, "lower_bound_s": 1.25, "gap": 1.4},
    ]
    text = printed(results_table(rows), 80)
    assert "…" not in text
    for wanted in ("1f1b", "atlas (turns)", "1.43x", "1.250 s", "wan", "simulated"):
        assert wanted in text


def test_a_row_that_lacks_figures_shows_dashes() -> None:
    assert printed(results_table([{"schedule": "[red]x"}]), 100).count("–") >= 6
    assert "[red]x" in printed(results_table([{"schedule": "[red]x"}]), 100)


def test_compare_names_the_first_op_that_differs() -> None:
    text = printed(compare_table(difference(job(), job(sharing=True, name="atlas"))), 160)
    assert "atlas (simulated) against 1f1b (simulated)" in text
    assert "first difference at" in text
    assert "SEND_F" in text


def test_seconds_choose_a_readable_unit() -> None:
    assert [seconds(v) for v in (0.99999, 999.99, 1234.5)] == ["1.000 s", "1,000 s", "1,234 s"]
    assert [seconds(v) for v in (7.81, 0.0602, 1.5e-6, 3e-9, 0, None)] == [
        "7.810 s",
        "60.20 ms",
        "1.500 µs",
        "3 ns",
        "0 s",
        "–",
    ]
