"""One stage of the model while it trains: forwards, recomputes, backwards whole or split, and gradients summed in
ascending order of microbatch, whatever order the Program computes them in, so that sums are reproducible.

Knows tensors and autograd. Does not know where its inputs come from, nor time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlas.runtime.flat import FlatParameters, local_part
from atlas.runtime.models.decoder import TIED_HEAD, loss_of
from atlas.runtime.models.linear import Linear, WeightWork, recording
from atlas.runtime.models.task import DecoderTask


class GradientSum:
    """Sums gradients of microbatches in ascending order and in float32, in flat memory; keeps those that come early."""

    def __init__(self, sums: Sequence[Tensor]) -> None:
        self._sums = list(sums)
        self._early: dict[int, Sequence[Tensor]] = {}
        self._first = self._next = 0

    @property
    def num_added(self) -> int:
        """Microbatches in the sum so far."""
        return self._next - self._first

    def begin(self, first_slot: int) -> None:
        assert not self._early, "an iteration ended with gradients missing"
        self._first, self._next = first_slot, first_slot

    def add(self, slot: int, gradients: Sequence[Tensor]) -> None:
        self._early[slot] = gradients
        while self._next in self._early:
            ready = list(self._early.pop(self._next))
            if self._next == self._first:
                torch._foreach_copy_(self._sums, ready)
            else:
                torch._foreach_add_(self._sums, ready)
            self._next += 1

    def total(self) -> list[Tensor]:
        """The sums, which change again with the next iteration."""
        assert not self._early, "the gradient of an earlier microbatch is missing"
        assert self._next > self._first, "no backward has run"
        return list(self._sums)


class _Pass(NamedTuple):
    """What a backward needs of its forward."""

    output: Tensor
    work: WeightWork


class _Half(NamedTuple):
    """What the weight half of a backward needs of its input half."""

    direct: Sequence[Tensor]
    """Gradients of norms, biases, embedding and head: cheap, or cheaper to compute at once than to keep inputs."""
    work: WeightWork


class Stage:
    """One stage of one pipeline. `slot` counts microbatches over all iterations."""

    def __init__(
        self,
        task: DecoderTask,
        stage: int,
        num_stages: int,
        pipeline: int,
        loss_scale: float,
        *,
        splits: bool = True,
    ) -> None:
        """`splits`: whether backwards come in two halves; if not, linear layers are torch's own, which are faster."""
        self.task, self.pipeline, self.loss_scale, self.splits = task, pipeline, loss_scale, splits
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.module = task.build_stage(stage, num_stages)
        self._trained = list(self.module.parameters())
        deferrable = {id(m.weight) for m in self.module.modules() if isinstance(m, Linear)}
        self._direct = [p for p in self._trained if id(p) not in deferrable]
        self.flat = FlatParameters(self.module)
        """The memory of all parameters and gradients."""
        self.named_parameters: Mapping[str, Tensor] = {n: local_part(p) for n, p in self.module.named_parameters()}
        """This process's part of every parameter, by its name in the whole model; `.grad` is float32."""
        for parameter in self.named_parameters.values():
            parameter.grad_dtype = torch.float32
        self.gradients = GradientSum([self.flat.gradient_of[name] for name in self.named_parameters])
        self._data: dict[int, tuple[Tensor, Tensor]] = {}
        self._losses: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        self._passes: dict[int, _Pass] = {}
        self._halves: dict[int, _Half] = {}

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.named_parameters.values())

    @property
    def losses(self) -> dict[int, float]:
        """By slot, on the last stage. Waits for the device."""
        return {slot: loss.item() for slot, loss in self._losses.items()}

    def pop_losses(self, last_slot: int) -> list[float]:
        """Remove and return the losses up to a slot, ascending. Waits for the device."""
        slots = sorted(slot for slot in self._losses if slot <= last_slot)
        return [self._losses.pop(slot).item() for slot in slots]

    def forget_losses(self) -> None:
        self._losses.clear()

    @property
    def counted(self) -> set[str]:
        """The parameters that this process counts in the global norm: each matrix counts once."""
        shared = self.module.tensor_rank > 0
        return {
            name
            for name, p in self.module.named_parameters()
            if not (shared and _is_replicated(p)) and not (self.module.config.tied and name == TIED_HEAD)
        }

    def warm_up(self) -> None:
        """Pay torch's first-call costs before anything is timed; changes no state."""
        some = self._trained[0]
        shape = self.task.activation_shape
        x = torch.zeros(shape[:2], dtype=torch.int64) if self.is_first else torch.zeros(shape, dtype=some.dtype)
        x = x.to(some.device).requires_grad_(not self.is_first)
        torch.autograd.grad(self.module(x).float().square().mean(), self._trained)

    def look_ahead(self, slots: Iterable[int]) -> None:
        """Read the data of later forwards, if this stage needs data."""
        if self.is_first or self.is_last:
            self._data |= {slot: self.task.microbatch(slot, self.pipeline) for slot in slots}

    def forward(self, slot: int, x: Tensor | None, *, keep: bool) -> Tensor:
        """`keep` false: discard the activations; a recompute follows."""
        if x is None:
            x = self._microbatch(slot)[0].to(self._trained[0].device)
        else:
            x.requires_grad_(True)
        self._inputs[slot] = x
        with torch.set_grad_enabled(keep):
            done = self._run(slot, x)
        if keep:
            self._passes[slot] = done
        return done.output.detach()

    def recompute(self, slot: int) -> None:
        self._passes[slot] = self._run(slot, self._inputs[slot])

    def backward(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        """Both halves at once; the gradient of the input, where there is a stage before."""
        output = self._passes.pop(slot).output
        x_gradient, gradients = self._differentiate(slot, output, self._trained, gradient)
        self._add(slot, gradients)
        return x_gradient

    def backward_input(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input; what the weights need is kept, the rest of the graph is freed."""
        assert self.splits, "its forward kept nothing for a weight gradient of its own"
        output, work = self._passes.pop(slot)
        work.deferring = True
        x_gradient, direct = self._differentiate(slot, output, self._direct, gradient)
        self._halves[slot] = _Half(direct, work)
        return x_gradient

    def backward_weight(self, slot: int) -> None:
        half = self._halves.pop(slot)
        gradients = half.work.finish() | {id(p): g for p, g in zip(self._direct, half.direct, strict=True)}
        self._add(slot, [gradients[id(p)] for p in self._trained])

    # ---- gradients, after the last microbatch ----------------------------------------------------------------------
    def outgoing(self) -> list[Tensor]:
        """The gradients to sum over the pipelines."""
        return self.gradients.total()

    def adopt(self, sums: Sequence[Tensor]) -> None:
        """Use the sums of the `outgoing` gradients as gradients."""
        for (name, parameter), gradient in zip(self.named_parameters.items(), sums, strict=True):
            parameter.grad = self.flat.gradient_of[name]
            if gradient.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(gradient)

    # ---- helpers ---------------------------------------------------------------------------------------------------
    def _microbatch(self, slot: int) -> tuple[Tensor, Tensor]:
        return self._data.pop(slot, None) or self.task.microbatch(slot, self.pipeline)

    def _run(self, slot: int, x: Tensor) -> _Pass:
        work = WeightWork()
        with recording(work if self.splits else None):
            output: Tensor = self.module(x, self.task.draw(slot, self.pipeline))
        if self.is_last:
            loss = loss_of(output, self._microbatch(slot)[1].to(output.device))
            self._losses[slot] = loss.detach()
            output = loss * self.loss_scale
        return _Pass(output, work)

    def _differentiate(
        self, slot: int, output: Tensor, wanted: Sequence[Tensor], gradient: Tensor | None
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        x = self._inputs.pop(slot)
        if self.is_first:
            return None, torch.autograd.grad(output, wanted, gradient)
        x_gradient, *gradients = torch.autograd.grad(output, [x, *wanted], gradient)
        return x_gradient, gradients

    def _add(self, slot: int, gradients: Sequence[Tensor]) -> None:
        self.gradients.add(slot, [_local(g, p) for g, p in zip(gradients, self._trained, strict=True)])


def _local(gradient: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of a gradient, in the layout of its parameter."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local_part(gradient)


def _is_replicated(parameter: Tensor) -> bool:
    placements = getattr(parameter, "placements", ())
    return all(placement.is_replicate() for placement in placements)
