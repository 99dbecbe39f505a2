"""Parameters and activations of each piece of a model on one GPU type: from the model's shape, or from a profile.

Activations are what one microbatch leaves on one GPU of the tp group for its backward. Knows one piece at a time:
which stage holds it, and what else is in memory, is `memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas.cost import flops
from atlas.cost.profile import Entry, Piece, entry_of
from atlas.cost.runtimes import RUNTIMES
from atlas.spec.job import Job


@dataclass(frozen=True)
class PieceSize:
    """One piece."""

    params: float
    """Of the whole tp group."""
    activation_bytes: float
    """On one GPU, of one microbatch."""


@dataclass(frozen=True)
class ModelSize:
    """A whole model on one GPU type."""

    embedding: PieceSize
    layers: tuple[PieceSize, ...]
    head: PieceSize


def model_size(job: Job, gpu: str) -> ModelSize:
    """By shape; where the job's profile has measured sizes for the GPU type, by those."""
    model = job.model
    embedding = PieceSize(flops.embedding_params(model), 0.0)
    layer = PieceSize(flops.layer_params(model), layer_activation_bytes(job))
    # Logits, and what the loss keeps of them.
    logits = 2.0 * job.microbatch * model.seq_len * model.vocab * job.element_bytes / job.tp
    head = PieceSize(flops.head_params(model), logits)
    entry = entry_of(job, gpu)
    if entry is None:
        return ModelSize(embedding, (layer,) * model.layers, head)
    return ModelSize(
        _measured(job, entry.embedding, embedding),
        tuple(_measured(job, one, layer) for one in _layers(job, entry)),
        _measured(job, entry.head, head),
    )


def _layers(job: Job, entry: Entry) -> tuple[Piece, ...]:
    if entry.layers is not None:
        return entry.layers
    assert entry.layer is not None
    return (entry.layer,) * job.model.layers


def _measured(job: Job, piece: Piece, by_shape: PieceSize) -> PieceSize:
    params = by_shape.params if piece.params is None else piece.params * job.tp
    found = by_shape.activation_bytes if piece.activation_bytes is None else piece.activation_bytes
    return PieceSize(params, found)


def layer_activation_bytes(job: Job) -> float:
    """By shape. Without sequence parallelism every GPU of a tp group holds the residual stream, and without fused
    attention the L x L scores: 10 + 24 / tp + 5 heads L / (H tp) bytes a token and width (arXiv 2205.05198)."""
    model, runtime = job.model, RUNTIMES[job.runtime]
    tokens = job.microbatch * model.seq_len
    if runtime.sequence_parallel:
        return tokens * flops.layer_activation_elements(model) * job.element_bytes / job.tp
    divided = flops.layer_activation_elements(model) - 4 * model.hidden
    scores = 0.0 if runtime.fused_attention else 2.5 * model.heads * model.seq_len
    return tokens * (5 * model.hidden + (divided + scores) / job.tp) * job.element_bytes
