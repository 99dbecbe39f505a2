"""Outlines: choices of parallelism without a place (replicas, tp by stage, stages), each with a lower bound of its time
in any placement.

All outlines of one microbatch size at once, as arrays. A bound shares the work ideally over whole layers and memory,
takes the best link everywhere, and charges what must go between clusters: whatever a plan uses is connected by
transfers or by gradient rings, so of links from best to worst it needs one at which the connected clusters have
enough GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atlas.sailor.cluster_links import ClusterLinks
from atlas.sailor.judge import MAX_RING_TP, SHORT_PIPELINE
from atlas.sailor.split import StageLimit, Stages, balanced, totals
from atlas.sailor.tables import Bools, Floats, Ints, SailorTables

Score = Callable[[Floats, Floats, Floats], Floats]
"""Of seconds, USD a second of the GPUs, and USD of egress; lower is better, infinite is not allowed."""
FEW = 3
"""Up to this many clusters every order of every subset is tried; beyond it, chains of nearest neighbours."""
ROUNDED = 1 - 1e-9
"""Bounds are lowered by this factor, because the judge may add in another order."""
RINGS, ONE_WAY, TEAMS, OVERLAP = range(4)
"""Ways to connect clusters: no column leaves its cluster; all go one way; columns go several ways, which share no
cluster; or which may share some."""


class Outlines(NamedTuple):
    """One entry for each outline: `num_first` stages of one run, then `num_second` (perhaps 0) of another."""

    columns: Ints
    first: Ints
    num_first: Ints
    second: Ints
    num_second: Ints
    share_bytes: Floats
    """Gradients that some stage's ring carries at least."""
    slowest_s: Floats
    """Of a stage, at least."""
    passing_s: Floats
    """All stages and transfers of one microbatch, at least."""
    bound_s: Floats
    """(outline, way to connect)."""

    def take(self, index: Ints) -> Outlines:
        return Outlines._make(field[index] for field in self)

    @property
    def num_stages(self) -> Ints:
        return self.num_first + self.num_second


def column_counts(global_batch: int, mbs: int, most: int) -> list[int]:
    """For each number of microbatches the fewest columns that reach it: more would only slow the gradient ring."""
    total = math.ceil(global_batch / mbs)
    counts = {math.ceil(total / n) for n in range(1, total + 1)}
    return sorted(count for count in counts if count <= most)


class OutlineGenerator:
    """All outlines of one microbatch size, bounded in steps: what one step rules out the next need not look at."""

    def __init__(self, tables: SailorTables) -> None:
        self.bounds = OutlineBounds(tables)
        self.tables = tables
        counts = column_counts(tables.inputs.global_batch, tables.mbs, tables.num_gpus)
        self.counts = np.array(counts, dtype=np.int64)

    def even(self, score: Score, limit: float) -> tuple[Outlines, Floats]:
        """Outlines of one run throughout, and lower bounds of their scores, lowest first."""
        stages = range(1, self.tables.num_layers + 1)
        return self._outlines([(run, n, run, 0) for run in range(len(self.tables.runs)) for n in stages], score, limit)

    def stepped(self, score: Score, limit: float) -> tuple[Outlines, Floats]:
        """Outlines of one run and then another; only where all GPUs are of one type."""
        runs, most = range(len(self.tables.runs)) if len(self.tables.gpu_types) == 1 else (), self.tables.num_layers
        pairs = [(a, b) for a in runs for b in runs if a != b]
        rows = [(a, n, b, m) for a, b in pairs for n in range(1, most) for m in range(1, most - n + 1)]
        return self._outlines(rows, score, limit)

    def _outlines(self, rows: list[tuple[int, int, int, int]], score: Score, limit: float) -> tuple[Outlines, Floats]:
        bounds, tables = self.bounds, self.tables
        shapes = bounds.shapes(np.array(rows, dtype=np.int64).reshape(-1, 4))
        columns, index = (x.ravel() for x in np.meshgrid(self.counts, np.arange(len(shapes.first)), indexing="ij"))
        fits = columns * shapes.gpus[index] <= tables.num_gpus
        columns, index, least = columns[fits], index[fits], np.zeros(0)
        for step in range(3) if limit < float("inf") else (2,):
            if step == 2:
                known, index = np.unique(index, return_inverse=True)
                shapes, held = bounds.with_whole_layers(shapes.take(known))
                columns, index = columns[held[index]], index[held[index]]
            chosen = shapes.take(index)
            seconds = bounds.seconds(chosen, columns) if step else bounds.inside_s(chosen, columns)[:, None]
            usd_per_s = (columns * chosen.gpus).astype(np.float64) * min(tables.usd_per_gpu_s)
            least = score(seconds.min(axis=1), usd_per_s, np.zeros(len(columns)))
            order = np.flatnonzero(least < limit)
            columns, index, seconds, least = columns[order], index[order], seconds[order], least[order]
        order = np.argsort(least, kind="stable")
        chosen = shapes.take(index[order])
        found = (chosen.first, chosen.num_first, chosen.second, chosen.num_second, chosen.share_bytes, chosen.slowest_s)
        passing = chosen.comm_s + chosen.compute_s
        return Outlines(columns[order], *found, passing, seconds[order]), least[order]


