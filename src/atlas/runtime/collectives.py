"""Exchanges among the workers of one stage by torch.distributed: NCCL between GPUs, Gloo in host memory.

Each stage has a process group of its own, one rank of each pipeline (and one for each tensor-parallel rank): stages of
one worker finish in an order that differs from pipeline to pipeline. The first pipeline's worker has the store through
which the others find each other. Store and groups carry plain bytes and unpickle nothing; they neither encrypt nor
authenticate, so the launcher allows them only on loopback, and in networks that the recipe declares private
(SECURITY.md).
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ReduceScatterOptions, TCPStore

from atlas.errors import WorkerError
from atlas.runtime.assignment import Assignment
from atlas.runtime.exchange import Exchange, ExchangeKey, PartSizes
from atlas.runtime.ordered_sum import CHUNK_BYTES, OrderedSum
from atlas.runtime.topology import WorkerRole
from atlas.runtime.waits import Pending
from atlas.wan.transport.base import Handle

START_S = 90.0
"""Processes start one after the other, possibly on a busy host."""
OPERATION_S = 24 * 3600.0
"""No time limit of torch's own: a sum begins long before it is awaited, and the waiting worker has a time limit."""
LANES = 4
"""Of a Gloo group: each has a thread and a socket to every peer. One alone serves one peer at a time."""
MAX_IN_PAIRS = 8
"""Ranks of a Gloo group that exchange in pairs. Its `all_to_all` sends every rank that gets nothing an empty message:
with more ranks, all exchange in one operation, and the sum is taken when all parts have arrived."""
NUM_THREADS = 6
"""Of a Gloo group, for operations that are under way at the same time."""
POLL_S = 100e-6
"""Between two looks at an operation of the device."""
DETERMINISTIC = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
"""NCCL adds in one order in every run on the same ranks, as in Megatron-LM's deterministic mode."""


