"""The Program: what every worker of one DP-cell does, in order. The simulator and the runtime both execute it.

It is stored as flat arrays, because a real job has half a million ops; `Program.ops(worker)` and `atlas.ir.text` are
the readable view. It knows which worker does what, in which datacenter, and the turns on the WAN. It does not know how
long anything takes (`cost`) or how bytes are sent (`sim`, `wan`).

Index legend: c pipeline of the cell, s stage, m microbatch (over all iterations), w worker, i op, t transfer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atlas.errors import ProgramError
from atlas.ir.ops import NUM_KINDS, Kind, Op

Ints = NDArray[np.int64]

FORWARD, BACKWARD = 0, 1
"""Directions of traffic. They never share a channel."""


@dataclass(frozen=True)
class Memory:
    """What an op takes from a worker's memory when it starts and gives back when it ends, in any unit.

    The default counts microbatches: a forward takes one, and the end of its backward gives it back.
    """

    cap: int
    """The most that a worker may hold at once."""
    acquire: tuple[int, ...] = (1, 0, 0, 0, 0, 0, 0, 0, 0)
    """By `Kind`, taken at the op's start."""
    release: tuple[int, ...] = (0, 0, 1, 0, 1, 0, 0, 0, 0)
    """By `Kind`, given back at the op's end."""


