"""CCL-Bench's metrics on real Kineto traces, against the values that its own tools gave; the time and memory of reading
a trace of 216,092 events; a trace of 1 GB in bounded memory; and our own runs, exported and read again.

    python bench/evidence.py DATA [--quick]

DATA is a folder with `README.md` (a table of metrics by trace) and `kineto/*.json.gz`. Without it, or where it does
not exist, only our own runs are measured; the bench ends with 77 if nothing was measured against real traces.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common.report import NOT_MEASURED, Report

import atlas
from atlas.evidence.ccl import ccl_metrics, rank_figures
from atlas.evidence.data_point import read_data_point
from atlas.evidence.rank_trace import read_rank
from atlas.evidence.write_card import RunFacts, write_data_point

ROOT = Path(__file__).parents[1]
DEFAULT_DATA = ROOT.parent / "shared" / "data"
LARGE = "df_index_resolver"
MAX_CPU_S, MAX_MB, MAX_DIFFERENCE, MIN_VALUES = 3.0, 600, 1e-6, 14
GIGABYTE_EVENTS = 2_000_000

CHILD = """
import json, resource, sys, time
from pathlib import Path
from atlas.evidence.data_point import read_data_point
before = time.process_time()
point = read_data_point(Path(sys.argv[1]))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([time.process_time() - before, used.ru_maxrss / 1024, point.ranks[0].num_kernels]))
"""


def golden(readme: Path) -> dict[str, dict[str, float]]:
    """By trace and metric: the value, from the table whose header begins with `metric`."""
    found: dict[str, dict[str, float]] = {}
    traces: list[str] = []
    for line in readme.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "metric":
            traces = cells[1:]
        elif traces and len(cells) == len(traces) + 1 and not cells[0].startswith("-"):
            for trace, value in zip(traces, cells[1:], strict=True):
                found.setdefault(trace, {})[cells[0]] = float(value)
    return found


def difference(ours: float | None, theirs: float) -> float:
    """Relative; their -1 and nan are no value."""
    if ours is None or theirs == -1 or math.isnan(theirs):
        return 0.0 if ours is None and (theirs == -1 or math.isnan(theirs)) else math.inf
    return abs(ours - theirs) / abs(theirs) if theirs else abs(ours)


def real_traces(report: Report, data: Path) -> None:
    for trace, wanted in golden(data / "README.md").items():
        figures = rank_figures(read_rank(data / "kineto" / f"{trace}.json.gz"))
        ours = {metric.name: metric.value for metric in ccl_metrics([figures], None)}
        worst = max(difference(ours[name], value) for name, value in wanted.items())
        name = f"{trace}: worst difference of {len(wanted)} metrics"
        report.figure(name, 1e6 * worst, "1e-6", at_most=1e6 * MAX_DIFFERENCE)
    odd = [path for path in sorted((data / "kineto").glob("*.json.gz")) if read_data_point(path).ccl]
    report.figure("real traces read, odd ones too", len(odd), "traces", at_least=8)
    cpu_s, mb, _ = in_child(data / "kineto" / f"{LARGE}.json.gz")
    report.figure("216,092 events: all metrics", cpu_s, "CPU s", at_most=MAX_CPU_S)
    report.figure("216,092 events: memory", mb, "MB", at_most=MAX_MB)


def in_child(path: Path) -> tuple[float, float, int]:
    """CPU seconds, megabytes and kernels of reading a data point in a process of its own."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
    cpu_s, mb, kernels = json.loads(done.stdout)
    return cpu_s, mb, kernels


def large_trace(report: Report, num_events: int) -> None:
    """A gzip member repeated: 500 bytes an event, one in twenty a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0_trace.json.gz"
        filler = {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": 1, "dur": 2, "args": {"shape": "x" * 400}}
        kernel = {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 0,
            "ts": 5,
            "dur": 2.5,
            "args": {"grid": [1] * 150},
        }
        member = gzip.compress(("," + ",".join(map(json.dumps, [*[filler] * 950, *[kernel] * 50]))).encode())
        with path.open("wb") as file:
            file.write(gzip.compress(b'{"traceEvents": [{"ph": "M"}'))
            for _ in range(num_events // 1000):
                file.write(member)
            file.write(gzip.compress(b"]}"))
        cpu_s, mb, kernels = in_child(path)
    assert kernels == num_events // 20
    report.figure(f"{num_events * 500 / 1e9:g} GB of events: memory", mb, "MB", at_most=MAX_MB)
    report.figure(f"{num_events * 500 / 1e9:g} GB of events: time", cpu_s, "CPU s")


def own_runs(report: Report, *, emulate: bool) -> None:
    found = atlas.simulate(ROOT / "examples" / "gpt-a.yaml", "atlas", iterations=7).best
    runs = {"simulated": (found.timeline, found.case)}
    if emulate:
        run = atlas.train(ROOT / "examples" / "tiny.yaml", "1f1b", steps=7, slower=3)
        case = atlas.simulate(ROOT / "examples" / "tiny.yaml", "1f1b").best.case
        runs["emulated"] = (run.measured, case)
    for name, (timeline, case) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            point = write_data_point(Path(folder) / "point", timeline, case.job, case.arrangement, RunFacts(name))
        values = sum(metric.value is not None for metric in point.ccl)
        report.figure(f"{name} run: metrics of CCL-Bench's 25 with a value", values, "metrics", at_least=MIN_VALUES)
        report.figure(f"{name} run: findings of the cross-check", len(point.findings), "findings", at_most=0)
        off = abs((point.value("avg_step_time") or 0.0) / (timeline.iteration_ns / 1e9) - 1)
        report.figure(f"{name} run: step time of the traces off the timeline's", 100 * off, "%", at_most=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, default=Path(os.environ.get("ATLAS_DATA", DEFAULT_DATA)))
    parser.add_argument("--quick", action="store_true", help="a trace of 0.1 GB instead of 1 GB, no emulated run")
    args = parser.parse_args()
    report = Report("Evidence: metrics of traces", "CCL-Bench's own tools on the same traces")
    there = (args.data / "kineto").is_dir()
    if there:
        real_traces(report, args.data)
    else:
        report.void("df_index_resolver: worst difference", f"no Kineto traces in {args.data}")
    large_trace(report, GIGABYTE_EVENTS // (10 if args.quick else 1))
    own_runs(report, emulate=not args.quick)
    status = report.finish()
    return status if there or status else NOT_MEASURED


if __name__ == "__main__":
    sys.exit(main())