def store_listener(host: str) -> tuple[int, int]:
    """A descriptor that listens at this address of the host, for a store, and its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family)
    port: int = server.getsockname()[1]
    return server.detach(), port


class GroupStore(NamedTuple):
    """Where the processes of a group find each other."""

    host: str
    port: int
    prefix: str
    """Of all keys."""
    listener: int | None = None
    """The descriptor, in the process that has the store."""

    def open(self, patience_s: float) -> TCPStore:
        patience, place = datetime.timedelta(seconds=max(START_S, patience_s)), (self.host, self.port)
        if self.listener is None:
            return TCPStore(*place, is_master=False, timeout=patience)
        fd = self.listener
        return TCPStore(*place, is_master=True, timeout=patience, wait_for_workers=False, master_listen_fd=fd)


def torch_exchanges(
    assignment: Assignment, role: WorkerRole, found: GroupStore, tensor_rank: int = 0
) -> dict[int, TorchExchange]:
    """Of every stage of a process of this worker. Returns when all pipelines have joined."""
    store = found.open(assignment.patience_s)
    on_gpu = assignment.device.startswith("cuda") and (assignment.nccl_on_shared_gpu or not assignment.shares_gpu)
    if assignment.nccl_on_shared_gpu:
        appear_alone(f"{role.node}.{tensor_rank}")
    return {
        stage: TorchExchange(
            store,
            f"{found.prefix}.{assignment.epoch}.s{stage}.t{tensor_rank}",
            role.pipeline,
            role.num_pipelines,
            host=assignment.sums_listen,
            place=assignment.device,
            backend="nccl" if on_gpu else "gloo",
            fast=assignment.training.sums == "fast",
        )
        for stage in role.stages
    }


def appear_alone(name: str) -> None:
    """Appear to NCCL as a host of its own: it refuses two ranks of one host on one GPU."""
    os.environ |= {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}


class TorchExchange(Exchange):
    """Among the ranks of one process group."""

    def __init__(
        self, store: TCPStore, name: str, rank: int, size: int, *, host: str, place: str, backend: str, fast: bool
    ) -> None:
        """`name`: of the group, in the store. `host`: the address of this host that Gloo listens on."""
        self.rank, self.size, self.on_host = rank, size, backend == "gloo"
        self._in_pairs = self.on_host and size <= MAX_IN_PAIRS
        self.reduces = self._in_pairs if self.on_host else fast
        self._place = torch.device("cpu" if self.on_host else place)
        limit = datetime.timedelta(seconds=OPERATION_S)
        if self.on_host:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            # Gloo takes its devices in turn, one for each operation.
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host) for _ in range(LANES)]
            gloo._timeout, gloo._threads = limit, NUM_THREADS
            self._group: Any = dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, gloo)
        else:
            if fast:
                os.environ.update({key: os.environ.get(key, value) for key, value in DETERMINISTIC.items()})
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = limit
            self._group = dist.ProcessGroupNCCL(PrefixStore(name, store), rank, size, nccl)
        self._warm_up(name)

    def _warm_up(self, name: str) -> None:
        """Connect all ranks: NCCL does so in its first operation."""
        out, into = torch.zeros(self.size, device=self._place), torch.zeros(self.size, device=self._place)
        for pending in self.swap(ExchangeKey(-1, 0, 0), out, into, None, f"the start of {name}"):
            pending.wait(START_S)

    def swap(self, key: ExchangeKey, out: Tensor, into: Tensor, sizes: PartSizes | None, what: str) -> list[Pending]:
        outs, intos = (list(sizes.out), list(sizes.into)) if sizes else ([], [])
        work = self._group.alltoall_base(into, out, intos, outs)
        return [self._pending(work, what)]

    def gather(self, key: ExchangeKey, mine: Tensor, whole: Tensor, what: str) -> list[Pending]:
        if not self._in_pairs:
            work = self._group._allgather_base(whole, mine, AllgatherOptions())
            return [self._pending(work, what)]
        parts = torch.split(whole, len(mine))
        if parts[self.rank].data_ptr() != mine.data_ptr():
            parts[self.rank].copy_(mine)
        count = max(1, min(LANES // (self.size - 1), mine.nbytes // CHUNK_BYTES))
        stripes = [part.tensor_split(count) for part in parts]
        return [
            _gloo_handle(self._to_peer(distance, out, stripes[(self.rank - distance) % self.size][number]), what)
            for distance in range(1, self.size)
            for number, out in enumerate(stripes[self.rank])
        ]

    def reduce(self, key: ExchangeKey, out: Tensor, mine: Tensor, what: str) -> list[Pending]:
        if not self.on_host:
            return [self._pending(self._group._reduce_scatter_base(mine, out, ReduceScatterOptions()), what)]
        handle = Handle(what)

        def add() -> None:
            OrderedSum(self.rank, self.size, LANES, self._to_peer, out, mine).run()

        threading.Thread(target=_settle, args=(handle, add), daemon=True, name="ordered sum").start()
        return [handle]

    def close(self) -> None:
        """Peers that wait for this rank fail at once."""
        self._group.abort()

    def _pending(self, work: Any, what: str) -> Pending:
        return _gloo_handle(work, what) if self.on_host else PolledWork(work, what)

    def _to_peer(self, distance: int, out: Tensor, into: Tensor) -> Any:
        """An `all_to_all` with values for one rank only: an operation with all ranks would use one lane."""
        target, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        return self._group.alltoall_base(into, out, self._only(source, into), self._only(target, out))

    def _only(self, peer: int, values: Tensor) -> list[int]:
        return [len(values) if rank == peer else 0 for rank in range(self.size)]


def _gloo_handle(work: Any, what: str) -> Handle:
    handle = Handle(what)
    work.get_future().add_done_callback(lambda future: _settle(handle, future.value))
    return handle


def _settle(handle: Handle, run: Callable[[], object]) -> None:
    """Ends the handle as the call ends."""
    try:
        run()
    except RuntimeError as error:
        handle.fail(str(error).partition("\n")[0])
    else:
        handle.finish()


class PolledWork:
    """An operation on a stream of the device, which does not report its end: the host asks."""

    def __init__(self, work: Any, what: str) -> None:
        self._work, self.what = work, what
        self._end_ns = 0
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        try:
            completed: bool = self._work.is_completed()
        except RuntimeError as error:
            raise WorkerError(f"{self.what}: {error}") from error
        with self._lock:
            if completed and not self._end_ns:
                self._end_ns = time.monotonic_ns()
        return completed

    @property
    def end_ns(self) -> int:
        """When the host first saw that it was done."""
        return self._end_ns or time.monotonic_ns()

    def wait(self, timeout_s: float | None = None) -> None:
        deadline = time.monotonic() + (OPERATION_S if timeout_s is None else timeout_s)
        while not self.done:
            if time.monotonic() > deadline:
                raise WorkerError(f"{self.what}: not done within {timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            self._work.wait()  # the compute stream waits too; raises the operation's error
        except RuntimeError as error:
            raise WorkerError(f"{self.what}: {error}") from error
