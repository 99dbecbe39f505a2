"""Idle windows of post-training: accelerators whose rollouts wait for tools, as written by `tvcache replay --waits`.
The job's accelerators, memory and prices are used; its training does not run. Knows the file, not the cache.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from atlas.spec.document import read_json, wrong
from bubbletea.sim.simulated_cluster import TOOL_WAITS, SimulatedCluster
from bubbletea.windows.bubbles import Pattern
from bubbletea.windows.free_network import free_network

FORMAT = "tvcache-waits-1"
MAKE = "Make it by `tvcache replay TRAJECTORIES --waits FILE`"
PERIOD_S = 30.0
"""Each accelerator uses this much of the file's windows, each from another start."""
Windows = list[tuple[float, float]]
"""(busy, idle) seconds, in turn."""


def load_waits(path: Path, *, cached: bool = True) -> Windows:
    """The idle windows with the cache, or those without it."""
    found = read_json(path, key="file of `tvcache replay`")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise wrong(path, "format", f"must be {FORMAT!r}", MAKE)
    key = "with_cache" if cached else "without_cache"
    try:
        made = [(float(busy), float(idle)) for busy, idle in found[key]["busy_idle_s"]]
    except (KeyError, TypeError, ValueError):
        made = []
    if not made or not all(0 <= busy < 1e9 and 0 <= idle < 1e9 for busy, idle in made) or not any(map(sum, made)):
        raise wrong(
            path, f"{key}.busy_idle_s", "must be a list of [busy, idle] seconds, none negative and not all 0", MAKE
        )
    return made


def waiting(cluster: SimulatedCluster, windows: Windows) -> SimulatedCluster:
    """The cluster's accelerators with these windows instead of training's; their networks are free."""
    count = cluster.pattern.num_workers
    period_s = min(PERIOD_S, math.fsum(map(sum, windows)))
    spans = [_spans(windows, worker * len(windows) // count, period_s) for worker in range(count)]
    period_ns = round(period_s * 1e9)
    pattern = Pattern.of_windows(spans, period_ns, cluster.pattern.worker_dc, cluster.pattern.memory_bytes)
    network = free_network(count, period_ns, cluster.some_costs.nic_bytes_per_s)
    return replace(cluster, schedule=TOOL_WAITS, pattern=pattern, residual=network, longest_op_ns=0, result=None)


def _spans(windows: Windows, first: int, period_s: float) -> list[tuple[int, int]]:
    """Idle spans of one period from window `first` on, in ns; continues at the start of the list."""
    at_s, found, number = 0.0, [], first
    while at_s < period_s:
        busy, idle = windows[number % len(windows)]
        begin, at_s = at_s + busy, at_s + busy + idle
        if begin < period_s and idle > 0:
            found.append((round(begin * 1e9), round(min(at_s, period_s) * 1e9)))
        number += 1
    return found
