"""The worker: does its ops of a Program in order, and nothing else. Every decision was taken before it started.

It waits for inputs, runs ops on its device, hands outputs to its channels and notes when what happened. It knows
its own ops, stages and peers' addresses; not the cluster, not the costs of others, not who started it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from atlas.errors import ProgramError
from atlas.ir.ops import Kind, Op
from atlas.ir.program import BACKWARD, FORWARD, Ints, Program
from atlas.runtime.device import Device, Span
from atlas.runtime.model import TinyGpt
from atlas.runtime.stage import Stage
from atlas.wan.framing import Frame, FrameType
from atlas.wan.peer import Channel, Key, Listener, Mailbox

GRADIENTS, WARM_UP = 2, 3
"""The directions of the gradient sums among pipelines and of the first, empty messages, next to FORWARD, BACKWARD."""

Address = tuple[str, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """What is trained and how."""

    gpt: TinyGpt
    optimizer: str = "sgd"
    learning_rate: float = 0.1


def make_optimizer(training: Training, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=training.learning_rate)
    if training.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=training.learning_rate)
    raise ProgramError(f"optimizer {training.optimizer!r}: choose sgd or adamw")


@dataclass
class Record:
    """What one worker saw, on the monotonic clock: spans by op in its own order, moments by transfer."""

    op_start_ns: list[int] = field(default_factory=list)
    op_end_ns: list[int] = field(default_factory=list)
    ready_ns: dict[int, int] = field(default_factory=dict)
    start_ns: dict[int, int] = field(default_factory=dict)
    arrive_ns: dict[int, int] = field(default_factory=dict)


class Worker:
    """`listener` is open from the start, so that peers can connect; then `connect`, then `run`."""

    def __init__(
        self, program: Program, worker: int, compute_ns: Ints, training: Training, device: Device, patience_s: float
    ) -> None:
        self.program, self.worker, self.compute_ns = program, worker, compute_ns
        self.device, self.patience_s = device, patience_s
        self.pipeline, self.rank = divmod(worker, program.num_ranks)
        self.name = program.worker_name(worker)
        self.ops = program.ops(worker)
        self.recomputed = {(op.stage, op.microbatch) for op in self.ops if op.kind == Kind.R}
        # The mean over the whole batch: every microbatch of every pipeline counts alike.
        scale = 1.0 / (program.num_microbatches * program.num_pipelines)
        self.stages = {
            s: Stage(training.gpt, s, program.num_stages, self.pipeline, scale)
            for s in range(program.num_stages)
            if program.stage_rank[s] == self.rank
        }
        self.parameters = [p for stage in self.stages.values() for p in stage.parameters]
        self.optimizer = make_optimizer(training, self.parameters)
        self.mailbox = Mailbox()
        self.listener = Listener(self.mailbox)
        self.channels: dict[tuple[int, int], Channel] = {}
        self.record = Record()
        self._keys: dict[Key, int] = {}
        self._dispatch: dict[Kind, Callable[[Op, int], Span]] = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward_weight,
            Kind.SYNC: self._sync,
            Kind.STEP: self._step,
        }

    # ---- life ------------------------------------------------------------------------------------------------
    def connect(self, addresses: dict[tuple[int, int], Address]) -> None:
        """Opens a channel for every (direction, boundary), and for (GRADIENTS, pipeline) to every peer.

        Everything is used once before it counts: a first burst over a cold connection is several times slower.
        """
        for (direction, number), address in addresses.items():
            channel = Channel(self.name, self._peer(direction, number), address, self.mailbox)
            self.channels[direction, number] = channel
            zeros = torch.zeros(next(iter(self.stages.values())).gpt.activation_shape)
            channel.send(self._frame(Key(WARM_UP, self.worker, direction, number), zeros))
        for stage in self.stages.values():
            stage.warm_up()
        for key in self._expected_warm_ups():
            who = f"{self.name} waits for a first message from {self.program.worker_name(key.pipeline)}"
            self.mailbox.wait(key, who, self.patience_s)

    def _expected_warm_ups(self) -> list[Key]:
        """By the sender's worker, and the direction and number of the channel as the sender calls it."""
        program, keys = self.program, []
        for s in self.stages:
            for neighbour, direction in ((s - 1, FORWARD), (s + 1, BACKWARD)):
                if 0 <= neighbour < program.num_stages and program.stage_rank[neighbour] != self.rank:
                    source = program.worker(self.pipeline, neighbour)
                    keys.append(Key(WARM_UP, source, direction, min(s, neighbour)))
        return keys + [
            Key(WARM_UP, c * program.num_ranks + self.rank, GRADIENTS, self.pipeline) for c in self._other_pipelines
        ]

    def run(self, start_ns: int) -> Record:
        """The whole Program, from `start_ns` on the monotonic clock."""
        time.sleep(max(0, start_ns - time.monotonic_ns()) / 1e9)
        for op in self.ops:
            span = self._dispatch[op.kind](op, start_ns)
            self.record.op_start_ns.append(span.start_ns)
            self.record.op_end_ns.append(span.end_ns)
        for channel in self.channels.values():
            channel.close(self.patience_s)
            for key, sent_ns in channel.start_ns.items():
                if key in self._keys:
                    self.record.start_ns[self._keys[key]] = sent_ns
        self.mailbox.check()
        return self.record

    def close(self) -> None:
        """Drops every connection, whatever state it is in."""
        self.listener.close()
        for channel in self.channels.values():
            channel.cut()

    # ---- ops: each waits for its input, runs, sends its output -------------------------------------------------
    def _forward(self, op: Op, start_ns: int) -> Span:
        stage, x = self.stages[op.stage], None
        if op.stage > 0:
            x, start_ns = self._receive(op, FORWARD)
        keep = (op.stage, op.microbatch) not in self.recomputed
        y, span = self._run(op, start_ns, lambda: stage.forward(op.microbatch, x, keep=keep))
        if not stage.is_last:
            self._send(op, FORWARD, y, span.end_ns)
        return span

    def _recompute(self, op: Op, start_ns: int) -> Span:
        stage = self.stages[op.stage]
        if self.program.recompute_on_arrival and not stage.is_last:
            _, start_ns = self._receive(op, BACKWARD, keep=True)
        return self._run(op, start_ns, lambda: stage.recompute(op.microbatch))[1]

    def _backward(self, op: Op, start_ns: int) -> Span:
        stage, gradient = self.stages[op.stage], None
        if not stage.is_last:
            gradient, start_ns = self._receive(op, BACKWARD)
        half = stage.backward if op.kind == Kind.B else stage.backward_input
        x_gradient, span = self._run(op, start_ns, lambda: half(op.microbatch, gradient))
        if x_gradient is not None:
            self._send(op, BACKWARD, x_gradient, span.end_ns)
        return span

    def _backward_weight(self, op: Op, start_ns: int) -> Span:
        stage = self.stages[op.stage]
        return self._run(op, start_ns, lambda: stage.backward_weight(op.microbatch))[1]

    def _sync(self, op: Op, start_ns: int) -> Span:
        """Everyone sends everyone its sum; all add up in the order of pipelines, so all get the same bits."""
        parts = {self.pipeline: torch.cat([g.flatten() for s in self.stages.values() for g in s.gradients.total()])}
        for c in self._other_pipelines:
            key = Key(GRADIENTS, self.pipeline, op.stage, op.microbatch)
            self.channels[GRADIENTS, c].send(self._frame(key, parts[self.pipeline]))
        for c in self._other_pipelines:
            who = f"{self._who(op)} waits for the gradients of {self._peer(GRADIENTS, c)}"
            letter = self.mailbox.wait(Key(GRADIENTS, c, op.stage, op.microbatch), who, self.patience_s)
            parts[c], start_ns = _tensor(letter.frame), max(start_ns, letter.arrive_ns)

        def add_up() -> None:
            total = torch.zeros_like(parts[self.pipeline])
            for c in sorted(parts):
                total += parts[c]
            sizes = [p.numel() for p in self.parameters]
            for parameter, gradient in zip(self.parameters, torch.split(total, sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)

        return self._run(op, start_ns, add_up)[1]

    def _step(self, op: Op, start_ns: int) -> Span:
        if any(parameter.grad is None for parameter in self.parameters):
            raise ProgramError(f"{self._who(op)}: no SYNC before it; every STEP needs one (see `with_optimizer`)")

        def step() -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            for stage in self.stages.values():
                stage.gradients.begin((op.microbatch + 1) * self.program.num_microbatches)

        return self._run(op, start_ns, step)[1]

    def _run(self, op: Op, ready_ns: int, work: Callable[[], T]) -> tuple[T, Span]:
        return self.device.run(work, int(self.compute_ns[op.stage, op.kind]), ready_ns)

    # ---- transfers ---------------------------------------------------------------------------------------------
    def _send(self, op: Op, direction: int, tensor: Tensor, ready_ns: int) -> None:
        to, boundary = (op.stage + 1, op.stage) if direction == FORWARD else (op.stage - 1, op.stage - 1)
        transfer = self._transfer(direction, boundary, op.microbatch)
        frame = self._frame(Key(direction, self.pipeline, to, op.microbatch), tensor)
        self.record.ready_ns[transfer] = ready_ns
        if self.program.stage_rank[to] == self.rank:
            self.record.start_ns[transfer] = ready_ns
            self.mailbox.put(frame)
            return
        self._keys[Key.of(frame)] = transfer
        # A link of one's own serves first come, first served; only a shared one takes turns.
        turn = int(self.program.turn[transfer]) if self.program.sharing else 0
        self.channels[direction, boundary].send(frame, turn)

    def _receive(self, op: Op, direction: int, *, keep: bool = False) -> tuple[Tensor, int]:
        boundary = op.stage - 1 if direction == FORWARD else op.stage
        transfer = self._transfer(direction, boundary, op.microbatch)
        source = self.program.worker_name(self.program.worker(self.pipeline, boundary + direction))
        who = f"{self._who(op)} waits for {self.program.transfer_name(transfer)} of {source}"
        key = Key(direction, self.pipeline, op.stage, op.microbatch)
        letter = self.mailbox.wait(key, who, self.patience_s, keep=keep)
        self.record.arrive_ns[transfer] = letter.arrive_ns
        return _tensor(letter.frame), letter.arrive_ns

    def _transfer(self, direction: int, boundary: int, slot: int) -> int:
        shape = (2, self.program.num_pipelines, self.program.num_stages - 1, self.program.num_slots)
        return int(np.ravel_multi_index((direction, self.pipeline, boundary, slot), shape))

    def _frame(self, key: Key, tensor: Tensor) -> Frame:
        payload = tensor.contiguous().numpy().data.cast("B")
        return Frame(FrameType.DATA, payload, dtype="float32", shape=tuple(tensor.shape), **key._asdict())

    @property
    def _other_pipelines(self) -> list[int]:
        return [c for c in range(self.program.num_pipelines) if c != self.pipeline]

    def _peer(self, direction: int, number: int) -> str:
        """The other end of a channel; a channel's number is its boundary, or the other pipeline."""
        if direction == GRADIENTS:
            return self.program.worker_name(number * self.program.num_ranks + self.rank)
        return self.program.worker_name(self.program.worker(self.pipeline, number + 1 - direction))

    def _who(self, op: Op) -> str:
        return f"{op} on {self.name} ({self.program.worker_dc(self.worker)})"


def _tensor(frame: Frame) -> Tensor:
    return torch.frombuffer(frame.payload, dtype=torch.float32).view(frame.shape)
