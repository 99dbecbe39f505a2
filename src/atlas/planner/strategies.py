"""The ways to look for a plan, by name. Each gives candidates to a Search, which simulates and ranks
them and keeps all results, so that an interrupted search still has the best so far.

    ours         estimates every candidate and its floor; of each kind, simulates those whose floor is lower than the
                 best of the kind, with searched orders; then neighbours of the leaders and some along the Pareto front
    algorithm1   the paper's: degrees as the job has them, largest datacenters first, one loop over the cells
    exhaustive   every candidate simulated: the reference, for small clusters
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from statistics import median

import numpy as np

from atlas.cost.arrange import arrange
from atlas.errors import AtlasError, InfeasibleError
from atlas.planner.candidate import Candidate
from atlas.planner.estimate import estimate
from atlas.planner.estimated_candidates import (
    SLACK,
    EstimatedCandidate,
    Variant,
    WorkerSetup,
    batch_of_variants,
    cell_sizes,
    entry_of,
    floors,
    single_groups,
    worker_setups,
)
from atlas.planner.exhaustive import every_candidate
from atlas.planner.objective import Objective
from atlas.planner.regions import several_groups
from atlas.planner.search import (
    FEW_TRIES,
    MAX_SEARCHED,
    MAX_SEARCHED_EVENTS,
    MAX_SIMULATIONS,
    MIN_SEARCHED,
    Search,
    events,
)
from atlas.planner.shapes import PipelineShape, alike
from atlas.sim.simulate import compiled_engine

FRONT = 4
"""Candidates along the estimated Pareto front of time and money that are simulated."""
NEIGHBOURS = 4
"""Candidates one change away from the leader that are simulated at a time."""
SAME = 0.0005
"""Estimates within this share of each other would be simulated alike."""
WORSE = 1.02
"""A neighbour whose sort key is worse than the leader's by this factor is not simulated."""
ENOUGH = 12
"""Searches that must be affordable to go by floors; where they are not, leaders under `1f1b-eager` are searched."""
WORTHWHILE = 0.995
"""A leader is searched if its floor is below this share of the best: searched orders mostly are a few % above it."""
NEAR_EAGER = 1.25
"""Those leaders are within this factor of the first: a searched order saves nothing in some plans and a fifth in
others."""

MAX_SEARCHED_OF_ALL, MAX_SEARCHED_EVENTS_OF_ALL = 3 * MAX_SEARCHED, 3 * MAX_SEARCHED_EVENTS
"""Limits of the simulations of candidates that may be the best of all kinds."""

SCORE_DIGITS = 12
"""Decimals of scores and floors in which candidates that are simulated alike agree."""
CHEAPER = 0.999
"""The next candidate of the front costs less than this share of the one before."""


# ---- ours --------------------------------------------------------------------------------------------------
def ours(search: Search) -> None:
    """Estimate widely, simulate the few that matter: of every kind of plan those whose floor is lower than the best of
    that kind. Where the simulations suffice for all of them, no candidate that was estimated is better."""
    known = _wanted(search, _algorithm1_entries(search)[: 1 if search.tries else 2])
    space, cluster, goal = search.space, search.cluster, search.objective
    alone, looked, worth = single_groups(space, cluster, goal, search.progress)
    few = [*known, *alone[:1]]
    is_large = search.tries > 0 and bool(few) and ENOUGH * FEW_TRIES * events(few[-1].candidate) > MAX_SEARCHED_EVENTS
    if not is_large:
        for entry in few:
            search.simulate(entry.candidate)  # from here on an interrupt leaves a result
    by_floor = search.tries > 0 and not is_large
    apart: list[EstimatedCandidate] = []
    more = 0
    if space.is_kind("data"):
        apart, more = several_groups(space, cluster, goal, worth, search.progress, by_floor=by_floor)
    search.num_estimated += looked + more
    entries = [*known, *alone, *_wanted(search, apart)]
    if is_large:
        _best_when_screened(search, entries)
        return
    _best_of_each_kind(search, entries)
    _improve(search)
    _improve(search, "pipeline")
    for entry in _front(entries[len(known) :]):
        if not search.is_spent:
            search.simulate(entry.candidate)
    if by_floor:
        _best_of_all(search, entries)


def _wanted(search: Search, entries: list[EstimatedCandidate]) -> list[EstimatedCandidate]:
    """Those that may score low enough."""
    return [entry for entry in entries if entry.floor < search.space.below]


