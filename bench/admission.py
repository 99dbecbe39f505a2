"""One admission decision with 10,000 accelerators and a thousand requests waiting, measured.

The bubbles are those of the five datacenters under Atlas, 42 cells of 240 workers, 2,520 lanes of four; requests are
Azure's where they are at hand, else synthetic, at a load that keeps the bubbles full. Only `admit` is timed: what the
service does on its event loop when a request comes in.
"""

from __future__ import annotations

import gc
import heapq
import os
import sys
import time
from pathlib import Path

import numpy as np
from common.report import Report

from bubbletea.admit.decide import admit, complete
from bubbletea.admit.words import Placement
from bubbletea.bubbles import Forecast
from bubbletea.sim.replay import Ours, arrivals, play
from bubbletea.sim.scene import scene_of
from bubbletea.traces import load_trace, synthetic

CELLS, SPLIT, CHUNK = 42, 4, 4096
WAITING, DECISIONS = 1000, 20_000
DATA = Path(__file__).parents[2] / "shared" / "data" / "requests" / "AzureLLMInferenceTrace_conv.csv"
TRACE = Path(os.environ.get("BUBBLETEA_TRACE", DATA))


def main() -> int:
    trace = load_trace(TRACE) if TRACE.exists() else synthetic()
    job = Path("examples/paper-5-dcs.yaml")
    changes = ["reserved_gib=6", f"cells={CELLS}", f"cluster.datacenters=[{_datacenters()}]"]
    one, scene = (scene_of(job, changes=changes, cells=cells) for cells in (1, CELLS))
    state = scene.state(Forecast(scene.pattern), scene.lanes(SPLIT, CHUNK), (CHUNK,))
    rate = 1.3 * scene.capacity_tokens_per_s(trace)
    times, waiting, ends = [], [], list[tuple[int, str]]()
    gc.collect()
    gc.freeze()  # as the service does once it is set up
    for request in arrivals(trace, rate, 10**15, "online", 20.0, 1):
        now = request.arrival_ns
        while ends and ends[0][0] <= now:
            complete(state, heapq.heappop(ends)[1], now)
        began = time.perf_counter()
        found = admit(state, request, now)
        took = time.perf_counter() - began
        if isinstance(found, Placement):
            heapq.heappush(ends, (found.delivered_ns, request.id))
        if state.num_waiting >= WAITING:
            times.append(took * 1e6)
            waiting.append(state.num_waiting)
        if len(times) >= DECISIONS:
            break
    report = Report("Admission (measured)", "200 us and 2 ms")
    report.figure("accelerators", scene.pattern.num_workers, "")
    report.figure("lanes", len(state.lanes), "")
    report.figure("requests waiting, median", float(np.median(waiting)), "")
    report.figure("one decision, median", float(np.median(times)), "us", at_most=200)
    report.figure("one decision, p99", float(np.percentile(times, 99)), "us", at_most=2000)
    full = one.state(Forecast(one.pattern), one.lanes(SPLIT, CHUNK), (CHUNK,))
    rate = 1.4 * one.capacity_tokens_per_s(trace)
    figures = play(one, Ours(full), "ours", trace, tokens_per_s=rate, periods=2, warm_up=1, patience_s=20.0).figures()
    report.figure("busy, the same decisions in one cell, saturated", figures["utilization"], "", at_least=0.94)
    return report.finish()


def _datacenters() -> str:
    """Room for 42 cells."""
    return ", ".join(
        f"{{name: dc{k}, nodes: 2016, gpus_per_node: 1, gpu: A100-80, net_gbps: 100}}" for k in range(1, 6)
    )


if __name__ == "__main__":
    sys.exit(main())
