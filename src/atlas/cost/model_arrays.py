"""The model on every datacenter's GPUs as arrays: seconds, parameters and activations of its pieces, at one tp and one
microbatch size; and from them what each stage of a batch of pipelines computes and holds.

The seconds come from `compute`, the sizes from the model's shape or from a profile. A job is a batch of
one. Knows no links and no order.

Index legend: i datacenter, n pipeline, s stage, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Flags, Floats, Ints
from atlas.cost.compute import (
    embedding_params,
    head_params,
    layer_activation_elements,
    layer_params,
    model_time,
    peer_bps,
)
from atlas.cost.profile import entry_of
from atlas.cost.runtimes import RUNTIMES
from atlas.errors import SpecError
from atlas.spec.job import DataCenter, Job

FORWARD, RECOMPUTE, INPUT, WEIGHT, UPDATE = range(5)
"""Rows of `seconds`: the fields of `compute.PieceTime`."""

WHOLE_WIDTHS = 4
"""Of `layer_activation_elements`, in widths of the model, that tp does not divide: inputs of the two norms, of the
projections to queries, keys and values, and of the MLP."""


# ---- sizes of the pieces -------------------------------------------------------------------------------------------
def piece_sizes(job: Job, gpu: str) -> tuple[list[float], list[float]]:
    """Of embedding, LM head and each layer: parameters over the whole tp group, and activations on one GPU of one
    microbatch. By shape; where the job's profile has measured sizes for the GPU type, by those."""
    model = job.model
    # Logits, and what the loss keeps of them.
    logits = 2.0 * job.microbatch * model.seq_len * model.vocab * job.element_bytes / job.tp
    params: list[float] = [embedding_params(model), head_params(model), *[layer_params(model)] * model.layers]
    held = [0.0, logits, *[layer_activation_bytes(job)] * model.layers]
    if job.profile is not None:
        entry = entry_of(job, job.profile, gpu)
        for k, piece in enumerate((entry.embedding, entry.head, *entry.each_layer(model.layers))):
            params[k] = params[k] if piece.params is None else piece.params * job.tp
            held[k] = held[k] if piece.activation_bytes is None else piece.activation_bytes
    return params, held


def layer_activation_bytes(job: Job) -> float:
    """By shape. Every GPU of a tp group holds the residual stream whole. Without fused attention it also holds its part
    of the L x L scores: 10 + 24 / tp + 5 heads L / (H tp) bytes a token and width in Megatron (arXiv 2205.05198)."""
    model, runtime = job.model, RUNTIMES[job.runtime]
    divided = layer_activation_elements(model) - WHOLE_WIDTHS * model.hidden
    scores = 0.0 if runtime.fused_attention else 2.5 * model.heads * model.seq_len
    elements = runtime.whole_widths * model.hidden + (divided + scores) / job.tp
    return job.microbatch * model.seq_len * elements * job.element_bytes


