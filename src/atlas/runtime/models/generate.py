"""Prefill and decoding with a range of a decoder's layers. The KV of a layer goes in and comes out; the caller decides
where it is kept, and when a range runs.

Shape letters: B batch, L length, D width, V vocabulary; KV as in `block`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atlas.runtime.models.block import Kv, KvSlab
from atlas.runtime.models.decoder import Decoder

Cache = dict[int, Kv | KvSlab]
"""By layer."""


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
