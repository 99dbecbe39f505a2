"""What the search asks again and again, as prefix sums and cached link times: one `Tables` for each microbatch size.

Clusters are pools of one GPU type whose zones reach each other about as fast as themselves (zones of a region); the
search places on clusters first and on zones later. Between clusters the best zone pair counts, so that every time
here is a lower bound of what the judge will say.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from atlas.plan.sailor.inputs import Inputs, Pool
from atlas.plan.sailor.judge import FLOAT_BYTES, STATE_BYTES_PER_PARAM, all_reduce_s
from atlas.plan.sailor.links import Fit

NEAR = 0.5
"""Zones belong together if both directions have this share of the bandwidth that each has inside itself."""
PROBE_BYTES = 32e6


@dataclass(frozen=True)
class Cluster:
    """Pools of one GPU type that are near each other."""

    gpu: str
    pools: tuple[Pool, ...]

    @cached_property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)


def find_clusters(inputs: Inputs) -> tuple[Cluster, ...]:
    """Every pool in the first cluster all of whose members are near it."""
    groups: list[list[Pool]] = []
    for pool in inputs.pools:
        for group in groups:
            if all(_near(inputs, pool, other) for other in group):
                group.append(pool)
                break
        else:
            groups.append([pool])
    return tuple(Cluster(g[0].gpu, tuple(g)) for g in groups)


def _near(inputs: Inputs, a: Pool, b: Pool) -> bool:
    if a.gpu != b.gpu:
        return False
    fits = [inputs.network.find(x.end, 1, y.end, 1) for x, y in ((a, b), (b, a), (a, a), (b, b))]
    if any(fit is None for fit in fits):
        return False
    there, back, own_a, own_b = (fit.seconds(PROBE_BYTES) for fit in fits if fit is not None)
    return max(there, back) * NEAR <= min(own_a, own_b)


class Tables:
    """Times and sizes for one microbatch size."""

    def __init__(
        self, inputs: Inputs, clusters: tuple[Cluster, ...], mbs: int, usd_per_gpu_s: Mapping[str, float]
    ) -> None:
        self.inputs, self.clusters, self.mbs = inputs, clusters, mbs
        self.num_layers = inputs.num_layers
        self.gpu_types = sorted({cluster.gpu for cluster in clusters})
        self.usd_per_gpu_s = usd_per_gpu_s
        self.least_usd_per_s = min((usd_per_gpu_s[gpu] for gpu in self.gpu_types), default=0.0)
        self.num_gpus = sum(cluster.num_gpus for cluster in clusters)
        self._room = list(accumulate(sorted((cluster.num_gpus for cluster in clusters), reverse=True)))
        outputs = inputs.sizes[1].act_output
        self.act_bytes = min(outputs[:-1], default=outputs[-1]) * FLOAT_BYTES * mbs
        self.head_bytes = outputs[-1] * FLOAT_BYTES * mbs
        self.head_is_heavy = self.head_bytes > self.act_bytes
        self.stage_bytes = _prefix([p * FLOAT_BYTES for p in inputs.sizes[1].params])
        self.kinds = {(cluster.gpu, tp) for cluster in clusters for tp in inputs.tps(cluster.gpu, mbs)}
        self.time_s = {kind: self._time_s(kind) for kind in self.kinds}
        self.update_s = {kind: min(inputs.times[kind[0], mbs, kind[1]].update_s) for kind in self.kinds}
        self._send: dict[tuple[int, int, int, int, bool], float] = {}
        self._sync: dict[tuple[int, int, float, int], float] = {}
        self._ring_fits: dict[bool, set[Fit]] = {}
        self._usd: dict[tuple[int, int], float] = {}
        self._memory: dict[tuple[str, int, int], tuple[list[int], int]] = {}
        self._work: dict[frozenset[tuple[str, int]], float] = {}
        middle = {kind: self._middle_s(kind) for kind in self.kinds}
        self.ratio = {kind: seconds / middle[min(self.kinds)] for kind, seconds in middle.items()}
        tps = {tp for _, tp in self.kinds}
        self.best_send_s = {tp: self._best_send_s(tp, False) for tp in tps}
        self.cross_send_s = {tp: self._best_send_s(tp, True) for tp in tps}

    def _time_s(self, kind: tuple[str, int]) -> list[float]:
        times = self.inputs.times[kind[0], self.mbs, kind[1]]
        return _prefix([f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)])

    # ---- the work, for bounds ----------------------------------------------------------------------------
    def work_s(self, kinds: frozenset[tuple[str, int]]) -> float:
        """All layers in the reference kind's seconds: a stage of a kind takes at least `ratio` x its share."""
        if kinds not in self._work:
            layers = range(self.num_layers)
            self._work[kinds] = sum(
                min((self.time_s[kind][i + 1] - self.time_s[kind][i]) / self.ratio[kind] for kind in kinds)
                for i in layers
            )
        return self._work[kinds]

    def _middle_s(self, kind: tuple[str, int]) -> float:
        times = self.time_s[kind]
        return max(times[-2] - times[1] if self.num_layers > 2 else times[-1], 1e-9)

    def least_sync_s(self, num_bytes: float, num_replicas: int, across: bool) -> float:
        """The gradient ring over the best pair there is, or the best that goes across clusters."""
        if across not in self._ring_fits:
            self._ring_fits[across] = {fit for a, b in self._pairs(across) for fit in self._fits(a, 1, b, 1)}
        fits = self._ring_fits[across]
        return min((all_reduce_s(fit, num_bytes, num_replicas) for fit in fits), default=float("inf"))

    def _pairs(self, across: bool) -> list[tuple[int, int]]:
        ids = range(len(self.clusters))
        return [(a, b) for a in ids for b in ids if a != b or not across]

    # ---- links -------------------------------------------------------------------------------------------
    def _best_send_s(self, tp: int, across: bool) -> float:
        tps = {t for _, t in self.kinds}
        return min(
            (min(self.send_s(a, tp, b, t), self.send_s(b, t, a, tp)) for a, b in self._pairs(across) for t in tps),
            default=float("inf"),
        )

    def send_s(self, a: int, tp_a: int, b: int, tp_b: int, head: bool = False) -> float:
        """One activation from cluster a to cluster b, over the best pair of zones; infinite where none is measured."""
        key = (a, tp_a, b, tp_b, head)
        if key not in self._send:
            num_bytes = self.head_bytes if head else self.act_bytes
            found = (fit.seconds(num_bytes) for fit in self._fits(a, tp_a, b, tp_b))
            self._send[key] = min(found, default=float("inf"))
        return self._send[key]

    def sync_s(self, a: int, b: int, num_bytes: float, num_replicas: int) -> float:
        """The gradient ring over a pair of clusters, at best."""
        key = (a, b, num_bytes, num_replicas)
        if key not in self._sync:
            found = (all_reduce_s(fit, num_bytes, num_replicas) for fit in self._fits(a, 1, b, 1))
            self._sync[key] = min(found, default=float("inf"))
        return self._sync[key]

    def _fits(self, a: int, gpus_a: int, b: int, gpus_b: int) -> list[Fit]:
        """The measured pairs of zones between two clusters."""
        pairs = [(x.end, y.end) for x in self.clusters[a].pools for y in self.clusters[b].pools]
        fits = [self.inputs.network.find(x, gpus_a, y, gpus_b) for x, y in pairs]
        return [fit for fit in fits if fit is not None]

    def usd_per_byte(self, a: int, b: int) -> float:
        """Egress from cluster a to cluster b, from its cheapest zone."""
        if (a, b) not in self._usd:
            pairs = [(x.zone, y.zone) for x in self.clusters[a].pools for y in self.clusters[b].pools]
            self._usd[a, b] = min(self.inputs.egress.usd_per_byte(*pair) for pair in pairs)
        return self._usd[a, b]

    def clusters_needed(self, num_gpus: int) -> int:
        """So many clusters at least hold so many GPUs."""
        return bisect_left(self._room, num_gpus) + 1

    def furthest_layer(self, kind: tuple[str, int], start: int, stages_after: int) -> int:
        """The end of the longest run from `start` that fits the GPU's memory."""
        key = (*kind, stages_after)
        if key not in self._memory:
            sizes = self.inputs.sizes[kind[1]]
            held = [
                STATE_BYTES_PER_PARAM * p + FLOAT_BYTES * act * self.mbs * stages_after
                for p, act in zip(sizes.params, sizes.act_memory, strict=True)
            ]
            reserved = 2_000_000_000 if kind[1] == 1 else 3_000_000_000
            self._memory[key] = (list(accumulate(held, initial=0)), self.inputs.gpus[kind[0]].memory_bytes - reserved)
        prefix, room = self._memory[key]
        return bisect_right(prefix, prefix[start] + room) - 1


def _prefix(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))
