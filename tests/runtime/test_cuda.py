"""A real GPU behind the same interface: copies come back as they went, spans are the GPU's, and it learns as a CPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from worker_threads import run_in_threads

from atlas.errors import AtlasError, WorkerError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.runtime.assignment import stand_in
from atlas.runtime.cuda import Copies
from atlas.runtime.device import Device, Span
from atlas.runtime.hardware import make_device
from atlas.runtime.op_queue import OpQueue
from atlas.schedules.classic import one_f_one_b

gpu = pytest.mark.gpu
T = TypeVar("T")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(AtlasError, match="device 'cuda:0': there are 0 CUDA devices here"):
        make_device("cuda:0")
    with pytest.raises(AtlasError, match="must be paced, cpu, cuda or cuda:N"):
        make_device("tpu")


def run(device: Device, work: Callable[[], T]) -> tuple[T, Span]:
    """As a worker runs an op."""
    ops, spans = OpQueue(device), list[Span]()
    result = ops.launch(work, 0, 0, spans.append)
    ops.settle()
    return result, spans[0]


@gpu
def test_a_tensor_copied_to_the_host_and_back_is_unchanged() -> None:
    device = make_device("cuda:0")
    arrived, copies = threading.Event(), list[torch.Tensor]()
    sent, _ = run(device, lambda: torch.arange(1 << 20, device=device.place).to(torch.bfloat16))
    device.download(sent, lambda host: (copies.append(host), arrived.set()))  # type: ignore[func-returns-value]
    assert arrived.wait(10)
    assert copies[0].is_pinned()
    assert torch.equal(copies[0], sent.cpu())
    assert torch.equal(device.upload(copies[0])(), sent)
    device.close()


@gpu
def test_a_span_is_measured_by_the_gpu() -> None:
    device = make_device("cuda:0")
    matrix = torch.randn(8192, 8192, device=device.place)
    run(device, lambda: matrix @ matrix)
    _, one = run(device, lambda: matrix @ matrix)
    _, four = run(device, lambda: [matrix @ matrix for _ in range(4)])
    assert 2 < (four.end_ns - four.start_ns) / (one.end_ns - one.start_ns) < 8
    device.close()


@gpu
def test_copies_and_overlapping_computation_are_timed() -> None:
    device = make_device("cuda:0")
    matrix = torch.randn(8192, 8192, device=device.place)
    run(device, lambda: matrix @ matrix)
    host = device.buffer((1 << 24,), torch.float32)
    alone = device.copied()
    device.upload(host)()
    torch.cuda.synchronize()
    idle = device.copied()
    assert (idle.num, idle.under_compute_ns) == (alone.num + 1, alone.under_compute_ns)
    assert idle.total_ns > alone.total_ns

    def compute() -> None:
        for _ in range(20):
            matrix @ matrix
        device.upload(host)

    run(device, compute)
    both = device.copied()
    assert both.under_compute_ns - idle.under_compute_ns > 0.9 * (both.total_ns - idle.total_ns)
    device.close()


@gpu
def test_two_stages_on_one_gpu_learn_as_two_cpus() -> None:
    program = with_optimizer(one_f_one_b(Layout(2, 2, 4, ("a", "b"))))
    training = stand_in(num_layers=4, learning_rate=0.05)

    def device() -> Device:
        return make_device("cuda:0")

    there, here = run_in_threads(program, training, 3, device=device), run_in_threads(program, training, 3)
    assert there.losses() == pytest.approx(here.losses(), rel=1e-4)


class Moment:
    """The end of a copy, without a GPU."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


def test_a_failed_copy_is_reported_at_once_and_raised_by_the_next() -> None:
    copies, told, handed = Copies("cuda:0"), queue.SimpleQueue[WorkerError](), list[bool]()
    copies.report, all_put = told.put, threading.Event()
    copies.put(Moment().synchronize, torch.ones(1), lambda host: handed.append(all_put.wait(10)))
    copies.put(
        Moment(RuntimeError("unspecified launch failure")).synchronize, torch.ones(1), lambda host: handed.append(False)
    )
    copies.put(Moment().synchronize, torch.ones(1), lambda host: handed.append(False))
    all_put.set()
    error = told.get(timeout=10)
    assert "a copy from cuda:0 to the host failed" in str(error)
    assert "unspecified launch failure" in str(error)
    with pytest.raises(WorkerError, match="unspecified launch failure"):
        copies.put(Moment().synchronize, torch.ones(1), lambda host: None)
    copies.close()
    assert handed == [True], "what follows a copy that failed is not handed over"


def test_a_failing_callback_of_a_copy_is_reported() -> None:
    copies, told = Copies("cuda:0"), queue.SimpleQueue[WorkerError]()
    copies.report = told.put
    copies.put(Moment().synchronize, torch.ones(1), lambda host: {}["no such channel"])
    assert "no such channel" in str(told.get(timeout=10))
    copies.close()
