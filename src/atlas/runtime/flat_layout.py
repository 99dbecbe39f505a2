"""Where each parameter of a stage lies in its flat memory, computed from sizes alone. Workers of other groups of
pipelines, and launchers, know from it who holds which part of a gradient. Loads no torch.

Matrices come first: they decay, vectors do not. Every parameter begins at a multiple of ALIGNMENT values, so that its
arithmetic does not depend on what lies before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ALIGNMENT = 64
"""Values. 128 bytes in bf16, the widest line that a GPU or a CPU loads at once. Cut slices at multiples of it."""


class ParameterSize(NamedTuple):
    num_values: int
    is_matrix: bool


class FlatLayout(NamedTuple):
    offsets: dict[str, int]
    """Where each parameter begins. A second name of the same memory has a gradient only, behind all weights."""
    num_values: int
    """Of the weights, padding included."""
    num_decayed: int
    """Of the matrices at their beginning."""
    num_gradients: int
    """Of the gradients; the first `num_values` lie as the weights do."""


def flat_layout(sizes: Mapping[str, ParameterSize], owner: Mapping[str, str], num_slices: int = 1) -> FlatLayout:
    """`owner`, by name: the first name of the same memory, usually its own. `num_slices`: weights and gradients can be
    divided into this many equal slices."""
    offsets: dict[str, int] = {}
    end = num_decayed = 0
    owned = [name for name in sizes if owner[name] == name]
    for name in sorted(owned, key=lambda name: not sizes[name].is_matrix):  # stable: names keep the module's order
        offsets[name] = end
        end += _padded(sizes[name].num_values)
        num_decayed = end if sizes[name].is_matrix else num_decayed
    num_values = end = _padded(end, num_slices)
    for name in [name for name in sizes if name not in offsets]:
        offsets[name] = end
        end += _padded(sizes[name].num_values)
    return FlatLayout(offsets, num_values, num_decayed, _padded(end, num_slices))


def _padded(count: int, num_slices: int = 1) -> int:
    unit = ALIGNMENT * num_slices
    return -(-count // unit) * unit