# ---- arrays --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class ModelArrays:
    """Unknown is infinite: a datacenter whose GPU type the job's profile has not measured."""

    job: Job
    """At this tp and microbatch size."""
    priced: Flags
    """[i]: whether the GPU type has a price."""
    layers_s: Floats
    """[5, i, L]: seconds of each layer."""
    first_s: Floats
    last_s: Floats
    """[5, i]: of the embedding, of the LM head."""
    layers_params: Floats
    """[i, L]: parameters of each layer, over the whole tp group."""
    first_params: Floats
    last_params: Floats
    """[i]: of the embedding, of the LM head."""
    layer_bytes: Floats
    """[i]: activations of one layer, the mean where layers differ; on one GPU, of one microbatch."""
    head_bytes: Floats
    """[i]: activations of the LM head."""

    @cached_property
    def layer_sums_s(self) -> Floats:
        """[5, i, L + 1]: seconds of the first 0, 1, ... layers."""
        return sums_from_zero(self.layers_s)

    @cached_property
    def layer_sums_params(self) -> Floats:
        """[i, L + 1]: parameters of the first 0, 1, ... layers."""
        return sums_from_zero(self.layers_params)

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Of each piece of the model, over a whole tp group: embedding, layers, LM head."""
        i = int(np.argmax(self.priced))
        pieces = [self.first_params[i], *self.layers_params[i], self.last_params[i]]
        return np.array(pieces) * self.job.gradient_bytes

    def stage_seconds(self, dc: Ints, layers: Ints) -> Floats:
        """[5, n, s] for stages in datacenters `dc` [n, s] that hold `layers` [n, s] layers."""
        end = np.cumsum(layers, axis=1)
        found = np.asarray(self.layer_sums_s[:, dc, end] - self.layer_sums_s[:, dc, end - layers])
        found[:, :, 0] += self.first_s[:, dc[:, 0]]
        found[:, :, -1] += self.last_s[:, dc[:, -1]]
        return found

    def microbatch_s(self, seconds: Floats) -> Floats:
        """Of [5, ...]: what one microbatch takes in all; without recompute where the job has none."""
        again_s = seconds[RECOMPUTE] if self.job.recompute else 0.0
        return np.asarray(seconds[FORWARD] + again_s + (seconds[INPUT] + seconds[WEIGHT]))

    def stage_params(self, dc: Ints, start: Ints, end: Ints, *, one_worker: bool) -> Floats:
        """[n, s]: parameters of stages that hold the layers `start` to `end` - 1, over their whole tp groups."""
        model = self.job.model
        found = np.asarray(self.layer_sums_params[dc, end] - self.layer_sums_params[dc, start])
        found[:, 0] += self.first_params[dc[:, 0]]
        found[:, -1] += self.last_params[dc[:, -1]]
        if model.tied_embeddings and one_worker and self.job.profile is None:
            found[:, -1] -= model.vocab * model.hidden  # both ends on one worker: the matrix is there once
        return found


def sums_from_zero(values: Floats) -> Floats:
    """Of the first 0, 1, ... entries of the last axis."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(axis=-1)], axis=-1)


def model_arrays(job: Job, cluster: ClusterArrays, required: Collection[str] = ()) -> ModelArrays:
    """At the job's tp and microbatch size. A datacenter of `required` that has no price is a SpecError."""
    pieces = 2 + job.model.layers
    unknown = np.full((5, pieces), np.inf), np.full(pieces, np.inf), np.full(2, np.inf)
    known: dict[object, int] = {}
    columns: list[tuple[Floats, Floats, Floats]] = []
    which = []
    for dc in cluster.spec.datacenters:
        key = dc.gpu, peer_bps(job, dc)
        if key not in known:
            known[key] = len(columns)
            columns.append(unknown)
            with suppress(*(() if dc.name in required else (SpecError,))):
                columns[-1] = _columns(job, dc)
        which.append(known[key])
    at = np.array(which)
    seconds, params, activations = (np.stack(part, axis=-2)[..., at, :] for part in zip(*columns, strict=True))
    return ModelArrays(
        job,
        priced=np.array([columns[k] is not unknown for k in which]),
        layers_s=seconds[..., 2:],
        first_s=seconds[..., 0],
        last_s=seconds[..., 1],
        layers_params=params[..., 2:],
        first_params=params[..., 0],
        last_params=params[..., 1],
        layer_bytes=activations[..., 0],
        head_bytes=activations[..., 1],
    )


def _columns(job: Job, dc: DataCenter) -> tuple[Floats, Floats, Floats]:
    """On one GPU type, of embedding, LM head and each layer: [5, 2 + L] seconds, [2 + L] parameters; and activations of
    a layer and of the LM head."""
    time, (params, (_, head_bytes, *layers_bytes)) = model_time(job, dc), piece_sizes(job, dc.gpu)
    seconds = np.array([time.embedding, time.head, *time.layers]).T
    return seconds, np.array(params, np.float64), np.array([sum(layers_bytes) / len(layers_bytes), head_bytes])
