"""Runs pieces of a dummy prompt before the first request, in every size that will occur. This loads the kernels
(the first use of one can block a device for a second), and the measured times calibrate `PieceTimes`.

Knows a shard and its memory; not prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.runtime.models.block import KvSlab
from bubbletea.costs import grain_of
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.shard import ModelShard

FEW, RUNS = 8, 5
STAGED, PASSED = 8, 2
"""Blocks of keys and values, and of activations, that are in transfer at once."""


def warm_up(shard: ModelShard, pace: PieceTimes, chunk: int) -> None:
    length = min(2 * chunk, max(chunk, shard.config.max_length))
    allocation = shard.arena.take(shard.job_bytes(length, chunk))
    if allocation is None:  # then no piece will ever follow a whole chunk
        length, allocation = chunk, shard.arena.take(shard.job_bytes(chunk, chunk))
    if allocation is None:
        raise WorkerError(f"no memory is left beside the weights for one chunk of {chunk} tokens: raise --arena-mib")
    slabs, x = shard.lay_out(allocation, length, chunk)
    layer = shard.cut.layers[0]
    x.zero_()
    try:
        for num, past in _sizes(chunk, length):
            _timed_ns(shard, layer, x[:, :num], slabs[layer], past)
        _run_ends(shard, x)
        _load_host_memory(shard, chunk)
        few, many = ((num, _best_ns(shard, layer, x[:, :num], slabs[layer])) for num in (min(FEW, chunk), chunk))
    finally:
        shard.arena.free(allocation)
    if few[0] < many[0]:
        pace.calibrate(few, many)


def _sizes(chunk: int, length: int) -> Iterator[tuple[int, int]]:
    """Tokens of a piece, and tokens before it: none, a few, many."""
    grain = grain_of(chunk)
    for num in range(grain, chunk + 1, grain):
        yield from ((num, past) for past in (0, grain, chunk) if past + num <= length)


def _run_ends(shard: ModelShard, x: Tensor) -> None:
    """Runs the embedding and the head."""
    if shard.cut.has_embedding:
        shard.embed(torch.zeros(x.shape[1], dtype=torch.int64), 0)
    if shard.cut.has_head:
        shard.logits(x)


def _load_host_memory(shard: ModelShard, chunk: int) -> None:
    """Allocates pinned memory for keys and values and for activations, in all their sizes: torch caches it, and a new
    allocation takes milliseconds."""
    if shard.arena.device.type == "cpu":
        return
    wanted = [shard.served.kv_bytes_per_layer_token] * STAGED
    if not (shard.cut.has_embedding and shard.cut.has_head):
        wanted += [shard.config.width * shard.dtype.itemsize] * PASSED
    nums = {num for num, _ in _sizes(chunk, chunk)}
    held = [torch.empty(num * size, dtype=torch.uint8, pin_memory=True) for size in wanted for num in nums]
    del held


def _best_ns(shard: ModelShard, layer: int, x: Tensor, slab: KvSlab) -> int:
    return min(_timed_ns(shard, layer, x, slab, 0) for _ in range(RUNS))


def _timed_ns(shard: ModelShard, layer: int, x: Tensor, slab: KvSlab, past: int) -> int:
    slab.length = past
    began_ns = time.monotonic_ns()
    float(shard.layer(layer, x, slab)[0, 0, 0])
    return time.monotonic_ns() - began_ns
