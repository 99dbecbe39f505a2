"""The memory of a stage's parameters: all weights in one flat tensor, all gradients, in float32, in another, at the
same offsets. One kernel then steps a whole stage, one copy refreshes its weights, and a slice can be sent or owned.

Matrices come first: they decay, vectors do not. Every parameter begins at a multiple of ALIGNMENT values, so that its
arithmetic does not depend on what lies before it. Knows tensors; not optimizers, not stages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Values. 128 bytes in bf16, the widest line that a GPU or a CPU loads at once. Cut slices at multiples of it."""


class FlatPiece(NamedTuple):
    """The part of a parameter that is in a slice of flat memory."""

    within: slice
    """Of the parameter, flattened."""
    at: slice
    """Of the flat memory."""


class FlatParameters:
    """Moves the parameters of a module into flat memory; they stay the module's parameters, with the same names."""

    def __init__(self, module: nn.Module, num_slices: int = 1) -> None:
        """`num_slices`: the flat memory can be divided into so many equal slices."""
        found = dict(module.named_parameters())
        some = local_part(next(iter(found.values())))
        first = _owners(found)
        owned = [name for name in found if first[name] == name]
        owned.sort(key=lambda name: found[name].dim() < 2)  # stable: names keep the module's order
        self.offsets: dict[str, int] = {}
        """Where each parameter begins. A second name of the same memory has a gradient only, behind all weights."""
        self.num_values = self.num_decayed = 0
        """Values of `weights`, and of the matrices at its beginning; padding included."""
        for name in owned:
            self.offsets[name] = self.num_values
            self.num_values += _padded(local_part(found[name]).numel())
            self.num_decayed = self.num_values if found[name].dim() > 1 else self.num_decayed
        self.num_values = num_gradients = _padded(self.num_values, num_slices)
        for name in [name for name in found if name not in self.offsets]:
            self.offsets[name] = num_gradients
            num_gradients += _padded(local_part(found[name]).numel())
        num_gradients = _padded(num_gradients, num_slices)
        self.weights = torch.zeros(self.num_values, dtype=some.dtype, device=some.device)
        self.gradients = torch.zeros(num_gradients, dtype=torch.float32, device=some.device)
        """`[: num_values]` lies as `weights` does."""
        self.num_slices, self.owner = num_slices, first
        """`owner`, by name: the first name of the same memory, usually its own."""
        shapes = {name: local_part(parameter).shape for name, parameter in found.items()}
        self.gradient_of = {name: self.view(self.gradients, name, shapes[name]) for name in found}
        self.weight_of = {name: self.view(self.weights, first[name], shapes[name]) for name in found}
        for name, parameter in found.items():
            if first[name] == name:
                self.weight_of[name].copy_(local_part(parameter).detach())
            _move(parameter, self.weight_of[name])

    def view(self, flat: Tensor, name: str, shape: torch.Size) -> Tensor:
        """A parameter's part of a tensor that lies as `weights` or `gradients`."""
        begin = self.offsets[name]
        return flat[begin : begin + math.prod(shape)].view(shape)

    def slice_of(self, rank: int) -> slice:
        """One of the equal slices of `weights`."""
        length = self.num_values // self.num_slices
        return slice(rank * length, (rank + 1) * length)

    def pieces(self, part: slice) -> dict[str, FlatPiece]:
        """The parameters that lie in a part of `weights`, or begin or end there; in order, without second names."""
        found: dict[str, FlatPiece] = {}
        for name, weight in self.weight_of.items():
            begin = self.offsets[name]
            first, last = max(begin, part.start), min(begin + weight.numel(), part.stop)
            if self.owner[name] == name and first < last:
                found[name] = FlatPiece(slice(first - begin, last - begin), slice(first, last))
        return found


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; the tensor itself if it is not sharded.

    Checks for the method and not for DTensor, whose import takes a second that most processes do not need.
    """
    if not hasattr(tensor, "to_local"):
        return tensor
    local: Tensor = tensor.to_local().detach()
    return local


def _move(parameter: Tensor, memory: Tensor) -> None:
    inner = getattr(parameter, "_local_tensor", parameter)  # DTensor has no method that replaces its part
    inner.data = memory


def _padded(count: int, num_slices: int = 1) -> int:
    unit = ALIGNMENT * num_slices
    return -(-count // unit) * unit


def _owners(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """By name: the first name of the same memory, usually its own."""
    first: dict[int, str] = {}
    return {name: first.setdefault(local_part(p).data_ptr(), name) for name, p in parameters.items()}
