"""Tied embeddings: one matrix at both ends of the model. Each end sums its own gradient; once an iteration the two sums
are added, wherever the ends are: in one memory, on two stages of a worker, or on two workers.

Knows gradients; sends nothing. Both ends then take the same optimizer step and stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD


def join(parameters: Mapping[str, Tensor]) -> None:
    """Give both ends, if both are here, the gradient of the whole matrix."""
    embedding, head = parameters[TIED_EMBEDDING], parameters[TIED_HEAD]
    assert embedding.grad is not None, "the embedding's gradient is missing"
    assert head.grad is not None, "the head's gradient is missing"
    embedding.grad.copy_(joined(embedding.grad, head.grad))
    head.grad.copy_(embedding.grad)


def joined(embedding_gradient: Tensor, head_gradient: Tensor) -> Tensor:
    """Both ends add in this order, so both get the same bits."""
    return embedding_gradient + head_gradient
