"""`make_plan`: a job and a goal in, the best plan found and its rivals out.

The winner alone gets a schedule search (`schedules.atlas`); its figures are then those of the order found. Knows the
strategies by name, prints nothing and writes no files.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from atlas.cost.price import Tcp, price
from atlas.errors import InfeasibleError, SpecError
from atlas.ir.ops import Kind
from atlas.plan.candidate import Candidate
from atlas.plan.evaluate import Result, evaluate
from atlas.plan.ground import Ground, ground_of
from atlas.plan.infeasible import explain
from atlas.plan.judge import Judged, judge
from atlas.plan.meet import meeting_s, started_s
from atlas.plan.objective import Objective, require_prices
from atlas.plan.order import NAME
from atlas.plan.pool import Tick
from atlas.plan.space import Space, space_of
from atlas.plan.split import sizes_of
from atlas.plan.strategies import STRATEGIES, Search
from atlas.spec import Job

POLISH_EVENTS = 2_000_000
"""What the winner's schedule search may play through: less than a second."""


@dataclass(frozen=True, eq=False)
class Planned:
    """The outcome of a search."""

    space: Space
    ground: Ground
    objective: Objective
    strategy: str
    winner: Judged
    """As simulated for the ranking, under the same order as its rivals."""
    rivals: tuple[Judged, ...]
    """Best first, without the winner."""
    schedule: str
    """Of the winner: what `atlas simulate` is to be told."""
    iteration_s: float
    """Of the winner under that schedule."""
    tries: int
    seed: int
    num_estimated: int
    num_simulated: int
    interrupted: bool
    result: Result | None = None
    """The simulation behind `iteration_s`; of the slowest group where there are several."""

    @property
    def job(self) -> Job:
        return self.space.job

    @property
    def figures(self) -> Judged:
        """The winner with the figures of its own schedule."""
        old = self.winner.figures
        rent = old.rent_usd / old.iteration_s * self.iteration_s
        new = replace(
            old,
            iteration_s=self.iteration_s,
            tokens_per_s=old.tokens / self.iteration_s,
            rent_usd=rent,
            usd_per_iteration=rent + old.egress_usd,
        )
        return Judged(self.winner.candidate, new)


def make_plan(
    job: Job,
    *,
    strategy: str = "ours",
    objective: Objective | None = None,
    keep: Collection[str] = (),
    global_batch: int | None = None,
    tcp: Tcp = "many",
    tries: int | None = None,
    seed: int = 0,
    tick: Tick | None = None,
) -> Planned:
    """The best plan that the strategy finds. `tries` is the winner's schedule search (None: by size; 0: none)."""
    goal = objective or Objective()
    search = start(job, goal, keep=keep, global_batch=global_batch, tcp=tcp, tick=tick)
    explore(search, strategy)
    best = search.best
    assert best is not None
    if search.score(best) >= 1e6:
        raise _limits_missed(search)
    schedule, iteration_s, count, result = NAME, best.figures.iteration_s, 0, None
    if tries != 0 and not search.interrupted:
        try:
            schedule, iteration_s, count, result = polish(search, best, tries, seed)
        except KeyboardInterrupt:
            search.interrupted = True
        except InfeasibleError:
            pass  # too many events to play in full: the plan stands, its order is not searched
    return Planned(
        space=search.space,
        ground=search.ground,
        objective=goal,
        strategy=strategy,
        winner=best,
        rivals=tuple(other for other in search.ranking() if other is not best),
        schedule=schedule,
        iteration_s=iteration_s,
        tries=count,
        seed=seed,
        num_estimated=search.num_estimated,
        num_simulated=search.num_simulated,
        interrupted=search.interrupted,
        result=result,
    )


def start(
    job: Job,
    objective: Objective,
    *,
    keep: Collection[str] = (),
    global_batch: int | None = None,
    tcp: Tcp = "many",
    tick: Tick | None = None,
) -> Search:
    """A search that has looked at nothing yet."""
    if objective.needs_prices:
        require_prices(job)
    return Search(space_of(job, keep=keep, global_batch=global_batch, tcp=tcp), ground_of(job), objective, tick)


