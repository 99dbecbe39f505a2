"""Rotary positions: the frequencies of a config (plain, linear or Llama 3 scaling) and the rotation itself.

Frequencies are a function of the config, never a buffer: nothing to save, to load or to move.

Shape letters: L length, H heads, E head width.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from atlas.runtime.models.config import DecoderConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [L, E]."""


@functools.lru_cache(maxsize=32)
def frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions, float32, [E / 2]."""
    # Computed on the CPU: a GPU may round differently.
    with torch.inference_mode(False):  # cached: a tensor of inference mode cannot be used in training
        exponent = torch.arange(0, config.head_width, 2, dtype=torch.int64).float() / config.head_width
        plain = 1.0 / (config.rope_theta**exponent)
        scaling = config.rope_scaling
        if scaling is None:
            return plain.to(device)
        return (plain / scaling.factor if scaling.kind == "linear" else _llama3(plain, scaling)).to(device)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones are kept, those between are blended."""
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def rotation(config: DecoderConfig, positions_L: Tensor, dtype: torch.dtype) -> Rotation:  # noqa: N803
    """For `rotate`; computed in float32, used in the model's dtype."""
    angles = positions_L.float()[:, None] * frequencies(config, positions_L.device)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHLE: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:  # noqa: N803
    """Hugging Face's layout: dimension i turns with i + E / 2."""
    left, right = x_BHLE.chunk(2, dim=-1)
    return x_BHLE * cos_LE + torch.cat([-right, left], dim=-1) * sin_LE