def _best_when_screened(search: Search, entries: list[EstimatedCandidate]) -> None:
    """Plans too large to search many: all are compared under `1f1b-eager` first, then the leaders are searched."""
    compiled_engine()  # the searches need it; loaded before, it simulates the screening too
    first = Search(search.space, search.cluster, search.objective, search.progress)
    try:
        _best_of_each_kind(first, entries)
        _improve(first)
        _improve(first, "pipeline")
        for entry in _front(entries):
            first.simulate(entry.candidate)
    finally:
        search.screened, search.refused, search.num_simulated = first.judged, first.refused, first.num_simulated
        search.floors = first.floors
        best = first.best
        if best is not None:  # an interrupt leaves a result
            search.keep(best)
    ranking = first.ranking()
    if not ranking:
        return
    kinds = {one.candidate.kind: one for one in reversed(ranking)}
    leaders = [one for one in kinds.values() if first.score(one) <= NEAR_EAGER * first.score(ranking[0])]
    for num, one in enumerate(dict.fromkeys([ranking[0].candidate, *(o.candidate for o in [*leaders, *ranking])])):
        if num >= MIN_SEARCHED and search.events >= MAX_SEARCHED_EVENTS:
            break
        search.events += search.tries * events(one)
        least = min((search.score(scheduled.judged) for scheduled in search.scheduled.values()), default=np.inf)
        if first.floors.get(one, 0.0) >= WORTHWHILE * least:
            continue
        with suppress(InfeasibleError):
            search.schedule(one, search.tries)


def _best_of_each_kind(search: Search, entries: list[EstimatedCandidate]) -> None:
    """The kinds in turn, as long as a floor is lower than the best of the kind."""
    kinds: dict[str, list[EstimatedCandidate]] = {}
    for entry in entries:
        kinds.setdefault(entry.candidate.kind, []).append(entry)
    queues = [_Queue(found, search) for found in kinds.values()]
    seen: set[tuple[object, ...]] = set()
    last = MAX_SEARCHED if search.tries else MAX_SIMULATIONS - NEIGHBOURS
    while queues and not search.is_spent and search.num_simulated < last:
        for queue in list(queues):
            new = next((e for e in queue if _is_new(search, e, seen)), None)
            if new is None:
                queues.remove(queue)
            elif (judged := search.simulate(new.candidate)) is not None:
                queue.learn(new, search.score(judged))


def _best_of_all(search: Search, entries: list[EstimatedCandidate]) -> None:
    """Where the simulations did not suffice for every kind: candidates of any kind whose floor is lower than the best
    plan. With a larger cluster more of them come before the best plan of a smaller one, so there are more of these."""
    seen: set[tuple[object, ...]] = set()
    queue = _Queue(entries, search)
    for entry in entries:
        if (judged := search.judged.get(entry.candidate)) is not None:
            queue.learn(entry, search.score(judged))
    for entry in queue:
        if search.num_simulated >= MAX_SEARCHED_OF_ALL or search.events >= MAX_SEARCHED_EVENTS_OF_ALL:
            return
        best = search.best
        if (best is None or entry.floor < search.score(best)) and _is_new(search, entry, seen):
            search.simulate(entry.candidate)


class _Queue:
    """Candidates of one kind, alternately the best by estimate and the best by promise. Promise is the floor times how
    far simulated candidates of the same class were above theirs. Floors alone would not do: candidates with a low floor
    that none of them comes close to can be so many that a good one is not reached."""

    def __init__(self, entries: list[EstimatedCandidate], search: Search) -> None:
        self._by_estimate = iter(sorted(entries, key=lambda e: e.score))
        self._classes: dict[tuple[int, int], deque[EstimatedCandidate]] = {}
        for entry in sorted(entries, key=search.priority):
            self._classes.setdefault(_class_of(entry), deque()).append(entry)
        self._above: dict[tuple[int, int], list[float]] = {name: [] for name in self._classes}
        self._priority, self._is_estimate_next = search.priority, True
        self._promises: dict[tuple[int, int], float] = {}
        """Of the first candidate of each class that is not empty."""
        for name in self._classes:
            self._update(name)

    def learn(self, entry: EstimatedCandidate, score: float) -> None:
        name = _class_of(entry)
        self._above[name].append(score / self._priority(entry))
        self._update(name)

    def __iter__(self) -> Iterator[EstimatedCandidate]:
        return self

    def __next__(self) -> EstimatedCandidate:
        self._is_estimate_next = not self._is_estimate_next
        if not self._is_estimate_next:
            return next(self._by_estimate)
        if not self._promises:
            raise StopIteration
        name = min(self._promises, key=self._promises.__getitem__)
        found = self._classes[name].popleft()
        self._update(name)
        return found

    def _update(self, name: tuple[int, int]) -> None:
        """After the class or what is known of it has changed."""
        above, found = self._above[name], self._classes[name]
        if found:
            self._promises[name] = self._priority(found[0]) * (median(above) if above else 1.0)
        else:
            self._promises.pop(name, None)


