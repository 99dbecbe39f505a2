"""The state of a layer as it is saved: its parameters and the optimizer's state of each. By layer, because stages
change with the plan and layers do not.

Knows modules and optimizers of torch; not files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime.models.config import layer_of


class HasState(Protocol):
    """An optimizer of torch, or ours, with state by parameter and entry."""

    state: Any


@dataclass(frozen=True)
class LayerState:
    """Names are those in the whole model (`layers.3.mlp.up.weight`), whatever the stage."""

    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """By parameter, then by entry (`exp_avg`). Hyper-parameters belong to the configuration."""


def states_of(parameters: Iterable[tuple[str, Tensor]], optimizer: HasState | None = None) -> dict[str, LayerState]:
    """By layer; live tensors, not copies. `parameters`: as from `module.named_parameters()`."""
    weights: dict[str, dict[str, Tensor]] = {}
    entries: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, parameter in parameters:
        layer = layer_of(name)
        weights.setdefault(layer, {})[name] = parameter.detach()
        kept = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        tensors = {entry: torch.as_tensor(value) for entry, value in kept.items() if value is not None}
        if tensors:
            entries.setdefault(layer, {})[name] = tensors
    return {layer: LayerState(weights[layer], entries.get(layer, {})) for layer in weights}


def restore(
    states: Mapping[str, LayerState], parameters: Iterable[tuple[str, Tensor]], optimizer: HasState | None = None
) -> None:
    """Copy saved states into parameters and their optimizer. Checks everything before it changes anything."""
    pairs = list(parameters)
    for name, parameter in pairs:
        saved = states[layer_of(name)].parameters.get(name) if layer_of(name) in states else None
        if saved is None or saved.shape != parameter.shape:
            has = "no such tensor" if saved is None else f"shape {tuple(saved.shape)}"
            raise AtlasError(
                f"checkpoint: {name}: {has}, but the model has shape {tuple(parameter.shape)}. "
                "Resume with the model that was saved"
            )
    groups = getattr(optimizer, "param_groups", [])
    on_device = {p for group in groups if group.get("fused") or group.get("capturable") for p in group["params"]}
    with torch.no_grad():
        for name, parameter in pairs:
            state = states[layer_of(name)]
            parameter.copy_(state.parameters[name])
            if optimizer is not None and name in state.optimizer:
                # Moments are on the device of their parameter; the step count only for fused or capturable optimizers.
                home = torch.device("cpu") if parameter not in on_device else parameter.device
                kept = optimizer.state.get(parameter, {})
                optimizer.state[parameter] = {
                    entry: kept[entry].copy_(value)  # its memory may be part of a larger one
                    if entry in kept and value.dim()
                    else value.to(parameter.device if value.dim() else home, copy=True)
                    for entry, value in state.optimizer[name].items()
                }


def share(layers: Sequence[str], replica: int, num_replicas: int) -> list[str]:
    """The layers that one of several workers with the same stage saves: each layer once, divided evenly."""
    return [layer for number, layer in enumerate(layers) if number % num_replicas == replica]
