"""`make_plan` takes a job and a goal, and returns the best plan that it finds and its rivals.

Candidates are compared under orders of their own, searched with few tries (`schedules.atlas`); the best few are then
searched in full. With no tries all are compared under the schedule `1f1b-eager`, and the winner is simulated once more,
in full. Knows the strategies by name, prints nothing and writes no files.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, cluster_arrays
from atlas.cost.price import Tcp
from atlas.errors import InfeasibleError, SpecError
from atlas.evaluate import Progress
from atlas.planner.candidate import Candidate
from atlas.planner.infeasible import explain
from atlas.planner.judge import SimulatedCandidate, judge
from atlas.planner.objective import Objective, require_prices
from atlas.planner.plan_simulation import PlanSimulation
from atlas.planner.pruning import undominated
from atlas.planner.search import FEW_TRIES, MIN_SEARCHED, ScheduledCandidate, Search, events
from atlas.planner.shapes import FEW_DCS
from atlas.planner.space import Space, space_of
from atlas.planner.strategies import STRATEGIES
from atlas.schedules.eager import NAME
from atlas.spec import Job

POLISH_EVENTS = 1_000_000
"""Events that the schedule search of a finalist may simulate: less than a second."""
MAX_TRIES = 150
"""Tries of a finalist's schedule search, where POLISH_EVENTS allows them (docs/design.md)."""
COLLECT_AFTER = 200_000
"""Objects made between two garbage collections of a search. Python's default is 700 to 2,000."""
NEAR = 1.08
"""Finalists score within this factor of the first: more tries gain less than that."""
FINALISTS = 8
"""A candidate is searched in full if fewer than this are better and need no more GPUs in any datacenter."""


