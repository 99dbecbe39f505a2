"""`make_plan`: a job and a goal in, the best plan found and its rivals out.

The leaders alone get a schedule search (`schedules.atlas`); the winner's figures are then those of the order found.
Without one it is simulated once more, in full, under the schedule `1f1b-eager`. Knows the strategies by name, prints
nothing and writes no files.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from atlas.cost.cluster_arrays import ClusterArrays, cluster_arrays
from atlas.cost.price import Tcp
from atlas.errors import InfeasibleError, SpecError
from atlas.planner.candidate import Candidate, kind_of
from atlas.planner.infeasible import explain
from atlas.planner.judge import Judged, judge
from atlas.planner.objective import Objective, require_prices
from atlas.planner.pool import Tick
from atlas.planner.space import Space, space_of
from atlas.planner.strategies import STRATEGIES, Search, mirrored
from atlas.planner.whole import Whole, simulate_whole
from atlas.schedules.eager import NAME
from atlas.spec import Job

POLISH_EVENTS = 1_000_000
"""What a leader's schedule search may play through: less than a second."""
LEADERS = 8
"""Different plans of each kind whose schedule is searched a little; fewer where they are large, but at least three in
all."""
NEAR = 1.25
"""Leaders score within this factor of the first: a searched order saves nothing in some plans and a fifth in others."""
FEW = 24
"""Tries of that search: mostly within 3 % of a full one (7 % in the worst of 70 plans)."""
MIRRORED = 4
"""Of the leaders, those that are also searched with their datacenters in reverse order."""
FINALISTS = 6
"""Of the leaders, those whose schedule is searched in full."""


@dataclass(frozen=True, eq=False)
class Planned:
    """The outcome of a search."""

    space: Space
    cluster: ClusterArrays
    objective: Objective
    strategy: str
    winner: Judged
    """As simulated for the ranking, under the same order as its rivals."""
    rivals: tuple[Judged, ...]
    """Best first, without the winner."""
    schedule: str
    """The winner's schedule, as `atlas simulate` takes it."""
    iteration_s: float
    """Of the winner under that schedule."""
    tries: int
    seed: int
    num_estimated: int
    num_simulated: int
    interrupted: bool
    whole: Whole | None = None
    """The simulation behind `iteration_s`; None where there was no time, or too much to simulate in full."""

    @property
    def job(self) -> Job:
        return self.space.job

    @property
    def figures(self) -> Judged:
        """The winner with the figures of its own schedule."""
        return timed(self.winner, self.iteration_s)


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
    with _seldom_collected():
        search = start(job, objective or Objective(), keep=keep, global_batch=global_batch, tcp=tcp, tick=tick)
        explore(search, strategy)
        best = search.best
        assert best is not None
        if (missed := search.missed(best)) > 0:
            raise _limits_missed(search, best, missed)
        return finished(search, best, strategy, tries, seed)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Collect garbage rarely: a search makes millions of tuples without cycles, and collecting takes a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def finished(search: Search, best: Judged, strategy: str, tries: int | None, seed: int) -> Planned:
    """The outcome of a search, with its winner simulated in full."""
    schedule, count, whole = NAME, 0, None
    # Interrupted, it is still played once: the figure is then that of the Plan file, whenever it is simulated again.
    for wanted in [0] if search.interrupted else [tries, 0]:
        try:
            best, schedule, count, whole = _fastest(search, best, wanted, seed)
            break
        except KeyboardInterrupt:
            search.interrupted = True
        except InfeasibleError:  # too many events to simulate in full: keep the plan without searching its order
            best = judge(search.space, search.cluster, best.candidate, exact=True)
            break
    return Planned(
        space=search.space,
        cluster=search.cluster,
        objective=search.objective,
        strategy=strategy,
        winner=best,
        rivals=tuple(other for other in search.ranking() if other.candidate != best.candidate),
        schedule=schedule,
        iteration_s=best.figures.iteration_s if whole is None else whole.iteration_s,
        tries=count,
        seed=seed,
        num_estimated=search.num_estimated,
        num_simulated=search.num_simulated,
        interrupted=search.interrupted,
        whole=whole,
    )


