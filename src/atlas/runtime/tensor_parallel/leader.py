"""A worker whose stages are divided over several processes of one node: the side of the one that leads.

It forks the others, and tells them what it does, in JSON lines, before it does it; tensors travel by the group's
collectives. One of them that dies ends the worker, as if it had died itself. Knows processes and what a worker may ask
of its stages; not why it asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TextIO

from torch import Tensor

from atlas.errors import AtlasError, WorkerError
from atlas.ir.parse import from_text
from atlas.lifetime import end_with_parent
from atlas.runtime.assignment import Assignment
from atlas.runtime.checkpoint import LayerState
from atlas.runtime.stage import Stage
from atlas.runtime.tensor_parallel.follower import follow
from atlas.runtime.tensor_parallel.group import LEADER, TensorGroup, listen, place_of
from atlas.runtime.tensor_parallel.sharding import ShardedStageSet
from atlas.runtime.wiring import WorkerRole

NEWS_S = 2.0
"""How long after a broken collective the news of a death may take."""


class _Process(NamedTuple):
    pid: int
    orders: TextIO
    answers: TextIO


class Followers:
    """The other processes of a worker's group. To be made before the worker has any thread: they are forks of it."""

    def __init__(self, assignment: Assignment, lost: Callable[[AtlasError], None]) -> None:
        """`lost` is called, on another thread, when one of them has ended unasked."""
        role = WorkerRole(from_text(assignment.program), assignment.worker, assignment.cell, assignment.num_cells)
        self.name, self._lost = role.name, lost
        self._is_ending = False
        self._error: AtlasError | None = None
        self._has_news = threading.Event()
        self._listener, self._port = listen()
        self._processes = [_fork(assignment, rank, self._port) for rank in range(1, assignment.tp)]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True, name=f"rank {rank}").start()

    def join(self, assignment: Assignment, place: str) -> TensorGroup:
        """Meets them, on this node."""
        return TensorGroup(LEADER, assignment.tp, self._port, place, assignment.patience_s, self._listener)

    def order(self, what: str, **details: Any) -> None:
        line = json.dumps({"do": what, **details}) + "\n"
        with self.explaining():
            for process in self._processes:
                process.orders.write(line)
                process.orders.flush()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """A collective or a pipe that breaks mostly means that a process of the group has died: then that is said."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._has_news.wait(NEWS_S)
            raise self._error or error from error

    def end(self) -> None:
        self._is_ending = True
        self.order("end")

    def _watch(self, rank: int, process: _Process) -> None:
        """What it says is why it ends."""
        said = [json.loads(line) for line in process.answers]
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if self._is_ending:
            return
        who = f"tensor-parallel rank {rank} of {self.name}"
        if said:
            kind = AtlasError if said[-1]["mend"] else WorkerError
            self._error = kind(f"{who} failed: {said[-1]['error']}")
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended early with exit code {code}"
            self._error = WorkerError(f"{who} {how}")
        self._has_news.set()
        self._lost(self._error)


def _fork(assignment: Assignment, rank: int, port: int) -> _Process:
    their_orders, orders = os.pipe()
    answers, their_answers = os.pipe()
    leader = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            end_with_parent(leader)
            os.dup2(their_orders, 0)
            os.dup2(2, 1)  # a stray print of some library is no answer
            os.dup2(their_answers, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # the leader's
            mine = replace(assignment, device=place_of(assignment.device, rank))
            follow(mine, rank, port, os.fdopen(0), os.fdopen(3, "w"))
            code = 0
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)  # gloo's threads may abort an interpreter that unwinds under them
    os.close(their_orders)
    os.close(their_answers)
    return _Process(pid, os.fdopen(orders, "w"), os.fdopen(answers))


# ---- what the worker asks, done by all -------------------------------------------------------------------------------
class LeaderStage(Stage):
    """A stage of the leader's: each call is one of the whole group's."""

    led: LeaderStageSet
    number: int

    def _order(self, what: str, **details: Any) -> None:
        self.led.order(what, stage=self.number, **details)

    def warm_up(self) -> None:
        self._order("warm_up")
        super().warm_up()

    def forward(self, slot: int, x: Tensor | None, *, keep: bool) -> Tensor:
        self._order("forward", slot=slot, keep=keep, has_input=x is not None)
        return super().forward(slot, self.led.shared(x), keep=keep)

    def recompute(self, slot: int) -> None:
        self._order("recompute", slot=slot)
        super().recompute(slot)

    def backward(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        self._order("backward", slot=slot, has_input=gradient is not None)
        return super().backward(slot, self.led.shared(gradient))

    def backward_input(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        self._order("backward_input", slot=slot, has_input=gradient is not None)
        return super().backward_input(slot, self.led.shared(gradient))

    def backward_weight(self, slot: int) -> None:
        self._order("backward_weight", slot=slot)
        super().backward_weight(slot)

    def outgoing(self) -> list[Tensor]:
        """Everybody's, where there are other pipelines to sum with."""
        if self.led.is_alone:
            return super().outgoing()
        self._order("gather_gradients")
        return self.led.gather_gradients(self)

    def adopt(self, sums: Sequence[Tensor]) -> None:
        if self.led.is_alone:
            self._order("adopt")
            super().adopt(sums)
        else:
            self._order("scatter_sums")
            self.led.scatter_sums(self, sums)


class LeaderStageSet(ShardedStageSet):
    """The leader's."""

    stage_kind = LeaderStage

    def __init__(self, assignment: Assignment, role: WorkerRole, place: str, followers: Followers) -> None:
        self._followers = followers
        self.is_alone = not role.other_pipelines
        super().__init__(assignment, role, place, followers.join(assignment, place))
        for number, stage in self.stages.items():
            assert isinstance(stage, LeaderStage)
            stage.led, stage.number = self, number

    def order(self, what: str, **details: Any) -> None:
        self._followers.order(what, **details)

    def shared(self, tensor: Tensor | None) -> Tensor | None:
        """An input, given to all."""
        return None if tensor is None else self.group.share(tensor.contiguous())

    def join_tied(self) -> None:
        self.order("join_tied")
        super().join_tied()

    def tied_gradient(self, name: str) -> Tensor:
        self.order("gather_tied", name=name)
        whole = self.gather_tied(name)
        assert whole is not None, "the leader gathers"
        return whole

    def adopt_tied(self, name: str, gradient: Tensor) -> None:
        self.order("scatter_tied", name=name)
        self.scatter_tied(name, gradient)

    def squares(self) -> list[float]:
        self.order("gather_squares")
        return self.gather_squares()

    def clip(self, norm: float, max_norm: float) -> None:
        self.order("clip", norm=norm, max_norm=max_norm)
        super().clip(norm, max_norm)

    def step(self, num_done: int) -> None:
        self.order("step", num_done=num_done)
        super().step(num_done)

    def states(self, layers: Collection[str]) -> dict[str, LayerState]:
        self.order("states", layers=list(layers))
        return super().states(layers)

    def weights(self) -> dict[str, Tensor]:
        self.order("weights")
        return super().weights()

    def end(self) -> None:
        self._followers.end()
