"""Prefill and greedy decoding with a range of a decoder's layers, in one process. BubbleTea runs the same slice by
slice. The KV of a layer goes in and comes out; the caller decides where it is kept, and when a layer runs.

Shape letters: B batch, L length, D width, V vocabulary; KV as in `block`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atlas.runtime.flat import local_part
from atlas.runtime.models.block import DecoderLayer, Kv, KvSlab
from atlas.runtime.models.decoder import Decoder, LayerRange

Cache = dict[int, Kv | KvSlab]
"""By layer."""


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
    weight = layer.attention.k.weight
    return local_part(weight).shape[0] // decoder.config.head_width


@torch.inference_mode()
def run_cut(decoder: Decoder, x: Tensor, start: int, cache: Cache) -> Tensor:
    """Tokens or activations of positions `start`, `start + 1`, ... through the layers; `cache` is extended.

    With the head: the logits of the last position [B, V]; otherwise activations [B, L, D].
    """
    decoder.require_known(start + x.shape[1])
    positions_L = torch.arange(start, start + x.shape[1], device=x.device)
    if decoder.embedding is not None:
        x = decoder.embedding(x, positions_L)
    for i in decoder.cut.layers:
        past = cache.get(i)
        x, kv = decoder.layers[str(i)](x, positions_L, past)
        if not isinstance(past, KvSlab):
            cache[i] = kv
    return x if decoder.head is None else decoder.head(x[:, -1:])[:, 0]


def prefill(decoder: Decoder, tokens_BL: Tensor, cache: Cache, chunk: int | None = None) -> Tensor:  # noqa: N803
    """The logits after a prompt, `chunk` tokens at a time, of a whole decoder; fills `cache`."""
    assert decoder.cut == LayerRange.whole(decoder.config), "use run_cut for a part of a decoder"
    start, logits = 0, None
    for piece in torch.split(tokens_BL, chunk or tokens_BL.shape[1], dim=1):
        logits = run_cut(decoder, piece, start, cache)
        start += piece.shape[1]
    assert logits is not None, "an empty prompt"
    return logits


def greedy(
    decoder: Decoder,
    tokens_BL: Tensor,  # noqa: N803
    num_tokens: int,
    chunk: int | None = None,
    stop: int | None = None,
) -> Tensor:
    """The prompt and up to `num_tokens` most likely tokens; ends early when every row has had `stop`."""
    decoder.require_known(tokens_BL.shape[1] + num_tokens)
    cache = make_slabs(decoder, tokens_BL.shape[0], tokens_BL.shape[1] + num_tokens)
    logits_BV = prefill(decoder, tokens_BL, cache, chunk)
    stopped = torch.zeros(tokens_BL.shape[0], 1, dtype=torch.bool, device=tokens_BL.device)
    for done in range(1, num_tokens + 1):
        following = logits_BV.argmax(-1, keepdim=True)
        if stop is not None:
            following = torch.where(stopped, torch.full_like(following, stop), following)
            stopped |= following == stop
        tokens_BL = torch.cat([tokens_BL, following], dim=1)
        if done == num_tokens or bool(stopped.all()):
            break
        logits_BV = run_cut(decoder, following, tokens_BL.shape[1] - 1, cache)
    return tokens_BL
