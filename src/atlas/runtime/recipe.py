"""How weights are updated: learning rates over steps, the optimizer's settings. Plain values without torch, for
launchers. `optimizer` implements them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from atlas.errors import SpecError


@dataclass(frozen=True)
class LearningRate:
    """By step, from 0: a linear warm-up to `peak`, then constant, or a decay to `floor` at `num_steps`."""

    peak: float
    decay: Literal["constant", "linear", "cosine"] = "constant"
    num_warmup_steps: int = 0
    num_steps: int = 0
    """The end of the decay; unused if constant."""
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.decay not in ("constant", "linear", "cosine"):
            raise wrong("decay", self.decay, "must be constant, linear or cosine", "Write one of them")
        if self.decay != "constant" and self.num_steps <= self.num_warmup_steps:
            rule = f"a {self.decay} decay must end after the warm-up of {self.num_warmup_steps} steps"
            raise wrong("num_steps", self.num_steps, rule, "Train longer, or warm up for fewer steps")

    def at(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / self.num_warmup_steps
        if self.decay == "constant":
            return self.peak
        gone = min(1.0, (step - self.num_warmup_steps) / (self.num_steps - self.num_warmup_steps))
        left = 1.0 - gone if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
        return self.floor + (self.peak - self.floor) * left


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: LearningRate
    name: str = "adamw"
    """adamw or sgd."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices, not of norms and biases. AdamW only."""


def wrong(key: str, value: object, rule: str, remedy: str) -> SpecError:
    return SpecError(where="training", key=key, value=value, rule=rule, remedy=remedy)
