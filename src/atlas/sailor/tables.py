"""Times, sizes and links as the search needs them, in prefix sums and tables; one `SailorTables` per microbatch size.

Clusters are pools of one GPU type whose zones reach each other about as fast as themselves (zones of a region); the
search places on clusters first and on zones later. Between clusters the best zone pair counts, so that every time
here is a lower bound of what the judge will say. A `run` is one tp for each GPU type, which stages share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product

import numpy as np
from numpy.typing import NDArray

from atlas.sailor.inputs import Inputs, Pool
from atlas.sailor.judge import FLOAT_BYTES, STATE_BYTES_PER_PARAM, all_reduce_s, reserved_bytes
from atlas.sailor.links import BandwidthFit

NEAR = 0.5
"""Zones belong together if both directions have this share of the bandwidth that each has inside itself."""
PROBE_BYTES = 32e6
"""Bandwidths of zones are compared at this size."""
MIN_TIME_S = 1e-9
"""So that ratios of times are finite where layers were measured as 0."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class ZoneCluster:
    """Pools of one GPU type that are near each other."""

    gpu: str
    pools: tuple[Pool, ...]

    @cached_property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)


def find_clusters(inputs: Inputs) -> tuple[ZoneCluster, ...]:
    """Every pool in the first cluster all of whose members are near it."""
    groups: list[list[Pool]] = []
    for pool in inputs.pools:
        for group in groups:
            if all(_near(inputs, pool, other) for other in group):
                group.append(pool)
                break
        else:
            groups.append([pool])
    return tuple(ZoneCluster(g[0].gpu, tuple(g)) for g in groups)


def _near(inputs: Inputs, a: Pool, b: Pool) -> bool:
    if a.gpu != b.gpu:
        return False
    fits = [inputs.network.find(x.zone_gpu, 1, y.zone_gpu, 1) for x, y in ((a, b), (b, a), (a, a), (b, b))]
    if any(fit is None for fit in fits):
        return False
    there, back, own_a, own_b = (float(fit.seconds(PROBE_BYTES)) for fit in fits if fit is not None)
    return max(there, back) * NEAR <= min(own_a, own_b)


@dataclass(frozen=True)
class LayerTables:
    """Times and memory of runs of layers, one row for each (GPU type, tp)."""

    num_layers: int
    head_is_heavy: bool
    time_s: Floats
    """(row, layer): prefix sums."""
    furthest: Ints
    """(row, stages from this one on, first layer): the end of the longest run of layers that fits the memory."""

    def best(self, groups: Sequence[Sequence[int]]) -> LayerTables:
        """A row for each group: no member is faster layer by layer, nor holds more. The head may be on any stage."""
        steps = np.diff(self.time_s, axis=1)
        least = [np.minimum.reduce(steps[list(group)]) for group in groups]
        times = np.array([[0.0, *np.cumsum(row)] for row in least])
        held = np.array([np.maximum.reduce(self.furthest[list(group)]) for group in groups])
        return LayerTables(self.num_layers, False, times, held)


