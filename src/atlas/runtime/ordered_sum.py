"""A sum over ranks in the order of ranks, chunk by chunk: one chunk is added while the next ones are received. Few
buffers are in use again and again, so they stay in the caches, and a sum takes no memory of the size of a stage.

Knows ranks and tensors in host memory. How two ranks exchange a chunk is given to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES, BUFFER_BYTES = 4 << 20, 32 << 20
"""At most: of a chunk, and of all buffers of a sum."""


ToPeer = Callable[[int, Tensor, Tensor], Any]
"""(distance, out, into): sends `out` to the rank at this distance and receives `into` from the one at the opposite
distance; returns torch's `Work`. All ranks call it alike."""


class OrderedSum:
    """One sum, of this rank's slice."""

    def __init__(self, rank: int, size: int, num_lanes: int, to_peer: ToPeer, out: Tensor, mine: Tensor) -> None:
        """`out`: an equal slice for each rank. `mine`: the result, which may be this rank's slice of `out`; that slice
        may change in any case. `num_lanes`: how many exchanges should be under way at least."""
        self.rank, self.size, self._to_peer = rank, size, to_peer
        self.depth = max(2, -(-num_lanes // (size - 1)))
        """Chunks that are received at the same time."""
        num_bytes = min(CHUNK_BYTES, BUFFER_BYTES // (self.depth * (size - 1)))
        length = max(1, num_bytes // mine.element_size())
        self._slices = [torch.split(part, length) for part in out.view(size, -1)]
        self._results = torch.split(mine, length)
        self._buffers = [
            {source: torch.empty_like(self._results[0]) for source in range(size) if source != rank}
            for _ in self._results[: self.depth]
        ]

    @torch.no_grad()
    def run(self) -> None:
        """Returns when `mine` is the sum; raises the error of an exchange."""
        started = [self._start(number) for number in range(len(self._buffers))]
        for number in range(len(self._results)):
            for exchange in started[number]:
                exchange.wait()
            self._add(number)
            if number + self.depth < len(self._results):
                started.append(self._start(number + self.depth))

    def _start(self, number: int) -> list[Any]:
        return [
            self._to_peer(
                distance,
                self._slices[(self.rank + distance) % self.size][number],
                self._part(number, (self.rank - distance) % self.size),
            )
            for distance in range(1, self.size)
        ]

    def _part(self, number: int, source: int) -> Tensor:
        """What a rank has for a chunk of this rank's slice."""
        if source == self.rank:
            return self._slices[source][number]
        return self._buffers[number % self.depth][source][: len(self._results[number])]

    def _add(self, number: int) -> None:
        first, *others, last = (self._part(number, source) for source in range(self.size))
        for part in others:
            first.add_(part)
        torch.add(first, last, out=self._results[number])