class OutlineShapes(NamedTuple):
    """Stages without a number of columns, and what does not depend on it."""

    first: Ints
    num_first: Ints
    second: Ints
    num_second: Ints
    gpus: Ints
    """Of a column, at least."""
    share_bytes: Floats
    """Gradients that some stage's ring carries at least."""
    comm_s: Floats
    slowest_s: Floats
    """No split over the best links has a faster slowest stage."""
    ideal_s: Floats
    """The same, as if layers could be divided."""
    pace: Floats
    least_pace: Floats
    compute_s: Floats
    """All stages together, at least."""
    equal_from: Floats
    """From this many waits on, equal stages are best."""

    def take(self, index: Ints) -> OutlineShapes:
        return OutlineShapes._make(field[index] for field in self)


class OutlineBounds:
    """Lower bounds for one microbatch size."""

    def __init__(self, tables: SailorTables) -> None:
        self.tables = tables
        self.links = ClusterLinks(tables)
        runs = tables.runs
        self.ratio = np.array([min(tables.ratio[k] for k in run) for run in runs])
        self.tp = tables.run_tp.min(axis=1)
        self.sync_tp = np.minimum(MAX_RING_TP, tables.run_tp.max(axis=1))
        self.layers = tables.layers.best(runs)
        self.gradients = np.array(tables.stage_bytes) / self.sync_tp[:, None]

    def shapes(self, rows: Ints) -> OutlineShapes:
        """With bounds as if layers could be divided."""
        tables = self.tables
        first, num_first, second, num_second = rows.T
        gpus = num_first * self.tp[first] + num_second * self.tp[second]
        first, num_first, second, num_second = rows[gpus <= tables.num_gpus].T
        num_stages = num_first + num_second
        run, inside = runs_by_stage(first, num_first, second, num_stages)
        comm = self._comm_s(run, num_stages)
        pace_by_stage = np.where(inside, 1 / self.ratio[run], 0.0)
        pace = pace_by_stage.sum(axis=1)
        work = tables.work_s[first, second]
        ideal = (work + (comm * pace_by_stage).sum(axis=1)) / pace
        ratio, other = self.ratio[first], self.ratio[second]
        return OutlineShapes(
            first,
            num_first,
            second,
            num_second,
            gpus[gpus <= tables.num_gpus],
            tables.stage_bytes[-1] / (num_first * self.sync_tp[first] + num_second * self.sync_tp[second]),
            comm.sum(axis=1),
            np.maximum(ideal, comm.max(axis=1)),
            ideal,
            pace,
            np.minimum(1 / ratio, 1 / other),
            np.minimum(ratio, other) * work,
            num_stages * np.maximum(ratio / other, other / ratio),
        )

    def with_whole_layers(self, shapes: OutlineShapes) -> tuple[OutlineShapes, Bools]:
        """With bounds for whole layers, and whether memory allows any split."""
        num_stages = shapes.num_first + shapes.num_second
        run, inside = runs_by_stage(shapes.first, shapes.num_first, shapes.second, num_stages)
        stages = Stages(num_stages, run[:, None], inside[:, None], np.zeros(len(run), dtype=bool))
        work = StageLimit(self.layers.time_s, self._comm_s(run, num_stages), shapes.slowest_s)
        ends, held = balanced(self.layers, stages, work)
        slowest = (totals(work, stages, ends) + work.fixed).max(axis=1)
        gradients = StageLimit(self.gradients, np.zeros(run.shape), shapes.share_bytes)
        ends, _ = balanced(self.layers, stages, gradients)
        share = totals(gradients, stages, ends).max(axis=1)
        return shapes._replace(slowest_s=slowest * ROUNDED, share_bytes=share * ROUNDED), held

    def _comm_s(self, run: Ints, num_stages: Ints) -> Floats:
        """What each stage waits over the best links."""
        forward, backward = np.zeros(run.shape), np.zeros(run.shape)
        forward[:, :-1] = self.links.forward_s[run[:, :-1], run[:, 1:]]
        backward[:, 1:] = self.links.backward_s[run[:, :-1], run[:, 1:]]
        return combined_comm_s(forward, backward, num_stages)

    def seconds(self, shapes: OutlineShapes, columns: Ints) -> Floats:
        """(outline, way to connect): no placement and no split is faster."""
        rings, inside = self._rings_s(shapes.share_bytes, columns), self.inside_s(shapes, columns)
        if len(self.tables.cluster_gpus) == 1:
            return np.stack([inside + rings.least_s, *np.full((3, len(columns)), np.inf)], axis=1)
        links = self.links
        level = np.maximum(np.searchsorted(links.connected_gpus, columns * shapes.gpus) - 1, 0)
        nearest, by_level = np.zeros_like(level), links.by_level(rings.table)
        near_way, far_way = (
            self.inside_s(
                shapes, columns, *(table[k, shapes.first, shapes.second] for table in (links.extra_s, links.wait_s))
            )
            for k in (nearest, level)
        )
        near_ring, far_ring = by_level[nearest, rings.inverse], by_level[level, rings.inverse]
        whole = (links.whole_columns[:, shapes.gpus] < columns).sum(axis=0)
        ring = by_level[np.clip(whole - 1, 0, len(links.pairs) - 1), rings.inverse]
        ring = np.where(whole > 0, np.where(whole <= len(links.pairs), ring, np.inf), rings.least_s)
        # Facing stages connect their clusters by transfers. So one way alone has a far link for them; and of several
        # ways either one has, or each stays among near clusters and somewhere all rings between two go over a far link.
        one_way, far_rings = far_way + rings.least_s, near_way + far_ring
        teams = np.minimum(far_way + near_ring, far_rings)
        overlap = np.where(self._shares_one(shapes, columns), np.minimum(one_way, far_rings), teams)
        pipes = np.stack([one_way, teams, overlap], axis=1)
        has_borders = shapes.num_first + shapes.num_second > 1
        return np.concatenate([(inside + ring)[:, None], np.where(has_borders[:, None], pipes, np.inf)], axis=1)

    def _shares_one(self, shapes: OutlineShapes, columns: Ints) -> Bools:
        """Whether ways that share clusters may have whole columns in one cluster only."""
        gpus = self.tables.cluster_gpus
        small = np.where(gpus < shapes.gpus[:, None], gpus, 0).sum(axis=1)
        few: Bools = columns * shapes.gpus <= gpus.max() + small
        return few | (len(gpus) <= FEW)

    def inside_s(
        self, shapes: OutlineShapes, columns: Ints, extra_s: Floats | float = 0.0, wait_s: Floats | float = 0.0
    ) -> Floats:
        """Everything but the rings, where transfers between clusters take `extra_s` more and one stage `wait_s`."""
        waits = np.ceil(self.tables.inputs.global_batch / (self.tables.mbs * columns)) - 1
        ideal = shapes.ideal_s + extra_s * shapes.least_pace / shapes.pace
        slowest = np.maximum(np.maximum(ideal, shapes.slowest_s), wait_s)
        total = waits * slowest + shapes.comm_s + extra_s + shapes.compute_s
        equal = (waits + shapes.num_first + shapes.num_second) * ideal
        return np.where(waits >= shapes.equal_from, np.maximum(total, equal), total)

    def _rings_s(self, share_bytes: Floats, columns: Ints) -> _RingTimes:
        """Some stage holds at least its share of the gradients."""
        shares, which = np.unique(share_bytes, return_inverse=True)
        keys, inverse = np.unique(columns * len(shares) + which, return_inverse=True)
        replicas, part = np.divmod(keys, max(1, len(shares)))
        table = self.tables.rings_s(shares[part], replicas)
        return _RingTimes(table, inverse)


