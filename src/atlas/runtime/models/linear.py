"""A linear layer whose weight gradient can be deferred: the backward of activations (I) keeps what the weights need,
and `WeightWork.finish` (W) computes it. Whole or split, the same products are taken: the same bits.

Knows one product. The stage knows its microbatch, and when W runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class WeightWork:
    """The deferred weight gradients of one forward pass."""

    def __init__(self) -> None:
        self.deferring = False
        """Set it before a backward that defers weight gradients."""
        self._products: list[tuple[Linear, Tensor, Tensor]] = []

    def put(self, layer: Linear, x: Tensor, y_gradient: Tensor) -> None:
        self._products.append((layer, x, y_gradient))

    def finish(self) -> dict[int, Tensor]:
        """Gradients by `id` of the weight. Frees the kept tensors."""
        products, self._products = self._products, []
        return {id(layer.weight): _weight_gradient(x, y_gradient) for layer, x, y_gradient in products}


_current: ContextVar[WeightWork | None] = ContextVar("weight_work", default=None)


@contextmanager
def recording(work: WeightWork | None) -> Iterator[None]:
    """Linear layers called inside defer their weight gradients to `work` once it is deferring; None: never.

    They record `work` in the forward: a backward may run in a thread of autograd.
    """
    token = _current.set(work)
    try:
        yield
    finally:
        _current.reset(token)


class Linear(nn.Linear):
    """`nn.Linear` that can defer inside `recording`; elsewhere torch's own, with the same bits."""

    def forward(self, x: Tensor) -> Tensor:
        work = _current.get()
        if work is None or not torch.is_grad_enabled():
            return functional.linear(x, self.weight, self.bias)
        y: Tensor = _Linear.apply(x, self.weight, self.bias, work, self)  # type: ignore[no-untyped-call]
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, work: WeightWork, me: Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.work, ctx.me = work, me
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, y_gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_gradient = y_gradient @ weight if ctx.needs_input_grad[0] else None
        bias_gradient = y_gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        weight_gradient = None
        if ctx.work.deferring:
            ctx.work.put(ctx.me, x, y_gradient)
        elif ctx.needs_input_grad[1]:
            weight_gradient = _weight_gradient(x, y_gradient)
        return x_gradient, weight_gradient, bias_gradient, None, None


def _weight_gradient(x: Tensor, y_gradient: Tensor) -> Tensor:
    return y_gradient.flatten(0, -2).t() @ x.flatten(0, -2)
