"""Shapes: which datacenters a pipeline visits, in which order, and how many of its stages each of them holds.

Few datacenters: every ordered subset and, while they are not too many, every way to assign the stages. Many: tours from
every starting point to the nearest neighbours, by distance, by GPU speed or by rent, until the pipeline fits. `local`
changes one thing of a shape, to improve a good one. Knows workers and distance; `estimate` knows the time of a shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import combinations, pairwise, permutations
from math import comb

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Floats, Ints

PipelineShape = tuple[tuple[int, int], ...]
"""(datacenter's number, stages) along the pipeline."""

FEW_DCS = 4
"""Up to this many datacenters, every ordered subset is tried, and candidates are compared by their workers (`pruning`):
a search of 20 datacenters of 512 GPUs would not end."""
FEW_DEALS = 30
"""Up to this many ways to distribute stages over one ordered subset, all are tried; beyond it a few, and:"""
MAX_DEALS, FEW_WORKERS = 120, 16
"""Up to this many ways, however many stages fit: all that take no more than so many workers of each datacenter."""
MAX_STARTS = 24
"""Datacenters, the largest, from which tours start."""
MAX_RUNS = 12
"""Datacenters of one pipeline, where there are many."""
SHORTEST, PREFERRED = 8, 4
"""Parts of tours that become shapes: the shortest, and those with the fastest and with the cheapest GPUs."""
DETOUR, UNUSABLE = 100.0, 1e6
"""Hops that a tour makes rather than visit the slowest or most expensive datacenter early; and, as a multiple of that,
one that takes no part."""


class Shapes:
    """The shapes of one cluster at one tp; used for all depths and numbers of replicas."""

    def __init__(
        self,
        cluster: ClusterArrays,
        workers: Ints,
        layer_s: Floats,
        transfer_s: Floats,
        kept: Collection[str] | None = None,
    ) -> None:
        """`kept`: the names of the datacenters that every shape visits, and no others."""
        self.cluster, self.workers = cluster, workers
        self.layer_s = layer_s
        """[i]: of a layer, infinite where a datacenter takes no part."""
        self.hop_s = np.where(cluster.joined, cluster.latency_s + transfer_s, np.inf)
        """[i, j]: an activation's way, for ranking."""
        # Plain lists: a shape is made of a few numbers at a time, and numpy's are slow to pick one by one.
        takes_part = np.array([kept is None or name in kept for name in cluster.names])
        self._least = 1 if kept is None else len(kept)
        self._usable_workers: list[int] = np.where(np.isfinite(layer_s) & takes_part, workers, 0).tolist()
        self._hop_s: list[list[float]] = self.hop_s.tolist()
        self._joined: list[list[bool]] = cluster.joined.tolist()
        self._prefers: list[list[float]] = [layer_s.tolist(), cluster.usd_per_gpu_s.tolist()]
        self._known: dict[tuple[int, ...], list[PipelineShape]] = {}

    def of(self, depth: int, replicas: int) -> list[PipelineShape]:
        """Shapes for `replicas` pipelines of `depth` stages; the same list object where the same stages fit."""
        max_stages = [min(workers // replicas, depth) for workers in self._usable_workers]
        is_few = self.cluster.num_dcs <= FEW_DCS
        key = (depth, FEW_WORKERS // replicas if is_few else 0, *max_stages)
        if key not in self._known:
            self._known[key] = self._few(depth, max_stages, key[1]) if is_few else self._many(depth, max_stages)
        return self._known[key]

    def _few(self, depth: int, max_stages: list[int], least: int) -> list[PipelineShape]:
        few = [min(n, least) for n in max_stages]
        found: dict[object, PipelineShape] = {}
        usable = [i for i in range(len(max_stages)) if max_stages[i] > 0]
        for count in range(self._least, min(len(usable), depth) + 1):
            for order in permutations(usable, count):
                if not np.isfinite(self._way_s(order)) or sum(max_stages[i] for i in order) < depth:
                    continue
                for stages in self.deals(order, depth, max_stages, few):
                    shape = tuple(zip(order, stages, strict=True))
                    found.setdefault(self._seen_as(shape), shape)
        return list(found.values())

    def _many(self, depth: int, max_stages: list[int]) -> list[PipelineShape]:
        chains: dict[object, tuple[int, ...]] = {}
        for order in self.tours():
            chain = self._prefix(order, depth, max_stages)
            if chain is not None:
                classes = self.cluster.classes if len(chain) > 1 else self.cluster.classes_alone
                chains.setdefault((len(chain) > 1, *(classes[i] for i in chain)), chain)
        every = sorted(chains.values(), key=lambda chain: (len(chain), self._way_s(chain)))
        keep = every[:SHORTEST]
        for by in self._prefers:
            if len(set(by)) > 1:
                keep += sorted(every, key=lambda chain, by=by: sum(by[i] for i in chain) / len(chain))[:PREFERRED]  # type: ignore[misc]
        found: dict[object, PipelineShape] = {}
        for chain in dict.fromkeys(keep):
            for stages in _sensible(chain, depth, max_stages, self._prefers):
                shape = tuple(zip(chain, stages, strict=True))
                found.setdefault(self._seen_as(shape), shape)
        return list(found.values())

    def _prefix(self, order: Sequence[int], depth: int, max_stages: list[int]) -> tuple[int, ...] | None:
        """As much of a tour as holds the pipeline, datacenters without workers or path left out."""
        chain: list[int] = []
        held = 0
        for i in order:
            if max_stages[i] and (not chain or self._joined[chain[-1]][i]):
                chain.append(i)
                held += max_stages[i]
                if held >= depth and len(chain) >= self._least:
                    return tuple(chain)
                if len(chain) == min(max(MAX_RUNS, self._least), depth):
                    return None
        return None

    @cache  # noqa: B019 - one object per search
    def tours(self) -> tuple[tuple[int, ...], ...]:
        """From every datacenter, nearest neighbours first; likewise with slow or expensive ones last; largest first."""
        n = self.cluster.num_dcs
        hop = float(np.median(self.hop_s[np.isfinite(self.hop_s)])) if np.isfinite(self.hop_s).any() else 1.0
        weights = [np.zeros(n)]
        for by in (self.layer_s, self.cluster.usd_per_gpu_s):
            low, high = np.min(by), np.max(by[np.isfinite(by)], initial=0.0)
            if high > low:
                weights.append(DETOUR * hop * np.where(np.isfinite(by), (by - low) / (high - low), UNUSABLE))
        tours = [tuple(int(i) for i in np.argsort(-self.workers, kind="stable"))]
        for weight in weights:
            tours += [self._nearest(start, weight) for start in sorted(tours[0][:MAX_STARTS])]
        return tuple(dict.fromkeys(tours))

    def _nearest(self, start: int, weight: Floats) -> tuple[int, ...]:
        tour, left = [start], set(range(self.cluster.num_dcs)) - {start}
        while left:
            last = tour[-1]
            tour.append(min(left, key=lambda j: (float(self.hop_s[last, j] + weight[j]), j)))
            left.remove(tour[-1])
        return tuple(tour)

    # ---- stages ----------------------------------------------------------------------------------------------
    def deals(
        self, order: Sequence[int], depth: int, max_stages: Sequence[int], few: Sequence[int]
    ) -> Iterable[tuple[int, ...]]:
        """Ways to deal the stages to datacenters in this order, each at least one. All of those that fit into `few`,
        which does not grow with the datacenters: a cluster with more nodes would lose some otherwise."""
        every = list(compositions(depth, [max_stages[i] for i in order], FEW_DEALS))
        if len(every) < FEW_DEALS:
            return every
        found = list(_sensible(order, depth, max_stages, self._prefers))
        if comb(depth - 1, len(order) - 1) <= MAX_DEALS:
            found += compositions(depth, [few[i] for i in order], MAX_DEALS + 1)
        return dict.fromkeys(found)

    def _seen_as(self, shape: PipelineShape) -> object:
        """Equal for shapes that cost the same."""
        classes = alike(self.cluster) if len(shape) > 1 else self.cluster.classes_alone
        return tuple((classes[i], stages) for i, stages in shape)

    def _way_s(self, order: Sequence[int]) -> float:
        return sum(self._hop_s[a][b] for a, b in pairwise(order))

    # ---- neighbours --------------------------------------------------------------------------------------------
    def local(self, shape: PipelineShape, replicas: int) -> Iterator[PipelineShape]:
        """Shapes one change away: a stage moved, two datacenters swapped, one exchanged for another, one dropped."""
        depth = sum(stages for _, stages in shape)
        for found in self._changes(shape):
            order = [i for i, _ in found]
            fits = all(0 < stages <= self.workers[i] // replicas for i, stages in found)
            finite = all(np.isfinite(self.layer_s[i]) for i in order)
            if fits and finite and np.isfinite(self._way_s(order)) and sum(s for _, s in found) == depth:
                yield found

    def _changes(self, shape: PipelineShape) -> Iterator[PipelineShape]:
        runs = list(shape)
        used = {i for i, _ in shape}
        for a, b in permutations(range(len(runs)), 2):
            moved = list(runs)
            moved[a], moved[b] = (runs[a][0], runs[a][1] - 1), (runs[b][0], runs[b][1] + 1)
            yield tuple(run for run in moved if run[1])
        for a, b in combinations(range(len(runs)), 2):
            swapped = list(runs)
            swapped[a], swapped[b] = runs[b], runs[a]
            yield tuple(swapped)
        for a in range(len(runs)):
            for j in set(range(self.cluster.num_dcs)) - used:
                yield (*runs[:a], (j, runs[a][1]), *runs[a + 1 :])


@lru_cache(maxsize=64)
def alike(cluster: ClusterArrays) -> tuple[int, ...]:
    """By datacenter, the same number where pipelines cost the same; all different where links are listed. With one GPU
    a node, the number of nodes makes no difference."""
    if cluster.spec.links is not None:
        return tuple(range(cluster.num_dcs))
    known: dict[object, int] = {}
    plain = []
    for dc in cluster.spec.datacenters:
        nodes = dc.nodes if dc.gpus_per_node > 1 or dc.fabric is not None else 1
        plain.append(dc.model_copy(update={"name": "-", "location": None, "nodes": nodes}))
    return tuple(known.setdefault(dc, len(known)) for dc in plain)


def compositions(total: int, most: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as a sum of 1..most[k], at most about `limit` of them."""
    count = 0
    stack: list[tuple[int, ...]] = [()]
    while stack and count < limit:
        done = stack.pop()
        k, left = len(done), total - sum(done)
        if k == len(most) - 1:
            if 1 <= left <= most[k]:
                count += 1
                yield (*done, left)
            continue
        after = sum(most[k + 1 :])
        for stages in range(max(1, left - after), min(most[k], left - (len(most) - k - 1)) + 1):
            stack.append((*done, stages))


def _sensible(
    order: Sequence[int], depth: int, max_stages: Sequence[int], prefers: Sequence[list[float]]
) -> Iterable[tuple[int, ...]]:
    """Fill the first, the last, the fastest, the cheapest first; and in proportion to the stages that fit."""
    count = len(order)
    most = [max_stages[i] for i in order]
    if sum(most) == depth:
        return [tuple(most)]
    if count == 1:
        return [(depth,)]
    fills = [list(range(count)), list(range(count))[::-1]]
    fills += [sorted(range(count), key=lambda k, by=by: (by[order[k]], k)) for by in prefers]  # type: ignore[misc]
    found: list[tuple[int, ...]] = []
    for fill in fills:
        stages, left = [1] * count, depth - count
        for k in fill:
            more = min(left, most[k] - 1)
            stages[k] += more
            left -= more
        found.append(tuple(stages))
    return list(dict.fromkeys([*found, _in_proportion(tuple(most), depth)]))


@lru_cache(maxsize=10_000)
def _in_proportion(most: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """One stage each, and the rest one by one to the datacenter that is filled least by it."""
    stages = [1] * len(most)
    for _ in range(depth - len(most)):
        k = min((k for k in range(len(most)) if stages[k] < most[k]), key=lambda k: (stages[k] + 1) / most[k])
        stages[k] += 1
    return tuple(stages)