class SailorTables:
    """Times and sizes for one microbatch size."""

    def __init__(
        self, inputs: Inputs, clusters: tuple[ZoneCluster, ...], mbs: int, usd_per_gpu_s: Mapping[str, float]
    ) -> None:
        self.inputs, self.clusters, self.mbs = inputs, clusters, mbs
        self.num_layers = inputs.num_layers
        self.gpu_types = sorted({cluster.gpu for cluster in clusters})
        self.type_of = [self.gpu_types.index(cluster.gpu) for cluster in clusters]
        self.usd_per_gpu_s = [usd_per_gpu_s[cluster.gpu] for cluster in clusters]
        self.cluster_gpus = np.array([cluster.num_gpus for cluster in clusters], dtype=np.int64)
        self.num_gpus = int(self.cluster_gpus.sum())
        outputs = inputs.sizes[1].act_output
        self.act_bytes = min(outputs[:-1], default=outputs[-1]) * FLOAT_BYTES * mbs
        self.head_bytes = outputs[-1] * FLOAT_BYTES * mbs
        self.stage_bytes = _prefix([p * FLOAT_BYTES for p in inputs.sizes[1].params])
        self.kinds = [(gpu, tp) for gpu in self.gpu_types for tp in inputs.tps(gpu, mbs)]
        self.layers = self._layers()
        self.update_s = np.array([min(inputs.times[gpu, mbs, tp].update_s) for gpu, tp in self.kinds])
        self._sync: dict[tuple[int, int, float, int], float] = {}
        self._usd: dict[tuple[int, int], float] = {}
        middle = np.array([self._middle_s(times) for times in self.layers.time_s])
        self.ratio = middle / middle[0]
        """By kind: how slow it is."""
        self.runs = list(product(*([k for k, (g, _) in enumerate(self.kinds) if g == gpu] for gpu in self.gpu_types)))
        self.run_tp = np.array([[self.kinds[k][1] for k in run] for run in self.runs], dtype=np.int64)
        self.run_kind = np.array(self.runs, dtype=np.int64)
        self.usable = np.array(
            [[self._usable(c, int(tps[t])) for tps in self.run_tp] for c, t in zip(clusters, self.type_of, strict=True)]
        )
        """(cluster, run): GPUs in nodes or parts of nodes that hold whole groups of the run's tp."""
        self.send_s = self._send_table(self.act_bytes)
        """(a, b, run, next run): an activation from cluster a to cluster b, over the best pair of zones."""
        self.back_s = self.send_s.transpose(1, 0, 3, 2)
        """(a, b, run, next run): a gradient from b back to a."""

    def _usable(self, cluster: ZoneCluster, tp: int) -> int:
        node = self.inputs.gpus[cluster.gpu].gpus_per_node
        return sum(pool.num_gpus - pool.num_gpus % node % tp for pool in cluster.pools)

    def _layers(self) -> LayerTables:
        times, furthest = [], []
        for gpu, tp in self.kinds:
            found = self.inputs.times[gpu, self.mbs, tp]
            times.append(_prefix([f + b for f, b in zip(found.forward_s, found.backward_s, strict=True)]))
            furthest.append([self._furthest(gpu, tp, after) for after in range(self.num_layers + 1)])
        heavy = self.head_bytes > self.act_bytes
        return LayerTables(self.num_layers, heavy, np.array(times), np.array(furthest, dtype=np.int64))

    def _furthest(self, gpu: str, tp: int, stages_after: int) -> list[int]:
        sizes = self.inputs.sizes[tp]
        held = [
            STATE_BYTES_PER_PARAM * p + FLOAT_BYTES * act * self.mbs * stages_after
            for p, act in zip(sizes.params, sizes.act_memory, strict=True)
        ]
        free_bytes = self.inputs.gpus[gpu].memory_bytes - reserved_bytes(tp)
        prefix = list(accumulate(held, initial=0))
        return [bisect_right(prefix, before + free_bytes) - 1 for before in prefix]

    def _middle_s(self, times: Floats) -> float:
        return float(max(times[-2] - times[1] if self.num_layers > 2 else times[-1], MIN_TIME_S))

    @cached_property
    def work_s(self) -> Floats:
        """(first run, second run): all layers in the reference kind's seconds. A stage of a kind takes at least `ratio`
        x its share."""
        steps = np.diff(self.layers.time_s, axis=1) / self.ratio[:, None]
        return np.array([[steps[[*a, *b]].min(axis=0).sum() for b in self.runs] for a in self.runs])

    # ---- links -------------------------------------------------------------------------------------------
    def _send_table(self, num_bytes: float) -> Floats:
        num, runs = len(self.clusters), range(len(self.runs))
        table = np.full((num, num, len(runs), len(runs)), np.inf)
        seconds: dict[tuple[int, int, int, int], float] = {}
        for a, b, here, there in product(range(num), range(num), runs, runs):
            key = (a, b, int(self.run_tp[here, self.type_of[a]]), int(self.run_tp[there, self.type_of[b]]))
            if key not in seconds:
                fits = self._fits(a, key[2], b, key[3])
                seconds[key] = min((float(fit.seconds(num_bytes)) for fit in fits), default=float("inf"))
            table[a, b, here, there] = seconds[key]
        return table

    @cached_property
    def crossing_s(self) -> tuple[Floats, Floats]:
        """(a, b, first run, second run): what a crossing adds at least to the transfers, there and back; and what a
        stage beside it takes at least."""
        send, back = self.send_s, self.back_s
        extra = np.maximum(0.0, send + back - (send.min(axis=(0, 1)) + back.min(axis=(0, 1))))
        least_layer = float(np.diff(self.layers.time_s, axis=1).min())
        return _least_of_borders(extra), _least_of_borders(np.maximum(send, back)) + least_layer

    @cached_property
    def head_back_s(self) -> Floats:
        """(a, b, run, next run): the gradient of a head that is alone on the last stage, from b back to a."""
        return self._send_table(self.head_bytes).transpose(1, 0, 3, 2)

    def sync_s(self, a: int, b: int, num_bytes: float, num_replicas: int) -> float:
        """The gradient ring over a pair of clusters, at best."""
        key = (a, b, num_bytes, num_replicas)
        if key not in self._sync:
            found = (float(all_reduce_s(fit, num_bytes, num_replicas)) for fit in self._ring_fits[a][b])
            self._sync[key] = min(found, default=float("inf"))
        return self._sync[key]

    @cached_property
    def _ring_fits(self) -> list[list[list[BandwidthFit]]]:
        ids = range(len(self.clusters))
        return [[sorted(set(self._fits(a, 1, b, 1))) for b in ids] for a in ids]

    def rings_s(self, num_bytes: Floats, num_replicas: Ints) -> Floats:
        """(a, b, case): the gradient ring over each pair of clusters at best, for many sizes and replicas."""
        num = len(self.clusters)
        table = np.full((num, num, len(num_bytes)), np.inf)
        for a, b in product(range(num), repeat=2):
            for fit in self._ring_fits[a][b]:
                np.minimum(table[a, b], all_reduce_s(fit, num_bytes, num_replicas), out=table[a, b])
        return table

    def _fits(self, a: int, gpus_a: int, b: int, gpus_b: int) -> list[BandwidthFit]:
        """The measured pairs of zones between two clusters."""
        pairs = [(x.zone_gpu, y.zone_gpu) for x in self.clusters[a].pools for y in self.clusters[b].pools]
        fits = [self.inputs.network.find(x, gpus_a, y, gpus_b) for x, y in pairs]
        return [fit for fit in fits if fit is not None]

    def usd_per_byte(self, a: int, b: int) -> float:
        """Egress from cluster a to cluster b, from its cheapest zone."""
        if (a, b) not in self._usd:
            pairs = [(x.zone, y.zone) for x in self.clusters[a].pools for y in self.clusters[b].pools]
            self._usd[a, b] = min(self.inputs.egress.usd_per_byte(*pair) for pair in pairs)
        return self._usd[a, b]


def _prefix(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def _least_of_borders(table: Floats) -> Floats:
    """(..., run, next run), for stages of one run and then another: the least between two of the first, two of the
    second, or one of each.
    """
    own = np.diagonal(table, axis1=-2, axis2=-1)
    return np.minimum(np.minimum(own[..., :, None], own[..., None, :]), table)
