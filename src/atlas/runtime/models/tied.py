"""Tied embeddings: one matrix at both ends of the model. Each end sums its own gradient; once an iteration the two
are added, embedding first, wherever the ends are: in one memory, on two stages of a worker, or across the WAN.

Gives the worker what to send and what to do with what arrives; sends nothing itself. Both ends then take the same
optimizer step and stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from atlas.errors import SpecError
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD


def is_split(config: DecoderConfig, num_stages: int) -> bool:
    """Whether the ends of a tied matrix fall on two stages, the first and the last."""
    return config.tied and num_stages > 1


def require_joinable(config: DecoderConfig, num_stages: int, *, can_exchange: bool) -> None:
    """Refuses a plan whose workers would let the two copies drift apart."""
    if is_split(config, num_stages) and not can_exchange:
        raise SpecError(
            where="plan",
            key="tie_word_embeddings",
            value=True,
            rule=f"embedding and head are one matrix, but lie on the first and the last of {num_stages} stages, "
            "and this runtime was not given a way to exchange their gradient",
            remedy="Use one stage, untie them (tie_word_embeddings: false), or let the workers exchange it",
        )


def outgoing(parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The gradient that the other end needs; None where both ends, or neither, are here."""
    ends = [parameters[name] for name in (TIED_EMBEDDING, TIED_HEAD) if name in parameters]
    return ends[0].grad if len(ends) == 1 else None


def join(parameters: Mapping[str, Tensor], incoming: Tensor | None = None) -> None:
    """Gives the ends that are here the gradient of the whole matrix; `incoming` is the other end's, if elsewhere."""
    ends = [parameters.get(name) for name in (TIED_EMBEDDING, TIED_HEAD)]
    embedding, head = (incoming if end is None else end.grad for end in ends)
    assert embedding is not None, "the embedding's gradient is missing"
    assert head is not None, "the head's gradient is missing"
    total = joined(embedding, head)
    for end in ends:
        if end is not None:
            end.grad = total


def joined(embedding_gradient: Tensor, head_gradient: Tensor) -> Tensor:
    """Both ends add in this order, so both get the same bits."""
    return embedding_gradient + head_gradient
