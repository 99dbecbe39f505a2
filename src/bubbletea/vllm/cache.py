"""Writes keys and values into a vLLM worker's paged cache, with each layer's own cache update, which a forward pass
calls: the layout of a block depends on the attention backend (packed on a CPU, sometimes quantized on a GPU), so a
plain copy would give wrong tokens without an error.

Knows vLLM's attention layers by their attributes only, so that it can be tested without vllm. Does not know requests.

Shape letters: L tokens, K heads of keys and values of this rank, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def heads_of_rank(rank: int, num_ranks: int, num_heads: int) -> tuple[int, int]:
    """The heads of a tensor-parallel rank, the first and the one after the last: a part of them or, with more ranks
    than heads, a copy of one."""
    if num_heads >= num_ranks:
        each = num_heads // num_ranks
        return rank * each, (rank + 1) * each
    only = rank * num_heads // num_ranks
    return only, only + 1


class PagedCache:
    """`layers`: vLLM's attention layers by name, once their caches exist."""

    def __init__(self, layers: Mapping[str, Any], block_tokens: int) -> None:
        self._layers = {layer_index(name): layer for name, layer in layers.items()}
        self.block_tokens = block_tokens
        for name, layer in layers.items():
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise ValueError(
                    f"the attention backend of {name}, {type(layer.impl).__name__}, has no method "
                    "do_kv_cache_update, which the connector needs to write to the cache: start vLLM with another "
                    "--attention-backend"
                )

    @property
    def layers(self) -> Sequence[int]:
        """The layers of this worker; a part of them with pipeline parallelism."""
        return sorted(self._layers)

    def slots(self, block_ids: Sequence[int]) -> Tensor:
        """VLLM's slots (places of one token) of these blocks, in order."""
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        return (blocks[:, None] * self.block_tokens + torch.arange(self.block_tokens)).flatten()

    @torch.inference_mode()
    def write(self, index: int, kv_2KLE: Tensor, slots_L: Tensor) -> None:  # noqa: N803
        layer = self._layers[index]
        k, v = kv_2KLE.to(layer.kv_cache.device).transpose(1, 2).contiguous()
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots_L.to(layer.kv_cache.device))


def layer_index(name: str) -> int:
    """`model.layers.7.self_attn.attn` -> 7"""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ValueError(f"the layer {name!r} is not one of a plain decoder: serve this model without the connector")
    return numbers[0]
