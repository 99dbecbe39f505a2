"""Layers per stage for many pipelines at once: the slowest stage as fast as can be, and no stage over its memory.

The same aim as `cost.arrange.balanced_split`, within memory: where GPU types differ, the fastest does not always have
the most memory. All layers are assumed to be equal. Knows one batch of pipelines of equal depth.

Index legend: n pipeline, u pipeline that differs from all others in its GPUs, s stage, i datacenter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Flags, Floats, Ints
from atlas.cost.memory import in_flight, max_layers, split_memory
from atlas.cost.model_arrays import RECOMPUTE, ModelArrays

MOST_TIMES = 1_000_000
"""Times that are sorted at once: 8 MB."""
ROUNDING = 1e-9
"""Share by which a stage may be slower than the limit that it was computed from."""


class Split(NamedTuple):
    """Pipelines on the same GPUs are split once."""

    dc: Ints
    """[u, s]: datacenters of one pipeline of each sort."""
    layers: Ints
    """[u, s]"""
    held: Ints
    """[u]: microbatches that every stage has room for at once; 0 where it does not fit."""
    stashed: Ints
    """[u]: microbatches whose forwards alone there is room for: no order holds more."""
    sort: Ints
    """[n]: which of u each pipeline is."""


def split_layers(cluster: ClusterArrays, model: ModelArrays, stage_dc: Ints, shards: Ints | None = None) -> Split:
    """For pipelines whose stages are in `stage_dc` [n, s]. `shards` [n]: pipelines that divide optimizer state."""
    columns = np.moveaxis(model.layers_s, 1, 0)
    every = [
        (cluster.gpu_types[i], int(cluster.cap_bytes[i]), columns[i].tobytes()) for i in range(cluster.num_dcs)
    ]  # all that a stage depends on
    known = {key: k for k, key in enumerate(dict.fromkeys(every))}
    rows = np.array([known[key] for key in every], np.int16)[stage_dc]
    if shards is not None:
        which = np.unique(shards, return_inverse=True)[1]
        rows = np.ascontiguousarray(np.column_stack([rows, which.astype(np.int16)]))
    # As bytes: numpy finds equal rows ten times as fast as column by column.
    _, first, sort = np.unique(rows.view((np.void, 2 * rows.shape[1])).ravel(), return_index=True, return_inverse=True)
    dc = np.array([every.index(key) for key in known])[rows[first, : stage_dc.shape[1]]]
    divided = 1 if shards is None else shards[first][:, None]
    layers, fits = _split(cluster, model, dc, divided)
    end = np.cumsum(layers, axis=1)
    memory = split_memory(cluster, model, dc, end - layers, end, divided)
    rule = in_flight(memory.free, *memory.per_microbatch(model.job.recompute))
    stashed = np.maximum(1, rule.cap // np.maximum(1, rule.forward))
    return Split(dc, layers, np.where(fits, rule.most, 0), stashed, sort)


def busy_seconds(model: ModelArrays, dc: Ints, layers: Ints) -> Floats:
    """[5, n, s]: seconds of each stage, with the recompute that is done: none where the job has none, and none on the
    last stage, which goes straight on to its backward."""
    seconds = model.stage_seconds(dc, layers)
    seconds[RECOMPUTE, :, slice(None) if not model.job.recompute else -1] = 0.0
    return seconds


def _split(cluster: ClusterArrays, model: ModelArrays, dc: Ints, shards: Ints | int) -> tuple[Ints, Flags]:
    num_layers = model.job.model.layers
    layer_s = model.microbatch_s(model.layers_s.mean(axis=2))[dc]
    extra_s = np.zeros(dc.shape)
    extra_s[:, 0] += model.microbatch_s(model.first_s)[dc[:, 0]]
    extra_s[:, -1] += model.microbatch_s(model.last_s)[dc[:, -1]]
    most = max_layers(cluster, model, dc, shards)
    fits = (most.min(axis=1) >= 1) & (most.sum(axis=1) >= num_layers)
    layers = _held(_least_limit_s(layer_s, extra_s, most, num_layers) * (1 + ROUNDING), layer_s, extra_s, most)
    layers = np.maximum(layers, 1)
    spare = layers.sum(axis=1) - num_layers
    while (spare > 0).any():
        time_s = np.where(layers > 1, layers * layer_s + extra_s, -np.inf)
        at = time_s.argmax(axis=1)
        take = (spare > 0) & fits
        if not take.any():
            break
        layers[np.flatnonzero(take), at[take]] -= 1
        spare = np.where(take, spare - 1, spare)
    return np.where(fits[:, None], layers, 0), fits


def _least_limit_s(layer_s: Floats, extra_s: Floats, most: Ints, num_layers: int) -> Floats:
    """[u]: the least time of the slowest stage at which all layers find a place, and every stage has one. The n-th
    layer of a stage fits from some time on, so it is the `num_layers`-th smallest of these times."""
    found: Floats = np.max(layer_s + extra_s, axis=1)
    count = np.arange(1, num_layers + 1)
    at_once = max(1, MOST_TIMES // (layer_s.shape[1] * num_layers))
    for start in range(0, len(found), at_once):
        part = slice(start, start + at_once)
        times = layer_s[part, :, None] * count + extra_s[part, :, None]
        times[count > most[part, :, None]] = np.inf
        least = np.partition(times.reshape(len(times), -1), num_layers - 1, axis=1)[:, num_layers - 1]
        found[part] = np.maximum(found[part], least)
    return found


def _held(limit_s: Floats, layer_s: Floats, extra_s: Floats, most: Ints) -> Ints:
    held = np.floor((limit_s[:, None] - extra_s) / layer_s)
    return np.clip(held, 0, most).astype(np.int64)
