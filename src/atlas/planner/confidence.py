"""Choose a plan by a percentile of its iteration under drawn weather instead of by its time under the mean.

The contenders are the best plans by the mean and the best of each family. All have the same draws, and each keeps the
order that was found for it. The best of them and the plan with the best mean get more draws, which decide, because a
percentile of few draws is uncertain. The choice is never worse than the plan with the best mean under these draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atlas.errors import InfeasibleError, SpecError
from atlas.planner.candidate import Candidate
from atlas.planner.families import Families
from atlas.planner.judge import Judged
from atlas.planner.pool import Tick
from atlas.planner.run import Confident, Planned
from atlas.planner.search import FEW, Played, Search
from atlas.planner.whole import Whole
from atlas.sim.weather import WeatherRuns
from atlas.spec import Job

FIRST_DRAWS, CONTENDERS = 100, 8
"""Draws of each contender, and how many of the ranking are contenders."""
DRAWS, FINALISTS = 400, 3
"""Draws that decide, and how many contenders have them besides the plan with the best mean."""


def confident(families: Families, confidence: float, *, seed: int = 0, tick: Tick | None = None) -> Families:
    """The families with the winner chosen by the percentile."""
    planned = families.planned
    _require_weather(planned.job)
    search = Search(planned.space, planned.cluster, planned.objective, seed=planned.seed)
    times_s: dict[int, list[float]] = {}
    found: list[Played] = []
    contenders = _contenders(families)
    for k, judged in enumerate(contenders):
        if tick is not None:
            tick("weather", k, len(contenders))
        try:
            found.append(_played(search, planned, judged.candidate))
        except InfeasibleError:  # too long to simulate in full
            continue
        times_s[len(found) - 1] = whole_times_s(found[-1].whole, FIRST_DRAWS, seed)
    if not found:
        return families

    def score(k: int) -> float:
        return _score(planned, float(np.percentile(times_s[k], 100 * confidence)), found[k])

    finalists = dict.fromkeys([0, *sorted(times_s, key=score)[:FINALISTS]])
    for k in finalists:
        times_s[k] += whole_times_s(found[k].whole, DRAWS, seed, first=FIRST_DRAWS)
    best = min(finalists, key=score)
    by_mean_s, best_s = (float(np.percentile(times_s[k], 100 * confidence)) for k in (0, best))
    played = found[best]
    said = Confident(confidence, DRAWS, best_s, by_mean_s, best != 0)
    everything = [planned.winner, *planned.rivals]
    chosen = replace(
        planned,
        winner=played.judged,
        rivals=tuple(one for one in everything if one.candidate != played.judged.candidate),
        schedule=played.schedule,
        iteration_s=played.judged.figures.iteration_s,
        tries=played.tries,
        whole=played.whole,
        confident=said,
    )
    return replace(families, planned=chosen)


def _contenders(families: Families) -> list[Judged]:
    """The winner first, then the best of the ranking and of each family; each once."""
    planned = families.planned
    every = [planned.winner, *planned.rivals[: CONTENDERS - 1], *families.best.values()]
    return list({judged.candidate: judged for judged in every}.values())


def _played(search: Search, planned: Planned, candidate: Candidate) -> Played:
    if candidate == planned.winner.candidate and planned.whole is not None:
        return Played(planned.winner, planned.schedule, planned.tries, planned.whole)
    return search.play(candidate, min(FEW, planned.tries) if planned.tries else 0)


def _score(planned: Planned, percentile_s: float, played: Played) -> float:
    """The objective with the percentile in place of the mean; rent grows with time."""
    figures = played.judged.figures
    usd = figures.usd_per_iteration + (figures.usd_per_iteration - figures.egress_usd) * (
        percentile_s / figures.iteration_s - 1
    )
    return float(planned.objective.score(percentile_s, usd, figures.tokens))


def whole_times_s(whole: Whole, draws: int, seed: int, first: int = 0) -> list[float]:
    """Iterations of a plan under draws: that of its slowest group, and the rest as under the mean."""
    runs = [WeatherRuns(r.single.program, r.costs, seed) for r in {id(r): r for r in whole.results}.values()]
    rest_s = whole.iteration_s - max(r.single.makespan_ns for r in whole.results) / 1e9
    return [max(run.time_s(k) for run in runs) + rest_s for k in range(first, draws)]


def _require_weather(job: Job) -> None:
    links: Sequence[object] = (job.cluster.wan, *(job.cluster.links or ()))
    if not any(getattr(link, "model", None) for link in links):
        raise SpecError(
            where="--confidence",
            key="confidence",
            rule="needs weather, and no link has a `model`",
            remedy="Learn one with `atlas wan learn`, and name it in the cluster (docs/weather.md)",
        )
