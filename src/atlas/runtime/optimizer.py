"""The optimizer's step, and clipping by the global norm of a model that is spread over many workers.

AdamW and SGD of our own, a page together: torch.optim imports the whole compiler when it makes its first optimizer
(about a second of each worker's start). State is float32 whatever the model's dtype; a bf16 model has float32 master
weights. Knows parameters by name and their `.grad`; not stages, not where gradients come from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.runtime.recipe import OptimizerSettings, wrong

Parameters = Mapping[str, Tensor]


# ---- optimizers --------------------------------------------------------------------------------------------------
class Sgd:
    """Plain SGD, for stand-ins and tests."""

    def __init__(self, parameters: Parameters, settings: OptimizerSettings) -> None:
        self.settings, self.num_steps = settings, 0
        self.parameters, self.owner = dict(parameters), _owners(parameters)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """By parameter, then by slot, with torch.optim's names. Live tensors; a resumed run replaces them and sets
        `num_steps`."""

    def step(self) -> None:
        """Use the parameters' `.grad`. Two names of one memory (tied ends on one stage) take one step."""
        rate = self.settings.learning_rate.at(self.num_steps)
        self.num_steps += 1
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.owner[name] == name:
                    assert parameter.grad is not None, f"{name} has no gradient"
                    self._update(parameter, parameter.grad.float(), rate)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        parameter.add_(gradient, alpha=-rate)


class AdamW(Sgd):
    """Equal to the bit to torch.optim.AdamW in float32, tensor by tensor."""

    def __init__(self, parameters: Parameters, settings: OptimizerSettings) -> None:
        super().__init__(parameters, settings)
        for name, parameter in self.parameters.items():
            if self.owner[name] == name:
                zeros = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                self.state[parameter] = {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}
                if parameter.dtype != torch.float32:
                    self.state[parameter]["master"] = parameter.detach().float()
        self._share()

    def step(self) -> None:
        super().step()
        self._share()

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        settings, kept = self.settings, self.state[parameter]
        master = kept.get("master", parameter)
        first = 1.0 - settings.beta1**self.num_steps
        second = math.sqrt(1.0 - settings.beta2**self.num_steps)
        if parameter.dim() > 1:
            master.mul_(1.0 - rate * settings.weight_decay)
        kept["exp_avg"].lerp_(gradient, 1.0 - settings.beta1)
        kept["exp_avg_sq"].mul_(settings.beta2).addcmul_(gradient, gradient, value=1.0 - settings.beta2)
        denominator = (kept["exp_avg_sq"].sqrt() / second).add_(settings.eps)
        master.addcdiv_(kept["exp_avg"], denominator, value=-rate / first)
        if master is not parameter:
            parameter.copy_(master)

    def _share(self) -> None:
        """A second name has the state of the first: a resumed plan may put the two on different stages."""
        for name, owner in self.owner.items():
            self.state[self.parameters[name]] = self.state[self.parameters[owner]]


def make_optimizer(settings: OptimizerSettings, parameters: Parameters) -> Sgd:
    if settings.name not in OPTIMIZERS:
        raise wrong("optimizer", settings.name, f"must be one of {', '.join(OPTIMIZERS)}", "Write one of them")
    return OPTIMIZERS[settings.name](parameters, settings)


OPTIMIZERS: dict[str, type[Sgd]] = {"sgd": Sgd, "adamw": AdamW}


def _owners(parameters: Parameters) -> dict[str, str]:
    """By name: the first name of the same memory, usually its own."""
    first: dict[int, str] = {}
    return {name: first.setdefault(parameter.data_ptr(), name) for name, parameter in parameters.items()}


# ---- clipping: workers exchange squared norms and combine them alike --------------------------------------------
@torch.no_grad()
def squares(parameters: Parameters, counted: Collection[str] | None = None) -> list[float]:
    """The squared norm of each gradient of one worker that is in `counted`: 8 bytes each over the WAN."""
    gradients = [p.grad for n, p in parameters.items() if p.grad is not None and (counted is None or n in counted)]
    if not gradients:
        return []
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
    return [norm * norm for norm in norms.tolist()]


def global_norm(parts: Iterable[Iterable[float]]) -> float:
    """Of all workers' squares. The sum is exact, so neither order nor division into stages changes a bit."""
    return math.sqrt(math.fsum(square for part in parts for square in part))


@torch.no_grad()
def clip(parameters: Parameters, norm: float, max_norm: float) -> float:
    """Scale the gradients so that their global norm is at most `max_norm`; returns the factor."""
    if not math.isfinite(norm):
        raise WorkerError(
            f"the gradients' global norm is {norm}: the training has diverged; "
            "resume from an earlier checkpoint with a smaller learning rate or a longer warm-up"
        )
    factor = min(1.0, max_norm / (norm + 1e-6))
    if factor < 1.0:
        # Two names may share one gradient (tied ends): scale each memory once.
        for gradient in {p.grad.data_ptr(): p.grad for p in parameters.values() if p.grad is not None}.values():
            gradient.mul_(factor)
    return factor
