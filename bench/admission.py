"""Time of one admission decision with 10,000 accelerators and a thousand waiting requests (measured).

The bubbles are those of the five datacenters with Atlas: 42 cells of 240 workers, 2,520 lanes of four. Requests come
from Azure's trace if it is available, else they are synthetic, at a load that keeps the bubbles full. Only `admit` is
timed: the part that runs on the service's event loop when a request arrives.
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

from bubbletea.admit.aims import Aims
from bubbletea.admit.decide import admit, advance, complete
from bubbletea.admit.records import Placement
from bubbletea.admit.state import AdmissionState
from bubbletea.sim.replay import ServicePolicy, arrivals, play
from bubbletea.sim.simulated_cluster import simulated_cluster
from bubbletea.sim.traces import RequestTrace, load_trace, synthetic
from bubbletea.windows.bubbles import Forecast

CELLS, SPLIT, CHUNK = 42, 4, 4096
WAITING, DECISIONS = 1000, 20_000
GOAL_S, LATE = 1.0, 0.045
DATA = Path(__file__).parents[2] / "shared" / "data" / "requests" / "AzureLLMInferenceTrace_conv.csv"
TRACE = Path(os.environ.get("BUBBLETEA_TRACE", DATA))


def main() -> int:
    trace = load_trace(TRACE) if TRACE.exists() else synthetic()
    job = Path("examples/paper-5-dcs.yaml")
    changes = ["reserved_gib=6", f"cells={CELLS}", f"cluster.datacenters=[{_datacenters()}]"]
    one, cluster = (simulated_cluster(job, changes=changes, cells=cells) for cells in (1, CELLS))
    lanes, rate = cluster.lanes(SPLIT, CHUNK), 1.3 * cluster.capacity_tokens_per_s(trace)
    report = Report("Admission (measured)", "200 us and 2 ms")
    report.figure("accelerators", cluster.pattern.num_workers, "")
    report.figure("lanes", len(lanes), "")
    gc.collect()
    gc.freeze()  # as in the service after its start
    for name, chunks, aims in (("", (CHUNK,), None), (" with a goal", (CHUNK, 1024, 512), Aims(GOAL_S, LATE))):
        state = cluster.state(Forecast(cluster.pattern), lanes, chunks, aims=aims)
        times, waiting = measured(state, trace, rate)
        report.figure(f"requests waiting{name}, median", float(np.median(waiting)), "")
        report.figure(f"one decision{name}, median", float(np.median(times)), "us", at_most=200)
        report.figure(f"one decision{name}, p99", float(np.percentile(times, 99)), "us", at_most=2000)
    full = one.state(Forecast(one.pattern), one.lanes(SPLIT, CHUNK), (CHUNK,))
    rate = 1.4 * one.capacity_tokens_per_s(trace)
    figures = play(
        one, ServicePolicy(full), "ours", trace, tokens_per_s=rate, periods=2, warm_up=1, patience_s=20.0
    ).figures()
    report.figure("busy, the same decisions in one cell, saturated", figures["utilization"], "", at_least=0.94)
    return report.finish()


def measured(state: AdmissionState, trace: RequestTrace, tokens_per_s: float) -> tuple[list[float], list[int]]:
    """Microseconds of each decision, and the number of waiting requests."""
    times, waiting, ends = [], [], list[tuple[int, str]]()
    for request in arrivals(trace, tokens_per_s, 10**15, "online", 20.0, 1):
        now = request.arrival_ns
        while ends and ends[0][0] <= now:
            complete(state, heapq.heappop(ends)[1], now)
        began = time.perf_counter()
        found = admit(state, request, now)
        took = time.perf_counter() - began
        placed = [found] if isinstance(found, Placement) else []
        for one in (*placed, *advance(state, now)):
            heapq.heappush(ends, (one.delivered_ns, one.request.id))
        num_waiting = len(state.lane_of) + len(state.postponed) + len(state.backlog)
        if num_waiting >= WAITING:
            times.append(took * 1e6)
            waiting.append(num_waiting)
        if len(times) >= DECISIONS:
            break
    return times, waiting


def _datacenters() -> str:
    """Room for 42 cells."""
    return ", ".join(
        f"{{name: dc{k}, nodes: 2016, gpus_per_node: 1, gpu: A100-80, net_gbps: 100}}" for k in range(1, 6)
    )


if __name__ == "__main__":
    sys.exit(main())
