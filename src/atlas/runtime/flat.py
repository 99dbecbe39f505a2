"""The memory of a stage's parameters: all weights in one flat tensor, all gradients, in float32, in another, at the
same offsets. One kernel then steps a whole stage, one copy refreshes its weights, and a slice can be sent or owned.

`flat_layout` says where each parameter lies. Knows tensors; not optimizers, not stages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlas.runtime.flat_layout import ParameterSize, flat_layout


class FlatPiece(NamedTuple):
    """The part of a parameter that is in a slice of flat memory."""

    within: slice
    """Of the parameter, flattened."""
    at: slice
    """Of the flat memory."""


class FlatParameters:
    """Moves the parameters of a module into flat memory; they stay the module's parameters, with the same names."""

    def __init__(self, module: nn.Module, num_slices: int = 1) -> None:
        """`num_slices`: the flat memory can be divided into this many equal slices."""
        found = dict(module.named_parameters())
        some = local_part(next(iter(found.values())))
        first = _owners(found)
        sizes = {name: ParameterSize(local_part(p).numel(), p.dim() > 1) for name, p in found.items()}
        layout = flat_layout(sizes, first, num_slices)
        self.offsets, self.num_values, self.num_decayed = layout.offsets, layout.num_values, layout.num_decayed
        self.weights = torch.zeros(self.num_values, dtype=some.dtype, device=some.device)
        self.gradients = torch.zeros(layout.num_gradients, dtype=torch.float32, device=some.device)
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


def _owners(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """By name: the first name of the same memory, usually its own."""
    first: dict[int, str] = {}
    return {name: first.setdefault(local_part(p).data_ptr(), name) for name, p in parameters.items()}
