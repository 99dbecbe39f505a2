"""A failure is reported within seconds, by name, and leaves no process behind."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from process_trees import is_alive

from atlas.cost.table import kind_costs, uniform_costs
from atlas.errors import ProgramError, WorkerError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import EmulationSettings, emulate
from atlas.launch.paths import require_emulable
from atlas.launch.report.events import StepEvent
from atlas.launch.smoke import smoke_program
from atlas.runtime import process
from atlas.runtime.assignment import stand_in
from atlas.runtime.device import Cpu
from atlas.runtime.messages import MessageWriter
from atlas.runtime.transfers import ReceivedTensor
from atlas.schedules.classic import one_f_one_b
from atlas.wan.transport.base import Handle

TRAINING = stand_in(width=16, length=8, microbatch=2)


@pytest.mark.parametrize(
    ("how", "patience_s", "says"),
    [
        (signal.SIGKILL, 60.0, r"worker p0\.s1 was killed by SIGKILL"),
        (signal.SIGSTOP, 10.0, r"waits for .* of p0\.s1: (not done|nothing came) within 10 s"),
    ],
    ids=["killed", "frozen"],
)
def test_a_lost_worker_is_reported_and_nothing_is_left(how: signal.Signals, patience_s: float, says: str) -> None:
    program = with_optimizer(one_f_one_b(Layout(1, 2, 4, ("us-east", "us-west"))))
    per_kind_ns = kind_costs(forward_ns=30_000_000, backward_ns=60_000_000)
    costs = uniform_costs(1, 2, per_kind_ns, wan_boundaries=(0,), wan_ns=10_000_000, wan_latency_ns=10_000_000)
    pids, struck = dict[str, int](), list[float]()

    def strike(event: StepEvent, timeline: Timeline) -> None:
        if not struck:
            struck.append(time.monotonic())
            os.kill(pids["p0.s1"], how)

    setup = EmulationSettings(10_000, patience_s=patience_s)
    with pytest.raises(WorkerError, match=says):
        emulate(program, costs, TRAINING, setup, on_start=pids.update, on_step=strike)
    assert time.monotonic() - struck[0] < 60, "long before the run would end"
    assert len(pids) == 2
    assert not any(map(is_alive, pids.values()))


def test_unsupported_costs_are_an_error_before_the_start() -> None:
    program, costs = smoke_program()
    shared = uniform_costs(2, 2, costs.compute_ns[0, 0], wan_boundaries=(0,), wan_ns=1, sharing=True)
    with pytest.raises(ProgramError, match="do not agree on whether pipelines take turns"):
        require_emulable(program, shared)
    overlapping = replace(costs, links=tuple(replace(link, servers=4) for link in costs.links))
    with pytest.raises(ProgramError, match="serves 4 transfers at once"):
        require_emulable(program, overlapping)


# ---- threads beside the one that trains ------------------------------------------------------------------------------
class Full(Cpu):
    """A device without room for another tensor."""

    def upload(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_failed_upload_is_raised_where_the_tensor_is_needed_not_on_the_transports_thread() -> None:
    handle = Handle("1F0 waits for 0SEND_F0")
    arrival = ReceivedTensor(handle, torch.ones(2), Full())
    handle.finish()  # on the transport's thread
    with pytest.raises(torch.OutOfMemoryError):
        _ = arrival.tensor


class Exited(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("messages", "errors"),
    [('{"complete": [[0, 1]]}\n', ["a bug in Atlas"]), ("", [])],
    ids=["bug", "end"],
)
def test_an_invalid_message_ends_the_worker_with_an_error(
    monkeypatch: pytest.MonkeyPatch, messages: str, errors: list[str]
) -> None:
    """Messages are read by a thread: if it ended alone, the worker would miss a stop and the launcher's end."""

    def exit(code: int) -> None:
        raise Exited(code)

    def broken(*ids: object) -> None:
        raise KeyError("no such save")

    monkeypatch.setattr(os, "_exit", exit)
    out, worker = io.StringIO(), SimpleNamespace(saving=SimpleNamespace(confirm=broken))
    with pytest.raises(Exited):
        process._handle_all(io.StringIO(messages), cast(Any, worker), cast(Any, None), MessageWriter(out))
    sent = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [message["error"].partition(":")[0] for message in sent] == errors
