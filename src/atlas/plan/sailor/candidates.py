"""The search's first pass: every (microbatch, replicas, tp, stages, placement on clusters), bounded before it is
priced. What a bound cannot rule out gets its best split and a time that the judge will confirm or raise, because
clusters count their best zone pair. Knows objectives only as a score of (seconds, GPUs, egress).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from typing import NamedTuple

from atlas.plan.sailor.judge import combined_comm_s
from atlas.plan.sailor.shapes import FEW, Row, Teams, facing, neighbours, placements, ring_crossings
from atlas.plan.sailor.split import Kinds, balanced
from atlas.plan.sailor.tables import Tables

Tps = dict[str, tuple[int, ...]]
"""By GPU type: tp of each stage."""
Worth = Callable[[float, float, float], bool]
"""Whether so many seconds, on GPUs of so many USD a second, with so much egress in USD, could still win."""
INFINITE = float("inf")


@dataclass(frozen=True)
class Outline:
    """A choice of sizes, with no place yet."""

    bound_s: float
    mbs: int
    num_columns: int
    tps: Tps

    @property
    def num_stages(self) -> int:
        return len(next(iter(self.tps.values())))

    @property
    def least_gpus(self) -> int:
        return self.num_columns * min(sum(stages) for stages in self.tps.values())


@dataclass(frozen=True)
class Candidate:
    """An outline placed on clusters and split."""

    about_s: float
    usd_per_s: float
    """Of its GPUs."""
    egress_usd: float
    outline: Outline
    rows: tuple[Row, ...]
    ends: tuple[int, ...]


def column_counts(global_batch: int, mbs: int, most: int) -> list[int]:
    """For each number of microbatches the fewest columns that reach it: more would only slow the gradient ring."""
    total = math.ceil(global_batch / mbs)
    counts = {math.ceil(total / n) for n in range(1, total + 1)}
    return sorted(count for count in counts if count <= most)


def even_outlines(tables: Tables, columns: int, worth: Worth) -> Iterator[Outline]:
    """One tp for each GPU type throughout."""
    bound = ColumnBound(tables, columns)
    known = [[(gpu, tp) for g, tp in sorted(tables.kinds) if g == gpu] for gpu in tables.gpu_types]
    for kinds in product(*known):
        run = bound.run(kinds)
        most = min(tables.num_layers, tables.num_gpus // columns // run.tp_least)
        for num_stages in range(1, most + 1):
            seconds = bound.seconds(run, num_stages, run, 0)
            if worth(seconds, columns * run.tp_least * num_stages * tables.least_usd_per_s, 0.0):
                yield Outline(seconds, tables.mbs, columns, {gpu: (tp,) * num_stages for gpu, tp in kinds})


def stepped_outlines(tables: Tables, columns: int, worth: Worth) -> Iterator[Outline]:
    """One tp up to some stage and another after it; only where all GPUs are of one type."""
    bound, room = ColumnBound(tables, columns), tables.num_gpus // columns
    (gpu,) = tables.gpu_types
    for first, second in permutations([bound.run([kind]) for kind in sorted(tables.kinds)], 2):
        a, b = first.tp_least, second.tp_least
        for num_a in range(1, min(tables.num_layers - 1, (room - b) // a) + 1):
            for num_b in range(1, min(tables.num_layers - num_a, (room - num_a * a) // b) + 1):
                seconds = bound.seconds(first, num_a, second, num_b)
                if worth(seconds, columns * (a * num_a + b * num_b) * tables.least_usd_per_s, 0.0):
                    yield Outline(seconds, tables.mbs, columns, {gpu: (a,) * num_a + (b,) * num_b})


class Run(NamedTuple):
    """What a bound needs to know of stages of one kind."""

    kinds: Kinds
    tp_least: int
    tp_sync: int
    ratio: float
    pace: float
    """1 / ratio."""
    send_s: float
    cross_s: float
    """A transfer between clusters, over what the best transfer takes."""


class ColumnBound:
    """Lower bounds for one number of columns: the work shared ideally, the best link everywhere.

    Stages that no cluster can hold alone either send across clusters somewhere, or every column stays in a cluster
    and every gradient ring goes across: the lesser of the two counts. Of many clusters `shapes` makes chains, which
    cross as often as they have links.
    """

    def __init__(self, tables: Tables, columns: int) -> None:
        self.tables, self.columns = tables, columns
        self.waits = math.ceil(tables.inputs.global_batch / (tables.mbs * columns)) - 1
        self._sync_s: dict[tuple[int, bool], float] = {}

    def run(self, kinds: Sequence[tuple[str, int]]) -> Run:
        ratio = min(self.tables.ratio[kind] for kind in kinds)
        tps = [tp for _, tp in kinds]
        send_s = min(self.tables.best_send_s[tp] for tp in tps)
        cross_s = min(self.tables.cross_send_s[tp] for tp in tps) - send_s
        return Run(frozenset(kinds), min(tps), min(4, max(tps)), ratio, 1 / ratio, send_s, max(0.0, cross_s))

    def seconds(self, first: Run, num_first: int, second: Run, num_second: int) -> float:
        """No placement and no split of such stages is faster. `num_second` may be 0, with `second` the first again."""
        num_stages = num_first + num_second
        sends = 2 * num_first - (1 if num_stages <= 3 else 0) if num_stages > 1 else 0
        weighted = sends * first.send_s * first.pace + 2 * num_second * second.send_s * second.pace
        pace = num_first * first.pace + num_second * second.pace
        work = self.tables.work_s(first.kinds | second.kinds)
        slowest = (work + weighted) / pace
        if self.waits >= num_stages * max(first.ratio * second.pace, second.ratio * first.pace):
            passing = num_stages * slowest  # a stage that took less time would leave more to the slowest
        else:
            comm = sends * first.send_s + 2 * num_second * second.send_s
            passing = comm + min(first.ratio, second.ratio) * work
        inside = self.waits * slowest + passing
        ways = num_first * first.tp_sync + num_second * second.tp_sync
        gpus_per_column = num_first * first.tp_least + num_second * second.tp_least
        needed = self.tables.clusters_needed(self.columns * gpus_per_column)
        if needed == 1:
            return inside + self._least_sync_s(ways, False)
        rings = inside + self._least_sync_s(ways, True)
        if num_stages == 1:
            return rings
        crossings = min(num_stages, needed) - 1 if len(self.tables.clusters) > FEW else 1
        extra = 2 * crossings * min(first.cross_s, second.cross_s)
        across = inside + (1 + self.waits * min(first.pace, second.pace) / pace) * extra
        return min(rings, across + self._least_sync_s(ways, False))

    def _least_sync_s(self, ways: int, across: bool) -> float:
        """Some stage holds at least its share of the gradients, and its ring at best is this fast."""
        if (ways, across) not in self._sync_s:
            share = self.tables.stage_bytes[-1] / ways
            least = self.tables.least_sync_s(share, self.columns, across) if self.columns > 1 else 0.0
            self._sync_s[ways, across] = least
        return self._sync_s[ways, across]


# ---- an outline in its places ------------------------------------------------------------------------------
def priced(tables: Tables, outline: Outline, structures: Sequence[Teams], worth: Worth) -> Iterator[Candidate]:
    """The outline's placements with their splits, but for those that `worth` rules out."""
    pricings: dict[tuple[frozenset[str], ...], Pricing] = {}
    gpu_of = [cluster.gpu for cluster in tables.clusters]
    one_type = frozenset(gpu_of) if len(set(gpu_of)) == 1 else None
    for rows in placements(tables.clusters, structures, outline.num_columns, outline.tps):
        gpus = tuple(one_type or frozenset(gpu_of[c] for c, _ in row) for row in rows)
        if gpus not in pricings:
            pricings[gpus] = Pricing(tables, outline, gpus)
        pricing = pricings[gpus]
        usd_per_s = pricing.usd_per_s(rows)
        crossing_usd = pricing.crossing_usd(rows)
        shared = pricing.comm_s(rows)
        cases = [(False, shared)]
        if tables.head_is_heavy and len(rows) > 1:
            cases.append((True, [*shared[:-1], pricing.head_comm_s(rows)]))
        for head_alone, comm in cases:
            if not worth(pricing.bound_s(rows, comm), usd_per_s, crossing_usd):
                continue
            ends = balanced(tables, pricing.kinds, comm, pricing.slowest_s(comm), head_alone)
            if ends is not None:
                usd = crossing_usd + pricing.rings_usd(rows, ends)
                yield Candidate(pricing.time_s(rows, comm, ends), usd_per_s, usd, outline, rows, tuple(ends))


