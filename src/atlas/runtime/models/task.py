"""What a stage has to be told of a training: its module, its microbatches, its randomness. `DecoderTask` is the one
for real models: a config, a cut into stages, weights from a folder or a seed, and anybody's data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import Decoder, build, cuts
from atlas.runtime.models.dropout import Draw
from atlas.runtime.models.weights import load

Microbatches = Callable[[int, int], tuple[Tensor, Tensor]]
"""(slot, pipeline) -> tokens and targets, each [B, L]. A slot counts a pipeline's microbatches over all steps."""


class StageTask(Protocol):
    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Of what passes between stages: batch, length, width."""

    def build_stage(self, stage: int, num_stages: int) -> Decoder: ...

    def microbatch(self, slot: int, pipeline: int) -> tuple[Tensor, Tensor]: ...

    def draw(self, slot: int, pipeline: int) -> Draw | None:
        """Where dropout's masks come from; None: no dropout."""


@dataclass(frozen=True)
class DecoderTask:
    """A real model, cut as a plan says."""

    config: DecoderConfig
    layers_per_stage: tuple[int, ...]
    microbatch_size: int
    length: int
    num_microbatches: int
    """Per step and pipeline."""
    microbatches: Microbatches
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    weights: Path | None = None
    """A Hugging Face folder; None: random weights from the seed."""

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        return self.microbatch_size, self.length, self.config.width

    def whole(self) -> DecoderTask:
        """The same in one stage."""
        return replace(self, layers_per_stage=(self.config.num_layers,))

    def build_stage(self, stage: int, num_stages: int) -> Decoder:
        assert num_stages == len(self.layers_per_stage), "the Program and the cut must have the same stages"
        cut = cuts(self.config, self.layers_per_stage)[stage]
        if self.weights is None:
            return build(self.config, cut, seed=self.seed, dtype=self.dtype, device=self.device)
        return load(self.config, cut, self.weights, dtype=self.dtype, device=self.device)

    def microbatch(self, slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
        return self.microbatches(slot, pipeline)

    def draw(self, slot: int, pipeline: int) -> Draw | None:
        if not self.config.dropout:
            return None
        step, microbatch = divmod(slot, self.num_microbatches)
        return Draw(self.seed, step, pipeline * self.num_microbatches + microbatch)
