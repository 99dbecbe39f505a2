"""Finds the bandwidth, latency, number of GPUs and egress price at which the verdict changes, by bisection. Each step
runs the planner, restricted to plans over several regions.

The verdict is whether the best plan over several regions beats the best in one, by the plan's own objective. These runs
use `1f1b-eager`; the result is scaled by what the searched order of the winner saves. Knows no output.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from atlas.errors import AtlasError
from atlas.evaluate import Progress
from atlas.planner.families import Families, faster_links, score
from atlas.planner.run import SearchResult, finds_better, make_plan
from atlas.spec import Job
from atlas.spec.job import Route

STEPS = 6
"""Bisection steps: they narrow a factor of 256 to about 10 %."""
WIDEST = 256.0
"""The largest factor on bandwidth and latency that is tried."""
MOST_NODES = 64.0
"""The largest factor on the nodes of a datacenter that is tried."""
CPU_LIMIT_S = 13.0
"""CPU time of all searches together. A question whose share of it is used up is answered by a range."""

NOT_FOUND = "not found"


@dataclass(frozen=True)
class BreakEven:
    """One answer."""

    what: str
    """bandwidth, latency, gpus or egress."""
    value: float | None
    """The value at which the verdict changes. None: it does not change, or the value was not found."""
    text: str
    """The answer as a sentence."""

    @property
    def is_known(self) -> bool:
        """False where no answer was found in time."""
        return NOT_FOUND not in self.text


ACROSS = ("pipeline", "data")
"""The kinds of plans over several regions; the one that wins more often first."""


@dataclass(frozen=True)
class _Threshold:
    """The verdict changes between two factors; `near` is the one with today's verdict."""

    near: float
    far: float
    is_exact: bool
    """Whether all steps were made, so that `far` is within about 10 %."""


@dataclass
class _RegionComparison:
    """Compares one region with several regions after a figure of the job was changed."""

    families: Families
    progress: Progress | None
    until: float
    """CPU time at which the current question is given up."""
    searched: float = 1.0
    """What a searched order saves, as a factor."""
    asked: int = 0

    @property
    def planned(self) -> SearchResult:
        return self.families.planned

    @property
    def alone_score(self) -> float:
        """Of the best plan in one region."""
        assert self.families.alone is not None
        return score(self.planned, self.families.alone)

    def best(self, job: Job, kind: str) -> float:
        """The score of the best plan of a kind; infinite without one."""
        self._count()
        batch = self.planned.space.sequences
        try:
            found = make_plan(job, objective=self.planned.objective, global_batch=batch, tries=0, kind=kind)
        except AtlasError:
            return math.inf
        return score(self.planned, found.winner)

    def winners(self, job: Job, alone: float, kinds: Iterable[str] = ACROSS) -> Iterator[str]:
        """The kinds of these with a plan that beats one region."""
        return (kind for kind in kinds if self._wins(job, kind, alone))

    def _wins(self, job: Job, kind: str, alone: float) -> bool:
        self._count()
        planned, by = self.planned, self.searched if kind == "pipeline" else 1.0
        try:
            return finds_better(
                job, alone / by, objective=planned.objective, global_batch=planned.space.sequences, kind=kind
            )
        except AtlasError:
            return False

    def _count(self) -> None:
        if time.process_time() > self.until:
            raise TimeoutError
        if self.progress is not None:
            self.progress("break-even", self.asked, 0)
        self.asked += 1