@dataclass(frozen=True)
class PercentileChoice:
    """What the choice by a percentile under weather found."""

    confidence: float
    draws: int
    percentile_s: float
    """Of the chosen plan's iteration."""
    constants_choice_s: float
    """The same percentile of the plan that the links' constants choose, without weather."""
    changed: bool
    """Whether another plan was chosen."""

    def words(self) -> str:
        percent = f"{100 * self.confidence:g}"
        chosen = (
            f"{percent} % of {self.draws} runs with random cross traffic take at most {self.percentile_s:.4g} s "
            "an iteration"
        )
        if not self.changed:
            return f"{chosen}; no other plan is clearly better."
        return f"{chosen}; with the plan that is best for constant links: {self.constants_choice_s:.4g} s."


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The outcome of a search."""

    space: Space
    cluster: ClusterArrays
    objective: Objective
    strategy: str
    winner: SimulatedCandidate
    """Under `schedule`."""
    rivals: tuple[SimulatedCandidate, ...]
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
    num_searched: int
    """Of those simulated, under searched orders; the others under `1f1b-eager`."""
    simulation: PlanSimulation | None = None
    """The simulation behind `iteration_s`; None where there was no time, or too much to simulate in full."""
    percentile_choice: PercentileChoice | None = None
    """Where the winner was chosen by a percentile (`planner.confidence`)."""

    @property
    def job(self) -> Job:
        return self.space.job


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
    progress: Progress | None = None,
    kind: str | None = None,
) -> SearchResult:
    """The best plan that the strategy finds. `tries` is the winner's schedule search (None: by size; 0: none); `kind`
    restricts the search to one kind of plan."""
    with _seldom_collected():
        goal = objective or Objective()
        search = start(job, goal, keep=keep, global_batch=global_batch, tcp=tcp, progress=progress, kind=kind)
        if strategy != "exhaustive":
            search.tries, search.seed = FEW_TRIES if tries is None else min(FEW_TRIES, tries), seed
        explore(search, strategy)
        best = search.best
        assert best is not None
        if (missed := search.missed(best)) > 0:
            raise _limits_missed(search, best, missed)
        return finished(search, best, strategy, tries)


def finds_better(job: Job, below: float, *, objective: Objective, global_batch: int, kind: str) -> bool:
    """Whether there is a plan of this kind that scores below a value, compared under `1f1b-eager`. Candidates whose
    floor is too high are not simulated."""
    with _seldom_collected():
        search = start(job, objective, global_batch=global_batch, kind=kind, below=below)
        STRATEGIES["ours"][1](search)
        best = search.best
        return best is not None and search.score(finished(search, best, "ours", 0).winner) < below


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Collect garbage rarely: a search makes millions of tuples without cycles, and collecting takes a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def finished(search: Search, best: SimulatedCandidate, strategy: str, tries: int | None) -> SearchResult:
    """The outcome of a search, with its winner simulated in full."""
    scheduled: ScheduledCandidate | None = None
    # An interrupted search still simulates the winner once, so that `atlas simulate` gives the figure of the Plan file.
    for wanted in [0] if search.interrupted else [tries, 0]:
        try:
            scheduled = _fastest(search, best, wanted)
            break
        except KeyboardInterrupt:
            search.interrupted = True
        except InfeasibleError:  # too many events to simulate in full: keep the plan without searching its order
            best = judge(search.space, search.cluster, best.candidate, exact=True)
            break
    if scheduled is not None:
        best = scheduled.judged
    return SearchResult(
        space=search.space,
        cluster=search.cluster,
        objective=search.objective,
        strategy=strategy,
        winner=best,
        rivals=tuple(other for other in search.everything() if other.candidate != best.candidate),
        schedule=NAME if scheduled is None else scheduled.schedule,
        iteration_s=best.figures.iteration_s,
        tries=0 if scheduled is None else scheduled.tries,
        seed=search.seed,
        num_estimated=search.num_estimated,
        num_simulated=search.num_simulated,
        interrupted=search.interrupted,
        num_searched=sum(one.schedule != NAME for one in search.scheduled.values()),
        simulation=None if scheduled is None else scheduled.simulation,
    )


def _fastest(search: Search, best: SimulatedCandidate, tries: int | None) -> ScheduledCandidate:
    """The best of the leaders under searched orders: those near the best are searched with all tries."""
    if tries == 0 or search.missed(best) > 0:
        known = search.scheduled.get(best.candidate)
        return known or search.schedule(best.candidate, 0 if tries == 0 else FEW_TRIES)
    found: list[ScheduledCandidate] = []
    others = [one for one in search.ranking() if one.candidate != best.candidate]
    near = [one for one in others if search.score(one) <= NEAR * search.score(best)]
    for judged in _finalists(search, [best, *near]):
        least = min((search.score(one.judged) for one in found), default=float("inf"))
        if search.floors.get(judged.candidate, 0.0) >= least:
            continue
        wanted = tries or _tries(judged.candidate)
        known = search.scheduled.get(judged.candidate)
        if known is None or (0 < known.tries < wanted):
            try:
                search.schedule(judged.candidate, wanted)
            except InfeasibleError:
                if judged is best:
                    raise
                continue
        found.append(search.scheduled[judged.candidate])
    return min(found, key=lambda one: (search.missed(one.judged) > 0, search.score(one.judged)))


def _finalists(search: Search, ranking: list[SimulatedCandidate]) -> list[SimulatedCandidate]:
    """Those whose schedule is searched in full, best first. More nodes must not displace a finalist that fits fewer."""
    if search.screened or search.cluster.num_dcs > FEW_DCS:
        return ranking[: MIN_SEARCHED if search.screened else FINALISTS]
    used = np.array([[one.candidate.gpus.get(name, 0) for name in search.cluster.names] for one in ranking], np.int64)
    return [ranking[k] for k in undominated(np.arange(len(ranking), dtype=np.float64), used, FINALISTS, 2 * FINALISTS)]


def start(
    job: Job,
    objective: Objective,
    *,
    keep: Collection[str] = (),
    global_batch: int | None = None,
    tcp: Tcp = "many",
    progress: Progress | None = None,
    kind: str | None = None,
    below: float = math.inf,
) -> Search:
    """A new search."""
    if objective.needs_prices:
        require_prices(job)
    space = space_of(job, keep=keep, global_batch=global_batch, tcp=tcp, kind=kind, below=below)
    return Search(space, cluster_arrays(job), objective, progress)


def explore(search: Search, strategy: str) -> None:
    """Run a strategy. If interrupted, keep its results; without any, raise the interrupt."""
    if strategy not in STRATEGIES:
        remedy = f"Give one of {', '.join(STRATEGIES)}"
        raise SpecError(where="--strategy", key="strategy", value=strategy, rule="no such strategy", remedy=remedy)
    try:
        STRATEGIES[strategy][1](search)
    except KeyboardInterrupt:
        if search.best is None:
            raise
        search.interrupted = True
    if search.best is None:
        raise explain(search.space, search.cluster, list(search.refused.values()))


def _tries(candidate: Candidate) -> int:
    """Of a full search, by size. Somewhat more than FEW_TRIES finds nothing better."""
    most = min(MAX_TRIES, POLISH_EVENTS // events(candidate))
    return most if most > 2 * FEW_TRIES else FEW_TRIES


def _limits_missed(search: Search, best: SimulatedCandidate, missed: float) -> InfeasibleError:
    """The nearest that was found, and by which share it misses."""
    figures = best.figures
    return InfeasibleError(
        where=search.space.job.where,
        key="objective",
        value=search.objective.words(),
        rule=f"no plan meets the limit; the closest misses it by {100 * missed:.1f} %: {best.candidate.where()} "
        f"({best.candidate.how()}) with {figures.tokens_per_s:,.0f} tokens/s for ${figures.usd_per_hour:,.2f} an hour, "
        f"${figures.usd_per_iteration:,.4g} an iteration",
        remedy="Loosen the limit by as much, or add GPUs",
    )