def _class_of(entry: EstimatedCandidate) -> tuple[int, int]:
    return entry.candidate.tp, entry.candidate.microbatch


def _is_new(search: Search, entry: EstimatedCandidate, seen: set[tuple[object, ...]]) -> bool:
    """Whether an entry may be the best of its kind, and no equal of one that was simulated."""
    rival = search.best_of(entry.candidate.kind)
    if rival is not None and entry.floor >= search.score(rival):
        return False
    # The same stages in another order of the datacenters or in equal ones, estimated the same, are simulated the same.
    alike = (round(entry.score, SCORE_DIGITS), round(entry.floor, SCORE_DIGITS), *_stages(search, entry.candidate))
    if alike in seen or entry.candidate in search.judged or entry.candidate in search.refused:
        return False
    seen.add(alike)
    search.floors[entry.candidate] = entry.floor
    return True


def _stages(search: Search, candidate: Candidate) -> tuple[object, ...]:
    """The same for candidates that differ in the order of their datacenters or groups only, or in which of several
    equal datacenters they use."""
    sort = dict(zip(search.cluster.names, alike(search.cluster), strict=True))
    groups = sorted(
        (group.cells, group.pipelines_per_cell, sorted((sort[name], stages) for name, stages in group.places))
        for group in candidate.groups
    )
    return (candidate.tp, candidate.microbatch, str(groups))


def _front(entries: list[EstimatedCandidate]) -> list[EstimatedCandidate]:
    """A few candidates spread along the estimated front of time and money."""
    front: list[EstimatedCandidate] = []
    for entry in sorted(entries, key=lambda e: (e.iteration_s, e.usd)):
        if not front or entry.usd < front[-1].usd * CHEAPER:
            front.append(entry)
    if len(front) <= FRONT:
        return front
    return [front[round(k * (len(front) - 1) / (FRONT - 1))] for k in range(FRONT)]


def _improve(search: Search, kind: str | None = None) -> None:
    """Neighbours of the leader (of a kind), most promising first, as long as simulations are left."""
    tried: set[Candidate] = set()
    while not search.is_spent:
        best = search.best_of(kind)
        if best is None or best.candidate in tried or len(best.candidate.groups) > 1:
            return
        tried.add(best.candidate)
        near = sorted(_neighbours(search, best.candidate), key=search.priority)
        own = next((e for e in near if e.candidate == best.candidate), None)
        seen: set[tuple[object, ...]] = set()
        better = [e for e in near if _is_new(search, e, seen) and (own is None or _differs(search, e, own))]
        for entry in better[:NEIGHBOURS]:
            if not search.is_spent:
                search.simulate(entry.candidate)


def _differs(search: Search, entry: EstimatedCandidate, own: EstimatedCandidate) -> bool:
    """Whether the sort key of a neighbour differs from the leader's, and is not much worse."""
    ratio = search.priority(entry) / search.priority(own)
    return abs(ratio - 1) >= SAME and ratio < WORSE


def _setup_and_shape(search: Search, candidate: Candidate) -> tuple[WorkerSetup, PipelineShape]:
    """Of a candidate with one group."""
    every = worker_setups(search.space, search.cluster)
    setup = next(f for f in every if (f.tp, f.microbatch) == (candidate.tp, candidate.microbatch))
    at = search.cluster.index
    return setup, tuple((at[name], stages) for name, stages in candidate.groups[0].places)


def _neighbours(search: Search, candidate: Candidate) -> list[EstimatedCandidate]:
    """The leader with one thing changed: a stage moved, datacenters swapped, other cells."""
    space, cluster, group = search.space, search.cluster, candidate.groups[0]
    setup, shape = _setup_and_shape(search, candidate)
    cells = cell_sizes(space, group.replicas)
    every = [
        (near, group.replicas, cell)
        for near in dict.fromkeys([shape, *setup.shapes.local(shape, group.replicas)])
        if space.allows_group([cluster.names[i] for i, _ in near])
        for cell in (cells if len(near) > 1 else cells[:1])
    ]
    return _entries(search, setup, group.pp, every)


