"""The accelerators of this host, and the device of a worker by its name. Asking for them starts nothing on a GPU."""

from __future__ import annotations

import torch

from atlas.errors import AtlasError
from atlas.runtime.assignment import require_device_name
from atlas.runtime.cuda import Cuda
from atlas.runtime.device import Cpu, Device, Paced


def num_gpus() -> int:
    return torch.cuda.device_count()


def smallest_gpu_bytes() -> int | None:
    """Memory of the smallest GPU; None without a GPU."""
    return min((torch.cuda.get_device_properties(n).total_memory for n in range(num_gpus())), default=None)


def require_device(name: str) -> None:
    """Raise unless it is `paced`, `cpu`, or `cuda:N` (`cuda` is the first) of a GPU of this host."""
    require_device_name(name)
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= num_gpus():
        raise AtlasError(
            f"device {name!r}: there are {num_gpus()} CUDA devices here. Plan for the devices of this host, or use cpu"
        )


def make_device(name: str) -> Device:
    """A device that `require_device` accepts."""
    require_device(name)
    return Cpu() if name == "cpu" else Paced() if name == "paced" else Cuda(name)