class Pricing:
    """The formula over clusters, for one outline and the GPU types that each stage mixes."""

    def __init__(self, tables: Tables, outline: Outline, gpus: Sequence[frozenset[str]]) -> None:
        self.tables, self.outline = tables, outline
        self.kinds: list[Kinds] = [frozenset((gpu, outline.tps[gpu][i]) for gpu in g) for i, g in enumerate(gpus)]
        self.waits = math.ceil(tables.inputs.global_batch / (tables.mbs * outline.num_columns)) - 1
        ratios = [max(tables.ratio[kind] for kind in stage) for stage in self.kinds]
        self.paces = [1 / ratio for ratio in ratios]
        self.pace = sum(self.paces)
        self.work_s = tables.work_s(frozenset().union(*self.kinds))
        self.least_compute_s = min(ratios) * self.work_s
        self.sync_tp = [min(4, *(tp for _, tp in stage)) for stage in self.kinds]
        self.share = tables.stage_bytes[-1] / sum(self.sync_tp)
        self._ring_s: dict[Row, float] = {}
        self._gpu_of = [cluster.gpu for cluster in tables.clusters]

    def comm_s(self, rows: tuple[Row, ...]) -> list[float]:
        tables, tps, gpu_of = self.tables, self.outline.tps, self._gpu_of
        forward, backward = [0.0] * len(rows), [0.0] * len(rows)
        for i in range(len(rows) - 1):
            for a, b in facing(rows[i], rows[i + 1]):
                tp_a, tp_b = tps[gpu_of[a]][i], tps[gpu_of[b]][i + 1]
                forward[i] = max(forward[i], tables.send_s(a, tp_a, b, tp_b))
                backward[i + 1] = max(backward[i + 1], tables.send_s(b, tp_b, a, tp_a))
        return combined_comm_s(forward, backward)

    def head_comm_s(self, rows: tuple[Row, ...]) -> float:
        """What the last stage waits for transfers when it is the head alone."""
        tables, tps, gpu_of = self.tables, self.outline.tps, self._gpu_of
        pairs = facing(rows[-2], rows[-1])
        return 2 * max(tables.send_s(b, tps[gpu_of[b]][-1], a, tps[gpu_of[a]][-2], head=True) for a, b in pairs)

    def slowest_s(self, comm: Sequence[float]) -> float:
        """No split has a faster slowest stage."""
        weighted = sum(wait * pace for wait, pace in zip(comm, self.paces, strict=True))
        return max((self.work_s + weighted) / self.pace, *comm)

    def bound_s(self, rows: tuple[Row, ...], comm: Sequence[float]) -> float:
        """No split is faster. Some stage holds its share of the gradients: at best the one with the fastest ring."""
        sync = min(self._share_ring_s(row) for row in rows)
        return self.waits * self.slowest_s(comm) + sum(comm) + self.least_compute_s + sync

    def _share_ring_s(self, row: Row) -> float:
        if row not in self._ring_s:
            columns, share = self.outline.num_columns, self.share
            rings = (self.tables.sync_s(a, b, share, columns) for a, b in neighbours(row))
            self._ring_s[row] = max(rings, default=0.0)
        return self._ring_s[row]

    def usd_per_s(self, rows: tuple[Row, ...]) -> float:
        tps, gpu_of, price = self.outline.tps, self._gpu_of, self.tables.usd_per_gpu_s
        return sum(price[gpu_of[c]] * tps[gpu_of[c]][i] * n for i, row in enumerate(rows) for c, n in row)

    def crossing_usd(self, rows: tuple[Row, ...]) -> float:
        """Egress of activations and their gradients, at the best price between two clusters."""
        price = self.tables.usd_per_byte
        columns = sum(
            count * (price(a, b) + price(b, a))
            for here, there in pairwise(rows)
            for (a, b), count in facing(here, there).items()
            if a != b
        )
        return columns * self.tables.act_bytes * (self.waits + 1)

    def rings_usd(self, rows: tuple[Row, ...], ends: Sequence[int]) -> float:
        """Egress of the gradient rings."""
        total, bytes_before = 0.0, [0.0, *(self.tables.stage_bytes[end] for end in ends)]
        for row, (a, b) in zip(rows, pairwise(bytes_before), strict=True):
            total += (b - a) * sum(self.tables.usd_per_byte(x, y) for x, y in ring_crossings(row))
        return total * 2 * (self.outline.num_columns - 1) / self.outline.num_columns

    def time_s(self, rows: tuple[Row, ...], comm: Sequence[float], ends: Sequence[int]) -> float:
        tables, starts = self.tables, [0, *ends[:-1]]
        times, sync = [], 0.0
        for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
            times.append(max(tables.time_s[kind][b] - tables.time_s[kind][a] for kind in self.kinds[i]))
            share = (tables.stage_bytes[b] - tables.stage_bytes[a]) / self.sync_tp[i]
            for pair in neighbours(rows[i]):
                sync = max(sync, tables.sync_s(*pair, share, self.outline.num_columns))
        slowest = max(c + t for c, t in zip(times, comm, strict=True))
        update = max(tables.update_s[kind] for stage in self.kinds for kind in stage)
        return self.waits * slowest + sum(comm) + sum(times) + update + sync


class Shortlist:
    """The best so many candidates by score, lowest first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._heap: list[tuple[float, int, Candidate]] = []
        self._count = 0

    def add(self, score: float, candidate: Candidate) -> None:
        self._count += 1
        entry = (-score, -self._count, candidate)
        if len(self._heap) < self.size:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def best(self) -> list[tuple[float, Candidate]]:
        """(score, candidate), lowest first."""
        ordered = sorted(self._heap, key=lambda entry: (-entry[0], -entry[1]))
        return [(-score, candidate) for score, _, candidate in ordered]
