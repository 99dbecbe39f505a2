"""Sums of gradients over pipelines: what is being sent is left alone until it has gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from atlas.errors import WorkerError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.runtime.device import Cpu
from atlas.runtime.links import WorkerLinks
from atlas.runtime.sync import SUMS, GradientSync
from atlas.runtime.wiring import WorkerRole
from atlas.schedules.classic import one_f_one_b
from atlas.wan.transport.base import Handle


class HeldLinks:
    """Everything arrives at once, as zeros; what is sent stays on its way until `release`."""

    def __init__(self) -> None:
        self.role = WorkerRole(with_optimizer(one_f_one_b(Layout(2, 1, 1, ("a",)))), 0)
        self.patience_s = 10.0
        self.sums_out: list[tuple[Handle, Any]] = []

    def recv_from(self, lane: int, pipeline: int, rank: int, tag: tuple[int, ...], buffer: Any, what: str) -> Handle:
        buffer[:] = 0
        return self._done(what)

    def send_to(self, lane: int, pipeline: int, rank: int, tag: tuple[int, ...], buffer: Any, what: str) -> Handle:
        if tag[-1] != SUMS:
            return self._done(what)
        handle = Handle(what)
        self.sums_out.append((handle, buffer))
        return handle

    def _done(self, what: str) -> Handle:
        handle = Handle(what)
        handle.finish()
        return handle


def test_sums_are_given_out_when_the_others_have_them() -> None:
    """They may be clipped in place from then on, and lie in the memory that is sent."""
    links = HeldLinks()
    sync = GradientSync(cast(WorkerLinks, links), Cpu(), "p0.s0")
    mine = [torch.ones(6)]
    sync.begin(0, 0, mine)
    found: list[torch.Tensor] = []

    def wait(handles: Sequence[Handle]) -> None:
        for handle in handles:
            handle.wait(10)

    def finish() -> None:
        found.extend(sync.finish(0, 0, mine, wait)[0])

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join(0.2)
    assert not found, "half of the sums is still on its way"
    ((handle, buffer),) = links.sums_out
    assert buffer.view("float32").tolist() == [1.0, 1.0, 1.0]
    handle.finish()
    thread.join(10)
    assert found[0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


class Stuck(Cpu):
    """A device off which nothing comes."""

    def download(self, tensor: torch.Tensor, then: Callable[[torch.Tensor], None]) -> None:
        pass


def test_gradients_that_do_not_come_off_the_device_are_an_error_in_time() -> None:
    links = HeldLinks()
    links.patience_s = 0.05
    sync = GradientSync(cast(WorkerLinks, links), Stuck(), "p0.s0 (a)")
    mine = [torch.empty(6, device="meta")]
    sync.begin(3, 0, mine)
    with pytest.raises(WorkerError, match=r"SYNC of step 3 on p0\.s0 \(a\): its own gradients .* within 0\.05 s"):
        sync.finish(3, 0, mine, lambda handles: None)
