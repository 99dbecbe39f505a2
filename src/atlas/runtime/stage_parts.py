"""The parts of a stage that are differentiated one by one: embedding, each layer, head with loss. A stage's backward
goes through them from the last to the first, and the memory of a part is free before the next one begins.

A part's pass ends in an input half (I): the gradient of its input, gradients of vectors, and the products that make the
gradients of its matrices (W, `models.linear`). Layers and head run eagerly, or as one compiled function each, which all
layers share. Knows modules and autograd; not microbatches, not sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas.runtime.models.block import DecoderLayer
from atlas.runtime.models.decoder import Embedding, Head, loss_of
from atlas.runtime.models.dropout import DropoutDraw, Masks
from atlas.runtime.models.linear import EagerTape, GradientProduct, Linear, TapTape, make_taps
from atlas.runtime.models.rope import Rotation

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a compiled function, or the function itself."""


class InputHalf(NamedTuple):
    """The result of I."""

    x_gradient: Tensor | None
    direct: list[tuple[Tensor, Tensor]]
    """Parameters whose gradients are complete: norms, biases, embeddings."""
    products: list[GradientProduct]


class PassContext(NamedTuple):
    """What every layer of a pass uses."""

    positions_L: Tensor  # noqa: N815
    turned: Rotation | None
    draw: DropoutDraw | None


@dataclass(eq=False)
class PartPass:
    """A forward that a backward follows."""

    x: Tensor | None
    """None: tokens, which have no gradient."""
    output: Tensor
    direct: Sequence[Tensor]
    """Parameters whose gradients are complete after I."""
    tape: EagerTape | None
    """Of an eager part with matrices."""
    tapped: Sequence[tuple[Linear, Tensor, Tensor]] = ()
    """Of a compiled part: matrix, tap, input."""

    def input_half(self, y_gradient: Tensor | None) -> InputHalf:
        taps, own = [tap for _, tap, _ in self.tapped], [] if self.x is None else [self.x]
        found = list(torch.autograd.grad(self.output, [*own, *taps, *self.direct], y_gradient))
        x_gradient = found.pop(0) if own else None
        if self.tape is not None:
            products = self.tape.products
        else:
            pairs = zip(self.tapped, found[: len(taps)], strict=True)
            products = [GradientProduct(linear.weight, x, gradient) for (linear, _, x), gradient in pairs]
        return InputHalf(x_gradient, list(zip(self.direct, found[len(taps) :], strict=True)), products)


def embed(embedding: Embedding, around: PassContext, tokens_BL: Tensor) -> PartPass:  # noqa: N803
    output: Tensor = embedding(tokens_BL, around.positions_L, around.draw)
    return PartPass(None, output, list(embedding.parameters()), None)


# ---- layers ----------------------------------------------------------------------------------------------------------
class LayerRunner:
    """How the layers of a stage run."""

    def __init__(self, layers: Sequence[DecoderLayer], compile: Compile | None) -> None:
        self.layers = layers
        self._run = None if compile is None else compile(_tapped_layer)
        self._taps: list[Tensor] = []
        self._direct = {id(layer): _without_matrices(layer) for layer in layers}

    def forward(self, layer: DecoderLayer, around: PassContext, x: Tensor) -> PartPass:
        """`x` requires a gradient, unless autograd is off."""
        masks = None
        if around.draw is not None and layer.dropout:
            masks = around.draw.masks(x, layer.dropout, layer.index)
        if self._run is None:
            tape = EagerTape() if torch.is_grad_enabled() else None
            y, _ = layer(x, around.positions_L, masks=masks, turned=around.turned, tape=tape)
            return PartPass(x, y, self._direct[id(layer)], tape)
        if not self._taps or self._taps[0].shape[:-1] != x.shape[:-1]:
            self._taps = make_taps(layer.linears, x)
        y, inputs = self._run(layer, x, around.positions_L, masks, around.turned, self._taps)
        return PartPass(x, y, self._direct[id(layer)], None, list(zip(layer.linears, self._taps, inputs, strict=True)))


def _without_matrices(layer: DecoderLayer) -> list[Tensor]:
    """The parameters of a layer whose gradients are complete after I."""
    matrices = {id(linear.weight) for linear in layer.linears}
    return [p for p in layer.parameters() if id(p) not in matrices]


def _tapped_layer(
    layer: DecoderLayer,
    x: Tensor,
    positions_L: Tensor,  # noqa: N803
    masks: Masks | None,
    turned: Rotation | None,
    taps: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    tape = TapTape(taps)
    y, _ = layer(x, positions_L, masks=masks, turned=turned, tape=tape)
    return y, tape.inputs


# ---- head ------------------------------------------------------------------------------------------------------------
class LossHead:
    """How head and loss run. The product of the head's matrix belongs to I: deferring it would keep the gradient of the
    logits, the largest tensor, from I to W."""

    def __init__(self, head: Head, compile: Compile | None) -> None:
        self.head = head
        self._run = None if compile is None else compile(_tapped_loss)

    def forward(self, targets_BL: Tensor, scale: float, x: Tensor) -> HeadPass:  # noqa: N803
        direct = list(self.head.norm.parameters())
        if self._run is None:
            tape = EagerTape() if torch.is_grad_enabled() else None
            return HeadPass(x, loss_of(self.head(x, tape=tape), targets_BL), direct, tape, scale=scale)
        (tap,) = make_taps([self.head.out], x)
        loss, input = self._run(self.head, x, targets_BL, [tap])
        return HeadPass(x, loss, direct, None, [(self.head.out, tap, input)], scale)


def _tapped_loss(head: Head, x: Tensor, targets_BL: Tensor, taps: list[Tensor]) -> tuple[Tensor, Tensor]:  # noqa: N803
    tape = TapTape(taps)
    loss = loss_of(head(x, tape=tape), targets_BL)
    return loss, tape.inputs[0]


@dataclass(eq=False)
class HeadPass(PartPass):
    """Its backward is that of the loss times `scale`."""

    scale: float = 1.0

    def input_half(self, y_gradient: Tensor | None) -> InputHalf:
        return super().input_half(torch.full_like(self.output, self.scale))
