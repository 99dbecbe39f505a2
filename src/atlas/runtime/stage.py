"""One stage of the model while it trains: forwards, recomputes, and backwards in two halves. A whole backward is the
input half, and after each layer its weight half: one path, so that every schedule gets the same bits.

Knows tensors and the parts of a stage (`stage_parts`). Does not know where its inputs come from, nor time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from atlas.runtime import compiling
from atlas.runtime.flat import FlatParameters, local_part
from atlas.runtime.gradient_sum import GradientSum
from atlas.runtime.models.decoder import TIED_HEAD
from atlas.runtime.models.linear import GradientProduct
from atlas.runtime.models.rope import rotation
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.stage_parts import HeadPass, LayerRunner, LossHead, PartPass, PassContext, embed


class PartRerun(NamedTuple):
    """Runs a part of the stage again, with a graph."""

    run: Callable[[Tensor], PartPass]
    x: Tensor

    def __call__(self) -> PartPass:
        return self.run(self.x.requires_grad_(self.x.is_floating_point()))


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
        backend: str = compiling.EAGER,
        by_layer: bool = False,
        num_slices: int = 1,
    ) -> None:
        """`backend`: the compiler of layers and head. `by_layer`: a recompute happens inside the backward that follows
        it, part by part, from inputs that the forward kept: one part's activations exist at a time.
        `num_slices`: into how many equal slices its flat memory can be divided."""
        self.task, self.pipeline, self.loss_scale, self.by_layer = task, pipeline, loss_scale, by_layer
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.module = task.build_stage(stage, num_stages)
        self.flat = FlatParameters(self.module, num_slices)
        """The memory of all parameters and gradients."""
        self.named_parameters: Mapping[str, Tensor] = {n: local_part(p) for n, p in self.module.named_parameters()}
        """This process's part of every parameter, by its name in the whole model; `.grad` is float32."""
        for parameter in self.named_parameters.values():
            parameter.grad_dtype = torch.float32
        trained = self.module.named_parameters()
        self.gradients = GradientSum({id(p): self.flat.gradient_of[name] for name, p in trained}, _local)
        compile = compiling.compiler(backend)
        self.backend = backend
        self._layers = LayerRunner(list(self.module.layers.values()), compile)  # type: ignore[arg-type]
        self._head = None if self.module.head is None else LossHead(self.module.head, compile)
        self._place = self.flat.weights.device
        self._data: dict[int, tuple[Tensor, Tensor]] = {}
        self._losses: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        """Of forwards that a recompute follows."""
        self._passes: dict[int, list[PartPass | PartRerun]] = {}
        self._products: dict[int, list[list[GradientProduct]]] = {}
        """Between the halves of a backward: by part, the last one first."""
        self._x_gradient: Tensor | None = None
        """Result of the last input half."""
        self._constants: PassContext | None = None

    @property
    def losses(self) -> dict[int, float]:
        """By slot, on the last stage. Waits for the device."""
        return {slot: loss.item() for slot, loss in self._losses.items()}

    def pop_losses(self, last_slot: int) -> list[Tensor]:
        """Remove and return the losses up to a slot, ascending, on the device."""
        slots = sorted(slot for slot in self._losses if slot <= last_slot)
        return [self._losses.pop(slot) for slot in slots]

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
        """Pay torch's first-call costs, compile, and take the memory of a microbatch, before anything is timed. Changes
        no state: sums begin with the first microbatch."""
        batch, length, _ = shape = self.task.activation_shape
        dtype = torch.int64 if self.is_first else self.flat.weights.dtype
        x = torch.zeros(shape[:2] if self.is_first else shape, dtype=dtype, device=self._place)
        targets = torch.zeros(batch, length, dtype=torch.int64, device=self._place)
        passes, y = self._run(x, targets, self._around(length), keep=not self.by_layer)
        gradient = None if self._head is not None else torch.zeros_like(y)
        while passes:
            gradient, _, products = _ready(passes.pop()).input_half(gradient)
            self.gradients.try_out(products)

    def look_ahead(self, slots: Iterable[int]) -> None:
        """Read the data of later forwards, if this stage needs data."""
        if self.is_first or self.is_last:
            for slot in slots:
                self._microbatch(slot)

    def forward(self, slot: int, x: Tensor | None, *, keep: bool) -> Tensor:
        """`keep` false: discard the activations; a recompute follows."""
        if x is None:
            x = self._to_device(self._microbatch(slot)[0])
        if not keep and not self.by_layer:
            self._inputs[slot] = x
        return self._compute(slot, x, keep=keep)

    def recompute(self, slot: int) -> None:
        if not self.by_layer:
            self._compute(slot, self._inputs.pop(slot), keep=True)

    def backward(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        """Both halves; the gradient of the input, where there is a stage before."""
        self.gradients.add_products(slot, self._input_halves(slot, gradient))
        return self._x_gradient

    def backward_input(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input; what the matrices need is kept, the rest is freed."""
        self._products[slot] = list(self._input_halves(slot, gradient))
        return self._x_gradient

    def backward_weight(self, slot: int) -> None:
        self.gradients.add_products(slot, self._products.pop(slot))

    # ---- gradients, after the last microbatch ----------------------------------------------------------------------
    def adopt(self) -> None:
        """Use what is in the flat memory, usually sums over the pipelines, as gradients."""
        for name, parameter in self.named_parameters.items():
            parameter.grad = self.flat.gradient_of[name]

    # ---- helpers ---------------------------------------------------------------------------------------------------
    def _compute(self, slot: int, x: Tensor, *, keep: bool) -> Tensor:
        targets = self._to_device(self._microbatch(slot)[1]) if self.is_last else None
        around = self._around(x.shape[1])._replace(draw=self.task.draw(slot, self.pipeline))
        passes, y = self._run(x, targets, around, keep=keep)
        if keep or self.by_layer:
            self._passes[slot] = passes
        if self.is_last:
            self._losses[slot] = y
        return y

    def _run(
        self, x: Tensor, targets: Tensor | None, around: PassContext, *, keep: bool
    ) -> tuple[list[PartPass | PartRerun], Tensor]:
        """All parts; the output is detached. `keep` false: no graph, but what runs each part again."""
        passes: list[PartPass | PartRerun] = []

        def through(run: Callable[[Tensor], PartPass], x: Tensor, keep: bool = keep) -> Tensor:
            again = PartRerun(run, x.detach())
            # A compiled function without a graph is another one, with other bits: run it with one and discard it.
            with torch.set_grad_enabled(keep or self.backend != compiling.EAGER):
                part_pass = again()
            passes.append(part_pass if keep else again)
            return part_pass.output.detach()

        if self.module.embedding is not None:
            x = through(functools.partial(embed, self.module.embedding, around), x)
        for layer in self._layers.layers:
            x = through(functools.partial(self._layers.forward, layer, around), x)
        if self._head is not None:
            assert targets is not None
            x = through(functools.partial(self._head.forward, targets, self.loss_scale), x, keep or self._keeps_loss())
        return passes, x

    def _keeps_loss(self) -> bool:
        """Whether head and loss keep their graph though layers do not: if no other microbatch's exists."""
        return self.by_layer and not any(isinstance(found[-1], HeadPass) for found in self._passes.values())

    def _input_halves(self, slot: int, gradient: Tensor | None) -> Iterator[list[GradientProduct]]:
        """I, part by part; yields the products of each part. `_x_gradient` has the result."""
        passes = self._passes.pop(slot)
        self._data.pop(slot, None)
        while passes:
            part_pass = _ready(passes.pop())
            at_once = isinstance(part_pass, HeadPass)
            gradient, direct, products = part_pass.input_half(gradient)
            del part_pass
            self.gradients.add_direct(slot, direct, products if at_once else [])
            if not at_once:
                yield products
        self._x_gradient = gradient
        self.gradients.input_done(slot)

    def _around(self, length: int) -> PassContext:
        """Without dropout."""
        if self._constants is None or len(self._constants.positions_L) != length:
            config = self.module.config
            positions = torch.arange(self.module.require_known(length), device=self._place)
            rope = config.positions == "rope"
            turned = rotation(config, positions, self.flat.weights.dtype) if rope else None
            self._constants = PassContext(positions, turned, None)
        return self._constants

    def _microbatch(self, slot: int) -> tuple[Tensor, Tensor]:
        """Kept until the backward."""
        if slot not in self._data:
            tokens, targets = self.task.microbatch(slot, self.pipeline)
            pins = self._place.type == "cuda"
            self._data[slot] = (tokens.pin_memory(), targets.pin_memory()) if pins else (tokens, targets)
        return self._data[slot]

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._place, non_blocking=True)


def _ready(found: PartPass | PartRerun) -> PartPass:
    return found() if isinstance(found, PartRerun) else found


def _local(gradient: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of a gradient, in the layout of its parameter."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local_part(gradient)


def _is_replicated(parameter: Tensor) -> bool:
    placements = getattr(parameter, "placements", ())
    return all(placement.is_replicate() for placement in placements)
