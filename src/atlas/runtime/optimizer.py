"""The optimizer's step, and clipping by the global norm of a model that is spread over many workers.

AdamW and SGD of our own, a page together: torch.optim imports the whole compiler when it makes its first optimizer
(about a second of each worker's start). They step slices of flat memory (`flat`), or single parameters. State is
float32 whatever the model's dtype; a bf16 model has float32 master weights. Knows parameters and gradients; not stages,
not where gradients come from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlas.runtime.flat import FlatParameters
from atlas.runtime.recipe import OptimizerSettings, wrong

Parameters = Mapping[str, Tensor]
NORM_EPSILON = 1e-6
"""Added to a norm, as `torch.nn.utils.clip_grad_norm_` does."""
MAX_RUN = 1 << 30
"""Values that one kernel call steps: its indices have 32 bits."""


class FlatSlice(NamedTuple):
    """The part of a stage that one optimizer steps; `begin` and `end` are multiples of `flat_layout.ALIGNMENT`."""

    flat: FlatParameters
    begin: int
    end: int

    @classmethod
    def whole(cls, flat: FlatParameters) -> FlatSlice:
        return cls(flat, 0, flat.num_values)


class ParameterRun(NamedTuple):
    """Neighbouring values that take the same step: a parameter, or a run of flat memory."""

    weight: Tensor
    gradient: Callable[[], Tensor]
    """Float32, in the shape of `weight`."""
    decays: bool
    state: dict[str, Tensor]
    """`exp_avg`, `exp_avg_sq` and, unless the weights are float32, `master`."""

    @property
    def master(self) -> Tensor:
        return self.state.get("master", self.weight)


# ---- optimizers --------------------------------------------------------------------------------------------------
class Sgd:
    """Plain SGD, for stand-ins and tests."""

    entries: tuple[str, ...] = ()

    def __init__(
        self, parameters: Parameters, settings: OptimizerSettings, slices: Sequence[FlatSlice] | None = None
    ) -> None:
        """`slices`: what to step, if the parameters lie in flat memory; None: each parameter by itself."""
        self.settings, self.num_steps = settings, 0
        self.parameters = dict(parameters)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """By parameter, then by entry, with torch.optim's names: live tensors. A resumed run copies into them and sets
        `num_steps`. Parameters of which only a part is stepped here are missing."""
        self.factor = 1.0
        """The next step multiplies the gradients by it: clipping."""
        self.slices = slices
        self.flat_state: list[dict[str, Tensor]] = []
        """State of each of the `slices`."""
        with torch.no_grad():
            self.runs = list(self._single_runs() if slices is None else self._flat_runs(slices))

    def _single_runs(self) -> Iterator[ParameterRun]:
        first: dict[int, Tensor] = {}
        for parameter in self.parameters.values():
            owner = first.setdefault(parameter.data_ptr(), parameter)
            if owner is not parameter:  # a second name of tied ends on one stage: one step, one state
                self.state[parameter] = self.state[owner]
                continue
            self.state[parameter] = self._state(parameter)
            yield ParameterRun(parameter, lambda p=parameter: _gradient(p), parameter.dim() > 1, self.state[parameter])  # type: ignore[misc]

    def _flat_runs(self, slices: Sequence[FlatSlice]) -> Iterator[ParameterRun]:
        for flat, begin, end in slices:
            weight, gradient = flat.weights[begin:end], flat.gradients[begin:end]
            state = self._state(weight)
            self.flat_state.append(state)
            edges = sorted(
                {0, *range(MAX_RUN, end - begin, MAX_RUN), max(0, min(end, flat.num_decayed) - begin), end - begin}
            )
            for a, b in itertools.pairwise(edges):
                part = {entry: tensor[a:b] for entry, tensor in state.items()}
                yield ParameterRun(weight[a:b], lambda g=gradient[a:b]: g, begin + a < flat.num_decayed, part)  # type: ignore[misc]
            for name, view in flat.weight_of.items():
                at, owner = flat.offsets[flat.owner[name]] - begin, self.parameters[flat.owner[name]]
                if at >= 0 and at + view.numel() <= end - begin:
                    mine = {entry: t[at : at + view.numel()].view(view.shape) for entry, t in state.items()}
                    self.state[self.parameters[name]] = self.state.setdefault(owner, mine)

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        state = {entry: torch.zeros_like(weight, dtype=torch.float32, requires_grad=False) for entry in self.entries}
        if self.entries and weight.dtype != torch.float32:
            state["master"] = weight.detach().float()
        return state

    @torch.no_grad()
    def step(self) -> None:
        """Use the gradients. Two names of one memory (tied ends on one stage) take one step."""
        rate = self.settings.learning_rate.at(self.num_steps)
        self.num_steps += 1
        self._update(self.runs, rate)
        self.factor = 1.0

    @torch.no_grad()
    def start_from_weights(self) -> None:
        """The weights were replaced by those of a checkpoint without optimizer state."""
        for run in self.runs:
            if run.master is not run.weight:
                run.master.copy_(run.weight)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _update(self, runs: Sequence[ParameterRun], rate: float) -> None:
        for run in runs:
            run.weight.add_(self._clipped(run), alpha=-rate)

    def _clipped(self, run: ParameterRun) -> Tensor:
        gradient = run.gradient()
        return gradient if self.factor == 1.0 else gradient.mul_(self.factor)


class AdamW(Sgd):
    """Equal to the bit to torch.optim.AdamW in float32 on a CPU; torch's fused kernel on a GPU."""

    entries = ("exp_avg", "exp_avg_sq")

    def _update(self, runs: Sequence[ParameterRun], rate: float) -> None:
        if runs and runs[0].weight.is_cuda:
            for decays in (True, False):
                self._update_fused([run for run in runs if run.decays == decays], rate, decays)
        else:
            for run in runs:
                self._update_run(run, rate)
        for run in runs:
            if run.master is not run.weight:
                run.weight.copy_(run.master)

    def _update_run(self, run: ParameterRun, rate: float) -> None:
        settings, kept, master, gradient = self.settings, run.state, run.master, self._clipped(run)
        first = 1.0 - settings.beta1**self.num_steps
        second = math.sqrt(1.0 - settings.beta2**self.num_steps)
        if run.decays:
            master.mul_(1.0 - rate * settings.weight_decay)
        kept["exp_avg"].lerp_(gradient, 1.0 - settings.beta1)
        kept["exp_avg_sq"].mul_(settings.beta2).addcmul_(gradient, gradient, value=1.0 - settings.beta2)
        denominator = (kept["exp_avg_sq"].sqrt() / second).add_(settings.eps)
        master.addcdiv_(kept["exp_avg"], denominator, value=-rate / first)

    def _update_fused(self, runs: Sequence[ParameterRun], rate: float, decays: bool) -> None:
        """One pass over memory; it clips too (`grad_scale` divides)."""
        if not runs:
            return
        settings, place = self.settings, runs[0].weight.device
        torch._fused_adamw_(
            [run.master for run in runs],
            [run.gradient() for run in runs],
            [run.state["exp_avg"] for run in runs],
            [run.state["exp_avg_sq"] for run in runs],
            [],
            [torch.full((), self.num_steps, dtype=torch.float32, device=place)] * len(runs),
            lr=rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay if decays else 0.0,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if self.factor == 1.0 else torch.full((), 1.0 / self.factor, device=place),
        )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a parameter has no gradient"
    return parameter.grad.float()


def make_optimizer(
    settings: OptimizerSettings, parameters: Parameters, slices: Sequence[FlatSlice] | None = None
) -> Sgd:
    if settings.name not in OPTIMIZERS:
        raise wrong("optimizer", settings.name, f"must be one of {', '.join(OPTIMIZERS)}", "Write one of them")
    return OPTIMIZERS[settings.name](parameters, settings, slices)


OPTIMIZERS: dict[str, type[Sgd]] = {"sgd": Sgd, "adamw": AdamW}


# ---- clipping: workers exchange squared norms and combine them alike --------------------------------------------
def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """Of each of these float32 gradients, on their device."""
    return torch.stack(torch._foreach_norm(list(gradients)))


def squares_of(norms: Tensor) -> list[float]:
    """8 bytes each over the WAN. Waits for the device."""
    return [norm * norm for norm in norms.tolist()]


def global_norm(parts: Iterable[Iterable[float]]) -> float:
    """Of all workers' squares. The sum is exact, so neither order nor division into stages changes a bit."""
    return math.sqrt(math.fsum(square for part in parts for square in part))


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this global norm are multiplied by, so that it is at most `max_norm`."""
    return min(1.0, max_norm / (norm + NORM_EPSILON))
