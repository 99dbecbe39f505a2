"""Which part of a parameter this process has, where tensor parallelism divides it: rows or columns, an equal part each.

Asks for methods and not for DTensor, whose import takes a second that most processes do not need. Knows tensors; not
models, not files.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atlas.runtime.flat import local_part


class Shard(NamedTuple):
    """This process's part: rows, or all rows of some columns."""

    dimension: int
    start: int
    stop: int

    def within(self, shape: torch.Size) -> tuple[slice, slice]:
        """The part as rows and columns of the whole; a vector has one column."""
        rows, columns = slice(0, shape[0]), slice(0, shape[1] if len(shape) > 1 else 1)
        mine = slice(self.start, self.stop)
        return (mine, columns) if self.dimension == 0 else (rows, mine)


def shard_of(parameter: Tensor) -> Shard | None:
    """None: this process has the whole parameter."""
    dimension = sharded_dimension(parameter)
    if dimension is None:
        return None
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    length = parameter.shape[dimension] // mesh.size()
    first = mesh.get_local_rank() * length
    return Shard(dimension, first, first + length)


def sharded_dimension(parameter: Tensor) -> int | None:
    for placement in getattr(parameter, "placements", ()):
        if placement.is_shard():
            return int(placement.dim)
    return None


def memory_for(parameter: Tensor, device: torch.device | str) -> Tensor:
    """Uninitialized memory of this process's part of a parameter on `meta`, as a tensor of the same kind."""
    if not hasattr(parameter, "to_local"):
        # Not `empty_like` on `meta`, which imports sympy.
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    local = torch.empty(parameter.to_local().shape, dtype=parameter.dtype, device=device)
    found: Tensor = type(parameter).from_local(  # type: ignore[attr-defined]
        local,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return found


def needs(parameter: Tensor, first: int, last: int) -> bool:
    """Whether this process has any of the whole parameter's values from `first` to `last` (exclusive)."""
    shard = shard_of(parameter)
    if shard is None or shard.dimension > 0:
        return True
    columns = parameter.shape[1] if parameter.dim() > 1 else 1
    return first < shard.stop * columns and shard.start * columns < last


def put(parameter: Tensor, first: int, values: Tensor) -> None:
    """Set this process's part of consecutive values of the whole parameter, flattened, from `first` on."""
    shard, local = shard_of(parameter), local_part(parameter)
    if shard is None:
        local.view(-1)[first : first + len(values)].copy_(values)
        return
    rows, columns = shard.within(parameter.shape)
    width = parameter.shape[1] if parameter.dim() > 1 else 1
    local = local.view(rows.stop - rows.start, columns.stop - columns.start)
    at = 0
    while at < len(values):  # the rest of a row, whole rows, the beginning of a row
        row, column = divmod(first + at, width)
        num_rows = 1 if column or len(values) - at < width else (len(values) - at) // width
        length = min(width - column, len(values) - at)
        block = values[at : at + num_rows * length].view(num_rows, length)
        _put_block(local, block, (row - rows.start, column - columns.start))
        at += num_rows * length


def _put_block(local: Tensor, block: Tensor, at: tuple[int, int]) -> None:
    """Set what overlaps; `at`: where the block begins in `local`, possibly before it."""
    spans = []
    for dimension, offset in enumerate(at):
        first, last = max(0, offset), min(local.shape[dimension], offset + block.shape[dimension])
        if first >= last:
            return
        spans.append((slice(first, last), slice(first - offset, last - offset)))
    (rows, from_rows), (columns, from_columns) = spans
    local[rows, columns] = block[from_rows, from_columns]
