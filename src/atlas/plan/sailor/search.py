"""The search: the best plan by Sailor's judge for a goal. Bounds first, placements and splits for what survives them,
zones and a polish by the judge itself for the best few. Deterministic; asks no clock.

A Goal turns (seconds, USD) into a score; lower is better and infinite is out of the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from atlas.errors import InfeasibleError
from atlas.plan.sailor.candidates import (
    INFINITE,
    Candidate,
    Outline,
    Shortlist,
    Worth,
    column_counts,
    even_outlines,
    priced,
    stepped_outlines,
)
from atlas.plan.sailor.check import check
from atlas.plan.sailor.inputs import GIB, Inputs
from atlas.plan.sailor.judge import Verdict, judge
from atlas.plan.sailor.money import egress_usd, usd_per_gpu_s, usd_per_s
from atlas.plan.sailor.place import plans
from atlas.plan.sailor.plan_file import SailorPlan
from atlas.plan.sailor.polish import polished
from atlas.plan.sailor.shapes import team_structures
from atlas.plan.sailor.tables import Tables, find_clusters

SHORTLIST = 48
"""Candidates that get zones; those which the bound of a better one rules out are not looked at."""
POLISHED = 6
POLISH_SLACK = 1.02
"""How far above the best judged score a candidate may start and still be settled: a polish may bring so much."""
SLACK = 1.03
"""How far a bound may lie above the best score so far, where the choice of zones will still change that score."""
OutlineKind = Callable[[Tables, int, Worth], Iterator[Outline]]


@dataclass(frozen=True)
class Goal:
    """What to minimise, and what must hold."""

    objective: str = "throughput"
    """`throughput`: least seconds. `cost`: least USD an iteration."""
    min_throughput: float = 0.0
    """Iterations a second that a plan must reach."""
    max_usd: float = INFINITE
    """USD an iteration that a plan may cost."""

    @property
    def needs_money(self) -> bool:
        return self.objective == "cost" or self.max_usd < INFINITE

    def score(self, seconds: float, usd: float) -> float:
        if seconds * self.min_throughput > 1 or usd > self.max_usd:
            return INFINITE
        return usd if self.objective == "cost" else seconds


@dataclass(frozen=True)
class Found:
    """The best plan, its verdict, and how much was looked at."""

    plan: SailorPlan
    verdict: Verdict
    score: float
    runners_up: tuple[SailorPlan, ...]
    num_outlines: int
    num_priced: int
    num_judged: int
    interrupted: bool
    """Whether the search was cut short: the plan is the best so far."""


class Search:
    """One run of the search."""

    def __init__(self, inputs: Inputs, goal: Goal) -> None:
        self.inputs, self.goal = inputs, goal
        self.clusters = find_clusters(inputs)
        self.usd_per_gpu_s = {c.gpu: usd_per_gpu_s(inputs, c.gpu) if goal.needs_money else 0.0 for c in self.clusters}
        self.shortlist = Shortlist(SHORTLIST)
        self.slack = 1.0 if all(len(c.pools) == 1 for c in self.clusters) else SLACK
        self.limit = INFINITE
        self.finalists: list[tuple[float, SailorPlan, Verdict]] = []
        self.interrupted = False
        self.num_outlines = self.num_priced = self.num_judged = 0

    def run(self) -> Found:
        tables = {mbs: self._tables(mbs) for mbs in self.inputs.microbatches()}
        try:
            self._look(tables)
        except KeyboardInterrupt:
            self.interrupted = True  # what was found so far is still worth having
        self._settle(tables)
        if not self.finalists:
            if self.interrupted:
                raise KeyboardInterrupt
            raise self._nothing()
        return self._found()

    def _look(self, tables: dict[int, Tables]) -> None:
        structures = {mbs: team_structures(len(t.clusters), _chains(t)) for mbs, t in tables.items()}
        for kind_of_outline in (even_outlines, stepped_outlines):
            sketches = list(self._sketches(tables, kind_of_outline))
            self.num_outlines += len(sketches)
            for outline in sorted(sketches, key=self._least_score):
                if self._least_score(outline) >= self.limit:
                    break
                for candidate in priced(tables[outline.mbs], outline, structures[outline.mbs], self._worth):
                    self._keep(candidate)

    def _sketches(self, tables: dict[int, Tables], kind_of_outline: OutlineKind) -> Iterator[Outline]:
        for table in tables.values():
            if kind_of_outline is stepped_outlines and len(table.gpu_types) != 1:
                continue
            for columns in column_counts(self.inputs.global_batch, table.mbs, table.num_gpus):
                yield from kind_of_outline(table, columns, self._worth)

    def _found(self) -> Found:
        score, plan, verdict = self.finalists[0]
        check(self.inputs, plan)
        others = tuple(plan for _, plan, _ in self.finalists[1:])
        counts = (self.num_outlines, self.num_priced, self.num_judged)
        return Found(plan, verdict, score, others, *counts, self.interrupted)

    def _tables(self, mbs: int) -> Tables:
        usable = tuple(c for c in self.clusters if self.inputs.tps(c.gpu, mbs))
        return Tables(self.inputs, usable, mbs, self.usd_per_gpu_s)

    # ---- scores ------------------------------------------------------------------------------------------
    def _worth(self, seconds: float, usd_per_s: float, egress_usd: float) -> bool:
        return self.goal.score(seconds, usd_per_s * seconds + egress_usd) < self.limit

    def _least_score(self, outline: Outline) -> float:
        usd_per_s = outline.least_gpus * min(self.usd_per_gpu_s[gpu] for gpu in outline.tps)
        return self.goal.score(outline.bound_s, usd_per_s * outline.bound_s)

    def _keep(self, candidate: Candidate) -> None:
        self.num_priced += 1
        egress_usd = candidate.egress_usd if self.goal.needs_money else 0.0
        score = self.goal.score(candidate.about_s, candidate.usd_per_s * candidate.about_s + egress_usd)
        if score < INFINITE:
            self.shortlist.add(score, candidate)
            self.limit = min(self.limit, score * self.slack)

    def judged(self, plan: SailorPlan) -> tuple[float, Verdict]:
        """The judge's score of a plan."""
        self.num_judged += 1
        verdict = judge(self.inputs, plan)
        usd = 0.0
        if self.goal.needs_money:
            usd = usd_per_s(self.inputs, plan) * verdict.iteration_s
            usd += egress_usd(self.inputs, plan, verdict.num_microbatches)
        return self.goal.score(verdict.iteration_s, usd), verdict

    # ---- the best few ------------------------------------------------------------------------------------
    def _settle(self, tables: dict[int, Tables]) -> None:
        settled: list[tuple[float, int, SailorPlan, Verdict]] = []
        least = INFINITE
        for about, candidate in self.shortlist.best():
            if about >= least * POLISH_SLACK:
                break
            for plan in plans(self.inputs, tables[candidate.outline.mbs].clusters, candidate):
                score, verdict = self.judged(plan)
                settled.append((score, len(settled), plan, verdict))
                least = min(least, score)
        settled.sort(key=lambda entry: entry[:2])
        polishes = [polished(self.inputs, plan, self.judged) for _, _, plan, _ in settled[:POLISHED]]
        distinct = {plan: (score, plan, verdict) for score, plan, verdict in polishes if score < INFINITE}
        self.finalists = sorted(distinct.values(), key=lambda entry: entry[0])

    def _nothing(self) -> InfeasibleError:
        goal = self.goal
        if goal.min_throughput or goal.max_usd < INFINITE:
            rule = "no plan on these GPUs meets the goal"
            remedy = "Lower --min-throughput, raise --max-usd, or add GPUs"
            return InfeasibleError(where=str(self.inputs.trace), key="goal", value=None, rule=rule, remedy=remedy)
        need = min(24 * max(sizes.params) + 3_000_000_000 for sizes in self.inputs.sizes.values())
        return InfeasibleError(
            where=str(self.inputs.trace),
            key="counts",
            value=sum(pool.num_gpus for pool in self.inputs.pools),
            rule=f"no plan for {self.inputs.model} fits these GPUs; its largest layer alone needs {need / GIB:.1f} GiB",
            remedy="Add GPUs, or use a type with more memory",
        )


def _chains(tables: Tables) -> list[tuple[int, ...]]:
    """Orders of the clusters in which each is followed by the nearest that is left, from a few starts."""
    ids = range(len(tables.clusters))
    chains: dict[tuple[int, ...], None] = {}
    largest = sorted(ids, key=lambda c: -tables.clusters[c].num_gpus)
    for start in largest[:1]:
        chain, left = [start], set(ids) - {start}
        while left:
            here = chain[-1]
            nearest = min(sorted(left), key=lambda c: (tables.sync_s(here, c, 1e8, 2), -tables.clusters[c].num_gpus))
            chain.append(nearest)
            left.remove(nearest)
        chains[tuple(chain)] = None
    chains[tuple(largest)] = None
    return list(chains)


def search(inputs: Inputs, goal: Goal | None = None) -> Found:
    """The best plan found."""
    return Search(inputs, goal or Goal()).run()
