"""Layers per stage for many pipelines at once: the slowest stage as fast as can be, and no stage over its memory.

The same aim as `cost.arrange.balanced_split`, with memory respected: where GPUs differ, the fast one is not always the
roomy one. Layers are taken as alike. Knows one batch of pipelines of equal depth.

Index legend: n pipeline, s stage, i datacenter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from atlas.cost import flops
from atlas.cost.cluster_arrays import ClusterArrays, Flags, Floats, Ints, Speeds
from atlas.cost.memory import GIB, activation_parts, stash_bytes
from atlas.cost.runtimes import RUNTIMES
from atlas.errors import SpecError
from atlas.spec import Job

BISECTIONS = 45


@dataclass(frozen=True, eq=False)
class Sizes:
    """Bytes on one GPU, at one tp and microbatch size; the parts of `cost.memory`."""

    per_layer: float
    """Weights, gradients and optimizer of a layer."""
    first: float
    last: float
    """Of the embedding; of the LM head with what the loss holds of one microbatch."""
    forward_layer: float
    forward_stage: float
    """What a microbatch takes from its forward on: by layer, and once a stage."""
    again_layer: float
    again_stage: float
    """What its recompute takes on top."""
    reserved: float
    """For others, and by the runtime."""
    gradient_per_layer: float
    """Bytes of gradient that a worker (all GPUs of its tp group) sends at the end of an iteration."""
    gradient_first: float
    gradient_last: float


def sizes_of(job: Job, tp: int, microbatch: int) -> Sizes:
    model = job.model
    state = job.element_bytes + job.gradient_bytes + job.optimizer_bytes
    layer, first, last = flops.layer_params(model), flops.embedding_params(model), flops.head_params(model)
    one = job.model_copy(update={"tp": tp, "microbatch": microbatch})
    kinds = dict.fromkeys(dc.gpu for dc in job.cluster.datacenters)
    activations, temporary, logits = _largest(one, kinds)
    stash, by_layer = stash_bytes(one), RUNTIMES[job.runtime].recomputes_by_layer
    in_layer, in_stage = (stash, 0.0) if by_layer else (0.0, stash)
    again = (0.0, activations) if by_layer else (activations, 0.0)
    if not job.recompute:
        in_layer, in_stage, again = activations, 0.0, (0.0, 0.0)
    return Sizes(
        per_layer=layer * state / tp,
        first=first * state / tp,
        last=last * state / tp + max(logits, temporary) - temporary,
        forward_layer=in_layer,
        forward_stage=in_stage,
        again_layer=again[0],
        again_stage=again[1],
        reserved=math.ceil(job.reserved_gib * GIB) + RUNTIMES[job.runtime].fixed_bytes + temporary,
        gradient_per_layer=layer * job.gradient_bytes,
        gradient_first=first * job.gradient_bytes,
        gradient_last=last * job.gradient_bytes,
    )


def _largest(job: Job, kinds: Iterable[str]) -> tuple[float, float, float]:
    """The parts of `cost.memory.activation_parts`, the most that any GPU type needs; types without a profile aside."""
    found = []
    for kind in kinds:
        with suppress(SpecError):
            found.append(activation_parts(job, kind))
    layer, temporary, head = (max(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0, 0.0)
    return layer, temporary, head


def split_layers(job: Job, cluster: ClusterArrays, speeds: Speeds, sizes: Sizes, stage_dc: Ints) -> tuple[Ints, Flags]:
    """([n, s] layers, [n] whether they fit) for pipelines whose stages sit in `stage_dc` [n, s]."""
    every = [(cluster.kind[i], float(cluster.cap_bytes[i]), bool(speeds.usable[i])) for i in range(cluster.num_dcs)]
    kinds = {key: k for k, key in enumerate(dict.fromkeys(every))}  # what of a datacenter a stage can notice
    kind_of = np.array([kinds[key] for key in every], np.int16)
    rows = kind_of[stage_dc]
    # As bytes: numpy finds equal rows ten times as fast as column by column.
    _, first, back = np.unique(rows.view((np.void, 2 * rows.shape[1])).ravel(), return_index=True, return_inverse=True)
    example = np.array([every.index(key) for key in kinds])
    layers, fits = _split(job, cluster, speeds, sizes, example[rows[first]])
    return layers[back], fits[back]


def _split(job: Job, cluster: ClusterArrays, speeds: Speeds, sizes: Sizes, dc: Ints) -> tuple[Ints, Flags]:
    layer_s = (speeds.forward_s + speeds.again_s + speeds.backward_s)[dc]
    extra_s = np.zeros(dc.shape)
    extra_s[:, 0] += speeds.first[:3, dc[:, 0]].sum(axis=0)
    extra_s[:, -1] += speeds.last[:3, dc[:, -1]].sum(axis=0)
    most = max_layers(job, cluster, sizes, dc)
    fits = (most.min(axis=1) >= 1) & (most.sum(axis=1) >= job.model.layers)
    low = np.max(layer_s + extra_s, axis=1)
    high = np.max(layer_s * job.model.layers + extra_s, axis=1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = _held(middle, layer_s, extra_s, most).sum(axis=1) >= job.model.layers
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    layers = _held(high * (1 + 1e-9), layer_s, extra_s, most)
    layers = np.maximum(layers, 1)
    spare = layers.sum(axis=1) - job.model.layers
    while (spare > 0).any():
        time_s = np.where(layers > 1, layers * layer_s + extra_s, -np.inf)
        at = time_s.argmax(axis=1)
        take = (spare > 0) & fits
        if not take.any():
            break
        layers[np.flatnonzero(take), at[take]] -= 1
        spare = np.where(take, spare - 1, spare)
    return layers, fits


def _held(limit_s: Floats, layer_s: Floats, extra_s: Floats, most: Ints) -> Ints:
    held = np.floor((limit_s[:, None] - extra_s) / layer_s)
    return np.clip(held, 0, most).astype(np.int64)


def max_layers(job: Job, cluster: ClusterArrays, sizes: Sizes, dc: Ints) -> Ints:
    """[n, s]: layers that fit one GPU of each stage's tp group beside one microbatch."""
    free = cluster.cap_bytes[dc] - sizes.reserved - sizes.forward_stage - sizes.again_stage
    free[:, 0] -= sizes.first
    free[:, -1] -= sizes.last
    return np.floor(free / (sizes.per_layer + sizes.forward_layer + sizes.again_layer)).astype(np.int64)


def in_flight(job: Job, cluster: ClusterArrays, sizes: Sizes, dc: Ints, layers: Ints) -> Ints:
    """[n]: microbatches that every stage has room for at once, by the one rule of `cost.memory.memory_rule`."""
    free = cluster.cap_bytes[dc] - sizes.reserved - layers * sizes.per_layer
    free[:, 0] -= sizes.first
    free[:, -1] -= sizes.last
    forward = layers * sizes.forward_layer + sizes.forward_stage
    recompute = layers * sizes.again_layer + sizes.again_stage
    fits = (free - forward - recompute >= 0).all(axis=1)
    tightest = free.min(axis=1)
    scale = np.maximum(tightest, 1.0)[:, None] / np.maximum(free, 1.0)
    held = (scale * forward).max(axis=1)
    again = (scale * recompute).max(axis=1)
    return np.where(fits, np.maximum(1, np.floor((tightest - again) / held)), 0).astype(np.int64)
