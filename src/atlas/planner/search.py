"""One search: it simulates the candidates that a strategy gives it, ranks them, and keeps all results, so that an
interrupted search still has the best so far. It does not choose candidates (`strategies`).
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field

from atlas.cost.cluster_arrays import ClusterArrays
from atlas.errors import InfeasibleError
from atlas.ir.program import Layout
from atlas.planner.candidate import Candidate, kind_of
from atlas.planner.judge import Judged, judge, judged_groups, require_runnable
from atlas.planner.objective import Objective
from atlas.planner.pool import EstimatedCandidate, Tick
from atlas.planner.space import Space
from atlas.planner.whole import Whole, simulate_whole
from atlas.schedules.eager import NAME

SIMULATIONS = 26
"""What `ours` simulates at most where no order is searched."""
PLAYED_EVENTS = 2_000_000
"""Events that the searches of all candidates may simulate together: one or two seconds."""
MOST = 60
"""Candidates that are searched at most."""
LEAST = 3
"""Candidates that are searched in any case, however large."""
FEW = 24
"""Tries of a candidate's search: mostly within 3 % of a full one (7 % in the worst of 70 plans)."""

CLEARLY = 0.97
"""A simulated score below this share of a limit is below it: figures of long runs are extrapolated."""


@dataclass(frozen=True, eq=False)
class Played:
    """A candidate simulated in full under a schedule."""

    judged: Judged
    schedule: str
    tries: int
    whole: Whole


@dataclass
class Search:
    """One search: its choices, its goal, and what it has found."""

    space: Space
    cluster: ClusterArrays
    objective: Objective
    tick: Tick | None = None
    tries: int = 0
    """Orders that are tried for each candidate; 0: all are compared under `1f1b-eager`."""
    seed: int = 0
    judged: dict[Candidate, Judged] = field(default_factory=dict)
    played: dict[Candidate, Played] = field(default_factory=dict)
    refused: dict[Candidate, InfeasibleError] = field(default_factory=dict)
    screened: dict[Candidate, Judged] = field(default_factory=dict)
    """Under `1f1b-eager`, where the search of an order takes too long to search every candidate's."""
    floors: dict[Candidate, float] = field(default_factory=dict)
    """Scores that the candidates cannot beat."""
    num_estimated: int = 0
    num_simulated: int = 0
    events: int = 0
    """Played so far."""
    interrupted: bool = False
    _scores: dict[Judged, float] = field(default_factory=dict)
    _best: dict[str | None, Judged | None] = field(default_factory=dict)
    """By kind. Every candidate that is looked at is compared with the best one."""

    def score(self, judged: Judged) -> float:
        """Computed once."""
        if judged not in self._scores:
            figures = judged.figures
            found = self.objective.score(figures.iteration_s, figures.usd_per_iteration, figures.tokens)
            self._scores[judged] = float(found)
        return self._scores[judged]

    def missed(self, judged: Judged) -> float:
        """By which share the worst limit is missed; 0 where all are kept."""
        figures = judged.figures
        return float(self.objective.missed(figures.iteration_s, figures.usd_per_iteration, figures.tokens))

    def simulate(self, candidate: Candidate, of: int = SIMULATIONS) -> Judged | None:
        """The candidate's figures, or None where it cannot run."""
        if candidate in self.judged or candidate in self.refused:
            return self.judged.get(candidate)
        if self.tick is not None:
            self.tick("simulating", self.num_simulated, of)
        try:
            self.keep(self._simulated(candidate))
        except InfeasibleError as error:
            self.refused[candidate] = error
            return None
        finally:
            self.num_simulated += 1
        return self.judged[candidate]

    def _simulated(self, candidate: Candidate) -> Judged:
        if self.tries:
            require_runnable(self.space, self.cluster, candidate)
            self.events += self.tries * events(candidate)
            with suppress(InfeasibleError):  # too many events to simulate in full
                return self.play(candidate, self.tries).judged
        return judge(self.space, self.cluster, candidate)

    def play(self, candidate: Candidate, tries: int) -> Played:
        """Under the best order that a search finds, or without tries under the order of the comparison."""
        schedule = NAME
        if max(group.pp for group in candidate.groups) == 1:
            schedule, tries = "1f1b", 0  # with one stage there is nothing to order
        elif tries:
            schedule = "atlas"
        whole = simulate_whole(
            self.space.job, self.cluster, candidate, schedule,
            sharing=candidate.sharing or schedule != NAME, budget=tries, seed=self.seed,
        )  # fmt: skip
        judged = judged_groups(self.space, self.cluster, candidate, whole.groups)
        found = Played(judged, schedule, tries, whole)
        old = self.played.get(candidate)
        if old is None or whole.iteration_s < old.whole.iteration_s:
            self.played[candidate] = found
            self.keep(judged)
        return found

    def keep(self, judged: Judged) -> None:
        """Rank a candidate by these figures from now on."""
        self.judged[judged.candidate] = judged
        self._best.clear()

    @property
    def is_spent(self) -> bool:
        """Whether no more candidates should be simulated."""
        best = self.best if self.space.below < math.inf else None
        if best is not None and self.score(best) < CLEARLY * self.space.below:
            return True
        if not self.tries:
            return self.num_simulated >= SIMULATIONS
        if self.num_simulated >= MOST:
            return True
        return self.events >= PLAYED_EVENTS and self.num_simulated >= LEAST

    def priority(self, entry: EstimatedCandidate) -> float:
        """Sort key of candidates, lowest first. With searched orders it is the floor, because these orders come close
        to it."""
        return entry.floor if self.tries else entry.score

    def ranking(self) -> list[Judged]:
        """Best first; equals in the order in which they were found."""
        return sorted(self.judged.values(), key=self.score)

    def everything(self) -> list[Judged]:
        """The ranking, then what was compared under `1f1b-eager` alone."""
        rest = [judged for candidate, judged in self.screened.items() if candidate not in self.judged]
        return [*self.ranking(), *sorted(rest, key=self.score)]

    @property
    def best(self) -> Judged | None:
        return self.best_of(None)

    def best_of(self, kind: str | None) -> Judged | None:
        """The best so far, of a kind where one is given."""
        if kind not in self._best:
            found = [judged for judged in self.judged.values() if kind in (None, kind_of(judged.candidate))]
            self._best[kind] = min(found, key=self.score, default=None)
        return self._best[kind]


def events(candidate: Candidate) -> int:
    """Of one try."""
    cells = (Layout.even(g.pipelines_per_cell, g.pp, g.num_microbatches) for g in candidate.groups)
    return sum(cell.about_events(split=True) for cell in cells)
