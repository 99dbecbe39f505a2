"""A tiny GPT that can be cut into stages, and its batches. Every layer and every batch has its own seed, so that a
worker builds its own stage, a single process builds the whole, and both hold and see the same numbers.

Knows nothing of Programs, devices or who computes what. Real models come with Hugging Face configs later.

Shape letters: B batch, L length, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from atlas.errors import ProgramError


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


class Embedding(nn.Module):
    def __init__(self, gpt: TinyGpt) -> None:
        super().__init__()
        self.token = nn.Embedding(gpt.vocabulary, gpt.width)
        self.place = nn.Embedding(gpt.length, gpt.width)

    def forward(self, tokens_BL: Tensor) -> Tensor:  # noqa: N803 - shape letters
        out: Tensor = self.token(tokens_BL) + self.place.weight[: tokens_BL.shape[1]]
        return out


class Block(nn.Module):
    def __init__(self, gpt: TinyGpt) -> None:
        super().__init__()
        self.num_heads = gpt.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(gpt.width), nn.LayerNorm(gpt.width)
        self.qkv = nn.Linear(gpt.width, 3 * gpt.width)
        self.out = nn.Linear(gpt.width, gpt.width)
        self.up = nn.Linear(gpt.width, 4 * gpt.width)
        self.down = nn.Linear(4 * gpt.width, gpt.width)

    def forward(self, x_BLD: Tensor) -> Tensor:  # noqa: N803
        B, L, D = x_BLD.shape
        qkv = self.qkv(self.norm1(x_BLD)).view(B, L, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(mixed.transpose(1, 2).reshape(B, L, D))
        out: Tensor = x_BLD + self.down(functional.gelu(self.up(self.norm2(x_BLD))))
        return out


class Head(nn.Module):
    def __init__(self, gpt: TinyGpt) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(gpt.width)
        self.out = nn.Linear(gpt.width, gpt.vocabulary, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:  # noqa: N803
        out: Tensor = self.out(self.norm(x_BLD))
        return out


def build_layer(gpt: TinyGpt, index: int) -> nn.Module:
    """Layer `index` of the model, with the weights its own seed gives it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(gpt.seed * 1_000_003 + index)
        if index == 0:
            return Embedding(gpt)
        return Head(gpt) if index == gpt.num_layers - 1 else Block(gpt)


def stage_layers(gpt: TinyGpt, stage: int, num_stages: int) -> range:
    """The layers of a stage: consecutive runs of nearly equal length."""
    if num_stages > gpt.num_layers:
        raise ProgramError(f"{num_stages} stages for {gpt.num_layers} layers: give each stage at least one layer")
    return range(stage * gpt.num_layers // num_stages, (stage + 1) * gpt.num_layers // num_stages)


def build_stage(gpt: TinyGpt, stage: int, num_stages: int) -> nn.Sequential:
    """The stage; its parameters are named `<layer>.…` with the layer's number in the whole model."""
    module = nn.Sequential()
    for index in stage_layers(gpt, stage, num_stages):
        module.add_module(str(index), build_layer(gpt, index))
    return module


def batch(gpt: TinyGpt, slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one microbatch. A noisy count, so that there is something to learn."""
    generator = torch.Generator().manual_seed(gpt.seed * 7_919 + slot * 1_009 + pipeline + 1)
    start = torch.randint(gpt.vocabulary, (gpt.batch, 1), generator=generator)
    noise = torch.randint(2, (gpt.batch, gpt.length + 1), generator=generator)
    sequence = (start + torch.arange(gpt.length + 1) + noise) % gpt.vocabulary
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def loss_of(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:  # noqa: N803
    return functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())
