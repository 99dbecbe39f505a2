"""Exchanges tensors among the workers that hold the same stage, one of each pipeline: the two operations that sums and
sharded optimizers need. Here over the WAN transport; by torch.distributed in `collectives`.

Knows ranks (pipelines) and flat tensors; not gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.runtime.links import WorkerLinks
from atlas.runtime.topology import GRADIENTS
from atlas.runtime.transfers import bytes_of
from atlas.runtime.waits import Pending
from atlas.wan.transport.base import Handle

PARTS, SUMS, ENDS, HALVES, WEIGHTS, STATE, NORMS = range(7)
"""The last number of a tag: a part of a sum; a sum; an end of the tied matrix; its joined slices; weights after a step;
optimizer state for a checkpoint; squared norms."""


class ExchangeKey(NamedTuple):
    """Identifies an operation; the same on all ranks."""

    step: int
    stage: int
    kind: int


class Exchange(ABC):
    """Among the ranks of one stage. Buffers must not change until every `Pending` is done."""

    rank: int
    size: int
    on_host: bool = True
    """Whether it takes tensors in host memory, or on the device."""
    reduces: bool = False
    """Whether `reduce` may be used: the exchange adds."""

    @abstractmethod
    def swap(self, key: ExchangeKey, out: Tensor, into: Tensor, sizes: PartSizes | None, what: str) -> list[Pending]:
        """Send each rank its part of `out`, and receive a part of `into` from each, both in the order of ranks."""

    @abstractmethod
    def gather(self, key: ExchangeKey, mine: Tensor, whole: Tensor, what: str) -> list[Pending]:
        """Receive the equal parts of all ranks into `whole`, this rank's own included."""

    def reduce(self, key: ExchangeKey, out: Tensor, mine: Tensor, what: str) -> list[Pending]:
        """This rank's slice of the sum of all ranks' `out`. Where `on_host`, in the order of ranks; `mine` may be that
        slice of `out`."""
        raise WorkerError("this exchange does not add: use swap")

    def close(self) -> None:  # noqa: B027
        """End every operation that is the exchange's own; links are closed by their owner."""


class PartSizes(NamedTuple):
    """Values for each rank and from each rank; without it, all parts are equal."""

    out: Sequence[int]
    into: Sequence[int]


class TransportExchange(Exchange):
    """Over the worker's links, in host memory."""

    def __init__(self, links: WorkerLinks) -> None:
        self.links = links
        self.rank, self.size = links.role.pipeline, links.role.num_pipelines

    def swap(self, key: ExchangeKey, out: Tensor, into: Tensor, sizes: PartSizes | None, what: str) -> list[Pending]:
        outs, intos = self._parts(out, sizes and sizes.out), self._parts(into, sizes and sizes.into)
        others = self.links.role.other_pipelines
        handles = [self._recv(c, key, intos[c], what) for c in others if intos[c].numel()]
        handles += [self._send(c, key, outs[c]) for c in others if outs[c].numel()]
        intos[self.rank].copy_(outs[self.rank])
        return list(handles)

    def gather(self, key: ExchangeKey, mine: Tensor, whole: Tensor, what: str) -> list[Pending]:
        parts = self._parts(whole, None)
        others = self.links.role.other_pipelines
        handles = [self._recv(c, key, parts[c], what) for c in others] + [self._send(c, key, mine) for c in others]
        if parts[self.rank].data_ptr() != mine.data_ptr():
            parts[self.rank].copy_(mine)
        return list(handles)

    def _parts(self, flat: Tensor, sizes: Sequence[int] | None) -> Sequence[Tensor]:
        return torch.split(flat, list(sizes) if sizes else flat.numel() // self.size)

    def _send(self, pipeline: int, key: ExchangeKey, values: Tensor) -> Handle:
        what = f"{self.links.role.who} sends to pipeline {pipeline} in step {key.step}"
        tag = (key.step, key.stage, self.rank, key.kind)
        return self.links.send_to(GRADIENTS, pipeline, self.links.role.rank, tag, bytes_of(values), what)

    def _recv(self, pipeline: int, key: ExchangeKey, values: Tensor, what: str) -> Handle:
        what = f"{what} of p{pipeline}.s{self.links.role.rank}"
        tag = (key.step, key.stage, pipeline, key.kind)
        return self.links.recv_from(GRADIENTS, pipeline, self.links.role.rank, tag, bytes_of(values), what)