def break_even(
    families: Families,
    *,
    ask: Collection[str] = ("bandwidth", "latency", "gpus", "egress"),
    progress: Progress | None = None,
) -> list[BreakEven]:
    """Bandwidth, latency, GPUs and egress, one answer each; none where there is nothing to compare."""
    planned = families.planned
    alone, together = families.alone, families.together
    if alone is None or together is None or planned.objective.has_limits:
        return []
    end = time.process_time() + CPU_LIMIT_S
    comparison = _RegionComparison(families, progress, end)
    try:
        plain = comparison.best(planned.job, "pipeline")
        if together.candidate.kind == "pipeline" and math.isfinite(plain):
            comparison.searched = min(1.0, score(planned, together) / plain)
    except (TimeoutError, KeyboardInterrupt):
        return []
    wins = score(planned, together) < score(planned, alone)
    found = []
    questions = {"bandwidth": _bandwidth, "latency": _latency, "gpus": _gpus, "egress": _egress}
    for left, what in zip(range(len(ask), 0, -1), ask, strict=True):
        now = time.process_time()
        comparison.until = now + (end - now) / left
        try:
            found.append(questions[what](comparison, wins))
        except TimeoutError:
            found.append(BreakEven(what, None, f"{what}: {NOT_FOUND} within {CPU_LIMIT_S:g} s of CPU time."))
        except KeyboardInterrupt:
            break
    return found


def _threshold(wins_at: Callable[[float], bool], wins: bool, far: float) -> _Threshold | None:
    """Where between the factors 1 and `far` the verdict changes; None where it does not."""
    if wins_at(far) == wins:
        return None
    near = 1.0
    for _ in range(STEPS):
        middle = math.sqrt(near * far)
        try:
            near, far = (middle, far) if wins_at(middle) == wins else (near, middle)
        except TimeoutError:
            return _Threshold(near, far, is_exact=False)
    return _Threshold(near, far, is_exact=True)


def _link_threshold(
    comparison: _RegionComparison, wins: bool, far: float, job_at: Callable[[float], Job]
) -> _Threshold | None:
    """The same for links: a kind of plan that loses with better links loses with worse ones, and is not asked again."""
    scores = {kind: score(comparison.planned, judged) for kind, judged in comparison.families.best.items()}
    kinds = [kind for kind in ACROSS if not wins or scores.get(kind, math.inf) < comparison.alone_score]

    def wins_at(factor: float) -> bool:
        winners = comparison.winners(job_at(factor), comparison.alone_score, kinds)
        if factor == far and not wins:  # the best links that are tried
            kinds[:] = list(winners)
            return bool(kinds)
        return any(winners)

    return _threshold(wins_at, wins, far)


def _bandwidth(comparison: _RegionComparison, wins: bool) -> BreakEven:
    job = comparison.planned.job
    threshold = _link_threshold(
        comparison, wins, 1 / WIDEST if wins else WIDEST, lambda factor: changed_links(job, gbps=factor)
    )
    now = min(route.pair_gbps for route in _routes(job))
    if threshold is None:
        return BreakEven("bandwidth", None, _never("bandwidth", "Gbit/s per node pair", now, wins, 1 / WIDEST, WIDEST))
    where = (
        f"not worth it below {_round(threshold.far * now)}" if wins else f"worth it from {_round(threshold.far * now)}"
    )
    after = "" if wins else " on"
    return _answer(
        "bandwidth", threshold, now, f"{where} Gbit/s per node pair{after} (now {now:g})", "Gbit/s per node pair"
    )


def _latency(comparison: _RegionComparison, wins: bool) -> BreakEven:
    job = comparison.planned.job
    threshold = _link_threshold(
        comparison, wins, WIDEST if wins else 1 / WIDEST, lambda factor: changed_links(job, latency=factor)
    )
    now = max(route.latency_ms for route in _routes(job))
    if threshold is None:
        return BreakEven("latency", None, _never("latency", "ms one way", now, wins, WIDEST, 1 / WIDEST))
    where = (
        f"{'not worth it above' if wins else 'worth it below'} {_round(threshold.far * now)} ms one way (now {now:g})"
    )
    return _answer("latency", threshold, now, where, "ms one way")


def _answer(what: str, threshold: _Threshold, now: float, where: str, unit: str) -> BreakEven:
    if not threshold.is_exact:
        low, high = sorted((threshold.near * now, threshold.far * now))
        where = f"the verdict changes between {_round(low)} and {_round(high)} {unit}"
        where += f" (now {now:g}; no time to narrow it down)"
    return BreakEven(what, threshold.far * now, f"{what}: {where}.")


