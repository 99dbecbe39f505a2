"""The search: the best plan by Sailor's judge for a goal. Bounds first, placements and splits for what survives them,
zones and moved layers by the judge itself for the best few. Deterministic; uses no clock.

An Objective turns (seconds, USD) into a score; lower is better, and infinite misses a limit. An iteration counts as one
token: Sailor's files have iterations only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter

import numpy as np

from atlas.errors import InfeasibleError
from atlas.planner.objective import Objective
from atlas.sailor.candidates import OutlinePlacer, SailorCandidate
from atlas.sailor.check import check
from atlas.sailor.inputs import GIB, Inputs
from atlas.sailor.judge import PlanJudge, Verdict, stage_memory_bytes
from atlas.sailor.layer_moves import improved
from atlas.sailor.lower_bounds import OutlineGenerator, Outlines
from atlas.sailor.money import usd_per_gpu_s, usd_per_s
from atlas.sailor.placements import team_structures
from atlas.sailor.plan_file import SailorPlan
from atlas.sailor.tables import Floats, SailorTables, find_clusters
from atlas.sailor.zones import plans

SHORTLIST = 48
"""Candidates that get zones; those which the bound of a better one rules out are not looked at."""
NUM_IMPROVED = 6
"""Plans whose layers are moved; and of twice as many candidates the best plan of each."""
FIRST_FILLINGS = 8
"""Ways to fill zones that are tried for every candidate; all are tried for the best `2 * NUM_IMPROVED` of them."""
MOVE_SLACK = 1.02
"""How far above the best judged score a candidate may start and still get zones: moving layers may gain this much."""
SLACK = 1.03
"""How far a bound may lie above the best score so far, where the choice of zones will still change that score."""
FIRST_BATCH, BATCH_GROWTH, MAX_BATCH = 64, 4, 1024
"""Outlines that are placed together: at first, the factor from batch to batch, and at most. Best bounds come first, and
each batch may lower the limit."""
TIGHTER = (0.95, 0.9, 0.8, 0.7, 0.6)
"""Shares of a limit on money that candidates must keep, where zones make all others too expensive."""
INFINITE = float("inf")
"""The score of what misses a limit."""
LARGEST = 1e300
"""Stands for an infinite time where it is multiplied by a price that may be 0."""


@dataclass(frozen=True)
class SailorResult:
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


class SailorSearch:
    """One run of the search."""

    def __init__(self, inputs: Inputs, objective: Objective, candidates: Objective | None = None) -> None:
        self.inputs, self.objective = inputs, objective
        self.candidates = candidates or objective
        """For what has no zones yet."""
        self.clusters = find_clusters(inputs)
        priced = objective.needs_prices
        self.usd_per_gpu_s = {c.gpu: usd_per_gpu_s(inputs, c.gpu) if priced else 0.0 for c in self.clusters}
        self.priced: list[tuple[float, SailorCandidate]] = []
        """Score and candidate."""
        self.slack = MOVE_SLACK if all(len(c.pools) == 1 for c in self.clusters) else SLACK
        self.limit = INFINITE
        self.finalists: list[tuple[float, SailorPlan, Verdict]] = []
        self.interrupted = False
        self.num_outlines = self.num_priced = self.num_judged = 0

    def run(self) -> SailorResult:
        tables = {mbs: found for mbs in self.inputs.microbatches() if (found := self._tables(mbs)).clusters}
        try:
            self._look(tables)
        except KeyboardInterrupt:
            self.interrupted = True  # keep what was found so far
        self._settle(tables)
        if not self.finalists:
            if self.interrupted:
                raise KeyboardInterrupt
            raise self.nothing()
        return self._found()

    def _look(self, tables: dict[int, SailorTables]) -> None:
        generators = {mbs: OutlineGenerator(t) for mbs, t in tables.items()}
        structures = {mbs: team_structures(t) for mbs, t in tables.items()}
        for kind in (OutlineGenerator.even, OutlineGenerator.stepped):
            found = {mbs: kind(generator, self._scores, self.limit) for mbs, generator in generators.items()}
            self.num_outlines += sum(len(least) for _, least in found.values())
            for mbs, outlines in self._batches(found):
                placer = OutlinePlacer(tables[mbs], outlines, self._scores)
                for candidate in placer.candidates(structures[mbs], lambda: self.limit):
                    self._keep(candidate)

    def _batches(self, found: dict[int, tuple[Outlines, Floats]]) -> Iterator[tuple[int, Outlines]]:
        """Outlines of one microbatch size at a time, best first, while their bound is below the limit."""
        at, size = dict.fromkeys(found, 0), FIRST_BATCH
        while True:
            heads = {mbs: float(least[at[mbs]]) for mbs, (_, least) in found.items() if at[mbs] < len(least)}
            mbs = min(heads, key=lambda m: heads[m], default=0)
            if not heads or heads[mbs] >= self.limit:
                return
            outlines, least = found[mbs]
            stop = min(at[mbs] + size, int(np.searchsorted(least, self.limit)))
            start, at[mbs], size = at[mbs], stop, min(MAX_BATCH, BATCH_GROWTH * size)
            yield mbs, outlines.take(np.arange(start, stop))

    def _found(self) -> SailorResult:
        score, plan, verdict = self.finalists[0]
        check(self.inputs, plan)
        others = tuple(plan for _, plan, _ in self.finalists[1:])
        counts = (self.num_outlines, self.num_priced, self.num_judged)
        return SailorResult(plan, verdict, score, others, *counts, self.interrupted)

    def _tables(self, mbs: int) -> SailorTables:
        usable = tuple(c for c in self.clusters if self.inputs.tps(c.gpu, mbs))
        return SailorTables(self.inputs, usable, mbs, self.usd_per_gpu_s)

    # ---- scores ------------------------------------------------------------------------------------------
    def _scores(self, seconds: Floats, usd_per_s: Floats, egress_usd: Floats) -> Floats:
        """Of many plans."""
        finite = np.minimum(seconds, LARGEST)
        usd = usd_per_s * finite + egress_usd
        bad = finite == LARGEST
        if self.candidates.has_limits:
            bad |= self.candidates.missed(finite, usd, 1) > 0
        return np.where(bad, INFINITE, usd if self.candidates.minimise == "cost" else seconds)

    def _keep(self, candidate: SailorCandidate) -> None:
        self.num_priced += 1
        egress_usd = candidate.egress_usd if self.objective.needs_prices else 0.0
        usd = candidate.usd_per_s * candidate.about_s + egress_usd
        score = _score_of(self.candidates, candidate.about_s, usd)
        if score < INFINITE:
            self.priced.append((score, candidate))
            self.limit = min(self.limit, score * self.slack)

    def judged(self, plan: SailorPlan) -> tuple[float, Verdict]:
        """The judge's score of a plan."""
        self.num_judged += 1
        return self._judged(PlanJudge(self.inputs, plan), plan.ends, self._gpus_usd(plan))

    def _improved(self, plan: SailorPlan) -> SailorPlan:
        gpus_usd = self._gpus_usd(plan)
        return improved(self.inputs, plan, lambda judge, ends: self._judged(judge, ends, gpus_usd)[0])

    def _judged(self, judge: PlanJudge, ends: Sequence[int], gpus_usd: float) -> tuple[float, Verdict]:
        verdict = judge.verdict(ends)
        usd = gpus_usd * verdict.iteration_s + judge.egress_usd(ends) if self.objective.needs_prices else 0.0
        return _score_of(self.objective, verdict.iteration_s, usd), verdict

    def _gpus_usd(self, plan: SailorPlan) -> float:
        """A second."""
        return usd_per_s(self.inputs, plan) if self.objective.needs_prices else 0.0

    # ---- the best few ------------------------------------------------------------------------------------
    def _settle(self, tables: dict[int, SailorTables]) -> None:
        tried: list[tuple[list[tuple[float, SailorPlan]], Iterator[SailorPlan]]] = []
        least = INFINITE
        for about, candidate in sorted(self.priced, key=itemgetter(0))[:SHORTLIST]:
            if about >= least * MOVE_SLACK:
                break
            ways = plans(self.inputs, tables[candidate.outline.mbs].clusters, candidate)
            scored = self._scored(islice(ways, FIRST_FILLINGS))
            if scored:
                tried.append((scored, ways))
                least = min(least, scored[0][0])
        tried.sort(key=lambda entry: entry[0][0][0])
        best = [sorted([*scored, *self._scored(ways)], key=itemgetter(0)) for scored, ways in tried[: 2 * NUM_IMPROVED]]
        chosen = sorted((entry for scored in best for entry in scored), key=itemgetter(0))[:NUM_IMPROVED]
        chosen += [scored[0] for scored in best]
        changed = [self._improved(plan) for plan in dict.fromkeys(plan for _, plan in chosen)]
        found = [(*self.judged(plan), plan) for plan in dict.fromkeys(changed)]
        self.finalists = sorted(
            ((score, plan, verdict) for score, verdict, plan in found if score < INFINITE), key=lambda entry: entry[0]
        )

    def _scored(self, found: Iterable[SailorPlan]) -> list[tuple[float, SailorPlan]]:
        """Best first."""
        return sorted(((self.judged(plan)[0], plan) for plan in found), key=itemgetter(0))

    def nothing(self) -> InfeasibleError:
        """The error that no plan was found."""
        if self.objective.has_limits:
            rule = "no plan on these GPUs meets the goal"
            remedy = "Lower --min-throughput, raise --max-usd, or add GPUs"
            return InfeasibleError(where=str(self.inputs.trace), key="goal", rule=rule, remedy=remedy)
        layers = range(self.inputs.num_layers)
        tps = sorted(self.inputs.sizes)
        need = min(max(stage_memory_bytes(self.inputs, (layer,), tp, 1, 1) for layer in layers) for tp in tps)
        return InfeasibleError(
            where=str(self.inputs.trace),
            key="counts",
            value=sum(pool.num_gpus for pool in self.inputs.pools),
            rule=f"no plan for {self.inputs.model} fits these GPUs; its largest layer alone needs {need / GIB:.1f} GiB",
            remedy="Add GPUs, or use a type with more memory",
        )


def _score_of(objective: Objective, seconds: float, usd: float) -> float:
    """Of one plan."""
    if objective.has_limits and objective.missed(seconds, usd, 1) > 0:
        return INFINITE
    return usd if objective.minimise == "cost" else seconds


def search(inputs: Inputs, objective: Objective | None = None) -> SailorResult:
    """The best plan found.

    A candidate's USD leave out egress between zones of a cluster. So every candidate that seems to keep a limit on
    money may miss it once it has zones. Then the search is repeated with tighter limits for candidates, and for the
    cheapest ones.
    """
    objective = objective or Objective()
    most_usd = objective.max_usd_per_iteration
    try:
        return SailorSearch(inputs, objective).run()
    except InfeasibleError:
        if objective.minimise == "cost" or most_usd is None:
            raise
    attempts = [replace(objective, max_usd_per_iteration=share * most_usd) for share in TIGHTER]
    found = []
    for candidates in [*attempts, replace(objective, minimise="cost")]:
        with suppress(InfeasibleError):
            found.append(SailorSearch(inputs, objective, candidates).run())
    if not found:
        raise SailorSearch(inputs, objective).nothing()
    return min(found, key=lambda one: one.score)
