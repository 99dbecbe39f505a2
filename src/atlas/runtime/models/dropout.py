"""Dropout whose masks depend on (seed, step, microbatch, layer, site) and not on the order of calls: a recompute,
another schedule and another division into stages draw the same masks.

Masks differ between kinds of device (CPU, CUDA), whose generators differ.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

Masks = tuple[Tensor, Tensor]
"""Of one layer: after the attention and after the MLP."""
EMBEDDING = -1
"""The layer number of the embedding."""


@dataclass(frozen=True)
class DropoutDraw:
    """The randomness of one microbatch of one step."""

    seed: int
    step: int
    microbatch: int
    """Its number in the step, over all pipelines."""

    def dropout(self, x: Tensor, share: float, layer: int, site: str) -> Tensor:
        return x * self.mask(x, share, layer, site) / (1.0 - share)

    def mask(self, like: Tensor, share: float, layer: int, site: str) -> Tensor:
        generator = torch.Generator(like.device)
        generator.manual_seed(seed_of(self.seed, self.step, self.microbatch, layer, site))
        return torch.empty_like(like, requires_grad=False).bernoulli_(1.0 - share, generator=generator)

    def masks(self, like: Tensor, share: float, layer: int) -> Masks:
        return self.mask(like, share, layer, "attention"), self.mask(like, share, layer, "mlp")


def seed_of(*key: object) -> int:
    """63 bits from values with a reproducible string."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
