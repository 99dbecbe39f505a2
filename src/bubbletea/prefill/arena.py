"""All memory that prefill may use, allocated once at the start: weights, keys and values, activations between slices.
Training's memory limit includes it, so prefill never takes memory from training.

The temporaries of a running slice (`workspace`) are bounded: on CUDA they come from a separate memory pool, filled
once; on the CPU, which has no such pools, a slice that would need more is refused before it runs. Knows bytes and
tensors; not prompts, not layers.
"""

from __future__ import annotations

import contextlib
import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas.errors import InfeasibleError
from bubbletea.constants import MIB

ALIGN = 256
"""Bytes: as the addresses that CUDA allocates, so that kernels can use their widest loads."""
WORKSPACE_BYTES = 512 * MIB
"""Of a worker, unless its service says otherwise: for temporaries of a running slice."""


@dataclass(frozen=True)
class Allocation:
    """A contiguous part of an arena; returned with `Arena.free`."""

    start: int
    num_bytes: int


class Arena:
    """`num_bytes` for data that stays between slices, `workspace_bytes` for temporaries of a running slice."""

    def __init__(self, num_bytes: int, workspace_bytes: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.num_bytes, self.workspace_bytes = num_bytes, workspace_bytes
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._free: list[tuple[int, int]] = [(0, num_bytes)]
        """(start, end) of the free parts, in order; no two are adjacent."""
        self._pool = self._make_pool()

    @property
    def free_bytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def clear(self) -> None:
        """Frees all allocations: nothing may use them any more."""
        self._free = [(0, self.num_bytes)]

    def take(self, num_bytes: int) -> Allocation | None:
        """The first free part that is long enough; None if there is none."""
        needed = aligned(num_bytes)
        for index, (start, end) in enumerate(self._free):
            if end - start >= needed:
                self._free[index : index + 1] = [(start + needed, end)] if end - start > needed else []
                return Allocation(start, needed)
        return None

    def require(self, num_bytes: int, what: str) -> Allocation:
        allocation = self.take(num_bytes)
        if allocation is None:
            raise InfeasibleError(
                where="prefill arena",
                key="arena_bytes",
                value=self.num_bytes,
                rule=f"{what} needs {num_bytes} bytes and {self.free_bytes} are free",
                remedy="Raise --arena-mib of `bubbletea serve`, or split the model over more workers",
            )
        return allocation

    def free(self, allocation: Allocation) -> None:
        insort(self._free, (allocation.start, allocation.start + allocation.num_bytes))
        merged: list[tuple[int, int]] = []
        for start, end in self._free:
            if merged and merged[-1][1] >= start:
                assert merged[-1][1] == start, "an allocation was freed twice"
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def tensors(self, allocation: Allocation, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Views of an allocation, one after the other."""
        found, at = list[Tensor](), allocation.start
        for shape in shapes:
            size = math.prod(shape) * dtype.itemsize
            assert at + size <= allocation.start + allocation.num_bytes, (
                "an allocation is smaller than what is put into it"
            )
            found.append(self._memory[at : at + size].view(dtype).view(shape))
            at += aligned(size)
        return found

    @contextlib.contextmanager
    def workspace(self) -> Iterator[None]:
        """Context in which a slice runs: its temporaries come from the arena's pool."""
        if self._pool is None:
            yield
            return
        with torch.cuda.use_mem_pool(self._pool, device=self.device):
            yield

    def _make_pool(self) -> torch.cuda.MemPool | None:
        if self.device.type != "cuda":
            return None
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, device=self.device):
            del_me = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        del del_me  # stays in the pool as its only block
        return pool


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