def _fastest(search: Search, best: Judged, tries: int | None, seed: int) -> tuple[Judged, str, int, Whole]:
    """The best of the leaders, each under its own schedule: all with few tries, then the first of them with all tries.

    The plain order that candidates are compared by is up to a fifth slower than a searched one, and in some plans not
    at all: a ranking by it alone would lose a plan as soon as more nodes allow others."""
    found: list[tuple[float, Judged, str, int, Whole]] = []

    def play(judged: Judged, wanted: int | None) -> None:
        try:
            schedule, count, whole = played_in_full(search, judged, wanted, seed)
        except InfeasibleError:
            if judged is best:
                raise
            return
        own = timed(judged, whole.iteration_s)
        found.append((search.score(own) + (1e9 if search.missed(own) > 0 else 0.0), judged, schedule, count, whole))

    few = FEW if tries is None else min(FEW, tries)
    for judged in [best] if tries == 0 else _leaders(search, best):
        play(judged, few)
    found.sort(key=lambda one: one[0])
    for _, judged, _, count, _ in found[:MIRRORED]:
        if count and (other := mirrored(search, judged.candidate)) is not None:
            play(other, few)
    found.sort(key=lambda one: one[0])
    for _, judged, _, count, _ in found[:FINALISTS]:
        if 0 < count < (tries or _tries(judged.candidate)):
            play(judged, tries)
    _, judged, schedule, count, whole = min(found, key=lambda one: one[0])
    return judged, schedule, count, whole


def _leaders(search: Search, best: Judged) -> list[Judged]:
    """The best few of each kind, one for each way to deal stages to datacenters; the best of all comes first.

    The leaders of a kind do not depend on other kinds, so a better WAN never pushes out a plan that does not use it.
    """
    if search.missed(best) > 0:
        return [best]
    kinds: dict[str, dict[tuple[object, ...], Judged]] = {}
    for judged in [best, *search.ranking()]:
        kind = kinds.setdefault(kind_of(judged.candidate), {})
        if search.score(judged) <= NEAR * search.score(best) and len(kind) < LEADERS:
            kind.setdefault(_dealt(judged.candidate), judged)
    in_turn = [
        one for nth in zip_longest(*(kind.values() for kind in kinds.values())) for one in nth if one is not None
    ]
    return in_turn[: max(3, POLISH_EVENTS // (FEW * _events(best.candidate)))]


def _dealt(candidate: Candidate) -> tuple[object, ...]:
    """The same for plans that differ in layers or in the order of the datacenters only."""
    groups = sorted((group.cells, group.pipelines_per_cell, *sorted(group.places)) for group in candidate.groups)
    return (candidate.tp, candidate.microbatch, *groups)


def timed(judged: Judged, iteration_s: float) -> Judged:
    """The same plan with another iteration time."""
    old = judged.figures
    rent = old.rent_usd / old.iteration_s * iteration_s
    new = replace(
        old,
        iteration_s=iteration_s,
        tokens_per_s=old.tokens / iteration_s,
        rent_usd=rent,
        usd_per_iteration=rent + old.egress_usd,
    )
    return Judged(judged.candidate, new)


def start(
    job: Job,
    objective: Objective,
    *,
    keep: Collection[str] = (),
    global_batch: int | None = None,
    tcp: Tcp = "many",
    tick: Tick | None = None,
) -> Search:
    """A new search."""
    if objective.needs_prices:
        require_prices(job)
    return Search(space_of(job, keep=keep, global_batch=global_batch, tcp=tcp), cluster_arrays(job), objective, tick)


def explore(search: Search, strategy: str) -> None:
    """Run a strategy. If interrupted, keep its results; without any, raise the interrupt."""
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
        raise explain(search.space, search.cluster, list(search.refused.values()))


def played_in_full(search: Search, best: Judged, tries: int | None, seed: int) -> tuple[str, int, Whole]:
    """(schedule, tries, simulation) of the winner: under the best order that a search finds, or with no tries under
    the order that it was compared by."""
    candidate = best.candidate
    schedule, count = NAME, 0
    if max(group.pp for group in candidate.groups) == 1:
        schedule = "1f1b"  # with one stage there is nothing to order
    elif tries != 0:
        schedule = "atlas"
        count = tries or _tries(candidate)
    tick = None if search.tick is None else partial(search.tick, "searching an order")
    sharing = candidate.sharing or schedule != NAME
    job, cluster = search.space.job, search.cluster
    whole = simulate_whole(job, cluster, candidate, schedule, sharing=sharing, budget=count, seed=seed, tick=tick)
    return schedule, count, whole


def _tries(candidate: Candidate) -> int:
    """Of a full search, by size."""
    return max(FEW, min(150, POLISH_EVENTS // _events(candidate)))


def _events(candidate: Candidate) -> int:
    """Of one try."""
    return sum(6 * g.pipelines_per_cell * g.pp * g.num_microbatches for g in candidate.groups)


def _limits_missed(search: Search, best: Judged, missed: float) -> InfeasibleError:
    """The nearest that was found, and by which share it misses."""
    figures = best.figures
    return InfeasibleError(
        where=search.space.job.where,
        key="objective",
        value=search.objective.words(),
        rule=f"no plan keeps the limit; the nearest misses it by {100 * missed:.1f} %: {best.candidate.where()} "
        f"({best.candidate.how()}) with {figures.tokens_per_s:,.0f} tokens/s for ${figures.usd_per_hour:,.2f} an hour, "
        f"${figures.usd_per_iteration:,.4g} an iteration",
        remedy="Loosen the limit by as much, or add GPUs",
    )
