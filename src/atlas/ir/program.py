"""The Program: what every worker of one DP-cell does, in order. The simulator and the runtime both execute it.

It is stored as flat arrays, because a real job has half a million ops; `Program.ops(worker)` and `atlas.ir.text` are
the readable view. It knows which worker does what, in which datacenter, and the turns on the WAN. It does not know how
long anything takes (`cost`) or how bytes are sent (`sim`, `wan`).

An op is written `3F17` (stage, kind, microbatch), like torch's pipelining actions. The dispatch rule, shared by
simulator and runtime, is at the end.

Index legend: c pipeline of the cell, s stage, m microbatch (over all iterations), w worker, i op, t transfer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.errors import ProgramError

Ints = NDArray[np.int64]

FORWARD, BACKWARD = 0, 1
"""Directions of traffic. They never share a channel."""


class Kind(IntEnum):
    """The kinds of op. The engines' arrays hold the integer values."""

    F = 0
    """Forward of one microbatch through one stage."""
    R = 1
    """Recompute of the activations that the forward discarded."""
    B = 2
    """Backward in one piece: input gradient and weight gradient."""
    I = 3  # noqa: E741 - the letter that the zero-bubble papers and torch use
    """The part of the backward that the previous stage waits for: gradient of the stage's input."""
    W = 4
    """The part of the backward that no other worker waits for: gradient of the weights."""
    SYNC = 5
    """All-reduce of the stage's gradients over every pipeline."""
    NORM = 6
    """Global gradient norm over all workers."""
    STEP = 7
    """Optimizer step."""
    P = 8
    """A slice of prefill in a bubble."""


NUM_KINDS = len(Kind)

BACKWARDS = (Kind.B, Kind.I)
"""The kinds that send a gradient to the previous stage."""
PER_MICROBATCH = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
COLLECTIVES = (Kind.SYNC, Kind.NORM)
USEFUL = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.STEP, Kind.P)
"""The kinds that keep the accelerator busy; the others wait for a network."""

_TEXT = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|SYNC|NORM|STEP|F|R|B|I|W|P)(\d*)")


class Op(NamedTuple):
    """One op of one worker. For SYNC, NORM and STEP `microbatch` is the number of the iteration."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"


@cache
def parse_action(text: str) -> tuple[int, str, int]:
    """`3F17` -> (3, "F", 17). A missing microbatch is 0, as torch writes REDUCE_GRAD."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ProgramError(
            f"{text!r} is not an op: write stage, kind, microbatch, such as 3F17 or 0SEND_F2; "
            f"kinds are {', '.join(k.name for k in Kind)}, SEND_F, RECV_F, SEND_B, RECV_B"
        )
    stage, kind, microbatch = match.groups()
    return int(stage), kind, int(microbatch or 0)


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

    @cached_property
    def op_iteration(self) -> Ints:
        """The iteration of each op."""
        return np.where(self.kind <= Kind.W, self.microbatch // self.num_microbatches, self.microbatch).astype(np.int64)

    def op_groups(self, by_stage: Sequence[Kind] = (Kind.SYNC,)) -> Ints:
        """The collective that each op takes part in, or -1. Those of `by_stage` join the same stage of every pipeline,
        NORM joins all workers; each once per iteration."""
        key, stages = np.full(self.num_ops, -1, np.int64), self.num_stages
        for number, kind in enumerate(by_stage):
            mine = self.kind == kind
            key[mine] = (self.microbatch[mine] * 2 + number) * (stages + 1) + self.stage[mine]
        norm = self.kind == Kind.NORM
        key[norm] = self.microbatch[norm] * 2 * (stages + 1) + stages
        members = key >= 0
        _, key[members] = np.unique(key[members], return_inverse=True)
        return key

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
        return np.concatenate([self.op_index[Kind.F][:, 1:].ravel(), self._backward[:, :-1].ravel()])

    @cached_property
    def op_input(self) -> Ints:
        """The transfer that each op needs to start, or -1."""
        found = np.full(self.num_ops, -1, np.int64)
        known = np.flatnonzero((self.transfer_dst >= 0) & (self.transfer_src >= 0))
        found[self.transfer_dst[known]] = known
        return found

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

    def peak_held(self, memory: Memory) -> int:
        """The most that any worker holds at once under a memory rule."""
        return int(self.held(memory).max(initial=0))

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

    def about_events(self, *, split: bool) -> int:
        """About as many events as a Program has with recompute: by microbatch and stage, F, R, B (`split`: I and W) and
        a transfer each way. Budgets and limits of size use it before there is a Program; `Program.num_events` counts.
        """
        return (6 if split else 5) * self.num_pipelines * self.num_stages * self.num_microbatches


# ---- the dispatch rule ---------------------------------------------------------------------------------------------
# A worker or a WAN queue takes the smallest key first and is never idle while something is ready. Simulator and runtime
# share only these functions of integers: the compiled engine compiles them; the others call them.
def turn_key(microbatch: int, pipeline: int, num_pipelines: int) -> int:
    """A transfer's turn on the WAN of its DP-cell: oldest microbatch first, pipelines in order within it.

    Serving one whole pipeline first would be worse than not sharing: the other pipelines' stages on the other side of
    the WAN would start a whole iteration late.
    """
    return microbatch * num_pipelines + pipeline


def before(turn: int, sequence: int) -> tuple[int, int]:
    """The order in which a link serves what is ready: smallest turn first; equal turns first come, first served."""
    return (turn, sequence)


QUANTUM_NS = 5_000_000
"""A link that serves turns switches only at chunk boundaries, and a chunk takes at most this long. With longer chunks a
late urgent turn waits behind an early one; with shorter ones the cost per chunk grows."""


def chunk_bytes(rate_bps: float, smallest: int, largest: int) -> int:
    """How many bytes a link of this rate carries in one quantum, within bounds of the transport."""
    return max(smallest, min(largest, int(rate_bps * QUANTUM_NS / 8e9)))
