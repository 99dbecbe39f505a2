"""Linear layers whose weight gradients are products of their own: the backward of activations (I) leaves the input and
the output's gradient of every matrix, and `multiply` (W) makes the gradient of them, whenever W runs.

Two tapes collect them. Eager layers hand the output's gradient to the `EagerTape` from their backward. A compiled layer
cannot; a `TapTape` adds a tap to each output, an input of the compiled function that is zero and whose gradient is the
output's. Knows products; not layers, not microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from atlas.runtime.flat import local_part


class GradientProduct(NamedTuple):
    """The gradient of one matrix, not multiplied yet."""

    weight: Tensor
    x: Tensor
    y_gradient: Tensor


class Tape(Protocol):
    """Collects what the weight gradients of one pass through a layer need."""

    def linear(self, layer: Linear, x: Tensor) -> Tensor: ...


class Linear(nn.Linear):
    """`nn.Linear`, or on a tape; with the same bits. Its memory is uninitialized, as a `Decoder`'s."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor, *, tape: Tape | None = None) -> Tensor:
        return functional.linear(x, self.weight, self.bias) if tape is None else tape.linear(self, x)


class EagerTape:
    """Has the `products` once the backward has run."""

    def __init__(self) -> None:
        self.products: list[GradientProduct] = []

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        y: Tensor = _Deferred.apply(x, layer.weight.detach(), layer.bias, self, layer)  # type: ignore[no-untyped-call]
        return y


class TapTape:
    """Inside a compiled function: `taps` are its inputs, `inputs` its outputs, both in the order of the calls."""

    def __init__(self, taps: Sequence[Tensor]) -> None:
        self._taps = taps
        self.inputs: list[Tensor] = []

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        tap = self._taps[len(self.inputs)]
        self.inputs.append(x.detach())
        return functional.linear(x, layer.weight.detach(), layer.bias) + tap


def make_taps(layers: Sequence[Linear], x: Tensor) -> list[Tensor]:
    """For layers whose inputs have the leading dimensions of `x`. They have no memory: one zero each, of stride 0."""
    return [x.new_zeros(()).expand(*x.shape[:-1], layer.out_features).requires_grad_() for layer in layers]


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tape: EagerTape, layer: Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tape, ctx.layer = tape, layer
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, y_gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.tape.products.append(GradientProduct(ctx.layer.weight, x, y_gradient))
        x_gradient = y_gradient @ weight if ctx.needs_input_grad[0] else None
        bias_gradient = y_gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return x_gradient, None, bias_gradient, None, None


@torch.no_grad()
def multiply(product: GradientProduct, total: Tensor, *, first: bool) -> None:
    """Add a weight gradient to its float32 sum, or begin the sum with it."""
    weight, x, y_gradient = product
    left, right = y_gradient.flatten(0, -2).t(), x.flatten(0, -2)
    if hasattr(left, "to_local"):  # sharded: each process adds its part
        gradient = (left @ right).redistribute(placements=weight.placements)  # type: ignore[attr-defined]
        left = local_part(gradient)
    elif left.dtype == total.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)
        return
    elif left.is_cuda and sums_in_float32():
        if first:
            torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
        return
    else:
        left = left @ right
    if first:
        total.copy_(left)
    else:
        total.add_(left)


@functools.cache
def sums_in_float32() -> bool:
    """Whether torch's products of bf16 can add to float32 in one pass (torch 2.9 and later, CUDA)."""
    a, total = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda"), torch.ones(16, 16, device="cuda")
    try:
        torch.ops.aten.mm.dtype_out(a, a, torch.float32, out=total)
        torch.ops.aten.addmm.dtype_out(total, a, a, torch.float32, out=total)
    except (RuntimeError, AttributeError):
        return False
    return bool((total == 32.0).all())
