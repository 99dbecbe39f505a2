"""Prefill and greedy decoding with a whole decoder: what hand-offs and slices are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from atlas.runtime.flat import local_part
from atlas.runtime.models.block import DecoderLayer, KvSlab
from atlas.runtime.models.decoder import Decoder
from atlas.runtime.models.generate import Cache, run_cut


def make_slabs(decoder: Decoder, batch: int, length: int) -> Cache:
    """Preallocated KV of `length` tokens for every layer."""
    some = next(decoder.parameters())
    slabs: Cache = {}
    for i in decoder.cut.layers:
        shape = (batch, _local_kv_heads(decoder, i), length, decoder.config.head_width)
        k, v = (torch.empty(shape, dtype=some.dtype, device=some.device) for _ in range(2))
        slabs[i] = KvSlab(k, v)
    return slabs


def _local_kv_heads(decoder: Decoder, index: int) -> int:
    """Fewer than the model has, under tensor parallelism."""
    layer = decoder.layers[str(index)]
    assert isinstance(layer, DecoderLayer)
    return local_part(layer.attention.k.weight).shape[0] // decoder.config.head_width


def prefill(decoder: Decoder, tokens_BL: Tensor, cache: Cache, chunk: int | None = None) -> Tensor:  # noqa: N803
    """The logits after a prompt, `chunk` tokens at a time; fills `cache`."""
    start = 0
    for piece in torch.split(tokens_BL, chunk or tokens_BL.shape[1], dim=1):
        logits = run_cut(decoder, piece, start, cache)
        start += piece.shape[1]
    return logits


def greedy(decoder: Decoder, tokens_BL: Tensor, num_tokens: int, chunk: int | None = None) -> Tensor:  # noqa: N803
    """The prompt and the `num_tokens` most likely tokens."""
    cache = make_slabs(decoder, tokens_BL.shape[0], tokens_BL.shape[1] + num_tokens)
    logits_BV = prefill(decoder, tokens_BL, cache, chunk)
    for done in range(1, num_tokens + 1):
        following = logits_BV.argmax(-1, keepdim=True)
        tokens_BL = torch.cat([tokens_BL, following], dim=1)
        if done < num_tokens:
            logits_BV = run_cut(decoder, following, tokens_BL.shape[1] - 1, cache)
    return tokens_BL
