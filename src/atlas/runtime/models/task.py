"""What a stage needs to know of a training: its module, its microbatches, its randomness. A config, a division into
stages, weights from a folder or a seed, and a function that returns data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import Decoder, Sharding, build, cuts, empty
from atlas.runtime.models.dropout import DropoutDraw
from atlas.runtime.models.weights import load

Microbatches = Callable[[int, int], tuple[Tensor, Tensor]]
"""(slot, pipeline) -> tokens and targets, each [B, L]. A slot counts a pipeline's microbatches over all steps."""


@dataclass(frozen=True)
class DecoderTask:
    """A model, divided into stages as a plan says."""

    config: DecoderConfig
    layers_per_stage: tuple[int, ...]
    microbatch_size: int
    length: int
    num_microbatches: int
    """Per step and pipeline."""
    microbatch: Microbatches
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    first_microbatch: int = 0
    """Of a step, over all groups of pipelines."""
    weights: Path | None = None
    """A Hugging Face folder; None: random weights from the seed."""
    shard: Sharding | None = None
    """Divides the stages among processes; None: this process has them whole."""
    filled: bool = True
    """False: stages are built with uninitialized memory, because a checkpoint will fill it."""

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Of what passes between stages: batch, length, width."""
        return self.microbatch_size, self.length, self.config.width

    def build_stage(self, stage: int, num_stages: int) -> Decoder:
        assert num_stages == len(self.layers_per_stage), "the Program and the model must have the same number of stages"
        cut = cuts(self.config, self.layers_per_stage)[stage]
        if not self.filled:
            return empty(self.config, cut, self.dtype, self.device, self.shard)
        if self.weights is None:
            return build(self.config, cut, seed=self.seed, dtype=self.dtype, device=self.device, shard=self.shard)
        return load(self.config, cut, self.weights, dtype=self.dtype, device=self.device, shard=self.shard)

    def draw(self, slot: int, pipeline: int) -> DropoutDraw | None:
        """The randomness of dropout; None: no dropout."""
        if not self.config.dropout:
            return None
        step, microbatch = divmod(slot, self.num_microbatches)
        return DropoutDraw(self.seed, step, self.first_microbatch + pipeline * self.num_microbatches + microbatch)
