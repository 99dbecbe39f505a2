"""Copies to and from the accelerator while it computes: keys and values of a finished layer are copied to host memory
beside the running layer, and activations of the previous stage go through pinned memory, so that their copy does not
wait for queued work. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Staged = Callable[[], Tensor]
"""Returns the tensor in host memory; waits for the copy if needed. Called on the sending thread."""


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def into(self, tensor: Tensor) -> Tensor:
        """`tensor` in pinned host memory, from which the device copies asynchronously."""
        return tensor if self._stream is None else torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def out(self, tensor: Tensor) -> Staged:
        """`tensor` must not be written to afterwards."""
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
