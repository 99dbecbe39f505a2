"""The exact optimum of small cases, by constraint programming (OR-tools CP-SAT), for tests and `bench/optimum.py`.

The search is compared with it. It is no scheduler: seconds to minutes for a dozen microbatches. It may choose every
start time freely under the same rules as the dispatcher: ascending microbatches within a kind, one op at a time
on a worker, one whole transfer at a time on a link, memory from a forward's start to its last backward's end.
Links of policy FAIR, several servers and rates that vary are outside its model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from atlas.cost.table import FAIR, Costs
from atlas.errors import AtlasError
from atlas.ir.program import Kind, Layout


@dataclass(frozen=True)
class Optimum:
    """What the solver proved."""

    makespan_ns: int
    """Of the best schedule it found."""
    bound_ns: int
    """No schedule is faster than this."""

    @property
    def proven(self) -> bool:
        return self.makespan_ns == self.bound_ns


def optimum(
    layout: Layout, costs: Costs, *, cap: int, recompute: bool, split: bool, seconds: float = 30.0, upper_ns: int = 0
) -> Optimum:
    """The fastest possible iteration with at most `cap` microbatches in flight on any worker."""
    from ortools.sat.python import cp_model

    if any(link.policy == FAIR or link.servers != 1 or link.trace for link in costs.links):
        raise AtlasError("the exact optimum knows private and turn-taking links of constant rate only")
    unit = _common_unit(costs)
    model = cp_model.CpModel()
    horizon = upper_ns // unit if upper_ns else _horizon(layout, costs) // unit
    build = _Model(model, layout, costs, unit, horizon, recompute, split, cap)
    build.constrain()
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise AtlasError(f"no schedule found within {seconds} s: {solver.status_name(status)}")
    bound = int(np.ceil(solver.best_objective_bound - 1e-6))
    return Optimum(int(solver.objective_value) * unit, bound * unit)


def _common_unit(costs: Costs) -> int:
    used = [costs.compute_ns[:, :, : Kind.W + 1], costs.work_ns, costs.before_ns, costs.latency_ns]
    return gcd(*(int(v) for array in used for v in np.unique(array))) or 1


def _horizon(layout: Layout, costs: Costs) -> int:
    """Everything one after the other."""
    compute = costs.compute_ns[:, :, [Kind.F, Kind.R, Kind.I, Kind.W, Kind.B]].sum()
    network = (costs.work_ns + costs.before_ns + costs.latency_ns).sum()
    return int(compute + network) * layout.num_microbatches


class _Model:
    """Variables and constraints; `model` is OR-tools' CpModel, untyped."""

    def __init__(
        self, model: Any, layout: Layout, costs: Costs, unit: int, horizon: int, recompute: bool, split: bool, cap: int
    ) -> None:
        self.model, self.layout, self.costs = model, layout, costs
        self.unit, self.horizon = unit, horizon
        self.recompute, self.split, self.cap = recompute, split, cap
        self.backward = Kind.I if split else Kind.B
        self.end = model.new_int_var(0, horizon, "makespan")
        self.ops: dict[tuple[int, int, int, int], tuple[Any, Any, Any]] = {}
        self.on_link: dict[int, list[Any]] = {}

    def constrain(self) -> None:
        for c in range(self.layout.num_pipelines):
            for s in range(self.layout.num_stages):
                self._worker(c, s)
        for c in range(self.layout.num_pipelines):
            for b in range(self.layout.num_stages - 1):
                for m in range(self.layout.num_microbatches):
                    self._transfer(0, c, b, m, (c, b, Kind.F, m), (c, b + 1, Kind.F, m))
                    self._transfer(1, c, b, m, (c, b + 1, self.backward, m), (c, b, self.backward, m))
        for intervals in self.on_link.values():
            self.model.add_no_overlap(intervals)
        self.model.minimize(self.end)

    def _interval(self, length: int, name: str) -> tuple[Any, Any, Any]:
        start = self.model.new_int_var(0, self.horizon, name)
        end = self.model.new_int_var(0, self.horizon, name)
        return start, end, self.model.new_interval_var(start, length, end, name)

    def _kinds(self, stage: int) -> list[Kind]:
        last = stage == self.layout.num_stages - 1
        middle = [Kind.R] if self.recompute and not last else []
        return [Kind.F, *middle, self.backward, *([Kind.W] if self.split else [])]

    def _worker(self, c: int, s: int) -> None:
        kinds, last = self._kinds(s), s == self.layout.num_stages - 1
        held, intervals = [], []
        for m in range(self.layout.num_microbatches):
            for kind in kinds:
                length = int(self.costs.compute_ns[c, s, kind]) // self.unit
                op = self._interval(length, f"{s}{kind.name}{m}.p{c}")
                self.ops[c, s, kind, m] = op
                intervals.append(op[2])
                self.model.add(op[1] <= self.end)
                if m:
                    self.model.add(op[0] >= self.ops[c, s, kind, m - 1][1])
            chain = [self.ops[c, s, kind, m] for kind in kinds]
            for before, after in itertools.pairwise(chain):
                self.model.add(after[0] >= before[1])
            if self.recompute and last:
                self.model.add(chain[1][0] == chain[0][1])
            size = self.model.new_int_var(0, self.horizon, "held")
            held.append(self.model.new_interval_var(chain[0][0], size, chain[-1][1], f"held{m}.{s}.p{c}"))
        self.model.add_no_overlap(intervals)
        self.model.add_cumulative(held, [1] * len(held), self.cap)

    def _transfer(self, d: int, c: int, b: int, m: int, src: tuple[int, ...], dst: tuple[int, ...]) -> None:
        costs, unit = self.costs, self.unit
        before, work, latency = (int(a[d, c, b]) // unit for a in (costs.before_ns, costs.work_ns, costs.latency_ns))
        source, target = self.ops[src], self.ops[dst]  # type: ignore[index]
        if not work:
            self.model.add(target[0] >= source[1] + before + latency)
            return
        start, end, interval = self._interval(work, f"t{d}.{c}.{b}.{m}")
        self.model.add(start >= source[1] + before)
        self.model.add(target[0] >= end + latency)
        self.on_link.setdefault(int(costs.channel_link[d, c, b]), []).append(interval)