def explore(search: Search, strategy: str) -> None:
    """Let a strategy loose. Interrupted, it leaves what it has; with nothing to show the interrupt goes on."""
    if strategy not in STRATEGIES:
        remedy = f"One of {', '.join(STRATEGIES)}"
        raise SpecError(where="--strategy", key="strategy", value=strategy, rule="no such strategy", remedy=remedy)
    try:
        STRATEGIES[strategy][1](search)
    except KeyboardInterrupt:
        if search.best is None:
            raise
        search.interrupted = True
    if search.best is None:
        raise explain(search.space, search.ground, list(search.refused.values()))


def polish(search: Search, best: Judged, tries: int | None, seed: int) -> tuple[str, float, int, Result]:
    """(schedule, iteration, tries, result) of the winner under the best order that a search finds."""
    candidate, job = best.candidate, search.space.job
    groups = candidate.groups
    # With one stage there is nothing to order.
    schedule = "atlas" if max(group.pp for group in groups) > 1 else "1f1b"
    events = sum(6 * group.pipelines_per_cell * group.pp * group.num_microbatches for group in groups)
    count = tries or max(24, min(300, POLISH_EVENTS // events))
    results: list[Result] = []
    known: dict[bytes, Result] = {}
    for k in range(len(groups)):
        if search.tick is not None:
            search.tick("searching an order", k, len(groups))
        one = candidate.job(job, k)
        costs = price(one, tcp=candidate.tcp)
        key = b"".join(part.tobytes() for part in (costs.compute_ns, costs.work_ns, costs.latency_ns))
        if key not in known:  # groups that nothing tells apart are searched once
            known[key] = evaluate(one, schedule, tcp=candidate.tcp, budget=count, seed=seed)
        results.append(known[key])
    iteration_s, slowest = _together(search, candidate, results)
    return schedule, iteration_s, count, results[slowest]


def _together(search: Search, candidate: Candidate, results: list[Result]) -> tuple[float, int]:
    """The iteration of all groups, and which of them is last: as `judge` has it, with each group's own order."""
    ends, closings = [], []
    for result in results:
        timeline, program = result.single, result.single.program
        work = program.kind <= Kind.W
        done = np.zeros(program.num_ranks, np.int64)
        np.maximum.at(done, program.op_worker[work] % program.num_ranks, timeline.op_end_ns[work])
        ends.append(done / 1e9)
        closings.append(result.case.apart.compute_ns[0][:, [Kind.SYNC, Kind.STEP]].sum(axis=1) / 1e9)
    sizes = sizes_of(search.space.job, candidate.tp, candidate.microbatch)
    between = meeting_s(search.ground, sizes, candidate)
    assert between is not None
    starts = started_s(candidate, ends)
    total = [float((s + c + b).max()) for s, c, b in zip(starts, closings, between, strict=True)]
    return max(total), int(np.argmax([end.max() for end in ends]))


def again(planned: Planned, candidate: Candidate) -> Judged:
    """Any candidate under the plan's own conditions."""
    return judge(planned.space, planned.ground, candidate)


def _limits_missed(search: Search) -> InfeasibleError:
    """The nearest that was found, and by how much it misses."""
    best = search.best
    assert best is not None
    figures = best.figures
    missed = float(search.objective.missed(figures.iteration_s, figures.usd_per_iteration, figures.tokens))
    return InfeasibleError(
        where=search.space.job.where,
        key="objective",
        value=search.objective.words(),
        rule=f"no plan keeps the limit; the nearest misses it by {100 * missed:.1f} %: {best.candidate.where()} "
        f"({best.candidate.how()}) with {figures.tokens_per_s:,.0f} tokens/s for ${figures.usd_per_hour:,.2f} an hour, "
        f"${figures.usd_per_iteration:,.4g} an iteration",
        remedy="Loosen the limit by as much, or add GPUs",
    )
