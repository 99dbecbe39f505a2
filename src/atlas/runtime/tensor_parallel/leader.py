"""A worker whose stages are sharded over several processes of one node: the leader's side.

It forks the followers and sends them each call, as a JSON line, before it makes the call itself; tensors travel by the
group's collectives. A follower that dies ends the worker. Knows processes and the calls of a worker to its stages.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TextIO, TypeVar

import torch
from torch import Tensor

from atlas.errors import AtlasError, WorkerError
from atlas.lifetime import describe_exit, forked
from atlas.runtime.assignment import Assignment
from atlas.runtime.collectives import GroupStore, appear_alone, store_listener
from atlas.runtime.device import Device
from atlas.runtime.exchange import Exchange
from atlas.runtime.group_sum import GroupSum, LeaderGroupSum
from atlas.runtime.stage import Stage
from atlas.runtime.tensor_parallel.follower import TENSOR, follow
from atlas.runtime.tensor_parallel.group import LEADER, TensorGroup, place_of
from atlas.runtime.tensor_parallel.sharding import ShardedStageSet
from atlas.runtime.topology import WorkerRole
from atlas.runtime.waits import Wait

EXIT_S = 10.0
"""How long after a broken collective the exit of a process may be noticed. On a busy host that takes seconds."""
TAIL_LINES, TAIL_BYTES = 50, 1 << 14
"""Of the log, in the error of a process that ended by itself."""

P = ParamSpec("P")
T = TypeVar("T")


class _Process(NamedTuple):
    pid: int
    orders: TextIO
    replies: TextIO


class Followers:
    """The other processes of a worker's group. Create them before the worker has threads: they are forks of it."""

    def __init__(self, assignment: Assignment, lost: Callable[[AtlasError], None]) -> None:
        """`lost` is called, on another thread, when a follower ends by itself."""
        role = assignment.role
        self.name, self.node, self._lost = role.name, role.node, lost
        self._is_ending = False
        self._error: AtlasError | None = None
        self._has_error = threading.Event()
        listener, port = store_listener("127.0.0.1")
        self._store = GroupStore("127.0.0.1", port, "", listener)
        theirs = self._store._replace(listener=None)
        self._processes = [_fork(assignment, rank, theirs) for rank in range(1, assignment.tp)]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True, name=f"rank {rank}").start()

    def join(self, assignment: Assignment, place: str) -> TensorGroup:
        """Form the group."""
        if assignment.nccl_on_shared_gpu:
            appear_alone(f"{self.node}.{LEADER}")
        return TensorGroup(LEADER, assignment.tp, self._store, place, assignment.patience_s)

    def order(self, call: str, stage: int | None = None, args: Sequence[Any] = (), kwargs: Any = None) -> None:
        """Have every follower call a method of its stages, or of one `stage`."""
        args = [TENSOR if isinstance(value, Tensor) else value for value in args]
        line = json.dumps({"call": call, "stage": stage, "args": args, "kwargs": kwargs or {}}) + "\n"
        with self.explaining():
            for process in self._processes:
                process.orders.write(line)
                process.orders.flush()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Replace the error of a broken collective or pipe by its usual cause: a process of the group has died."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            traceback.print_exc()  # into the log; the other process may have ended because of this error
            self._has_error.wait(EXIT_S)
            raise self._error or error from error

    def end(self) -> None:
        self._is_ending = True
        self.order("end")

    def _watch(self, rank: int, process: _Process) -> None:
        """Wait for a follower's end; its last message is the reason."""
        replies = [json.loads(line) for line in process.replies]
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if self._is_ending:
            return
        who = f"tensor-parallel rank {rank} of {self.name}"
        if replies:
            kind = AtlasError if replies[-1]["user_error"] else WorkerError
            self._error = kind(f"{who} failed: {replies[-1]['error']}")
        else:
            self._error = WorkerError(f"{who} {describe_exit(code)}{_end_of_stderr()}")
        self._has_error.set()
        self._lost(self._error)


