"""Sums in the order of ranks by Gloo, in chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import pytest
import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.runtime import collectives, ordered_sum
from atlas.runtime.collectives import GroupStore, TorchExchange, store_listener
from atlas.runtime.exchange import PARTS, SUMS, ExchangeKey

WAIT_S = 30.0
KEY = ExchangeKey(0, 0, PARTS)


def on_ranks(size: int, each: Callable[[TorchExchange], Tensor]) -> list[Tensor]:
    """What `each` returns, called on a thread of every rank."""
    listener, port = store_listener("127.0.0.1")

    def run(rank: int) -> Tensor:
        store = GroupStore("127.0.0.1", port, "test", listener if rank == 0 else None).open(WAIT_S)
        return each(
            TorchExchange(store, "group", rank, size, host="127.0.0.1", place="cpu", backend="gloo", fast=False)
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def gradients(rank: int, num_values: int) -> Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(("size", "num_values"), [(2, 8), (2, 2 * 1000), (3, 3 * 1000), (4, 4 * 257)])
def test_all_ranks_get_the_sum_in_the_order_of_ranks(
    size: int, num_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_sum, "CHUNK_BYTES", 256)  # many chunks, the last one shorter

    def summed(exchange: TorchExchange) -> Tensor:
        flat = gradients(exchange.rank, num_values)
        mine = flat.view(size, -1)[exchange.rank]
        for kind, start in ((PARTS, lambda key: exchange.reduce(key, flat, mine, "the sum")),
                            (SUMS, lambda key: exchange.gather(key, mine, flat, "the sums"))):  # fmt: skip
            for pending in start(KEY._replace(kind=kind)):
                pending.wait(WAIT_S)
        return flat

    found = on_ranks(size, summed)
    expected = reduce(torch.add, (gradients(rank, num_values) for rank in range(size)))
    assert all(torch.equal(sums, expected) for sums in found)


def test_many_ranks_exchange_in_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MAX_IN_PAIRS", 2)

    def gathered(exchange: TorchExchange) -> Tensor:
        assert not exchange.reduces, "the caller adds"
        flat = gradients(exchange.rank, 3 * 64)
        for pending in exchange.gather(KEY, flat[:64].clone(), flat, "the sums"):
            pending.wait(WAIT_S)
        return flat

    expected = torch.cat([gradients(rank, 3 * 64)[:64] for rank in range(3)])
    assert all(torch.equal(found, expected) for found in on_ranks(3, gathered))


def test_a_sum_fails_when_a_rank_leaves() -> None:
    gone = threading.Event()

    def left_alone(exchange: TorchExchange) -> Tensor:
        if exchange.rank == 1:
            exchange.close()
            gone.set()
            return torch.empty(0)
        flat = gradients(exchange.rank, 3 * 64)
        gone.wait(WAIT_S)
        (pending,) = exchange.reduce(KEY, flat, flat[:64], "the sum")
        with pytest.raises(WorkerError, match="the sum"):
            pending.wait(WAIT_S)
        exchange.close()
        return flat

    on_ranks(3, left_alone)
