"""Out of the accelerator and into it while it goes on: a finished layer's keys and values copied to host memory next to
the layer that runs, and what the stage before has sent put where a copy to the device does not wait for what is queued
there. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Staged = Callable[[], Tensor]
"""The tensor in host memory; waits for the copy where it is still under way. To be called on the sending thread."""


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def into(self, tensor: Tensor) -> Tensor:
        """`tensor`, of any host memory, in such that goes to the device by itself."""
        return tensor if self._stream is None else torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def out(self, tensor: Tensor) -> Staged:
        """`tensor` is a copy of its own: nobody else writes into it."""
        if self._stream is None:
            return lambda: tensor
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
            copied = self._stream.record_event()

        def here() -> Tensor:
            copied.synchronize()
            return host

        return here
