"""Whether a stage's state fits a device: weights, gradient sums and optimizer state, counted from the modules
themselves. Activations are the planner's business (`cost.memory`), which this only leaves room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atlas.errors import InfeasibleError
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import TIED_HEAD, Decoder, LayerRange

GIB = 2**30
SHARDED = ("attention.q.", "attention.k.", "attention.v.", "attention.o.weight", "mlp.gate.", "mlp.up.",
           "mlp.down.weight", "embedding.token.", "head.out.")  # fmt: skip
"""What tensor parallelism divides (see `parallel`)."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one stage on one device, at rest."""

    weights: int
    gradients: int
    """Summed in float32."""
    optimizer: int
    """AdamW: two moments in float32, and float32 master weights where the model has fewer bits."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def state_bytes(config: DecoderConfig, cut: LayerRange, dtype: torch.dtype, tensor_parallel: int = 1) -> StateBytes:
    with torch.device("meta"):
        decoder = Decoder(config, cut)
    stored = summed = 0
    for name, parameter in decoder.named_parameters():
        count = parameter.numel() // (tensor_parallel if any(part in name for part in SHARDED) else 1)
        summed += count
        if not (config.tied and name == TIED_HEAD and cut.has_embedding):
            stored += count
    master = 0 if dtype == torch.float32 else 4
    return StateBytes(stored * dtype.itemsize, summed * 4, stored * (8 + master))


def require_fits(
    config: DecoderConfig,
    cut: LayerRange,
    dtype: torch.dtype,
    available_bytes: int,
    *,
    where: str,
    tensor_parallel: int = 1,
) -> StateBytes:
    """`where`: the device, in words."""
    needed = state_bytes(config, cut, dtype, tensor_parallel)
    if needed.total > available_bytes:
        parts = ", ".join(
            f"{name} {size / GIB:.2f}"
            for name, size in (
                ("weights", needed.weights),
                ("gradients", needed.gradients),
                ("AdamW", needed.optimizer),
            )
        )
        raise InfeasibleError(
            where=where,
            key="layers_per_stage",
            value=len(cut.layers),
            rule=f"the state of these layers takes {needed.total / GIB:.2f} GiB ({parts}) "
            f"and the device has {available_bytes / GIB:.2f} GiB",
            remedy="Give the stage fewer layers, use more stages or more tensor-parallel GPUs",
        )
    return needed
