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
from atlas.runtime.optimizer import LearningRate, OptimizerSettings, make_optimizer
from atlas.runtime.stage import Stage
from atlas.wan.endpoint import Endpoint
from atlas.wan.settings import Settings
from atlas.wan.transport import Handle, Key, Tag

GRADIENTS, WARM_UP = 2, 3
"""The directions of the gradient sums among pipelines and of the first, empty messages, next to FORWARD, BACKWARD."""
CONNECT_S = 8.0
"""Peers listen before anybody is told to connect."""
STREAMS = 2
"""To each peer, in an emulation: its paths are wide or narrow, but have no window to overcome."""

Address = tuple[str, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """What is trained and how."""

    gpt: TinyGpt
    optimizer: str = "sgd"
    learning_rate: float = 0.1

    @property
    def settings(self) -> OptimizerSettings:
        return OptimizerSettings(LearningRate(self.learning_rate), self.optimizer)


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
        self,
        program: Program,
        worker: int,
        compute_ns: Ints,
        training: Training,
        device: Device,
        patience_s: float,
        settings: Settings | None = None,
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
        named = {name: p for stage in self.stages.values() for name, p in stage.named_parameters.items()}
        self.optimizer = make_optimizer(training.settings, named)
        settings = settings or Settings(max_streams=STREAMS, deadline_s=patience_s + 5)
        self.listener = Endpoint(self._node(worker), settings=settings)
        self.record = Record()
        self._sends: list[tuple[int | None, Handle]] = []
        """By transfer, where it is one of the Program's."""
        self._receives: dict[Tag, Handle] = {}
        self._here: dict[Tag, tuple[Tensor, int]] = {}
        """What stages of this worker hand to each other, and when."""
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
        end = self.listener
        channels = {
            (direction, number): end.open(self._peer_node(direction, number), _lane(direction, number), address)
            for (direction, number), address in addresses.items()
        }
        end.warm_up(channels.values(), min(self.patience_s, CONNECT_S))
        for direction, number in addresses:
            self._post(direction, number, (WARM_UP, self.worker, direction, number), torch.zeros(1))
        for stage in self.stages.values():
            stage.warm_up()
        for tag in self._expected_warm_ups():
            source, lane = tag[1], _lane(tag[2], tag[3])
            who = f"{self.name} waits for a first message from {self.program.worker_name(source)}"
            end.recv(Key(self._node(source), lane, tag), what=who).wait(self.patience_s)

    def _expected_warm_ups(self) -> list[Tag]:
        """By the sender's worker, and the direction and number of the channel as the sender calls it."""
        program, tags = self.program, list[Tag]()
        for s in self.stages:
            for neighbour, direction in ((s - 1, FORWARD), (s + 1, BACKWARD)):
                if 0 <= neighbour < program.num_stages and program.stage_rank[neighbour] != self.rank:
                    source = program.worker(self.pipeline, neighbour)
                    tags.append((WARM_UP, source, direction, min(s, neighbour)))
        return tags + [
            (WARM_UP, c * program.num_ranks + self.rank, GRADIENTS, self.pipeline) for c in self._other_pipelines
        ]

    def run(self, start_ns: int) -> Record:
        """The whole Program, from `start_ns` on the monotonic clock."""
        time.sleep(max(0, start_ns - time.monotonic_ns()) / 1e9)
        for op in self.ops:
            span = self._dispatch[op.kind](op, start_ns)
            self.record.op_start_ns.append(span.start_ns)
            self.record.op_end_ns.append(span.end_ns)
        for transfer, handle in self._sends:
            handle.wait(self.patience_s)
            if transfer is not None:
                self.record.start_ns[transfer] = handle.start_ns
        return self.record

    def close(self) -> None:
        """Drops every connection, whatever state it is in."""
        self.listener.close(0.0)

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
            tag = (GRADIENTS, self.pipeline, op.stage, op.microbatch)
            self._post(GRADIENTS, c, tag, parts[self.pipeline])
        for c in self._other_pipelines:
            who = f"{self._who(op)} waits for the gradients of {self._peer(GRADIENTS, c)}"
            key = Key(
                self._peer_node(GRADIENTS, c), _lane(GRADIENTS, self.pipeline), (GRADIENTS, c, op.stage, op.microbatch)
            )
            parts[c] = torch.empty_like(parts[self.pipeline])
            handle = self.listener.recv(key, parts[c].numpy(), who)
            handle.wait(self.patience_s)
            start_ns = max(start_ns, handle.end_ns)

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
        tag = (direction, self.pipeline, to, op.microbatch)
        self.record.ready_ns[transfer] = ready_ns
        if self.program.stage_rank[to] == self.rank:
            self.record.start_ns[transfer] = ready_ns
            self._here[tag] = (tensor, time.monotonic_ns())
            return
        # A link of one's own serves first come, first served; only a shared one takes turns.
        turn = int(self.program.turn[transfer]) if self.program.sharing else 0
        self._post(direction, boundary, tag, tensor, turn, transfer)

    def _post(
        self, direction: int, number: int, tag: Tag, tensor: Tensor, turn: int = 0, transfer: int | None = None
    ) -> None:
        key = Key(self._peer_node(direction, number), _lane(direction, number), tag)
        what = (
            f"{self.name} sends {self.program.transfer_name(transfer) if transfer is not None else tag} to {key.peer}"
        )
        self._sends.append((transfer, self.listener.send(key, tensor.contiguous().numpy(), turn, what)))

    def _receive(self, op: Op, direction: int, *, keep: bool = False) -> tuple[Tensor, int]:
        boundary = op.stage - 1 if direction == FORWARD else op.stage
        transfer = self._transfer(direction, boundary, op.microbatch)
        tag = (direction, self.pipeline, op.stage, op.microbatch)
        if tag in self._here:
            tensor, arrive_ns = self._here[tag] if keep else self._here.pop(tag)
        else:
            tensor, arrive_ns = self._fetch(op, direction, boundary, transfer, tag, keep=keep)
        self.record.arrive_ns[transfer] = arrive_ns
        return tensor, arrive_ns

    def _fetch(
        self, op: Op, direction: int, boundary: int, transfer: int, tag: Tag, *, keep: bool
    ) -> tuple[Tensor, int]:
        worker = self.program.worker(self.pipeline, boundary + direction)
        who = f"{self._who(op)} waits for {self.program.transfer_name(transfer)} of {self.program.worker_name(worker)}"
        handle = self._receives.pop(tag, None)
        if handle is None:
            handle = self.listener.recv(Key(self._node(worker), _lane(direction, boundary), tag), what=who)
        data = handle.wait(self.patience_s)
        if keep:
            self._receives[tag] = handle
        shape = next(iter(self.stages.values())).task.activation_shape
        return torch.frombuffer(data, dtype=torch.float32).view(shape), handle.end_ns

    def _transfer(self, direction: int, boundary: int, slot: int) -> int:
        shape = (2, self.program.num_pipelines, self.program.num_stages - 1, self.program.num_slots)
        return int(np.ravel_multi_index((direction, self.pipeline, boundary, slot), shape))

    @property
    def _other_pipelines(self) -> list[int]:
        return [c for c in range(self.program.num_pipelines) if c != self.pipeline]

    def _peer(self, direction: int, number: int) -> str:
        return self.program.worker_name(self._peer_worker(direction, number))

    def _peer_node(self, direction: int, number: int) -> str:
        return self._node(self._peer_worker(direction, number))

    def _peer_worker(self, direction: int, number: int) -> int:
        """The other end of a channel; a channel's number is its boundary, or the other pipeline."""
        if direction == GRADIENTS:
            return number * self.program.num_ranks + self.rank
        return self.program.worker(self.pipeline, number + 1 - direction)

    def _node(self, worker: int) -> str:
        return f"{self.program.worker_dc(worker)}/{self.program.worker_name(worker)}"

    def _who(self, op: Op) -> str:
        return f"{op} on {self.name} ({self.program.worker_dc(self.worker)})"


def _lane(direction: int, number: int) -> int:
    """Every channel of the Program has its own."""
    return direction + 4 * number
