"""Runs of one Program under drawn weather: their times, and which path causes the slowest of them.

The order of ops is fixed before the draws. Draw k of a seed is the same for every Program, so plans compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas.cost.table import Costs
from atlas.cost.weather import drawn, paths_with_weather
from atlas.errors import SpecError
from atlas.ir.program import Program
from atlas.sim.lower import SeededNoise, Tables, lower, noisy, trace_tables
from atlas.sim.simulate import run
from atlas.spec.job import Job

HORIZON = 3
"""A draw covers this many times the iteration without draws."""
TAIL, MOST_REPLAYED = 95, 8
"""Runs beyond this percentile are the tail; of them the slowest are simulated again to find their cause."""


@dataclass(frozen=True)
class Tail:
    """The path whose weather makes the slowest runs slow."""

    path: str
    share: float
    """Of the time by which the tail exceeds the median: what is saved if this path alone had its mean."""

    def words(self) -> str:
        return f"{100 * self.share:.0f} % of the time by which slow runs exceed the median comes from {self.path}"


@dataclass(frozen=True)
class Spread:
    """Iteration times of runs with jitter or weather."""

    times_s: tuple[float, ...]
    tail: Tail | None
    """What causes the runs beyond the 95th percentile; None without weather."""

    def row(self) -> dict[str, Any]:
        """The figures, JSON-able."""
        figures = {f"p{p}_s": float(np.percentile(self.times_s, p)) for p in (5, 50, 95)}
        path, share = (None, None) if self.tail is None else (self.tail.path, self.tail.share)
        worst_s = max(self.times_s)
        return {"runs": len(self.times_s), **figures, "worst_s": worst_s, "tail_path": path, "tail_share": share}


class WeatherRuns:
    """Draws for one Program and its Costs. `change` (tables, run) adds other noise to a run."""

    def __init__(
        self, program: Program, costs: Costs, seed: int, change: Callable[[Tables, int], Tables] | None = None
    ) -> None:
        self.costs, self.seed = costs, seed
        self.tables = lower(program, costs)
        self.paths = paths_with_weather(costs)
        self._change = change
        self._horizon_ns = HORIZON * _makespan_ns(self.tables)

    def time_s(self, k: int, calm: Sequence[str] = ()) -> float:
        """The iteration under draw `k`; the paths in `calm` have their mean."""
        tables = self.drawn(k, calm)
        return _makespan_ns(tables if self._change is None else self._change(tables, k)) / 1e9

    def drawn(self, k: int, calm: Sequence[str] = ()) -> Tables:
        """The tables of draw `k`."""
        if not self.paths:
            return self.tables
        links = drawn(self.costs, self.seed, k, self._horizon_ns, calm).links
        return self.tables._replace(**trace_tables([link.trace for link in links]))

    def tail(self, times_s: Sequence[float]) -> Tail | None:
        """What causes the runs beyond the 95th percentile. None without weather, or where nothing is slower."""
        limit, middle = np.percentile(times_s, [TAIL, 50])
        slowest = [int(k) for k in np.argsort(times_s)[::-1][:MOST_REPLAYED] if times_s[k] >= limit]
        excess = sum(times_s[k] - float(middle) for k in slowest)
        if not self.paths or excess <= 1e-9:
            return None
        saved = {path: sum(times_s[k] - self.time_s(k, (path,)) for k in slowest) for path in self.paths}
        worst = max(saved, key=lambda path: saved[path])
        return Tail(worst, min(1.0, max(0.0, saved[worst] / excess)))


def spread_of(job: Job, program: Program, costs: Costs, runs: int) -> Spread:
    """The same Program with new random durations in each run, and new weather on links that have a model. Only
    transfers between datacenters jitter."""
    jitter = job.jitter
    if not (jitter.compute or jitter.wan or paths_with_weather(costs)):
        raise SpecError(
            where=job.where,
            key="jitter",
            rule="Monte-Carlo runs need a spread, and the job has none",
            remedy="Write jitter: {compute: 0.05, wan: 0.1}, --set jitter.wan=0.1, or a `model` of a link",
        )

    def jittered(tables: Tables, k: int) -> Tables:
        return noisy(tables, SeededNoise(jitter.seed + k, jitter.compute, jitter.wan), program)

    draws = WeatherRuns(program, costs, jitter.seed, jittered if jitter.compute or jitter.wan else None)
    times = [draws.time_s(k) for k in range(runs)]
    return Spread(tuple(times), draws.tail(times))


def _makespan_ns(tables: Tables) -> int:
    events = run(tables)
    return int(events.op_end_ns.max() - events.op_start_ns.min())