def _gpus(comparison: _RegionComparison, wins: bool) -> BreakEven:
    """Of the region that adds most to the best single one."""
    families = comparison.families
    assert families.alone is not None
    home = families.alone.candidate.groups[0].places[0][0]
    others = [dc for dc in comparison.planned.job.cluster.datacenters if dc.name != home]
    dc = max(others, key=lambda one: one.nodes * one.gpus_per_node)

    def job_of(factor: float) -> Job:
        cluster = comparison.planned.job.cluster
        nodes = max(1, round(dc.nodes * factor))
        more = dc.model_copy(update={"nodes": nodes})
        dcs = tuple(more if one.name == dc.name else one for one in cluster.datacenters)
        return comparison.planned.job.model_copy(update={"cluster": cluster.model_copy(update={"datacenters": dcs})})

    def wins_at(factor: float) -> bool:
        job = job_of(factor)
        return any(comparison.winners(job, comparison.best(job, "one")))

    threshold = _threshold(wins_at, wins, 1 / dc.nodes if wins else MOST_NODES)
    now = dc.nodes * dc.gpus_per_node
    if threshold is None:
        if wins:
            return BreakEven("gpus", None, f"GPUs in {dc.name}: worth it from the first node on (now {now}).")
        return BreakEven("gpus", None, f"GPUs in {dc.name}: no change up to {now * MOST_NODES:,.0f} (now {now}).")
    near, count = (max(1, round(dc.nodes * factor)) * dc.gpus_per_node for factor in (threshold.near, threshold.far))
    word, why = f"not worth it with {count:,} or fewer" if wins else f"worth it from {count:,} on", ""
    if not threshold.is_exact:
        low, high = sorted((near, count))
        word, why = f"the verdict changes between {low:,} and {high:,}", "; no time to narrow it down"
    return BreakEven("gpus", float(count), f"GPUs in {dc.name}: {word} (now {now:,}{why}).")


def _egress(comparison: _RegionComparison, wins: bool) -> BreakEven:
    """Where speed is the goal, egress changes only which of the two is cheaper per token."""
    alone, together = comparison.families.alone, comparison.families.together
    assert alone is not None
    assert together is not None
    now = max(route.egress_usd_per_gb for route in _routes(comparison.planned.job))
    figures = together.figures
    if not figures.egress_usd or not now:
        return BreakEven("egress", None, "egress: the job has no price for it, so no break-even is computed.")
    # The cost of a token is linear in the price of egress, and the plan is the one above.
    threshold = (alone.figures.usd_per_iteration - figures.rent_usd) / figures.egress_usd
    speed = comparison.planned.objective.minimise == "throughput"
    lead = "egress: does not change the speed; " if speed else "egress: "
    if threshold <= 0:
        text = f"{lead}across regions a token costs more even with free egress (now ${now:g}/GB)."
        return BreakEven("egress", None, text)
    word = "below" if figures.usd_per_iteration > alone.figures.usd_per_iteration else "up to"
    text = f"{lead}across regions a token is cheaper {word} ${_round(threshold * now)}/GB (now ${now:g}/GB)."
    return BreakEven("egress", threshold * now, text)


# ---- figures of a job --------------------------------------------------------------------------------------
def changed_links(job: Job, *, gbps: float = 1.0, latency: float = 1.0) -> Job:
    """The job with every link's bandwidth and latency times a factor."""
    if gbps != 1.0:
        job = faster_links(job, gbps, only=("pair_gbps", "trunk_gbps"))
    if latency != 1.0:
        job = faster_links(job, 1 / latency, only=("latency_ms",))
    return job


def _routes(job: Job) -> list[Route]:
    pairs = combinations([dc.name for dc in job.cluster.datacenters], 2)
    return [route for a, b in pairs if (route := job.cluster.route(a, b)) is not None]


def _round(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _never(what: str, unit: str, now: float, wins: bool, if_wins: float, if_not: float) -> str:
    factor = if_wins if wins else if_not
    word = "up" if factor > 1 else "down"
    return f"{what}: no change {word} to {_round(now * factor)} {unit} (now {now:g})."
