"""One search: it simulates the candidates that a strategy gives it, ranks them, and keeps all results, so that an
interrupted search still has the best so far. It does not choose candidates (`strategies`).
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field

from atlas.cost.cluster_arrays import ClusterArrays
from atlas.errors import InfeasibleError
from atlas.evaluate import Progress
from atlas.ir.program import Layout
from atlas.planner.candidate import Candidate
from atlas.planner.estimated_candidates import EstimatedCandidate
from atlas.planner.judge import SimulatedCandidate, judge, judged_groups, require_runnable
from atlas.planner.objective import Objective
from atlas.planner.plan_simulation import PlanSimulation, simulate_plan
from atlas.planner.space import Space
from atlas.schedules.eager import NAME

MAX_SIMULATIONS = 26
"""What `ours` simulates at most where no order is searched."""
MAX_SEARCHED_EVENTS = 2_000_000
"""Events that the searches of all candidates may simulate together: one or two seconds."""
MAX_SEARCHED = 60
"""Candidates that are searched at most."""
MIN_SEARCHED = 3
"""Candidates that are searched in any case, however large."""
FEW_TRIES = 24
"""Tries of a candidate's search: mostly within 3 % of a full one (7 % in the worst of 70 plans)."""

CLEARLY = 0.97
"""A simulated score below this share of a limit is below it: figures of long runs are extrapolated."""


@dataclass(frozen=True, eq=False)
class ScheduledCandidate:
    """A candidate simulated in full under a schedule."""

    judged: SimulatedCandidate
    schedule: str
    tries: int
    simulation: PlanSimulation


@dataclass
class Search:
    """One search: its choices, its goal, and what it has found."""

    space: Space
    cluster: ClusterArrays
    objective: Objective
    progress: Progress | None = None
    tries: int = 0
    """Orders that are tried for each candidate; 0: all are compared under `1f1b-eager`."""
    seed: int = 0
    judged: dict[Candidate, SimulatedCandidate] = field(default_factory=dict)
    scheduled: dict[Candidate, ScheduledCandidate] = field(default_factory=dict)
    refused: dict[Candidate, InfeasibleError] = field(default_factory=dict)
    screened: dict[Candidate, SimulatedCandidate] = field(default_factory=dict)
    """Under `1f1b-eager`, where the search of an order takes too long to search every candidate's."""
    floors: dict[Candidate, float] = field(default_factory=dict)
    """Scores that the candidates cannot beat."""
    num_estimated: int = 0
    num_simulated: int = 0
    events: int = 0
    """Simulated so far, by searches."""
    interrupted: bool = False
    _scores: dict[SimulatedCandidate, float] = field(default_factory=dict)
    _best: dict[str | None, SimulatedCandidate | None] = field(default_factory=dict)
    """By kind. Every candidate that is looked at is compared with the best one."""

    def score(self, judged: SimulatedCandidate) -> float:
        """Computed once."""
        if judged not in self._scores:
            figures = judged.figures
            found = self.objective.score(figures.iteration_s, figures.usd_per_iteration, figures.tokens)
            self._scores[judged] = float(found)
        return self._scores[judged]

    def missed(self, judged: SimulatedCandidate) -> float:
        """By which share the worst limit is missed; 0 where all are kept."""
        figures = judged.figures
        return float(self.objective.missed(figures.iteration_s, figures.usd_per_iteration, figures.tokens))

    def simulate(self, candidate: Candidate, of: int = MAX_SIMULATIONS) -> SimulatedCandidate | None:
        """The candidate's figures, or None where it cannot run."""
        if candidate in self.judged or candidate in self.refused:
            return self.judged.get(candidate)
        if self.progress is not None:
            self.progress("simulating", self.num_simulated, of)
        try:
            self.keep(self._simulated(candidate))
        except InfeasibleError as error:
            self.refused[candidate] = error
            return None
        finally:
            self.num_simulated += 1
        return self.judged[candidate]

    def _simulated(self, candidate: Candidate) -> SimulatedCandidate:
        if self.tries:
            require_runnable(self.space, self.cluster, candidate)
            self.events += self.tries * events(candidate)
            with suppress(InfeasibleError):  # too many events to simulate in full
                return self.schedule(candidate, self.tries).judged
        return judge(self.space, self.cluster, candidate)

    def schedule(self, candidate: Candidate, tries: int) -> ScheduledCandidate:
        """Under the best order that a search finds, or without tries under the order of the comparison."""
        schedule = NAME
        if max(group.pp for group in candidate.groups) == 1:
            schedule, tries = "1f1b", 0  # with one stage there is nothing to order
        elif tries:
            schedule = "atlas"
        simulation = simulate_plan(
            self.space.job, self.cluster, candidate, schedule,
            sharing=candidate.sharing or schedule != NAME, budget=tries, seed=self.seed,
        )  # fmt: skip
        judged = judged_groups(self.space, self.cluster, candidate, simulation.groups)
        found = ScheduledCandidate(judged, schedule, tries, simulation)
        old = self.scheduled.get(candidate)
        if old is None or simulation.iteration_s < old.simulation.iteration_s:
            self.scheduled[candidate] = found
            self.keep(judged)
        return found

    def keep(self, judged: SimulatedCandidate) -> None:
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
            return self.num_simulated >= MAX_SIMULATIONS
        if self.num_simulated >= MAX_SEARCHED:
            return True
        return self.events >= MAX_SEARCHED_EVENTS and self.num_simulated >= MIN_SEARCHED

    def priority(self, entry: EstimatedCandidate) -> float:
        """Sort key of candidates, lowest first. With searched orders it is the floor, because these orders come close
        to it."""
        return entry.floor if self.tries else entry.score

    def ranking(self) -> list[SimulatedCandidate]:
        """Best first; equals in the order in which they were found."""
        return sorted(self.judged.values(), key=self.score)

    def everything(self) -> list[SimulatedCandidate]:
        """The ranking, then what was compared under `1f1b-eager` alone."""
        rest = [judged for candidate, judged in self.screened.items() if candidate not in self.judged]
        return [*self.ranking(), *sorted(rest, key=self.score)]

    @property
    def best(self) -> SimulatedCandidate | None:
        return self.best_of(None)

    def best_of(self, kind: str | None) -> SimulatedCandidate | None:
        """The best so far, of a kind where one is given."""
        if kind not in self._best:
            found = [judged for judged in self.judged.values() if kind in (None, judged.candidate.kind)]
            self._best[kind] = min(found, key=self.score, default=None)
        return self._best[kind]


def events(candidate: Candidate) -> int:
    """Of one try."""
    cells = (Layout.even(g.pipelines_per_cell, g.pp, g.num_microbatches) for g in candidate.groups)
    return sum(cell.about_events(split=True) for cell in cells)
