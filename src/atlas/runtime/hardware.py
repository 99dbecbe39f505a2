"""What accelerators this host has. Apart, so that whoever only asks starts nothing on them."""

from __future__ import annotations

import torch


def num_gpus() -> int:
    return torch.cuda.device_count()


def smallest_gpu_bytes() -> int | None:
    """Memory of the smallest; None where there is none."""
    return min((torch.cuda.get_device_properties(n).total_memory for n in range(num_gpus())), default=None)
