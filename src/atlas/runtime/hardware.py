"""What accelerators this host has. Apart, so that whoever only asks starts nothing on them."""

from __future__ import annotations

import re

import torch

from atlas.errors import AtlasError


def num_gpus() -> int:
    return torch.cuda.device_count()


def smallest_gpu_bytes() -> int | None:
    """Memory of the smallest; None where there is none."""
    return min((torch.cuda.get_device_properties(n).total_memory for n in range(num_gpus())), default=None)


def require_device(name: str) -> None:
    """`paced`, `cpu`, or `cuda:N` (`cuda` is the first) of a GPU that is there."""
    if name in ("paced", "cpu"):
        return
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if found is None:
        raise AtlasError(f"device {name!r}: must be paced, cpu or cuda:N. Write one of them")
    if int(found[1] or 0) >= num_gpus():
        raise AtlasError(
            f"device {name!r}: there are {num_gpus()} CUDA devices here. Plan for what is there, or say cpu"
        )