def _entries(search: Search, setup: WorkerSetup, depth: int, every: list[Variant]) -> list[EstimatedCandidate]:
    """Estimated and sorted, best first."""
    if not every:
        return []
    batch = batch_of_variants(setup, depth, every)
    found = estimate(search.space, search.cluster, setup.model, batch)
    score = search.objective.score(found.iteration_s, found.usd, search.space.tokens, SLACK)
    floor = floors(search.space, search.objective, found, np.arange(len(score)))
    order = [v for v in np.argsort(score, kind="stable").tolist() if found.fits[v]]
    return [entry_of(search.space, search.cluster, batch, found, v, float(score[v]), float(floor[v])) for v in order]


# ---- the paper's -------------------------------------------------------------------------------------------
def algorithm1(search: Search) -> None:
    """D = 1, 2, ...: the largest datacenters take as many consecutive stages as they hold; the fastest is kept."""
    entries = _algorithm1_entries(search)
    search.num_estimated += len(entries)
    if not entries:
        job = search.space.job
        raise InfeasibleError(
            where=job.where,
            key="pp",
            value=job.pp,
            rule="Algorithm 1 takes tp, pp, microbatch and pipelines per cell from the job, and with these no number "
            "of cells fits the GPUs, links and memory",
            remedy="Change them, or use --strategy ours, which chooses them",
        )
    for entry in entries[:2]:
        search.simulate(entry.candidate)


def _algorithm1_entries(search: Search) -> list[EstimatedCandidate]:
    """One candidate for each number of cells, fastest estimate first."""
    space, cluster, job = search.space, search.cluster, search.space.job
    if space.total_microbatches(1) % job.microbatch or not cluster.workers(job.tp).any() or job.pp > job.model.layers:
        return []
    setup = next((f for f in worker_setups(space, cluster) if (f.tp, f.microbatch) == (job.tp, job.microbatch)), None)
    if setup is None or space.tcp != "many":
        return []
    try:
        pipelines = job.pipelines_per_cell or arrange(job).num_pipelines
    except AtlasError:
        pipelines = 1
    every: list[Variant] = []
    largest = np.argsort(-setup.shapes.workers, kind="stable").tolist()
    for cells in range(1, space.total_microbatches(job.microbatch) // pipelines + 1):
        shape = _largest_first(setup, largest, job.pp, cells * pipelines)
        if shape is None:
            break
        kept = space.allows_group([cluster.names[i] for i, _ in shape])
        sizes = cell_sizes(space, cells * pipelines)[:1]  # one datacenter shares nothing
        if len(shape) > 1:
            sizes = [pipelines] if space.num_cells in (None, cells) else []
        if kept and sizes and all(cluster.joined[a[0], b[0]] for a, b in pairwise(shape)):
            every.append((shape, cells * pipelines, sizes[0]))
    fastest = Search(space, cluster, Objective())
    return _entries(fastest, setup, job.pp, every)


def _largest_first(setup: WorkerSetup, largest: Iterable[int], depth: int, replicas: int) -> PipelineShape | None:
    shape: list[tuple[int, int]] = []
    left = depth
    for i in largest:
        stages = min(left, int(setup.shapes.workers[i]) // replicas) if setup.usable[i] else 0
        if stages:
            shape.append((i, stages))
            left -= stages
    return None if left else tuple(shape)


def exhaustive(search: Search) -> None:
    """Every candidate there is."""
    best = np.inf
    candidates = every_candidate(search.space, search.cluster)
    search.num_estimated += len(candidates)
    for candidate, floor in candidates:
        if not search.space.is_kind(candidate.kind) or floor(search.objective) > best:
            continue
        judged = search.simulate(candidate, len(candidates))
        if judged is not None:
            best = min(best, search.score(judged))


STRATEGIES: dict[str, tuple[str, Callable[[Search], None]]] = {
    "ours": ("estimate every kind of plan, simulate the best of them (the default)", ours),
    "algorithm1": (
        "Algorithm 1 of the Atlas paper, with the job's own tp, pp, microbatch and pipelines per cell",
        algorithm1,
    ),
    "exhaustive": ("simulate every candidate, for small clusters", exhaustive),
}
