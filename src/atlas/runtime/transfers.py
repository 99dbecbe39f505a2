"""Activations forward and their gradients back: receives posted ahead in the order in which they will be needed, sends
that never block computation, and hand-over between stages of one worker without a socket.

Knows tensors, tags and transfers of the Program. The worker knows what is computed with them, and when.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.ir.program import BACKWARD, BACKWARDS, FORWARD, Kind, Op
from atlas.runtime.circuits import WorkerCircuits
from atlas.runtime.device import Device
from atlas.runtime.links import WorkerLinks
from atlas.runtime.record import PendingSend, StepRecord
from atlas.wan.transport.base import Handle, Tag

MAX_AHEAD = 16
"""Receives that are posted before their ops."""
AHEAD_BYTES = 256 << 20
"""Memory for receives that are posted and not yet needed."""


class StageInput(NamedTuple):
    """An input of an op that crosses a boundary; `slot` counts microbatches over all steps."""

    direction: int
    stage: int
    """The receiving stage."""
    slot: int

    @property
    def boundary(self) -> int:
        return self.stage - 1 if self.direction == FORWARD else self.stage


class ReceivedTensor:
    """A receive. Its copy to the device starts when its last byte has arrived, on whichever thread sees it first."""

    def __init__(self, handle: Handle, buffer: Tensor, device: Device) -> None:
        self.handle = handle
        self._buffer, self._device = buffer, device
        self._lock = threading.Lock()
        self._upload: Callable[[], Tensor] | None = None
        handle.on_done(self._start_early)

    @property
    def tensor(self) -> Tensor:
        self._start()
        assert self._upload is not None
        return self._upload()

    def _start_early(self, done: Handle) -> None:
        """On the transport's thread, which a device error must not end: the error is raised again by `tensor`."""
        if done.error is None:
            with contextlib.suppress(Exception):
                self._start()

    def _start(self) -> None:
        with self._lock:
            if self._upload is None:
                self._upload = self._device.upload(self._buffer)


class Transfers:
    """Of one worker. `needs`: all inputs from the network, in order, over all steps."""

    def __init__(
        self,
        links: WorkerLinks,
        device: Device,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        needs: Iterator[StageInput],
        circuits: WorkerCircuits | None = None,
    ) -> None:
        self.links, self.device, self.shape, self.dtype = links, device, shape, dtype
        self.role, self.program = links.role, links.role.program
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        self._num_ahead = max(2, min(MAX_AHEAD, AHEAD_BYTES // num_bytes))
        self._needs, self._circuits = needs, circuits
        self._posted: dict[StageInput, ReceivedTensor] = {}
        self._here: dict[StageInput, tuple[Tensor, int]] = {}
        """Inputs from another stage of this worker, and when they were ready."""
        self._failed: deque[WorkerError] = deque()
        self._later = int(self.program.turn.max(initial=0)) + 1

    # ---- in ----------------------------------------------------------------------------------------------------------
    def post_ahead(self) -> None:
        """Post several receives at a time: each sends a message to the peer, and a batch wakes it once."""
        if len(self._posted) <= self._num_ahead // 2:
            for need in itertools.islice(self._needs, self._num_ahead - len(self._posted)):
                self._post(need)

    def _post(self, need: StageInput) -> None:
        buffer = self.device.buffer(self.shape, self.dtype)
        what = f"{self._reader(need)} waits for {self._sender(need)}"
        handle = self.links.recv(need.direction, need.boundary, self._tag(need), bytes_of(buffer), what)
        self._posted[need] = ReceivedTensor(handle, buffer, self.device)
        if self._circuits is not None:
            self._circuits.count(handle, need.boundary, need.slot)

    def arrival(self, need: StageInput) -> Handle | None:
        """The receive to wait for; None if another stage of this worker provides the input."""
        if need in self._here:
            return None
        if need not in self._posted:
            self._post(need)
        return self._posted[need].handle

    def take(self, need: StageInput) -> tuple[Tensor, int]:
        """The tensor on the device, and when it arrived; after its `arrival` is done."""
        if need in self._here:
            return self._here.pop(need)
        arrival = self._posted.pop(need)
        return arrival.tensor, arrival.handle.end_ns

    # ---- out ---------------------------------------------------------------------------------------------------------
    def send(self, op: Op, slot: int, num_passes: int, tensor: Tensor, record: StepRecord) -> None:
        """Send the output of a forward or a backward; `num_passes`: passes through the Program before this one. The
        device may still compute it: copies wait for the device, the caller does not."""
        need = self._need(op, slot)
        transfer = self.transfer(need.direction, need.boundary, op.microbatch)
        if self.program.stage_rank[need.stage] == self.role.rank:
            self._here[need] = (tensor, time.monotonic_ns())
            return
        turn = int(self.program.turn[transfer]) + num_passes * self._later
        what = f"{self.role.name} sends {self.program.transfer_name(transfer)} (slot {slot}) to stage {need.stage}"
        sending = PendingSend(transfer)
        record.sendings.append(sending)

        def post(host: Tensor) -> None:
            sending.handle = self.links.send(need.direction, need.boundary, self._tag(need), bytes_of(host), turn, what)
            sending.handle.on_done(lambda handle: self._failed.append(handle.error) if handle.error else None)

        circuits = self._circuits
        if circuits is None:
            self.device.download(tensor, post)
        else:
            self.device.download(tensor, lambda host: circuits.hold(need.boundary, slot, lambda: post(host)))

    def note_ready(self, op: Op, ready_ns: int, record: StepRecord) -> None:
        """When the output of an op was computed."""
        need = self._need(op, 0)
        transfer = self.transfer(need.direction, need.boundary, op.microbatch)
        record.ready_ns[transfer] = ready_ns
        if self.program.stage_rank[need.stage] == self.role.rank:
            record.start_ns[transfer] = ready_ns

    def _need(self, op: Op, slot: int) -> StageInput:
        """Whose input the output of an op is."""
        is_backward = op.kind in BACKWARDS
        return StageInput(BACKWARD, op.stage - 1, slot) if is_backward else StageInput(FORWARD, op.stage + 1, slot)

    def raise_failed(self) -> None:
        """Raise the error of a send that has failed."""
        if self._failed:
            raise self._failed.popleft()

    def transfer(self, direction: int, boundary: int, microbatch: int) -> int:
        """The transfer's number in the Program of this worker's cell."""
        program = self.program
        pipeline = direction * program.num_pipelines + self.role.worker // program.num_ranks
        return (pipeline * (program.num_stages - 1) + boundary) * program.num_slots + microbatch

    # ---- names -------------------------------------------------------------------------------------------------------
    def _tag(self, need: StageInput) -> Tag:
        return (need.direction, self.role.pipeline, need.stage, need.slot)

    def _reader(self, need: StageInput) -> str:
        kind = Kind.F if need.direction == FORWARD else Kind.B
        return f"{Op(kind, need.stage, need.slot)} on {self.role.who}"

    def _sender(self, need: StageInput) -> str:
        source = need.stage - 1 if need.direction == FORWARD else need.stage + 1
        letter = "F" if need.direction == FORWARD else "B"
        return f"{source}SEND_{letter}{need.slot} of p{self.role.pipeline}.s{self.program.stage_rank[source]}"


def bytes_of(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The memory of a contiguous host tensor of any dtype."""
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat
