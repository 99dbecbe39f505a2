"""Compute the metrics of runs from their traces: data points of CCL-Bench (folders with a workload card and a trace per
rank, as `atlas card` writes them), or folders of torch.profiler's Kineto files.

CCL-Bench's metrics are computed by its definitions under its names; Atlas adds metrics of exposed communication,
idle time and imbalance. `--against` shows the first data point beside another one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from atlas.console import Meter, print_json, remark, require_outputs, show, write_text
from atlas.evidence.data_point import DataPoint, read_data_point
from atlas.evidence.metric import Metric
from atlas.evidence.page import metrics_page
from atlas.view.table import plain_table, right, whole_words


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="DIR", help="a data point, a folder of traces, or one trace")
    add(
        "--against",
        type=Path,
        metavar="DIR",
        help="another data point; the ratios are those of the first data point to it",
    )
    add("--salvage", action="store_true", help="read truncated traces up to the damage")
    add("--definitions", action="store_true", help="print what every metric means")
    add("--json", action="store_true", help="print the metrics as JSON")
    add("--page", type=Path, metavar="FILE", help="write an HTML page")


def run(args: argparse.Namespace) -> int:
    require_outputs({"--page": args.page})
    folders = [*args.folders, *([] if args.against is None else [args.against])]
    with Meter() as meter:
        points = [read_data_point(folder, salvage=args.salvage, progress=meter) for folder in folders]
    if args.json:
        print_json([as_dict(point) for point in points])
    else:
        compared = args.against is not None
        show(_table("CCL-Bench's metrics", [point.ccl for point in points], points, compared=compared), "")
        show(_table("Atlas's metrics", [point.own for point in points], points, compared=compared))
        if len(points) == 1:
            show(*_notes(points[0]))
        if args.definitions:
            show("", *(f"{metric.name}: {metric.definition}" for metric in (*points[0].ccl, *points[0].own)))
    for point in points:
        remark(*(f"{point.name}: {finding}" for finding in point.findings))
    if args.page is not None:
        write_text(args.page, metrics_page(points, against=args.against is not None))
    return 0


def as_dict(point: DataPoint) -> dict[str, Any]:
    """A data point's metrics, JSON-able."""
    return {
        "folder": str(point.found.folder),
        "source": point.source,
        "num_traces": len(point.ranks),
        "ccl_bench": [vars(metric) for metric in point.ccl],
        "atlas": [vars(metric) for metric in point.own],
        "findings": point.findings,
    }


def _table(title: str, metrics: list[list[Metric]], points: list[DataPoint], *, compared: bool) -> Table:
    """One line per metric that any data point has a value of."""
    values = [Column(f"{point.name[:24]}\n({point.source})", justify="right") for point in points]
    ratio = right("ratio") if compared else []
    table = plain_table(*whole_words("metric"), *values, "unit", *ratio, title=title)
    for row in zip(*metrics, strict=True):
        if all(metric.value is None for metric in row):
            continue
        times = [ratio_text(row[0].value, row[-1].value)] if compared else []
        table.add_row(row[0].name, *(value_text(metric.value) for metric in row), row[0].unit, *times)
    return table


def value_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def ratio_text(value: float | None, other: float | None) -> str:
    return "–" if value is None or not other else f"{value / other:.3f}x"


def _notes(point: DataPoint) -> list[str]:
    """How the run differs from its job, and the metrics without a value, by reason."""
    slowed = (
        f"all durations were multiplied by {point.slower:g} (--slower): the job's own rates and MFU are "
        f"{point.slower:g} times these."
    )
    by_reason: dict[str, list[str]] = {}
    for metric in (*point.ccl, *point.own):
        if metric.value is None:
            by_reason.setdefault(metric.reason, []).append(metric.name)
    missing = [f"{point.name}: no value for {', '.join(names)}: {reason}." for reason, names in by_reason.items()]
    return [f"{point.name}: {slowed}", *missing] if point.slower != 1 else missing
