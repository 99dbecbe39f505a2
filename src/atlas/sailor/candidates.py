"""Places outlines on clusters: each gets a lower bound, then its best split and a time. The judge's time is equal or
longer, because here the best zone pair of two clusters counts. Many placements at once, along the leading axis.

Knows objectives only as a `Score` of (seconds, USD a second of GPUs, USD of egress).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, groupby, pairwise, product
from typing import NamedTuple

import numpy as np

from atlas.sailor.judge import MAX_RING_TP
from atlas.sailor.lower_bounds import RINGS, Outlines, Score, combined_comm_s, runs_by_stage
from atlas.sailor.placements import (
    ClusterCells,
    FilledStructure,
    Row,
    TeamStructure,
    fill_structure,
    fillings,
    neighbours,
    ring_crossings,
)
from atlas.sailor.split import StageLimit, Stages, balanced, totals
from atlas.sailor.tables import Bools, Floats, Ints, SailorTables

SPLIT_AT_ONCE = 256
"""Placements that are split together, best bounds first; each batch may lower the limit for the next."""


@dataclass(frozen=True)
class Outline:
    """A choice of parallelism, without a place."""

    mbs: int
    num_columns: int
    tps: dict[str, tuple[int, ...]]
    """By GPU type: tp of each stage."""


@dataclass(frozen=True)
class SailorCandidate:
    """An outline placed on clusters and split."""

    about_s: float
    usd_per_s: float
    """Of its GPUs."""
    egress_usd: float
    outline: Outline
    rows: tuple[Row, ...]
    ends: tuple[int, ...]


class PlacementBatch(NamedTuple):
    """Placements with a way to split them, and what the formula needs to know of them; one entry each."""

    outline: Ints
    source: Ints
    """Which FilledStructure."""
    case: Ints
    """Which entry of it."""
    head_alone: Bools
    kinds: Ints
    """(case, GPU type, stage): its kind."""
    present: Bools
    """(case, GPU type, stage): whether the stage has GPUs of this type."""
    comm_s: Floats
    slowest_s: Floats
    """No split has a faster slowest stage."""
    sync_s: Floats
    """Some stage holds its share of the gradients: at best the one with the fastest ring."""
    bound_s: Floats
    usd_per_s: Floats
    crossing_usd: Floats

    def take(self, which: Ints) -> PlacementBatch:
        return PlacementBatch._make(field[which] for field in self)


class OutlinePlacer:
    """Some outlines of one microbatch size, placed, bounded and split."""

    def __init__(self, tables: SailorTables, outlines: Outlines, score: Score) -> None:
        self.tables, self.outlines, self.score = tables, outlines, score
        self.run, self.inside = runs_by_stage(outlines.first, outlines.num_first, outlines.second, outlines.num_stages)
        self.stage = np.arange(self.run.shape[1])
        self.next_run = self.run * len(tables.runs) + np.roll(self.run, -1, axis=1)
        self.waits = np.ceil(tables.inputs.global_batch / (tables.mbs * outlines.columns)) - 1
        self.work_s = tables.work_s[outlines.first, outlines.second]
        sync_tp = np.array([min(MAX_RING_TP, tp) for _, tp in tables.kinds])
        self.gradients = np.array(tables.stage_bytes) / sync_tp[:, None]
        rings = tables.rings_s(outlines.share_bytes, outlines.columns)
        gpus = np.where(self.inside, tables.run_tp.min(axis=1)[self.run], 0).sum(axis=1) * outlines.columns
        usd_per_s = (gpus * min(tables.usd_per_gpu_s))[:, None]
        self.least = score(outlines.bound_s, usd_per_s, np.zeros(outlines.bound_s.shape))
        """(outline, way to connect)."""
        self.rings_s = np.moveaxis(rings, 2, 0).reshape(len(rings[0, 0]), -1)
        """(outline, pair of clusters)."""

    def candidates(self, structures: Sequence[TeamStructure], limit: Callable[[], float]) -> Iterator[SailorCandidate]:
        """Every candidate whose bound is below the limit, which may fall meanwhile."""
        ways = [(way, early, teams) for teams in structures for early, way in fillings(teams)]
        seen: set[tuple[int, bool, tuple[Row, ...]]] = set()
        for _, group in groupby(sorted(ways, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
            self.placed: list[FilledStructure] = []
            found = [cases for way, early, teams in group for cases in self._bounded(teams, early, way, limit())]
            if found:
                yield from self._in_order(PlacementBatch(*map(np.concatenate, zip(*found, strict=True))), seen, limit)

    def _in_order(
        self, every: PlacementBatch, seen: set[tuple[int, bool, tuple[Row, ...]]], limit: Callable[[], float]
    ) -> Iterator[SailorCandidate]:
        """Best bounds first."""
        ranked = np.argsort(self._least(every), kind="stable")
        for at in range(0, len(ranked), SPLIT_AT_ONCE):
            batch = every.take(ranked[at : at + SPLIT_AT_ONCE])
            worth = np.flatnonzero(self._least(batch) < limit())
            fresh = []
            for case in worth:
                rows = self.placed[batch.source[case]].rows(int(batch.case[case]))
                key = (int(batch.outline[case]), bool(batch.head_alone[case]), rows)
                if key not in seen:
                    seen.add(key)
                    fresh.append(case)
            if fresh:
                yield from self._split(batch.take(np.array(fresh)), limit)

    def _least(self, cases: PlacementBatch) -> Floats:
        return self.score(cases.bound_s, cases.usd_per_s, cases.crossing_usd)

    # ---- bounds ------------------------------------------------------------------------------------------
    def _bounded(self, teams: TeamStructure, early: int | None, way: int, limit: float) -> Iterator[PlacementBatch]:
        which = np.flatnonzero(self.least[:, way] < limit)
        placed = fill_structure(self.tables, self.outlines.take(which), teams, early) if which.size else None
        if placed is None:
            return
        placed = replace(placed, index=which[placed.index])
        if way != RINGS:
            kept = np.flatnonzero(self._rough_score(placed) < limit)
            if not kept.size:
                return
            placed = placed.take(kept)
        self.placed.append(placed)
        for cases in self._cases(self.placed[-1]):
            worth = self._least(cases) < limit
            if worth.any():
                yield cases.take(np.flatnonzero(worth))

    def _rough_score(self, placed: FilledStructure) -> Floats:
        """A lower bound of what the placements will score: the worst crossing, and the best ring between two teams."""
        outlines, rings = placed.outlines, self.rings_s[placed.index]
        extra_s, wait_s = self.tables.crossing_s
        extra, wait = np.zeros(len(rings)), outlines.slowest_s
        for here, there in _facing(placed):
            a, b = here.cluster, there.cluster
            if a != b:
                start, stop = _cells(here, there)
                crosses = start < stop
                pair = (a, b, outlines.first, outlines.second)
                extra = np.maximum(extra, np.where(crosses, extra_s[pair], 0.0))
                wait = np.maximum(wait, np.where(crosses, wait_s[pair], 0.0))
        num, clusters = len(self.tables.clusters), {(part.team, part.cluster) for part in placed.parts}
        pairs = [a * num + b for (s, a), (t, b) in product(clusters, repeat=2) if s < t] or [
            a * num + a for _, a in clusters
        ]
        seconds = self.waits[placed.index] * wait + outlines.passing_s + extra + rings[:, pairs].min(axis=1)
        return self.score(seconds, self._gpus_usd(placed), np.zeros(len(seconds)))

    def _gpus_usd(self, placed: FilledStructure) -> Floats:
        usd: Floats = np.add.reduce([gpus * self.tables.usd_per_gpu_s[cluster] for cluster, gpus in placed.used])
        return usd

    def _cases(self, placed: FilledStructure) -> Iterator[PlacementBatch]:
        tables, index, stage = self.tables, placed.index, self.stage
        inside = self.inside[index]
        forward, backward, head_back = self._transfers(placed)
        kinds, present = self._kinds(placed)
        ratio = np.where(present, tables.ratio[kinds], 0.0).max(axis=1)
        pace_by_stage = np.where(inside, 1 / np.where(inside, ratio, 1.0), 0.0)
        pace = pace_by_stage.sum(axis=1)
        compute = np.where(inside, ratio, np.inf).min(axis=1) * self.work_s[index]
        sync = self._sync_s(placed)
        usd_per_s = self._gpus_usd(placed)
        num_stages = placed.outlines.num_stages
        comm = combined_comm_s(forward, backward, num_stages)
        rest = (usd_per_s, self._crossing_usd(placed))
        source, case = np.full(len(index), len(self.placed) - 1), np.arange(len(index))
        for head_alone in (False, True) if tables.layers.head_is_heavy else (False,):
            if head_alone:
                comm = np.where(stage == num_stages[:, None] - 1, head_back[:, None], comm)
            ideal = (self.work_s[index] + (comm * pace_by_stage).sum(axis=1)) / pace
            slowest = np.maximum(ideal, comm.max(axis=1))
            bound = self.waits[index] * slowest + comm.sum(axis=1) + compute + sync
            if head_alone:
                bound = np.where(num_stages > 1, bound, np.inf)
            alone = np.full(len(index), head_alone)
            yield PlacementBatch(index, source, case, alone, kinds, present, comm, slowest, sync, bound, *rest)

    def _transfers(self, placed: FilledStructure) -> tuple[Floats, Floats, Floats]:
        """A and B by stage over the slowest pair of facing clusters; twice B of the last where it is the head alone."""
        tables, stage, next_run = self.tables, self.stage, self.next_run[placed.index]
        forward, backward = np.zeros(next_run.shape), np.zeros((len(next_run), len(stage) + 1))
        head = np.zeros(len(next_run))
        end = placed.outlines.num_stages - 2
        rows = np.arange(len(next_run))
        for here, there in _facing(placed):
            columns = np.maximum(here.columns, 1)
            start, stop = _cells(here, there)
            low, high = start // columns, (stop - 1) // columns
            high = np.where(start < stop, high, -1)
            if high.max() < 0:
                continue
            facing = (stage >= low[:, None]) & (stage <= high[:, None])
            a, b = here.cluster, there.cluster
            np.maximum(forward, np.where(facing, tables.send_s[a, b].take(next_run), 0.0), out=forward)
            onward = backward[:, 1:]
            np.maximum(onward, np.where(facing, tables.back_s[a, b].take(next_run), 0.0), out=onward)
            if tables.layers.head_is_heavy:
                facing_head = (end >= low) & (end <= high)
                value = tables.head_back_s[a, b].take(next_run[rows, np.maximum(end, 0)])
                head = np.maximum(head, np.where(facing_head, value, 0.0))
        return forward, backward[:, :-1], 2 * head

    def _kinds(self, placed: FilledStructure) -> tuple[Ints, Bools]:
        tables = self.tables
        kinds = tables.run_kind[self.run[placed.index]].transpose(0, 2, 1)
        if len(tables.gpu_types) == 1:
            return kinds, self.inside[placed.index][:, None]
        present = np.zeros(kinds.shape, dtype=bool)
        for part in placed.parts:
            present[:, tables.type_of[part.cluster]] |= _counts(part, self.stage) > 0
        return kinds, present

    def _sync_s(self, placed: FilledStructure) -> Floats:
        num, rings = len(self.tables.clusters), self.rings_s[placed.index]
        inside = self.inside[placed.index]
        slowest = np.zeros(inside.shape)
        before = np.full(inside.shape, -1)
        rows = np.arange(len(rings))[:, None]
        for part in placed.parts:
            counts = _counts(part, self.stage)
            own = rings[:, part.cluster * num + part.cluster][:, None]
            np.maximum(slowest, np.where(counts > 1, own, 0.0), out=slowest)
            here = counts > 0
            joined = here & (before >= 0)
            if joined.any():
                pair = np.where(joined, before * num + part.cluster, 0)
                np.maximum(slowest, np.where(joined, rings[rows, pair], 0.0), out=slowest)
            before = np.where(here, part.cluster, before)
        least: Floats = np.where(inside, slowest, np.inf).min(axis=1)
        return least

    def _crossing_usd(self, placed: FilledStructure) -> Floats:
        """Egress of activations and their gradients, at the best price between two clusters."""
        total, price = np.zeros(len(placed.index)), self.tables.usd_per_byte
        for here, there in _facing(placed):
            a, b = here.cluster, there.cluster
            if a != b and (both := price(a, b) + price(b, a)):
                start, stop = _cells(here, there)
                total += both * np.maximum(0, stop - start)
        usd: Floats = total * self.tables.act_bytes * (self.waits[placed.index] + 1)
        return usd

    # ---- splits ------------------------------------------------------------------------------------------
    def _split(self, cases: PlacementBatch, limit: Callable[[], float]) -> Iterator[SailorCandidate]:
        """Each with the layers that suit its compute, its gradient rings, or one after the other."""
        layers = self.tables.layers
        stages, work = self._stages(cases), StageLimit(layers.time_s, cases.comm_s, cases.slowest_s)
        by_work, held = balanced(layers, stages, work)
        slowest = (totals(work, stages, by_work) + work.fixed).max(axis=1)
        bound = cases.bound_s + self.waits[cases.outline] * (slowest - cases.slowest_s)
        left = np.flatnonzero(held & (self.score(bound, cases.usd_per_s, cases.crossing_usd) < limit()))
        if not left.size:
            return
        cases, by_work = cases.take(left), by_work[left]
        stages, work = self._stages(cases), work._replace(fixed=cases.comm_s, limit=slowest[left])
        rings = StageLimit(self.gradients, np.zeros(cases.comm_s.shape), self.outlines.share_bytes[cases.outline])
        both, held_both = balanced(layers, stages, rings, work)
        by_rings, _ = balanced(layers, stages, rings)
        share = totals(rings, stages, by_rings).max(axis=1)
        by_rings, held_rings = balanced(layers, stages, work, rings._replace(limit=share))
        found = [self._seconds(cases, ends) for ends in (by_work, both, by_rings)]
        for case, num_stages in enumerate(stages.num_stages):
            splits = [(by_work, True), (both, held_both[case]), (by_rings, held_rings[case])]
            tried = [
                self._candidate(cases, case, float(seconds[case]), tuple(ends[case, :num_stages].tolist()))
                for (ends, ok), (seconds, least) in zip(splits, found, strict=True)
                if ok and least[case] < limit()
            ]
            if tried:
                yield min(tried, key=self._score_of)

    def _stages(self, cases: PlacementBatch) -> Stages:
        return Stages(self.outlines.num_stages[cases.outline], cases.kinds, cases.present, cases.head_alone)

    def _seconds(self, cases: PlacementBatch, ends: Ints) -> tuple[Floats, Floats]:
        """Seconds without the rings; and a lower bound of the score with them."""
        work = StageLimit(self.tables.layers.time_s, cases.comm_s, cases.slowest_s)
        times = totals(work, self._stages(cases), ends)
        slowest = (times + cases.comm_s).max(axis=1)
        update = np.where(cases.present, self.tables.update_s[cases.kinds], 0.0).max(axis=(1, 2))
        seconds = self.waits[cases.outline] * slowest + cases.comm_s.sum(axis=1) + times.sum(axis=1) + update
        return seconds, self.score(seconds + cases.sync_s, cases.usd_per_s, cases.crossing_usd)

    def _score_of(self, candidate: SailorCandidate) -> float:
        figures = (candidate.about_s, candidate.usd_per_s, candidate.egress_usd)
        return float(self.score(*(np.array([figure]) for figure in figures))[0])

    def _candidate(self, cases: PlacementBatch, case: int, compute_s: float, ends: tuple[int, ...]) -> SailorCandidate:
        tables, outline = self.tables, self._outline(int(cases.outline[case]))
        rows, columns = self.placed[cases.source[case]].rows(int(cases.case[case])), outline.num_columns
        sync_s = rings = 0.0
        borders = [0.0, *(tables.stage_bytes[end] for end in ends)]
        for i, (row, (a, b)) in enumerate(zip(rows, pairwise(borders), strict=True)):
            tp = min(MAX_RING_TP, *(outline.tps[tables.clusters[cluster].gpu][i] for cluster, _ in row))
            for pair in neighbours(row):
                sync_s = max(sync_s, tables.sync_s(*pair, (b - a) / tp, columns))
            rings += (b - a) * sum(tables.usd_per_byte(x, y) for x, y in ring_crossings(row))
        egress_usd = float(cases.crossing_usd[case]) + rings * 2 * (columns - 1) / columns
        usd_per_s = float(cases.usd_per_s[case])
        return SailorCandidate(compute_s + sync_s, usd_per_s, egress_usd, outline, rows, ends)

    def _outline(self, index: int) -> Outline:
        tables, run = self.tables, self.run[index, self.inside[index]]
        tps = {gpu: tuple(tables.run_tp[run, kind].tolist()) for kind, gpu in enumerate(tables.gpu_types)}
        return Outline(tables.mbs, int(self.outlines.columns[index]), tps)


def _facing(placed: FilledStructure) -> Iterator[tuple[ClusterCells, ClusterCells]]:
    """Pairs of parts that replicas of one column may have in two stages."""
    return ((a, b) for a, b in combinations_with_replacement(placed.parts, 2) if a.team == b.team)


def _cells(here: ClusterCells, there: ClusterCells) -> tuple[Ints, Ints]:
    """The first and last cell of `here` whose next stage is in `there`."""
    columns = here.columns
    return np.maximum(here.start, there.start - columns), np.minimum(here.end, there.end - columns)


def _counts(part: ClusterCells, stage: Ints) -> Ints:
    """(placement, stage): columns in the part."""
    columns = part.columns[:, None]
    low, high = np.maximum(part.start[:, None], stage * columns), np.minimum(part.end[:, None], (stage + 1) * columns)
    counts: Ints = np.maximum(0, high - low)
    return counts
