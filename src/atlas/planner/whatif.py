"""What-if: simulates a job or a plan repeatedly with one key changed, and reports the iteration time.

    sweep        any key of the job over a range; or a datacenter lost or added (`lose=east`, `add=east`)
    marginal     what a tenth more of each resource saves, by simulating again with it
    spread       the plan's own order under random bandwidths and latencies, or drawn weather, percentiles

A job is re-arranged by the cost model where its file leaves things open; a plan stays as it is placed. With `replan`
the planner runs again at every point. A point of a sweep has the figure that `atlas simulate` (or `atlas plan`) gives
for the changed job. Prints nothing and draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atlas.cost.cluster_arrays import cluster_arrays
from atlas.cost.table import Costs
from atlas.errors import AtlasError, InfeasibleError
from atlas.evaluate import Progress, restaged
from atlas.ir.program import Program
from atlas.planner.candidate import Candidate, Group
from atlas.planner.change import Sweep, changed
from atlas.planner.files import candidate_of, space_of_plan
from atlas.planner.judge import SimulatedCandidate, judge, timed
from atlas.planner.plan_simulation import PlanSimulation, simulate_plan
from atlas.planner.run import make_plan
from atlas.planner.space import space_of
from atlas.sim.lower import SeededNoise, Tables, noisy, stretched
from atlas.sim.weather import Tail, WeatherRuns
from atlas.spec import Job, override
from atlas.spec.plan import Plan, PlanSchedule

MORE, LESS = 1.1, 0.9
"""Factors on a resource, and on latency, whose effect the bottleneck table shows: a tenth better."""

PERCENTILES = (5, 25, 50, 75, 95, 99)
"""Of the iteration times of Monte-Carlo runs."""
SEEDS = 2**31
"""Seeds of the noise of a run are below this."""


@dataclass(frozen=True)
class Point:
    """One value of a sweep, and its result."""

    value: Any
    iteration_s: float | None
    """None where the job cannot run with it."""
    tokens_per_s: float | None
    usd_per_iteration: float | None
    note: str = ""
    """Where it runs, or why it cannot."""


@dataclass(frozen=True)
class Marginal:
    """What a tenth more of a resource, or a tenth less latency, saves."""

    resource: str
    key: str
    now: float
    more: float
    iteration_s: float
    saves_s: float


# ---- one question --------------------------------------------------------------------------------------------
class WhatIfSimulator:
    """A job or a plan, to be simulated with something changed."""

    def __init__(self, job: Job, plan: Plan | None = None, *, replan: bool = False) -> None:
        self.job, self.plan, self.replan = job, plan, replan

    def judged(self, job: Job) -> SimulatedCandidate:
        """The figures of the changed job under its searched schedule: those of `atlas simulate` (or, with `replan`, of
        `atlas plan`). InfeasibleError where it cannot run."""
        return make_plan(job).winner if self.replan else self.searched(job)[0]

    def searched(self, job: Job) -> tuple[SimulatedCandidate, PlanSimulation | None]:
        """The figures under the plan's own schedule, or under `atlas`, and the simulation. A job too long to be
        simulated in full uses `1f1b-eager`, and its simulation is None."""
        plain = self.plain(job, exact=True)
        how = PlanSchedule(name="atlas", tcp="many") if self.plan is None else self.plan.schedule
        try:
            simulation = simulate_plan(
                job, cluster_arrays(job), plain.candidate, how.name, as_stated=self.plan is None,
                sharing=how.sharing or self.plan is None, budget=how.tries or None, seed=how.seed,
            )  # fmt: skip
        except InfeasibleError:
            return plain, None
        return timed(plain, simulation.iteration_s), simulation

    def plain(self, job: Job, *, exact: bool) -> SimulatedCandidate:
        """The figures under `1f1b-eager`, which needs no search. `exact`: long runs are not extrapolated roughly."""
        return self._arranged(job, exact) if self.plan is None else self._placed(job, self.plan, exact)

    def _placed(self, job: Job, plan: Plan, exact: bool) -> SimulatedCandidate:
        """The plan with its placement, and only this key changed."""
        old = plan.job
        names = {dc.name for dc in job.cluster.datacenters}
        candidate = candidate_of(plan)
        gone = sorted(set(candidate.gpus) - names)
        if gone:
            raise InfeasibleError(
                where=job.where,
                key="placement",
                value=gone[0],
                rule="the plan has stages there",
                remedy="Use --replan to plan without it",
            )
        if any(
            getattr(job, key) != getattr(old, key) for key in ("pp", "cells", "pipelines_per_cell", "tp", "placement")
        ):
            return self._arranged(job, exact)
        groups = tuple(_scaled(group, job, old) for group in candidate.groups)
        moved = Candidate(job.tp, job.microbatch, groups, candidate.sharing, candidate.tcp)
        space = space_of_plan(plan)
        if job.num_microbatches != old.num_microbatches or job.microbatch != old.microbatch:
            space = space_of(job, global_batch=moved.slots * job.microbatch, tcp=candidate.tcp)
        return judge(replace(space, job=job), cluster_arrays(job), moved, exact=exact)

    def _arranged(self, job: Job, exact: bool) -> SimulatedCandidate:
        """The job as its file has it, one stage a worker, taking turns where that is faster."""
        job, found = restaged(job, 1)
        group = Group.arranged(job, found)
        space = space_of(job, global_batch=group.replicas * job.num_microbatches * job.microbatch)
        turns = [True, False] if found.num_pipelines > 1 and group.num_hops else [False]
        cluster = cluster_arrays(job)
        every = [
            judge(space, cluster, Candidate(job.tp, job.microbatch, (group,), sharing), exact=exact)
            for sharing in turns
        ]
        return min(every, key=lambda judged: judged.figures.iteration_s)


def _scaled(group: Group, job: Job, old: Job) -> Group:
    """Where the number of microbatches was changed, every group has as many more."""
    if job.num_microbatches == old.num_microbatches:
        return group
    more = max(1, round(group.num_microbatches * job.num_microbatches / old.num_microbatches))
    return replace(group, num_microbatches=more)


def sweep(simulator: WhatIfSimulator, one: Sweep, progress: Progress | None = None) -> list[Point]:
    """The iteration at every value. What cannot run leaves a gap, with the reason; what makes no sense is an error."""
    points = []
    for k, value in enumerate(one.values):
        if progress is not None:
            progress(f"{one.key}={value}", k, len(one.values))
        try:
            judged = simulator.judged(changed(simulator.job, one.key, value))
        except InfeasibleError as error:
            points.append(Point(value, None, None, None, error.rule))
            continue
        figures = judged.figures
        points.append(
            Point(value, figures.iteration_s, figures.tokens_per_s, figures.usd_per_iteration, judged.candidate.where())
        )
    return points


# ---- bottleneck ------------------------------------------------------------------------------------------------
def marginals(
    simulator: WhatIfSimulator, progress: Progress | None = None
) -> tuple[SimulatedCandidate, list[Marginal]]:
    """The job now, and what a tenth more (or less latency) of each resource saves, the best first. The share that is
    saved is that of `1f1b-eager`: a search finds its best order only to within a few per cent."""
    now, plain = simulator.judged(simulator.job), simulator.plain(simulator.job, exact=False)
    found = []
    trials = list(_trials(simulator.job, now.candidate))
    for k, (resource, key, value, more, changes) in enumerate(trials):
        if progress is not None:
            progress(resource, k, len(trials))
        try:
            after = simulator.plain(override(simulator.job, changes), exact=False).figures
        except AtlasError:
            continue
        saves = now.figures.iteration_s * (1 - plain.figures.tokens_per_s / after.tokens_per_s)
        found.append(Marginal(resource, key, value, more, now.figures.iteration_s - saves, saves))
    return now, sorted(found, key=lambda m: -m.saves_s)


def _trials(job: Job, candidate: Candidate) -> Iterator[tuple[str, str, float, float, list[str]]]:
    """(what, key, value, changed value, overrides): a tenth more of everything that the plan uses."""
    if not job.is_calibrated:
        efficiency = job.stated_efficiency
        yield _share("speed of the GPUs", "efficiency", efficiency, min(1.0, MORE * efficiency))
    wan = job.cluster.wan
    if candidate.num_datacenters > 1:
        links = job.cluster.links
        if links is None:
            yield _share("bandwidth of a node pair", "cluster.wan.pair_gbps", wan.pair_gbps, MORE * wan.pair_gbps)
            if wan.trunk_gbps is not None:
                yield _share("trunks", "cluster.wan.trunk_gbps", wan.trunk_gbps, MORE * wan.trunk_gbps)
            if wan.latency_ms:
                yield _share("latency", "cluster.wan.latency_ms", wan.latency_ms, LESS * wan.latency_ms)
        else:
            used = set(candidate.gpus)
            for k, link in enumerate(links):
                if set(link.between) <= used:
                    yield from _link_trials(job, k, " - ".join(link.between))
    for name in candidate.gpus:
        now_gbps = job.cluster.node_gbps(job.cluster.dc(name))
        key = f"cluster.datacenters.{name}.net_gbps"
        yield _share(f"network inside {name}", key, now_gbps, MORE * now_gbps)
    gib = job.memory_gib
    if gib is not None:
        yield _share("memory of a GPU", "memory_gib", gib, MORE * gib)


def _link_trials(job: Job, k: int, name: str) -> Iterator[tuple[str, str, float, float, list[str]]]:
    link, wan = (job.cluster.links or ())[k], job.cluster.wan
    pair, trunk = link.pair_gbps or wan.pair_gbps, link.trunk_gbps or wan.trunk_gbps
    latency = wan.latency_ms if link.latency_ms is None else link.latency_ms
    at = f"cluster.links[{k}]"
    yield _share(f"bandwidth of a node pair, {name}", f"{at}.pair_gbps", pair, MORE * pair)
    if trunk is not None:
        yield _share(f"trunk {name}", f"{at}.trunk_gbps", trunk, MORE * trunk)
    if latency:
        yield _share(f"latency {name}", f"{at}.latency_ms", latency, LESS * latency)


def _share(what: str, key: str, now: float, more: float) -> tuple[str, str, float, float, list[str]]:
    return what, key, now, more, [f"{key}={more:.10g}"]


# ---- Monte-Carlo -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class MonteCarlo:
    """Seconds of every run, and what causes the slowest."""

    times_s: tuple[float, ...] = ()
    tail: Tail | None = None

    def figures(self) -> dict[str, Any] | None:
        """JSON-able; None without runs."""
        tail = {} if self.tail is None else {"tail_path": self.tail.path, "tail_share": self.tail.share}
        return {"runs": len(self.times_s), **percentiles(self.times_s), **tail} if self.times_s else None


def spread(
    simulator: WhatIfSimulator, runs: int, *, wan: float, compute: float, seed: int, progress: Progress | None = None
) -> MonteCarlo:
    """`runs` iterations: links with a model have new weather in each run, the others their own bandwidth and latency
    (log-normal, sigma `wan`), and every op its own duration (sigma `compute`)."""
    now, simulation = simulator.searched(simulator.job)
    if simulation is None:
        raise InfeasibleError(
            where=simulator.job.where, key="num_microbatches", value=simulator.job.num_microbatches,
            rule="the job is too long to be simulated in full, which Monte-Carlo runs need", remedy="Lower it",
        )  # fmt: skip
    base = simulation.results[simulation.slowest]
    program, costs = base.single.program, base.costs
    rest_s = now.figures.iteration_s - base.single.makespan_ns / 1e9
    draws = WeatherRuns(program, costs, seed, _varied(program, costs, wan, compute, seed))
    times = []
    for k in range(runs):
        if progress is not None:
            progress("Monte-Carlo", k, runs)
        times.append(draws.time_s(k))
    return MonteCarlo(tuple(time_s + rest_s for time_s in times), draws.tail(times))


def _varied(program: Program, costs: Costs, wan: float, compute: float, seed: int) -> Callable[[Tables, int], Tables]:
    """The noise of run `k`, which does not depend on other runs."""
    plain = np.array([link.weather is None for link in costs.links])
    crosses = program.transfer_crosses

    def varied(tables: Tables, k: int) -> Tables:
        rng = np.random.default_rng([seed, k])
        slow = np.exp(rng.normal(0.0, wan, (2, len(plain))) * plain)
        found = noisy(tables, SeededNoise(int(rng.integers(SEEDS)), compute, 0.0), program)
        link = tables.channel_link[tables.transfer_channel]
        work_factor, latency_factor = np.where(crosses, slow[:, link], 1.0)
        return found._replace(
            transfer_work_ns=stretched(tables.transfer_work_ns, work_factor),
            transfer_latency_ns=stretched(tables.transfer_latency_ns, latency_factor),
        )

    return varied


def percentiles(times: Sequence[float]) -> dict[str, float]:
    return {f"p{p}_s": float(np.percentile(times, p)) for p in PERCENTILES} | {"worst_s": max(times)}