@dataclass(frozen=True)
class _RingTimes:
    """Gradient rings over each pair of clusters, for many outlines."""

    table: Floats
    """(a, b, key)."""
    inverse: Ints
    """The key of each outline."""

    @property
    def least_s(self) -> Floats:
        """Over the best pair."""
        least: Floats = self.table.min(axis=(0, 1))
        return least[self.inverse]


def runs_by_stage(first: Ints, num_first: Ints, second: Ints, num_stages: Ints) -> tuple[Ints, Bools]:
    """(outline, stage): the run, and whether there is such a stage."""
    stage = np.arange(int(num_stages.max(initial=1)))
    return np.where(stage < num_first[:, None], first[:, None], second[:, None]), stage < num_stages[:, None]


def combined_comm_s(forward_s: Floats, backward_s: Floats, num_stages: Ints) -> Floats:
    """comm_i from A_i (what stage i sends on) and B_i (what it sends back), as in the judge; (case, stage)."""
    stage, last = np.arange(forward_s.shape[1]), num_stages[:, None] - 1
    comm = np.where(stage < last, forward_s, 0.0) + np.where(stage <= last, backward_s, 0.0)
    comm[:, 0] = np.where(num_stages > SHORT_PIPELINE, 2 * forward_s[:, 0], forward_s[:, 0])
    rows = np.arange(len(comm))
    comm[rows, last[:, 0]] = 2 * np.where(num_stages > 1, backward_s[rows, last[:, 0]], 0.0)
    return comm
