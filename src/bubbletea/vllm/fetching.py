"""Fetches one load from BubbleTea and checks every block against the dimensions of this engine's cache.

Knows the dimensions of vLLM's model; not the cache or the engine. Shape letters: K heads of keys
and values of the whole model, E head width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas.errors import WorkerError
from bubbletea.handoff.fetch import Fetcher, Ticket
from bubbletea.kv_blocks import KvBlock
from bubbletea.vllm.loader import KvLoad


@dataclass(frozen=True)
class WantedTokens:
    """What a worker expects to receive."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_width: int
    dtype: torch.dtype
    block_tokens: int


def fetch(load: KvLoad[Ticket], wanted: WantedTokens, token: str, timeout_s: float) -> dict[int, Tensor]:
    """[2, K, L, E] by layer; raises WorkerError if anything is missing."""
    until = time.monotonic() + timeout_s
    first, stop = load.first_token, load.first_token + len(load.block_ids) * wanted.block_tokens
    pieces: dict[int, list[KvBlock]] = {layer: [] for layer in wanted.layers}
    with Fetcher(load.ticket.host, load.ticket.port, token, "vllm worker") as fetcher:
        for block in fetcher.fetch(load.ticket, first, stop, wanted.layers):
            _require_expected(block, pieces, first, stop, wanted)
            pieces[block.layer].append(block)
            if time.monotonic() > until:
                raise WorkerError(f"hand-off {load.ticket.id} took longer than {timeout_s:g} s")
    return {layer: _joined(layer, blocks, first, stop) for layer, blocks in pieces.items()}


def _require_expected(
    block: KvBlock, pieces: dict[int, list[KvBlock]], first: int, stop: int, wanted: WantedTokens
) -> None:
    shape = (2, wanted.num_kv_heads, block.stop - block.start, wanted.head_width)
    if tuple(block.kv.shape) != shape or block.kv.dtype != wanted.dtype:
        raise WorkerError(
            f"keys and values of shape {list(block.kv.shape)} in {block.kv.dtype}, this cache takes {list(shape)} in"
            f" {wanted.dtype}: serve the same model in the same dtype on both"
        )
    if block.layer not in pieces:
        raise WorkerError(f"a block of layer {block.layer}, which was not asked for")
    reached = pieces[block.layer][-1].stop if pieces[block.layer] else first
    if block.start != reached or block.stop > stop:
        raise WorkerError(f"tokens {block.start} to {block.stop} of layer {block.layer} where {reached} is next")


def _joined(layer: int, blocks: Sequence[KvBlock], first: int, stop: int) -> Tensor:
    reached = blocks[-1].stop if blocks else first
    if reached != stop:
        raise WorkerError(f"layer {layer} ends at token {reached} instead of {stop}")
    return blocks[0].kv if len(blocks) == 1 else torch.cat([block.kv for block in blocks], dim=2)
