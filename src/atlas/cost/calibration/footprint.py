"""Peak bytes of one GPU of a stage, from measured sizes of its layers: state, activations of the microbatches in
flight, what the backward of one microbatch holds on top, and what is there before the first tensor.

The three things that no shape tells (`Overheads`) are fitted. Knows sizes, not where they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atlas.cost.calibration.fit import Floats, least_squares

STATE_BYTES = 16
"""Per parameter, all in fp32: weight, gradient and Adam's two moments."""


@dataclass(frozen=True)
class StageSize:
    """One GPU's part of one stage."""

    params: int
    activation_bytes: float
    """What one microbatch leaves for its backward, the head's part not counted."""
    layer_bytes: float
    """The same of one layer."""
    head_bytes: float
    """Activations of LM head and loss; zero elsewhere."""
    in_flight: int
    """Most microbatches between their forward and the end of their backward."""


@dataclass(frozen=True)
class Overheads:
    """What a process needs that no shape tells."""

    fixed_bytes: float
    """CUDA context, NCCL's buffers, workspaces."""
    layer_copies: float
    """Gradients and temporaries that a backward holds at once, in activations of one layer."""
    head_copies: float
    """Logits, probabilities and their gradients at the loss, in activations of the head."""


def peak_bytes(stages: Sequence[StageSize], overheads: Overheads) -> float:
    """Of the fullest GPU of a pipeline. Head and layers hold their temporaries one after the other."""
    return max(
        overheads.fixed_bytes
        + STATE_BYTES * stage.params
        + stage.in_flight * stage.activation_bytes
        + max(overheads.layer_copies * stage.layer_bytes, overheads.head_copies * stage.head_bytes)
        for stage in stages
    )


def fit_overheads(pipelines: Sequence[Sequence[StageSize]], measured_bytes: Floats) -> Overheads:
    """Least squares on the logarithm of predicted over measured."""

    def overheads(point: Floats) -> Overheads:
        fixed, layer, head = np.exp(point).tolist()
        return Overheads(fixed * 1e9, layer, head)

    def residuals(point: Floats) -> Floats:
        at = overheads(point)
        return np.log(np.array([peak_bytes(stages, at) for stages in pipelines]) / measured_bytes)

    return overheads(least_squares(residuals, np.log(np.array([3.0, 1.0, 2.0]))))
