"""CUDA as a device: compute on one stream, copies on two others, so that an activation leaves and the next arrives
while the GPU computes. Host memory is pinned; who waits for a copy is a thread of our own, never the one that
launches kernels.

Knows streams, events and copies. Does not know ops, nor who sends what.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime.device import Span, Upload

T = TypeVar("T")


class Cuda:
    """One GPU, or a share of one that several stage processes use."""

    overrun_ns = 0

    def __init__(self, name: str = "cuda:0") -> None:
        self.place = name if ":" in name else f"{name}:0"
        number = int(self.place.partition(":")[2])
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            there = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise AtlasError(
                f"device {name!r}: there are {there} CUDA devices here. Plan for what is there, or say cpu"
            )
        torch.cuda.set_device(number)
        self._compute = torch.cuda.current_stream()
        self._down, self._up = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hand_over, daemon=True, name=f"atlas {self.place} copies")
        self._thread.start()

    def run(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> tuple[T, Span]:
        """Waits for the end of the work, with the interpreter's lock released: spans are what the GPU did."""
        start_ns = time.monotonic_ns()
        result = work()
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ended.record(self._compute)
        ended.synchronize()
        return result, Span(start_ns, time.monotonic_ns())

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def download(self, tensor: Tensor, then: Callable[[Tensor], None]) -> None:
        host = self.buffer(tuple(tensor.shape), tensor.dtype)
        self._down.wait_stream(self._compute)
        with torch.cuda.stream(self._down):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._down)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._down)
        self._copies.put(_Copy(done, host, then))

    def upload(self, tensor: Tensor) -> Upload:
        with torch.cuda.device(self.place), torch.cuda.stream(self._up):
            there = tensor.to(self.place, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._up)
        return _Uploaded(there, done, tensor)

    def close(self) -> None:
        self._copies.put(None)
        self._thread.join()

    def _hand_over(self) -> None:
        while (copy := self._copies.get()) is not None:
            copy.done.synchronize()
            copy.then(copy.host)


class _Copy(NamedTuple):
    """To the host, under way."""

    done: torch.cuda.Event
    host: Tensor
    then: Callable[[Tensor], None]


class _Uploaded(NamedTuple):
    """To the device, under way; `source` must live until it is done."""

    tensor: Tensor
    done: torch.cuda.Event
    source: Tensor

    def get(self) -> Tensor:
        stream = torch.cuda.current_stream()
        stream.wait_event(self.done)
        self.tensor.record_stream(stream)
        return self.tensor
