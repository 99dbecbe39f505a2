"""The task of the walking skeleton: a tiny GPT and batches with something to learn, both from a seed, so that a
worker builds its own stage, a single process builds the whole, and both hold and see the same numbers.

Knows nothing of Programs, devices or who computes what. The model itself is `models`; real data is `data`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from atlas.errors import ProgramError
from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.models.decoder import Cut, Decoder, build, cuts, loss_of
from atlas.runtime.models.dropout import Draw

__all__ = ["TinyGpt", "batch", "build_stage", "loss_of", "stage_layers"]


@dataclass(frozen=True)
class TinyGpt:
    """The dimensions of the model and of one microbatch."""

    num_blocks: int = 4
    width: int = 64
    num_heads: int = 2
    vocabulary: int = 64
    length: int = 32
    batch: int = 4
    """Sequences in a microbatch."""
    seed: int = 0

    @property
    def num_layers(self) -> int:
        """Embedding, blocks, head."""
        return self.num_blocks + 2

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        return self.batch, self.length, self.width

    @cached_property
    def config(self) -> DecoderConfig:
        return gpt(
            num_layers=self.num_blocks,
            width=self.width,
            num_heads=self.num_heads,
            vocabulary=self.vocabulary,
            max_length=self.length,
        )

    # ---- as a Task of `stage` ----------------------------------------------------------------------------------
    def build_stage(self, stage: int, num_stages: int) -> Decoder:
        return build_stage(self, stage, num_stages)

    def microbatch(self, slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
        return batch(self, slot, pipeline)

    def draw(self, slot: int, pipeline: int) -> Draw | None:
        return None


def stage_layers(gpt: TinyGpt, stage: int, num_stages: int) -> range:
    """The layers of a stage, embedding and head counted: consecutive runs of nearly equal length."""
    if num_stages > gpt.num_layers:
        raise ProgramError(f"{num_stages} stages for {gpt.num_layers} layers: give each stage at least one layer")
    return range(stage * gpt.num_layers // num_stages, (stage + 1) * gpt.num_layers // num_stages)


def build_stage(gpt: TinyGpt, stage: int, num_stages: int) -> Decoder:
    return build(gpt.config, _cuts(gpt, num_stages)[stage], seed=gpt.seed)


def _cuts(gpt: TinyGpt, num_stages: int) -> list[Cut]:
    counts = [len(stage_layers(gpt, s, num_stages)) for s in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return cuts(gpt.config, counts)


def batch(gpt: TinyGpt, slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one microbatch. A noisy count, so that there is something to learn."""
    generator = torch.Generator().manual_seed(gpt.seed * 7_919 + slot * 1_009 + pipeline + 1)
    start = torch.randint(gpt.vocabulary, (gpt.batch, 1), generator=generator)
    noise = torch.randint(2, (gpt.batch, gpt.length + 1), generator=generator)
    sequence = (start + torch.arange(gpt.length + 1) + noise) % gpt.vocabulary
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
