"""Consecutive layers of a decoder, with the embedding if they include the first and the head if they include the
last; how a model is divided into such ranges, and their initial weights.

Every tensor has its own seed, from its name in the whole model: any division has the same weights. Parameters have the
same names in every division (`layers.3.attention.q.weight`). Knows nothing of Programs, microbatches or files.

Shape letters: B batch, L length, D width, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from atlas.errors import SpecError
from atlas.priority import lower_priority
from atlas.runtime.models.block import DecoderLayer, make_norm
from atlas.runtime.models.config import DecoderConfig, wrong
from atlas.runtime.models.dropout import EMBEDDING, DropoutDraw, seed_of
from atlas.runtime.models.linear import Linear, Tape
from atlas.runtime.models.shards import memory_for, needs, put
from atlas.runtime.models.sizes import TIED

TIED_EMBEDDING, TIED_HEAD = TIED
"""The two ends of one matrix, if the embeddings are tied."""
DRAWN_AT_ONCE = 1 << 24
"""Initial weights from one generator; later runs of a matrix have generators of their own, so threads can share it."""
MANY_WEIGHTS = 100_000_000
"""From this number on, several threads of low priority draw the initial weights: the compiler is imported meanwhile
(`compiling`), on one thread of each worker of a host, and takes longer than they do."""


@dataclass(frozen=True)
class LayerRange:
    """The layers of one stage."""

    layers: range
    has_embedding: bool
    has_head: bool

    @classmethod
    def whole(cls, config: DecoderConfig) -> LayerRange:
        return cls(range(config.num_layers), True, True)


def cuts(config: DecoderConfig, layers_per_stage: Sequence[int]) -> list[LayerRange]:
    """The stages of a model: the first has the embedding, the last has the head; both may have no layer."""
    rule = remedy = ""
    if sum(layers_per_stage) != config.num_layers or not layers_per_stage or min(layers_per_stage) < 0:
        rule, remedy = f"must add up to the model's {config.num_layers} layers", "Change the split or the model"
    elif 0 in layers_per_stage[1:-1]:
        rule, remedy = "a stage between the first and the last needs a layer", "Use fewer stages"
    if rule:
        value = list(layers_per_stage)
        raise SpecError(where="plan", key="layers_per_stage", value=value, rule=rule, remedy=remedy)
    ends = [sum(layers_per_stage[: s + 1]) for s in range(len(layers_per_stage))]
    last = len(ends) - 1
    return [
        LayerRange(range(end - n, end), s == 0, s == last)
        for s, (n, end) in enumerate(zip(layers_per_stage, ends, strict=True))
    ]


class Embedding(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.token = _table(config.vocabulary, config.width)
        self.place = _table(config.max_length, config.width) if config.positions == "learned" else None

    def forward(self, tokens_BL: Tensor, positions_L: Tensor, draw: DropoutDraw | None = None) -> Tensor:  # noqa: N803
        x_BLD: Tensor = self.token(tokens_BL)
        if self.place is not None:
            x_BLD = x_BLD + self.place(positions_L)
        return x_BLD if draw is None or not self.dropout else draw.dropout(x_BLD, self.dropout, EMBEDDING, "token")


def _table(rows: int, width: int) -> nn.Embedding:
    """Without initialization, which on the device `meta` imports the compiler: two seconds of every worker."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Head(nn.Module):
    """Final norm and the projection to the vocabulary."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.out = Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x_BLD: Tensor, *, tape: Tape | None = None) -> Tensor:  # noqa: N803
        logits_BLV: Tensor = self.out(self.norm(x_BLD), tape=tape)
        return logits_BLV


class Decoder(nn.Module):
    """The layers of a range. Its memory is uninitialized: `build` or `weights.load` fills it."""

    def __init__(self, config: DecoderConfig, cut: LayerRange) -> None:
        super().__init__()
        self.config, self.cut = config, cut
        self.tensor_rank = 0
        """This process's tensor-parallel rank."""
        self.embedding = Embedding(config) if cut.has_embedding else None
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i) for i in cut.layers})
        self.head = Head(config) if cut.has_head else None

    def forward(self, x: Tensor, draw: DropoutDraw | None = None) -> Tensor:
        """Tokens or activations in; activations, or logits if it has the head, out."""
        positions_L = torch.arange(self.require_known(x.shape[1]), device=x.device)
        if self.embedding is not None:
            x = self.embedding(x, positions_L, draw)
        for layer in self.layers.values():
            assert isinstance(layer, DecoderLayer)
            masks = draw.masks(x, self.config.dropout, layer.index) if draw is not None else None
            x, _ = layer(x, positions_L, masks=masks)
        return x if self.head is None else self.head(x)

    def retie(self) -> None:
        """If both ends of tied embeddings are here: two parameters with two gradients, but one memory.

        Call it again whenever parameters are replaced.
        """
        if self.config.tied and self.embedding is not None and self.head is not None:
            self.head.out.weight = nn.Parameter(self.embedding.token.weight.detach())

    def require_known(self, length: int) -> int:
        if length > self.config.max_length:
            known = self.config.max_length
            raise wrong(
                "max_length",
                known,
                f"a sequence has {length} tokens",
                "Use shorter sequences, or a model with a longer context",
            )
        return length


