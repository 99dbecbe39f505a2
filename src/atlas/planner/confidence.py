"""Choose a plan by a percentile of its iteration under drawn weather instead of by its time under the mean.

The contenders are the plan that the links' constants choose, the best plans by the mean and the best of each family.
All have the same draws, and each keeps the order that was found for it. The best of them and the plan by constants get
more draws, which decide, because a percentile of few draws is uncertain. The plan by constants is kept unless another
is clearly better: under other draws, a plan that is better by less may be worse.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from atlas.errors import InfeasibleError, SpecError
from atlas.evaluate import Progress
from atlas.planner.candidate import Candidate
from atlas.planner.families import Families, find_families
from atlas.planner.judge import SimulatedCandidate
from atlas.planner.plan_simulation import PlanSimulation
from atlas.planner.run import PercentileChoice, SearchResult, make_plan
from atlas.planner.search import FEW_TRIES, ScheduledCandidate, Search
from atlas.sim.weather import WeatherRuns
from atlas.spec import Job

FIRST_DRAWS, CONTENDERS = 100, 8
"""Draws of each contender, and how many of the ranking are contenders."""
DRAWS, FINALISTS = 400, 3
"""Draws that decide, and how many contenders have them besides the plan by constants."""
CLEARLY, SURE, RESAMPLES = 0.01, 0.95, 200
"""Another plan must be better than the plan by constants by this much, and in this share of random resamples of the
draws. On one of five clusters, a plan that was better by 3 % was worse by 0.3 % under other draws."""


def choose_by_percentile(
    families: Families,
    confidence: float,
    *,
    keep: Collection[str] = (),
    tries: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Families:
    """The families with the winner chosen by the percentile; see `require_weather`."""
    planned = families.planned
    search = Search(planned.space, planned.cluster, planned.objective, seed=planned.seed)
    times_s: dict[int, list[float]] = {}
    found: list[ScheduledCandidate] = []
    contenders = _contenders(families, _by_constants(planned, keep, tries, progress))
    for k, candidate in enumerate(contenders):
        if progress is not None:
            progress("cross traffic", k, len(contenders))
        try:
            found.append(_scheduled(search, planned, candidate))
        except InfeasibleError:  # too long to simulate in full
            continue
        times_s[len(found) - 1] = plan_times_s(found[-1].simulation, FIRST_DRAWS, seed)
    if not found:
        return families

    def score(k: int, which: Sequence[int] | None = None) -> float:
        times = np.array(times_s[k])
        percentile_s = float(np.percentile(times if which is None else times[which], 100 * confidence))
        return _score(planned, percentile_s, found[k])

    finalists = dict.fromkeys([0, *sorted(times_s, key=score)[:FINALISTS]])
    for k in finalists:
        times_s[k] += plan_times_s(found[k].simulation, DRAWS, seed, first=FIRST_DRAWS)
    best = min(finalists, key=score)
    sure = np.mean([score(best, which) < score(0, which) for which in _resamples(DRAWS)]) >= SURE
    if score(0) - score(best) < CLEARLY * abs(score(0)) or not sure:
        best = 0
    by_constants_s, best_s = (float(np.percentile(times_s[k], 100 * confidence)) for k in (0, best))
    scheduled = found[best]
    said = PercentileChoice(confidence, DRAWS, best_s, by_constants_s, best != 0)
    everything = [planned.winner, *planned.rivals]
    chosen = replace(
        planned,
        winner=scheduled.judged,
        rivals=tuple(one for one in everything if one.candidate != scheduled.judged.candidate),
        schedule=scheduled.schedule,
        iteration_s=scheduled.judged.figures.iteration_s,
        tries=scheduled.tries,
        simulation=scheduled.simulation,
        percentile_choice=said,
    )
    return replace(families, planned=chosen)


def _resamples(num: int) -> Sequence[Sequence[int]]:
    """Random choices of draws, each as many as there are; the same on every machine."""
    raw = np.random.PCG64(np.random.SeedSequence(0)).random_raw(RESAMPLES * num)
    return (raw % num).astype(np.int64).reshape(RESAMPLES, num).tolist()


def _by_constants(
    planned: SearchResult, keep: Collection[str], tries: int | None, progress: Progress | None
) -> SimulatedCandidate:
    """The plan of the same job without weather."""
    cluster, calm = planned.job.cluster, {"model": None}
    wan = cluster.wan.model_copy(update=calm)
    links = None if cluster.links is None else tuple(link.model_copy(update=calm) for link in cluster.links)
    job = planned.job.model_copy(update={"cluster": cluster.model_copy(update={"wan": wan, "links": links})})
    batch, tcp, goal = planned.space.sequences, planned.space.tcp, planned.objective
    try:
        found = make_plan(
            job, strategy=planned.strategy, objective=goal, keep=keep, global_batch=batch, tcp=tcp, tries=tries,
            seed=planned.seed, progress=progress,
        )  # fmt: skip
    except InfeasibleError:  # such as a limit on time that only holds in this weather
        return planned.winner
    return find_families(found, keep=keep, global_batch=batch, tries=tries, progress=progress).planned.winner


def _contenders(families: Families, by_constants: SimulatedCandidate) -> list[Candidate]:
    """The plan by constants first, then the winner, the best of the ranking and of each family; each once."""
    planned = families.planned
    every = [by_constants, planned.winner, *planned.rivals[: CONTENDERS - 1], *families.best.values()]
    return list(dict.fromkeys(judged.candidate for judged in every))


def _scheduled(search: Search, planned: SearchResult, candidate: Candidate) -> ScheduledCandidate:
    if candidate == planned.winner.candidate and planned.simulation is not None:
        return ScheduledCandidate(planned.winner, planned.schedule, planned.tries, planned.simulation)
    return search.schedule(candidate, min(FEW_TRIES, planned.tries) if planned.tries else 0)


def _score(planned: SearchResult, percentile_s: float, scheduled: ScheduledCandidate) -> float:
    """The objective with the percentile in place of the mean; rent grows with time."""
    figures = scheduled.judged.figures
    usd = figures.usd_per_iteration + (figures.usd_per_iteration - figures.egress_usd) * (
        percentile_s / figures.iteration_s - 1
    )
    return float(planned.objective.score(percentile_s, usd, figures.tokens))


def plan_times_s(simulation: PlanSimulation, draws: int, seed: int, first: int = 0) -> list[float]:
    """Iterations of a plan under draws: that of its slowest group, and the rest as under the mean."""
    runs = [WeatherRuns(r.single.program, r.costs, seed) for r in {id(r): r for r in simulation.results}.values()]
    rest_s = simulation.iteration_s - max(r.single.makespan_ns for r in simulation.results) / 1e9
    return [max(run.time_s(k) for run in runs) + rest_s for k in range(first, draws)]


def require_weather(job: Job, confidence: float | None) -> None:
    """Raise SpecError for a confidence where no link of the job has a model: its iterations take the same time."""
    links: Sequence[object] = (job.cluster.wan, *(job.cluster.links or ()))
    if confidence is not None and not any(getattr(link, "model", None) for link in links):
        raise SpecError(
            where="--confidence",
            key="confidence",
            rule="needs a link with a `model`, and no link has one",
            remedy="Learn one with `atlas wan learn`, and name it in the cluster (docs/weather.md)",
        )