def _fork(assignment: Assignment, rank: int, store: GroupStore) -> _Process:
    their_orders, orders = os.pipe()
    replies, their_replies = os.pipe()

    def run() -> None:
        os.dup2(their_orders, 0)
        os.dup2(2, 1)  # a library's print must not become a reply
        os.dup2(their_replies, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # descriptors of the leader
        logging.getLogger("atlas").handlers.clear()  # they write to one of those; its number may be used again
        place = assignment.device if assignment.nccl_on_shared_gpu else place_of(assignment.device, rank)
        follow(replace(assignment, device=place), rank, store, os.fdopen(0), os.fdopen(3, "w"))

    pid = forked(run)
    os.close(their_orders)
    os.close(their_replies)
    return _Process(pid, os.fdopen(orders, "w"), os.fdopen(replies))


def _end_of_stderr() -> str:
    """What the processes of this worker wrote last, if their stderr is a log file: why one was killed by a signal."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode):
            with Path(f"/proc/self/fd/{sys.stderr.fileno()}").open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                if lines := log.read().decode(errors="replace").strip().splitlines()[-TAIL_LINES:]:
                    return "\n".join(["; the end of its log:", *(f"  {line}" for line in lines)])
    return ""


# ---- calls of the worker, made by all ranks -----------------------------------------------------------------------
def on_all_ranks(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The method, called by the leader and by all followers; tensors among its arguments are sent to them."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.owner.followers.order(method.__name__, self.number, args, kwargs)
        group = self.owner.group
        shared = [group.share(value.contiguous()) if isinstance(value, Tensor) else value for value in args]
        return method(self, *shared, **kwargs)  # type: ignore[arg-type]

    return call


class LeaderStage(Stage):
    """A stage of the leader."""

    owner: LeaderStageSet
    number: int

    warm_up = on_all_ranks(Stage.warm_up)
    forward = on_all_ranks(Stage.forward)
    recompute = on_all_ranks(Stage.recompute)
    backward = on_all_ranks(Stage.backward)
    backward_input = on_all_ranks(Stage.backward_input)
    backward_weight = on_all_ranks(Stage.backward_weight)


class LeaderStageSet(ShardedStageSet):
    """The leader's stages."""

    stage_kind = LeaderStage
    number = None

    def __init__(self, assignment: Assignment, role: WorkerRole, device: Device, followers: Followers) -> None:
        self.owner, self.followers = self, followers
        self._packed: dict[int, Tensor] = {}
        """Of sums through the leader, by stage: all ranks' gradients, each pipeline's slices together."""
        over_transport = assignment.training.sums == "transport" or role.num_pipelines == 1
        self.sums_through_leader = over_transport and (role.num_pipelines > 1 or bool(role.groups))
        super().__init__(assignment, role, device, followers.join(assignment, device.place))
        for number, stage in self.stages.items():
            assert isinstance(stage, LeaderStage)
            stage.owner, stage.number = self, number

    # ---- sums over pipelines: every rank its own shards, or, over the WAN transport, the leader for all -------------
    def sum_by(self, exchanges: Mapping[int, Exchange], group_sum: GroupSum | None = None) -> None:
        if group_sum is not None and not self.sums_through_leader:
            group_sum = LeaderGroupSum(self.group, group_sum)
        super().sum_by(exchanges, group_sum)

    def open_exchanges(self, store: GroupStore) -> Mapping[int, Exchange]:
        self.followers.order("join_pipelines", args=[store.host, store.port, store.prefix])
        return super().open_exchanges(store)

    def begin_sum(self, step: int, number: int) -> None:
        if self.sums_through_leader:
            assert self.sync is not None, "there are other pipelines"
            ranks = torch.stack(self.gather_gradients(number)).view(self.group.size, self.role.num_pipelines, -1)
            self._packed[number] = ranks.transpose(0, 1).reshape(-1)
            self.sync.begin(step, number, self._packed[number])
            return
        self.followers.order("begin_sum", args=[step, number])
        super().begin_sum(step, number)

    def finish_sum(self, step: int, number: int, wait: Wait | None = None) -> int:
        if not self.sums_through_leader:
            self.followers.order("finish_sum", args=[step, number])
            return super().finish_sum(step, number, wait)
        assert self.sync is not None, "there are other pipelines"
        arrived_ns = self.sync.finish(step, number, wait or self._wait, whole=True)
        packed = self._packed.pop(number).view(self.role.num_pipelines, self.group.size, -1)
        self.followers.order("scatter_sums", args=[number])
        self.scatter_sums(number, [rank.flatten() for rank in packed.unbind(1)])
        return arrived_ns

    # ---- the rest of an iteration, and state -------------------------------------------------------------------------
    join_tied = on_all_ranks(ShardedStageSet.join_tied)
    gather_gradients = on_all_ranks(ShardedStageSet.gather_gradients)
    gather_tied = on_all_ranks(ShardedStageSet.gather_tied)
    begin_norm = on_all_ranks(ShardedStageSet.begin_norm)
    squares = on_all_ranks(ShardedStageSet.squares)
    clip = on_all_ranks(ShardedStageSet.clip)
    step = on_all_ranks(ShardedStageSet.step)
    states = on_all_ranks(ShardedStageSet.states)
    weights = on_all_ranks(ShardedStageSet.weights)

    def tied_gradient(self, name: str) -> Tensor:
        whole: Tensor | None = self.gather_tied(name)
        assert whole is not None, "the leader has the result"
        return whole

    def adopt_tied(self, name: str, gradient: Tensor) -> None:
        self.followers.order("scatter_tied", args=[name])
        self.scatter_tied(name, gradient)

    def end(self) -> None:
        self.followers.end()
