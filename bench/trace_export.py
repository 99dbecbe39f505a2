"""Time to write a Chrome/Perfetto trace of 262,144 op spans, compared with `json.dumps` of one dict per span in the
same run.

Reference case: 4 pipelines of 64 stages, 512 microbatches, 1F1B, four datacenters.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common.host import median_s
from common.report import Report

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.program import Kind, Layout
from atlas.ir.timeline import Timeline
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from atlas.view.perfetto import write_trace

BAR_S = 0.5
MS = 1_000_000


def reference_case() -> Timeline:
    program = one_f_one_b(Layout.even(4, 64, 512, 4))
    boundaries = tuple(np.flatnonzero(program.boundary_crosses).tolist())
    costs = uniform_costs(
        4,
        64,
        kind_costs(forward_ns=10 * MS, backward_ns=20 * MS),
        lan_ns=MS,
        wan_boundaries=boundaries,
        wan_ns=40 * MS,
        wan_latency_ns=20 * MS,
    )
    return simulate(program, costs)


def with_json_dumps(path: Path, timeline: Timeline) -> None:
    """The straightforward way, for comparison."""
    program = timeline.program
    names = [kind.name for kind in Kind]
    columns = (
        program.kind.tolist(),
        program.stage.tolist(),
        program.microbatch.tolist(),
        program.op_worker.tolist(),
        timeline.op_start_ns.tolist(),
        timeline.op_end_ns.tolist(),
    )
    events = [
        {
            "ph": "X",
            "name": f"{s}{names[k]}{m}",
            "cat": names[k],
            "pid": 1,
            "tid": w,
            "ts": a / 1e3,
            "dur": (b - a) / 1e3,
        }
        for k, s, m, w, a, b in zip(*columns, strict=True)
    ]
    path.write_text(json.dumps({"traceEvents": events}))


def main() -> int:
    timeline = reference_case()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours.json", Path(folder) / "theirs.json"
        fast = median_s(lambda: write_trace(ours, timeline), 5, time.perf_counter)
        slow = median_s(lambda: with_json_dumps(theirs, timeline), 3, time.perf_counter)
        num_spans = sum(e.get("cat") in ("F", "B") for e in json.loads(ours.read_bytes())["traceEvents"])
        size_mb = ours.stat().st_size / 1e6
    report = Report("A trace to a file, seconds, medians", "json.dumps of one dict per span, ops only, same run")
    report.figure("trace_export", fast, "s", at_most=BAR_S)
    report.figure("op spans in it", num_spans, "spans", at_least=262_144)
    report.figure("size, WAN transfers included", size_mb, "MB")
    report.figure("json.dumps", slow, "s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
