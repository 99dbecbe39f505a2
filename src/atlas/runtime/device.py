"""The accelerator as an interface: run this, say when it began and ended; bring that tensor to the host, or back. Here
the plain CPU, and the paced device, which does the real arithmetic of a small model and then stays busy for as long
as the cost model says. CUDA is `cuda`.

Knows clocks, work and copies. Does not know ops, Programs or what a tensor means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.runtime.hardware import require_device

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Span(NamedTuple):
    """On the monotonic clock."""

    start_ns: int
    end_ns: int


class Copied(NamedTuple):
    """Copies between host and device, as far back as the device remembers."""

    num: int
    total_ns: int
    under_compute_ns: int
    """Of that, while the device also computed for the same worker."""


class Running(Protocol[T_co]):
    """Work that was begun."""

    @property
    def result(self) -> T_co:
        """What the work returned; on a GPU its numbers may still be under way."""
        ...

    @property
    def done(self) -> bool: ...

    def wait(self) -> Span:
        """When it began and ended, once it has."""
        ...


class PendingUpload(Protocol):
    """A copy to the device, under way."""

    def get(self) -> Tensor:
        """The tensor on the device; what is computed with it from now on waits for the copy."""
        ...


class Device(Protocol):
    place: str
    """Where its tensors live, as torch names it."""
    overrun_ns: int
    """Time by which the host was slower than the pace it was to keep."""
    is_thread: bool
    """Whether it is the worker's own thread and nothing else, so that whatever wakes meanwhile takes time from it."""

    def run(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> tuple[T, Span]:
        """Does `work`, whose inputs were there at `ready_ns`."""
        ...

    def begin(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> Running[T]:
        """As `run`; but a device with a queue returns at once, so that the next work is there when this one ends."""
        ...

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that copies well to and from the device."""
        ...

    def download(self, tensor: Tensor, then: Callable[[Tensor], None]) -> None:
        """Calls `then` with a contiguous copy in host memory once it is there, on any thread. Never blocks."""
        ...

    def upload(self, tensor: Tensor) -> PendingUpload:
        """Starts a copy of host memory, which must stay as it is until the copy is used; from any thread."""
        ...

    def copied(self) -> Copied:
        """Waits for the copies that are under way; none where host and device are one."""
        ...

    def on_failure(self, tell: Callable[[WorkerError], None]) -> None:
        """`tell` is called, on another thread, with what goes wrong beside the thread that computes."""
        ...

    def close(self) -> None:
        """Ends what runs beside."""
        ...


class _Done(NamedTuple, Generic[T]):
    """Of a device without a queue."""

    result: T
    span: Span
    done: bool = True

    def wait(self) -> Span:
        return self.span


class _OnHost(NamedTuple):
    tensor: Tensor

    def get(self) -> Tensor:
        return self.tensor


class Cpu:
    """As fast as it goes."""

    place = "cpu"
    overrun_ns = 0
    is_thread = True

    def run(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> tuple[T, Span]:
        start_ns = time.monotonic_ns()
        result = work()
        return result, Span(start_ns, time.monotonic_ns())

    def begin(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> Running[T]:
        return _Done(*self.run(work, cost_ns, ready_ns))

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def download(self, tensor: Tensor, then: Callable[[Tensor], None]) -> None:
        then(tensor.contiguous())

    def upload(self, tensor: Tensor) -> PendingUpload:
        return _OnHost(tensor)

    def copied(self) -> Copied:
        return Copied(0, 0, 0)

    def on_failure(self, tell: Callable[[WorkerError], None]) -> None:
        pass

    def close(self) -> None:
        pass


class Paced(Cpu):
    """Busy for `cost_ns` from the moment both the device and the inputs were there.

    That moment, not the one in which Python woke up, begins the op, as work queued on a CUDA stream begins
    when the stream is free: deadlines are absolute, and the host's small delays do not add up. Work that takes
    longer than its cost does delay the device; `overrun_ns` says how much, and a run with much of it is void.
    """

    is_thread = False
    """An input that comes while it keeps its pace must be noticed when it comes."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.overrun_ns = 0

    def run(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> tuple[T, Span]:
        start_ns = max(self.free_ns, ready_ns)
        result = work()
        end_ns = start_ns + cost_ns
        late_ns = time.monotonic_ns() - end_ns
        if late_ns > 0:
            self.overrun_ns += late_ns
            end_ns += late_ns
        else:
            time.sleep(-late_ns / 1e9)
        self.free_ns = end_ns
        return result, Span(start_ns, end_ns)


def make_device(name: str) -> Device:
    """`paced`, `cpu` or `cuda:N`."""
    require_device(name)
    if name in ("cpu", "paced"):
        return Cpu() if name == "cpu" else Paced()
    from atlas.runtime.cuda import Cuda

    return Cuda(name)
