"""The same on a GPU, where other kernels run: `pytest -m gpu tests/bubbletea/prefill`."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from prefill_samples import LLAMA
from torch import Tensor

from bubbletea.prefill.arena import Arena
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.shard import ModelShard, Served
from bubbletea.prefill.warming import warm_up

pytestmark = pytest.mark.gpu
WIDE = replace(LLAMA, num_layers=1, width=1024, num_heads=8, num_kv_heads=2, head_width=128, ffn_width=2048)
CHUNK = 512


@pytest.fixture(scope="module")
def shard() -> ModelShard:
    served = Served(WIDE, dtype="bfloat16")
    return ModelShard(served, served.cuts((1,))[0], Arena(512 << 20, 256 << 20, "cuda:0"))


def run(shard: ModelShard, x: Tensor, cuts: list[int]) -> Tensor:
    """One layer over the tokens, cut there."""
    allocation = shard.arena.require(shard.job_bytes(x.shape[1], x.shape[1]), "a prompt")
    slab = shard.lay_out(allocation, x.shape[1], x.shape[1])[0][0]
    ends = [*cuts, x.shape[1]]
    found = [shard.layer(0, x[:, a:b], slab) for a, b in zip([0, *cuts], ends, strict=True)]
    shard.arena.free(allocation)
    return torch.cat(found, 1)


def test_pieces_compute_the_same_as_the_whole_model(shard: ModelShard) -> None:
    x = torch.randn(1, 1000, WIDE.width, device="cuda:0").to(torch.bfloat16)
    whole = run(shard, x, [])
    for cuts in ([512], [64, 576], [1, 700], [999]):
        error = (run(shard, x, cuts).float() - whole.float()).norm() / whole.float().norm()
        assert error < 0.02, (cuts, error)


def test_no_length_is_slow_the_first_time(shard: ModelShard) -> None:
    """Kernels are loaded by the warm-up, and none is compiled for the lengths at hand."""
    warm_up(shard, PieceTimes(WIDE), CHUNK)
    took = list[float]()
    for num in range(301, 512, 10):
        x = torch.randn(1, num, WIDE.width, device="cuda:0").to(torch.bfloat16)
        torch.cuda.synchronize()
        began = time.monotonic()
        run(shard, x, [num // 3])
        torch.cuda.synchronize()
        took.append(time.monotonic() - began)
    assert sorted(took)[len(took) * 3 // 4] < 0.02, took