@dataclass(frozen=True, eq=False)
class Program:
    """One iteration, or several, of one DP-cell. Build it with `ir.assemble`; ops are stored worker by worker."""

    name: str
    num_pipelines: int
    num_stages: int
    num_microbatches: int
    """Per iteration and pipeline."""
    num_iterations: int
    stage_rank: tuple[int, ...]
    """By stage: the rank of its worker in the pipeline. Interleaved schedules have several stages per worker."""
    rank_dc: tuple[str, ...]
    """The datacenter of each rank of a pipeline."""
    worker_ptr: Ints
    """Ops of worker w are `worker_ptr[w] : worker_ptr[w + 1]`."""
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    turn: Ints
    """By transfer: the smallest is served first where transfers share a link."""
    sharing: bool = False
    """Whether the pipelines take turns on the WAN with the capacity of all their nodes (Atlas)."""
    recompute_on_arrival: bool = False
    """Whether a recompute waits for its gradient, as in Varuna's own simulator."""
    memory: Memory | None = None

    # ---- sizes -------------------------------------------------------------------------------------------
    @property
    def num_ranks(self) -> int:
        return len(self.rank_dc)

    @property
    def num_workers(self) -> int:
        return self.num_pipelines * self.num_ranks

    @property
    def num_ops(self) -> int:
        return len(self.kind)

    @property
    def num_slots(self) -> int:
        """Microbatches over all iterations."""
        return self.num_microbatches * self.num_iterations

    @property
    def num_transfers(self) -> int:
        return 2 * self.num_pipelines * (self.num_stages - 1) * self.num_slots

    @property
    def num_events(self) -> int:
        """Ops and transfers."""
        return self.num_ops + self.num_transfers

    @property
    def layout(self) -> Layout:
        """The sizes and places, without the ops."""
        return Layout(self.num_pipelines, self.num_stages, self.num_microbatches, self.rank_dc, self.stage_rank)

    # ---- workers -----------------------------------------------------------------------------------------
    def worker(self, pipeline: int, stage: int) -> int:
        return pipeline * self.num_ranks + self.stage_rank[stage]

    def worker_name(self, worker: int) -> str:
        pipeline, rank = divmod(worker, self.num_ranks)
        return f"p{pipeline}.s{rank}"

    def worker_dc(self, worker: int) -> str:
        return self.rank_dc[worker % self.num_ranks]

    @cached_property
    def op_worker(self) -> Ints:
        """The worker of each op."""
        return np.repeat(np.arange(self.num_workers), np.diff(self.worker_ptr))

    def op(self, index: int) -> Op:
        return Op(Kind(int(self.kind[index])), int(self.stage[index]), int(self.microbatch[index]))

    def ops(self, worker: int) -> list[Op]:
        return [self.op(i) for i in range(int(self.worker_ptr[worker]), int(self.worker_ptr[worker + 1]))]

    def describe(self, index: int) -> str:
        """`1B3 on p0.s1 (us-east)`: an op as an error or a tooltip names it."""
        worker = int(self.op_worker[index])
        return f"{self.op(index)} on {self.worker_name(worker)} ({self.worker_dc(worker)})"

    # ---- transfers: numbered [direction, pipeline, boundary, slot] -----------------------------------------
    @cached_property
    def op_index(self) -> Ints:
        """[kind, c, s, m] -> op, or -1. The collectives and STEP sit at their worker's first stage."""
        table = np.full((NUM_KINDS, self.num_pipelines, self.num_stages, self.num_slots), -1, np.int64)
        table[self.kind, self.op_worker // self.num_ranks, self.stage, self.microbatch] = np.arange(self.num_ops)
        return table

    @cached_property
    def _backward(self) -> Ints:
        """[c, s, m] -> the op that sends the gradient: B, or I where the backward is split."""
        backward: Ints = np.maximum(self.op_index[Kind.B], self.op_index[Kind.I])
        return backward

    @cached_property
    def transfer_src(self) -> Ints:
        """The op whose end makes a transfer ready, or -1 if the Program does not have it."""
        forward, backward = self.op_index[Kind.F][:, :-1], self._backward[:, 1:]
        return np.concatenate([forward.ravel(), backward.ravel()])

    @cached_property
    def transfer_dst(self) -> Ints:
        """The op that cannot start before a transfer has arrived, or -1."""
        gradient = self._backward[:, :-1]
        if self.recompute_on_arrival:
            recompute = self.op_index[Kind.R][:, :-1]
            gradient = np.where(recompute >= 0, recompute, gradient)
        return np.concatenate([self.op_index[Kind.F][:, 1:].ravel(), gradient.ravel()])

    @property
    def transfer_shape(self) -> tuple[int, int, int, int]:
        return 2, self.num_pipelines, self.num_stages - 1, self.num_slots

    def transfer(self, index: int) -> tuple[int, int, int, int]:
        """(direction, pipeline, boundary, slot); boundary b lies between stages b and b + 1."""
        direction, pipeline, boundary, slot = np.unravel_index(index, self.transfer_shape)
        return int(direction), int(pipeline), int(boundary), int(slot)

    def transfer_name(self, index: int) -> str:
        """`0SEND_F3`, as in the text form of the sender."""
        direction, _, boundary, slot = self.transfer(index)
        return f"{boundary}SEND_F{slot}" if direction == FORWARD else f"{boundary + 1}SEND_B{slot}"

    @cached_property
    def boundary_crosses(self) -> NDArray[np.bool_]:
        """By boundary: whether it lies between two datacenters."""
        dc = [self.rank_dc[r] for r in self.stage_rank]
        return np.array([a != b for a, b in itertools.pairwise(dc)], np.bool_)

    @cached_property
    def transfer_crosses(self) -> NDArray[np.bool_]:
        """By transfer: whether it crosses the WAN."""
        return np.broadcast_to(self.boundary_crosses[None, None, :, None], self.transfer_shape).ravel()

    # ---- memory --------------------------------------------------------------------------------------------
    def held(self, memory: Memory) -> Ints:
        """By op: what its worker holds while it runs."""
        acquire = np.array(memory.acquire, np.int64)[self.kind]
        release = np.array(memory.release, np.int64)[self.kind]
        if memory.acquire[Kind.R] and (recomputes := self.op_index[Kind.R] >= 0).any():
            # A backward right after its forward has no recompute: the forward takes its memory.
            acquire[self.op_index[Kind.F][~recomputes & (self.op_index[Kind.F] >= 0)]] += memory.acquire[Kind.R]
        total = np.cumsum(acquire) - np.cumsum(release) + release
        before = np.concatenate([[0], np.cumsum(acquire - release)])[self.worker_ptr[:-1]]
        held: Ints = total - np.repeat(before, np.diff(self.worker_ptr))
        return held

    @cached_property
    def peak_in_flight(self) -> int:
        """The most microbatches that any worker holds between the start of a forward and the end of its backward."""
        return int(self.held(Memory(cap=0)).max(initial=0))


@dataclass(frozen=True)
class Layout:
    """The sizes and places of a Program. A schedule fills it with ops."""

    num_pipelines: int
    num_stages: int
    num_microbatches: int
    rank_dc: tuple[str, ...]
    stage_rank: tuple[int, ...] = field(default=())
    """Default: stage s is on rank s, modulo the number of ranks."""

    def __post_init__(self) -> None:
        if not self.stage_rank:
            ranks = len(self.rank_dc)
            object.__setattr__(self, "stage_rank", tuple(s % ranks for s in range(self.num_stages)))
        if self.num_stages % len(self.rank_dc):
            raise ProgramError(
                f"{self.num_stages} stages cannot be distributed evenly over {len(self.rank_dc)} workers: "
                "make the number of stages a multiple of the number of workers"
            )

    @classmethod
    def even(cls, num_pipelines: int, num_stages: int, num_microbatches: int, num_dcs: int = 1) -> Layout:
        """Distributes stages over `num_dcs` datacenters in consecutive, nearly equal runs."""
        dcs = tuple(f"dc{s * num_dcs // num_stages}" for s in range(num_stages))
        return cls(num_pipelines, num_stages, num_microbatches, dcs)

    @property
    def num_ranks(self) -> int:
        return len(self.rank_dc)
