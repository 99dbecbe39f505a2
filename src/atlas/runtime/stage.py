"""One stage of the model while it trains: forwards, recomputes, backwards whole or split, gradients summed in
ascending order of microbatch whatever order the Program computes them in, so that sums are reproducible.

Knows tensors and autograd. Does not know where its inputs come from, nor time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atlas.runtime.model import TinyGpt, batch, build_stage, loss_of


class GradientSum:
    """Sums per-microbatch gradients in ascending order, holding back those that come early."""

    def __init__(self) -> None:
        self._sum: list[Tensor] | None = None
        self._early: dict[int, Sequence[Tensor]] = {}
        self._next = 0

    def begin(self, first_slot: int) -> None:
        assert not self._early, "an iteration ended with gradients missing"
        self._sum, self._next = None, first_slot

    def add(self, slot: int, gradients: Sequence[Tensor]) -> None:
        self._early[slot] = gradients
        while self._next in self._early:
            ready = self._early.pop(self._next)
            if self._sum is None:
                self._sum = [gradient.clone() for gradient in ready]
            else:
                for total, gradient in zip(self._sum, ready, strict=True):
                    total += gradient
            self._next += 1

    def total(self) -> list[Tensor]:
        assert self._sum is not None, "no backward has run"
        assert not self._early, "a gradient is missing below one that is there"
        return self._sum


class Stage:
    """The work of one stage of one pipeline. `slot` counts microbatches over all iterations."""

    def __init__(self, gpt: TinyGpt, stage: int, num_stages: int, pipeline: int, loss_scale: float) -> None:
        self.gpt, self.pipeline, self.loss_scale = gpt, pipeline, loss_scale
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.module: nn.Sequential = build_stage(gpt, stage, num_stages)
        self.parameters = list(self.module.parameters())
        self.gradients = GradientSum()
        self.losses: dict[int, float] = {}
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._output_gradients: dict[int, Tensor | None] = {}

    def warm_up(self) -> None:
        """Pays torch's first-call costs before anything is timed; leaves no trace."""
        x = batch(self.gpt, 0, 0)[0] if self.is_first else torch.zeros(self.gpt.activation_shape, requires_grad=True)
        torch.autograd.grad(self.module(x).square().mean(), self.parameters)

    def forward(self, slot: int, x: Tensor | None, *, keep: bool) -> Tensor:
        """`keep` false: throw the activations away and expect a recompute."""
        if x is None:
            x = batch(self.gpt, slot, self.pipeline)[0]
        else:
            x.requires_grad_(True)
        self._inputs[slot] = x
        with torch.set_grad_enabled(keep):
            output = self._run(slot, x)
        if keep:
            self._outputs[slot] = output
        return output.detach()

    def recompute(self, slot: int) -> None:
        self._outputs[slot] = self._run(slot, self._inputs[slot])

    def backward(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        """Both halves at once; the gradient of the input, where there is a stage before."""
        wanted = self.parameters if self.is_first else [self._inputs[slot], *self.parameters]
        gradients = torch.autograd.grad(self._outputs.pop(slot), wanted, gradient)
        del self._inputs[slot]
        self.gradients.add(slot, gradients if self.is_first else gradients[1:])
        return None if self.is_first else gradients[0]

    def backward_input(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        self._output_gradients[slot] = gradient
        if self.is_first:
            return None
        return torch.autograd.grad(self._outputs[slot], self._inputs[slot], gradient, retain_graph=True)[0]

    def backward_weight(self, slot: int) -> None:
        gradient = self._output_gradients.pop(slot)
        self.gradients.add(slot, torch.autograd.grad(self._outputs.pop(slot), self.parameters, gradient))
        del self._inputs[slot]

    def _run(self, slot: int, x: Tensor) -> Tensor:
        output: Tensor = self.module(x)
        if self.is_last:
            loss = loss_of(output, batch(self.gpt, slot, self.pipeline)[1])
            self.losses[slot] = loss.item()
            output = loss * self.loss_scale
        return output