Sharding = Callable[[Decoder], Decoder]
"""Divides a range, without memory yet, among processes (`parallel`)."""


def loss_of(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:  # noqa: N803
    """Mean over the tokens; in float32 whatever the model computes in. Targets of -100 do not count."""
    return functional.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())


def build(
    config: DecoderConfig,
    cut: LayerRange,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Sharding | None = None,
) -> Decoder:
    """A range with the weights of a seed; with `shard`, this process's part of them."""
    decoder = empty(config, cut, dtype, device, shard)
    initialize(decoder, seed)
    return decoder


def initialize(decoder: Decoder, seed: int) -> None:
    """Set the weights of a seed. Every tensor has its own generator, so threads can share the work."""
    config = decoder.config
    shared = config.tied and decoder.cut.has_embedding
    named = [(name, p) for name, p in decoder.named_parameters() if not (shared and name == TIED_HEAD)]
    runs = [
        (name, p, run)
        for name, p in named
        for run in range(-(-p.numel() // DRAWN_AT_ONCE))
        if needs(p, run * DRAWN_AT_ONCE, (run + 1) * DRAWN_AT_ONCE)
    ]
    with _drawing(sum(p.numel() for _, p in named)) as pool:
        list(pool.map(lambda item: _draw(item[1], item[0], item[2], config, seed), runs))


def _drawing(num_weights: int) -> ThreadPoolExecutor:
    if num_weights < MANY_WEIGHTS:
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=lower_priority)


def empty(
    config: DecoderConfig,
    cut: LayerRange,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Sharding | None = None,
) -> Decoder:
    """A range with uninitialized memory; with `shard`, of this process's part only."""
    with torch.device("meta"):
        decoder = Decoder(config, cut).to(dtype)
    if shard is not None:
        decoder = shard(decoder)
    decoder._apply(lambda parameter: memory_for(parameter, device))  # type: ignore[no-untyped-call]
    decoder.retie()
    return decoder


@torch.no_grad()
def _draw(parameter: Tensor, name: str, run: int, config: DecoderConfig, seed: int) -> None:
    """One run of a parameter's values. Normal, with smaller outputs of residual branches in deep models; norms are one.

    Biases are normal too: the keys' bias has only a rounding gradient, and from zero it would stay so small that a
    comparison of two runs could not distinguish it from an error.
    """
    first = run * DRAWN_AT_ONCE
    values = torch.empty(min(DRAWN_AT_ONCE, parameter.numel() - first))
    if "norm" in name:
        put(parameter, first, values.fill_(0.0 if name.endswith("bias") else 1.0))
        return
    deep = name.endswith(("attention.o.weight", "mlp.down.weight"))
    std = config.init_std / (math.sqrt(2 * config.num_layers) if deep else 1.0)
    source = TIED_EMBEDDING if config.tied and name == TIED_HEAD else name
    generator = torch.Generator().manual_seed(seed_of(seed, source, *([run] if run else [])))
    # On the CPU and in float32: all devices and dtypes start from the same values.
    put(parameter, first, values.normal_(0.0, std, generator=generator).to(parameter.dtype))
