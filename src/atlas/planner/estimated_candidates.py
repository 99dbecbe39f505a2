"""Tens of thousands of candidates of one group: every tp, microbatch size, depth, number of replicas, shape and cell,
estimated in batches, the promising ones kept. `regions` has the candidates of several groups.

For each number of microbatches, only the smallest number of replicas is tried: more replicas would leave slots empty.
Uses estimates only; the event simulator decides (`strategies`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Flags, Floats, Ints
from atlas.cost.memory import max_layers
from atlas.cost.model_arrays import FORWARD, ModelArrays, model_arrays
from atlas.evaluate import Progress
from atlas.planner.candidate import Candidate, Group
from atlas.planner.estimate import Estimate, PipelineBatch, estimate
from atlas.planner.objective import Objective
from atlas.planner.pruning import undominated, workers_used
from atlas.planner.shapes import FEW_DCS, PipelineShape, Shapes
from atlas.planner.space import Space

SLACK = 0.03
"""Share of a limit that an estimate may miss without being dropped: the simulator decides."""
BY_ESTIMATE, BY_FLOOR = 4, 16
"""Candidates of each kind kept of one tp, microbatch size and depth: those for which fewer are better and need no more
workers anywhere."""
WIDER = 4
"""With those, at most this many times as many are kept."""
FAR = 2.0
"""Variants that score worse than the best of their batch by this factor are not kept for their floors."""

WORSE = 1.1
"""If a larger microbatch has a floor higher by this factor, larger ones are not tried."""

Variant = tuple[PipelineShape, int, int]
"""(shape, replicas, pipelines per cell): all of a group but its layers and microbatches."""


@dataclass(frozen=True)
class EstimatedCandidate:
    """A candidate and what it is estimated at."""

    candidate: Candidate
    score: float
    iteration_s: float
    usd: float
    floor: float
    """A score that no order can beat."""


@dataclass(frozen=True, eq=False)
class WorkerSetup:
    """One tp and microbatch size: GPUs of a worker and what it computes at once, with what both imply."""

    tp: int
    microbatch: int
    model: ModelArrays
    usable: Flags
    """[i]: where a tp group fits, and a profile has measured it."""
    shapes: Shapes


def worker_setups(space: Space, cluster: ClusterArrays) -> Iterator[WorkerSetup]:
    """Every tp and microbatch size; shapes are shared where the same datacenters take part."""
    for tp in space.tps:
        workers = cluster.workers(tp)
        known: dict[bytes, Shapes] = {}
        for microbatch in space.microbatches:
            model = model_arrays(space.job.model_copy(update={"tp": tp, "microbatch": microbatch}), cluster)
            usable = model.priced & (workers > 0)
            key = usable.tobytes()
            if key not in known:
                transfer_s = 8.0 * model.job.activation_bytes / np.where(cluster.joined, cluster.pair_bps, 1.0)
                layer_s = np.where(usable, model.layers_s[FORWARD].mean(axis=1), np.inf)
                known[key] = Shapes(cluster, workers, layer_s, transfer_s, space.datacenters)
            yield WorkerSetup(tp, microbatch, model, usable, known[key])


def depths(space: Space, cluster: ClusterArrays, setup: WorkerSetup) -> list[int]:
    """The depths at which the model could fit at all: every stage on the GPU with most memory."""
    if not setup.usable.any():
        return []
    usable = np.flatnonzero(setup.usable)
    largest = int(usable[np.argmax(cluster.cap_bytes[usable])])
    workers = int(setup.shapes.workers[usable].sum())
    every = np.array([depth for depth in space.depths if depth <= workers], np.int64)
    found: list[int] = []
    # All stages between the first and the last are alike, so three stages stand for any depth but one.
    for depth, columns in ((every[every == 1], 1), (every[every > 1], 3)):
        shards = np.maximum(1, workers // depth)[:, None] if space.job.zero else 1
        most = max_layers(cluster, setup.model, np.full((len(depth), columns), largest), shards)
        count = np.ones_like(most)
        count[:, 1:-1] = depth[:, None] - 2
        holds_one = ((most >= 1) | (count == 0)).all(axis=1)
        found += depth[holds_one & ((count * most).sum(axis=1) >= space.job.model.layers)].tolist()
    return found


def useful_replicas(total: int, most: int) -> list[int]:
    """The least number of replicas for every number of microbatches per replica. `total`: microbatches of them all."""
    root = math.isqrt(total)
    found = {-(-total // num_mb) for num_mb in range(1, root + 1)} | set(range(1, root + 2))
    exact = {r for r in found if r <= min(most, total) and (r == 1 or -(-total // r) < -(-total // (r - 1)))}
    return sorted(exact)


def single_groups(
    space: Space, cluster: ClusterArrays, objective: Objective, progress: Progress | None = None
) -> tuple[list[EstimatedCandidate], int, list[WorkerSetup]]:
    """The best of every batch, best first; how many were estimated; the worker setups whose microbatch size may be the
    best: all of them where no candidate of one group is wanted.

    Larger microbatches are tried as long as they do not make things worse: the time of a layer per sequence falls or
    stays, bubbles and memory grow, so there is one best size.
    """
    entries: list[EstimatedCandidate] = []
    count = 0
    worth: list[WorkerSetup] = []
    best: dict[tuple[int, str], float] = {}
    ended: set[int] = set()
    for k, setup in enumerate(worker_setups(space, cluster)):
        if progress is not None:
            progress("estimating", k, len(space.tps) * len(space.microbatches))
        if setup.tp in ended:
            continue
        found: list[EstimatedCandidate] = []
        for depth in depths(space, cluster, setup) if space.kind != "data" else ():
            batch = variants(space, setup, depth)
            if batch is not None:
                values = estimate(space, cluster, setup.model, batch)
                found += kept(space, cluster, objective, batch, values)
                count += len(batch.shape)
        if not setup.usable.any():
            continue
        if not _is_better(found, setup.tp, best):
            ended.add(setup.tp)
        entries += found
        worth.append(setup)
    return sorted(entries, key=lambda entry: entry.score), count, worth


def _is_better(found: list[EstimatedCandidate], tp: int, best: dict[tuple[int, str], float]) -> bool:
    """Whether a microbatch size is about as good as smaller ones for any kind of plan; updates `best`."""
    scores: dict[str, float] = {}
    for entry in found:
        kind = entry.candidate.kind
        scores[kind] = min(entry.floor, scores.get(kind, np.inf))
    better = not any(known == tp for known, _ in best)
    for kind, score in scores.items():
        before = best.get((tp, kind), np.inf)
        better |= score <= WORSE * before
        best[tp, kind] = min(score, before)
    return better


def variants(space: Space, setup: WorkerSetup, depth: int) -> PipelineBatch | None:
    """All variants of one depth, of the kinds that are wanted."""
    index: dict[PipelineShape, int] = {}
    numbered: dict[int, tuple[Ints, Ints]] = {}
    columns: list[Ints] = []
    most = int(setup.shapes.workers.sum()) // depth
    for replicas in useful_replicas(space.total_microbatches(setup.microbatch), most):
        cells = np.array(cell_sizes(space, replicas), np.int64)
        shapes = setup.shapes.of(depth, replicas)
        if id(shapes) not in numbered:
            wanted = [shape for shape in shapes if space.is_kind("one" if len(shape) == 1 else "pipeline")]
            at = np.array([index.setdefault(shape, len(index)) for shape in wanted], np.int64)
            numbered[id(shapes)] = at, np.array([len(shape) > 1 for shape in wanted], bool)
        at, crosses = numbered[id(shapes)]
        # In one datacenter there is nothing to share: only the smallest cell is tried.
        count = np.where(crosses, len(cells), min(1, len(cells)))
        nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        columns.append(np.stack([np.repeat(at, count), np.full(len(nth), replicas), cells[nth]]))
    table = np.concatenate(columns, axis=1) if columns else np.empty((3, 0), np.int64)
    if not table.size:
        return None
    return PipelineBatch(setup.tp, setup.microbatch, depth, list(index), *table)


def batch_of_variants(setup: WorkerSetup, depth: int, every: Sequence[Variant]) -> PipelineBatch:
    """These variants, in this order."""
    number = {shape: k for k, shape in enumerate(dict.fromkeys(shape for shape, _, _ in every))}
    rows = np.array([(number[shape], replicas, cell) for shape, replicas, cell in every], np.int64)
    return PipelineBatch(setup.tp, setup.microbatch, depth, list(number), *rows.T)


def cell_sizes(space: Space, replicas: int) -> list[int]:
    """Pipelines per cell that divide the replicas, smallest first."""
    found = [size for size in space.cell_sizes if replicas % size == 0]
    if space.num_cells is not None:
        found = [size for size in found if replicas // size == space.num_cells]
    return found


def kept(
    space: Space, cluster: ClusterArrays, objective: Objective, batch: PipelineBatch, found: Estimate
) -> list[EstimatedCandidate]:
    """The best variants of a batch that fit, in one region and across regions: by estimate and by floor."""
    is_alone = np.array([len(shape) == 1 for shape in batch.shapes])[batch.shape]
    fits = found.fits.copy()
    if space.below < math.inf:
        fits &= floors(space, objective, found, np.arange(len(fits))) < space.below
    score = np.where(fits, objective.score(found.iteration_s, found.usd, space.tokens, SLACK), np.inf)
    floor = np.full_like(score, np.inf)
    used = np.zeros((len(score), 0), np.int64)
    if cluster.num_dcs <= FEW_DCS:
        used = workers_used(cluster, batch.shapes, batch.shape, batch.replicas)
    chosen: dict[int, None] = {}
    for kind in (is_alone, ~is_alone):
        of_kind = np.where(kind, score, np.inf)
        best = undominated(of_kind, used, BY_ESTIMATE, WIDER * BY_ESTIMATE)
        near = np.union1d(best, np.flatnonzero(of_kind <= FAR * of_kind.min(initial=np.inf)))
        near = near[np.isfinite(of_kind[near])]
        floor[near] = floors(space, objective, found, near)
        lowest = undominated(np.where(kind, floor, np.inf), used, BY_FLOOR, WIDER * BY_FLOOR)
        chosen |= dict.fromkeys([*best.tolist(), *lowest.tolist()])
    return [
        entry_of(space, cluster, batch, found, v, float(score[v]), float(floor[v]))
        for v in chosen
        if np.isfinite(score[v])
    ]


def floors(space: Space, objective: Objective, found: Estimate, v: Ints) -> Floats:
    """[.]: no order of these variants scores lower, except where a limit is missed by the estimate: there the estimate
    counts."""
    floor_s = found.floor_s(v)
    usd = found.usd[v] - (found.iteration_s[v] - floor_s) * found.usd_per_s[v]
    return np.asarray(floor_score(space, objective, floor_s, usd, found.iteration_s[v], found.usd[v]))


def floor_score(space: Space, objective: Objective, floor_s: Any, floor_usd: Any, iteration_s: Any, usd: Any) -> Any:
    missed = objective.missed(iteration_s, usd, space.tokens, SLACK) > 0
    free = Objective(objective.minimise).score(floor_s, floor_usd, space.tokens)
    return np.where(missed, objective.score(iteration_s, usd, space.tokens, SLACK), free)


def group_of(cluster: ClusterArrays, variant: Variant, layers: tuple[int, ...], num_microbatches: int) -> Group:
    shape, replicas, cell = variant
    places = tuple((cluster.names[i], stages) for i, stages in shape)
    return Group(places, layers, replicas // cell, cell, num_microbatches)


def entry_of(
    space: Space, cluster: ClusterArrays, batch: PipelineBatch, found: Estimate, v: int, score: float, floor: float
) -> EstimatedCandidate:
    shape, cell = batch.shapes[int(batch.shape[v])], int(batch.cell[v])
    group = group_of(cluster, (shape, int(batch.replicas[v]), cell), found.layers_of(v), int(found.num_microbatches[v]))
    candidate = Candidate(
        tp=batch.tp,
        microbatch=batch.microbatch,
        groups=(group,),
        sharing=space.takes_turns([group]),
        tcp=space.tcp,
    )
    return EstimatedCandidate(candidate, score, float(found.iteration_s[v]), float(found.usd[v]), floor)
