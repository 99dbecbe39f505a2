"""The accelerator as an interface: run work and report when it began and ended; copy a tensor to the host, or back.
Here the plain CPU, and the paced device, which does the real arithmetic of a small model and then stays busy for as
long as the cost model says. CUDA is `cuda`; `hardware` makes a device by its name.

Knows clocks, work and copies. Does not know ops, Programs or what a tensor means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from atlas.errors import WorkerError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Span(NamedTuple):
    """On the monotonic clock."""

    start_ns: int
    end_ns: int


class CopyTimes(NamedTuple):
    """Copies between host and device; of the last ones only."""

    num: int
    total_ns: int
    under_compute_ns: int
    """Of that, while the device also computed for this worker."""


class Running(Protocol[T_co]):
    """Work that was started."""

    @property
    def result(self) -> T_co:
        """What the work returned; on a GPU its values may not be computed yet."""
        ...

    @property
    def done(self) -> bool: ...

    def wait(self) -> Span:
        """Wait for its end; when it began and ended."""
        ...


class _Done(NamedTuple, Generic[T]):
    """Finished work of a device without a queue."""

    result: T
    span: Span
    done: bool = True

    def wait(self) -> Span:
        return self.span


class Device:
    """A device whose memory is the host's and which computes on the calling thread; others override what differs."""

    place = "cpu"
    """The torch device of its tensors."""
    overrun_ns = 0
    """Time by which the host was slower than the pace."""
    is_thread = True
    """Whether work runs on the worker's own thread, so that other threads take time from it."""

    def begin(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> Running[T]:
        """Do `work`, whose inputs were ready at `ready_ns`. A device with a queue returns at once, so that the next
        work can be queued."""
        start_ns = time.monotonic_ns()
        result = work()
        return _Done(result, Span(start_ns, time.monotonic_ns()))

    def ran(self, span: Span) -> None:
        """Work of training that `begin` started has ended, for statistics."""

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that copies well to and from the device."""
        return torch.empty(shape, dtype=dtype)

    def download(self, tensor: Tensor, then: Callable[[Tensor], None]) -> None:
        """Call `then`, on any thread, with a contiguous copy in host memory when it is complete. Never blocks."""
        then(tensor.contiguous())

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start a copy from host memory, which must not change until the copy is used; from any thread. The result
        returns the tensor on the device; work that uses it waits for the copy."""
        return lambda: tensor

    def copied(self) -> CopyTimes:
        """Wait for pending copies. Nothing is counted if host and device are the same."""
        return CopyTimes(0, 0, 0)

    def peak_bytes(self) -> int:
        """The most memory of the device that tensors have had at once; 0 if it is the host's."""
        return 0

    def on_failure(self, report: Callable[[WorkerError], None]) -> None:
        """`report` is called, on another thread, with errors of background threads."""

    def close(self) -> None:
        """End background threads."""


class Cpu(Device):
    """The host's cores, without a pace."""


class Paced(Device):
    """Busy for `cost_ns` from the moment at which both the device and the inputs were ready.

    The op begins at that moment, not when Python woke up, as work queued on a CUDA stream begins when the stream is
    free: deadlines are absolute, and small delays of the host do not add up. Work that takes longer than its cost
    delays the device; `overrun_ns` says by how much, and a run with much of it is not valid.
    """

    is_thread = False
    """Inputs that arrive while it waits must be received at once."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.overrun_ns = 0

    def begin(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> Running[T]:
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
        return _Done(result, Span(start_ns, end_ns))
