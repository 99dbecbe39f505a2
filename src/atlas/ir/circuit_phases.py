"""Which circuits of photonic rails each transfer and each gradient sum of a Program uses, and so every change of
circuits, known before anything runs.

A worker with too few circuits has either those of its pipeline hops or those of its gradient ring. The order of the
Program divides the run of each rank into phases: hops, ring, hops, ring. A Program with one SYNC at the end of an
iteration has one phase of each an iteration; one that sums stage by stage has more. NORM is a scalar and uses no
circuit.

    to the ring   of one rank: removes the hops of this rank in all pipelines
    to a hop      between two ranks of one pipeline: removes the rings of both

The run starts with the rings of an earlier iteration. Knows no durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from atlas.errors import ProgramError
from atlas.ir.program import FORWARD, Ints, Kind, Program

NONE = -1

_Row = tuple[tuple[int, ...], "Reconfiguration", Ints]
"""Its place in the order of changes, a change, and the transfers or ops that use its circuits."""


@dataclass(frozen=True)
class Reconfiguration:
    """One change of circuits: what it is for."""

    to: str
    """`hop` or `ring`."""
    iteration: int
    ranks: tuple[int, ...]
    """Whose circuits change."""
    pipeline: int
    """Of a hop; NONE where all pipelines take part."""
    phases: tuple[int, ...]
    """Of each rank: how many times it had its ring before."""


class CircuitPhases(NamedTuple):
    """The changes, and what uses their circuits. `NONE` means no change."""

    changes: tuple[Reconfiguration, ...]
    transfer_change: Ints
    """By transfer: the hop that it uses."""
    transfer_frees: Ints
    """[transfer, 2]: the rings that can be set up once it has arrived."""
    op_change: Ints
    """By op: the ring that it uses."""
    op_frees: dict[int, tuple[int, ...]]
    """By op of the first pipeline that is the last use of a ring: the hops that can be set up once it has ended."""
    initial: dict[int, tuple[int, ...]]
    """By hop that removes rings which are set up before the run: their ranks."""


def hop_pairs(program: Program, switches: Sequence[bool]) -> dict[tuple[int, int], list[int]]:
    """Ranks of one datacenter that exchange activations over circuits that change, and the boundaries between them.
    `switches`: by rank, whether its circuits change."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for boundary in range(program.num_stages - 1):
        a, b = sorted((program.stage_rank[boundary], program.stage_rank[boundary + 1]))
        if a != b and program.rank_dc[a] == program.rank_dc[b] and switches[a]:
            pairs.setdefault((a, b), []).append(boundary)
    return pairs


def circuit_phases(program: Program, switches: Sequence[bool], *, until_step: bool = False) -> CircuitPhases | None:
    """None where no circuits change. `until_step`: whether STEP uses the ring too, as the exchange of weights with
    ZeRO-1 does."""
    pairs = hop_pairs(program, switches)
    if not pairs or not bool((program.kind == Kind.SYNC).any()):
        return None
    return _Phases(program, pairs, until_step).found()


class _Phases:
    """Of one Program. `uses`: SYNC, and with ZeRO-1 also STEP; they are counted on each worker."""

    def __init__(self, program: Program, pairs: dict[tuple[int, int], list[int]], until_step: bool) -> None:
        self.program, self.pairs = program, list(pairs.items())
        self.is_use = (program.kind == Kind.SYNC) | ((program.kind == Kind.STEP) & until_step)
        self.rank = program.op_worker % program.num_ranks
        count = np.concatenate([[0], np.cumsum(self.is_use)])
        self.uses_before = count[:-1] - count[program.worker_ptr[program.op_worker]]
        """By op: how many uses of the ring are before it on its worker."""
        self.ranks = sorted({rank for pair in pairs for rank in pair})
        self.uses = {rank: self._uses(rank) for rank in self.ranks}
        self.through = [self._transfers(boundaries) for boundaries in pairs.values()]
        self.at = [
            (self._counted(t, a), self._counted(t, b)) for ((a, b), _), t in zip(self.pairs, self.through, strict=True)
        ]
        self.starts = {rank: self._starts(rank) for rank in self.ranks}
        """By rank: how many uses of the ring are before each phase of hops."""

    def _uses(self, rank: int) -> Ints:
        """[pipeline, use]: the ops."""
        program = self.program
        ops = np.flatnonzero(self.is_use & (self.rank == rank))
        found = ops.reshape(program.num_pipelines, -1) if len(ops) % program.num_pipelines == 0 else ops[None, :0]
        what = np.stack([program.kind[found], program.stage[found], program.microbatch[found]])
        if found.size != ops.size or (what != what[:, :1]).any():
            raise ProgramError(
                f"program {program.name!r}: pipelines sum the gradients of rank {rank} in different orders; on "
                "photonic rails all pipelines need the same order, because they share the circuits"
            )
        return found

    def _transfers(self, boundaries: list[int]) -> Ints:
        shape = self.program.transfer_shape
        return np.arange(self.program.num_transfers).reshape(shape)[:, :, boundaries].ravel()

    def _counted(self, transfers: Ints, rank: int) -> Ints:
        """How many uses of the rank's ring are before its op of each transfer."""
        src, dst = self.program.transfer_src[transfers], self.program.transfer_dst[transfers]
        found: Ints = self.uses_before[np.where(self.rank[src] == rank, src, dst)]
        return found

    def _starts(self, rank: int) -> Ints:
        ends = [at[pair.index(rank)] for (pair, _), at in zip(self.pairs, self.at, strict=True) if rank in pair]
        return np.unique(np.concatenate(ends))

    def found(self) -> CircuitPhases:
        program = self.program
        rows: list[_Row] = []
        for number, ((a, b), _) in enumerate(self.pairs):
            rows += self._hops(number, a, b)
        for rank in self.ranks:
            rows += self._rings(rank)
        rows.sort(key=lambda row: row[0])
        rings = {(one.ranks[0], one.phases[0]): g for g, (_, one, _) in enumerate(rows) if one.to == "ring"}
        transfer_change = np.full(program.num_transfers, NONE, np.int64)
        transfer_frees = np.full((program.num_transfers, 2), NONE, np.int64)
        op_change = np.full(program.num_ops, NONE, np.int64)
        freed: dict[int, list[int]] = {}
        initial: dict[int, list[int]] = {}
        for g, (_, one, used) in enumerate(rows):
            if one.to == "ring":
                op_change[used] = g
                continue
            transfer_change[used] = g
            for side, (rank, phase) in enumerate(zip(one.ranks, one.phases, strict=True)):
                transfer_frees[used, side] = rings.get((rank, phase), NONE)
                start = int(self.starts[rank][phase])
                if start:
                    freed.setdefault(int(self.uses[rank][0, start - 1]), []).append(g)
                else:
                    initial.setdefault(g, []).append(rank)
        return CircuitPhases(
            tuple(one for _, one, _ in rows), transfer_change, transfer_frees, op_change,
            {op: tuple(hops) for op, hops in freed.items()}, {g: tuple(ranks) for g, ranks in initial.items()},
        )  # fmt: skip

    def _hops(self, number: int, a: int, b: int) -> list[_Row]:
        """Of one pair of ranks."""
        program, transfers = self.program, self.through[number]
        _, pipeline, _, slot = np.unravel_index(transfers, program.transfer_shape)
        phases = [np.searchsorted(self.starts[rank], at) for rank, at in zip((a, b), self.at[number], strict=True)]
        sizes = (*(len(self.starts[rank]) for rank in (a, b)), program.num_pipelines)
        keys, which = np.unique(np.ravel_multi_index((*phases, pipeline), sizes), return_inverse=True)
        names = np.stack(np.unravel_index(keys, sizes), axis=1).tolist()
        rows: list[_Row] = []
        for (at_a, at_b, c), mine in zip(names, grouped(which, len(keys)), strict=True):
            iteration = int(slot[mine].min()) // program.num_microbatches
            change = Reconfiguration("hop", iteration, (a, b), c, (at_a, at_b))
            rows.append(((iteration, 0, number, at_a, at_b, c), change, transfers[mine]))
        return rows

    def _rings(self, rank: int) -> list[_Row]:
        """Of one rank; rings before the first hop are there already."""
        uses = self.uses[rank]
        phase_of = np.searchsorted(self.starts[rank], np.arange(uses.shape[1]), side="right") - 1
        rows: list[_Row] = []
        for phase in np.unique(phase_of[phase_of >= 0]).tolist():
            used = uses[:, phase_of == phase]
            iteration = int(self.program.microbatch[used[0, 0]])
            change = Reconfiguration("ring", iteration, (rank,), NONE, (phase,))
            rows.append(((iteration, 1, rank, phase, 0, 0), change, used.ravel()))
        return rows


def grouped(numbers: Ints, count: int) -> list[Ints]:
    """By number from 0: where it occurs."""
    order = np.argsort(numbers, kind="stable")
    first = np.searchsorted(numbers[order], np.arange(count + 1))
    return [order[a:b] for a, b in pairwise(first.tolist())]


def completing_ops(program: Program) -> Ints:
    """By op: for SYNC, the op that completes the gradients which it sums, after which its ring may be asked for; NONE
    for others. A worker's only SYNC of an iteration sums all its stages."""
    found = np.full(program.num_ops, NONE, np.int64)
    ops = np.flatnonzero(program.kind == Kind.SYNC)
    of_worker = program.op_worker[ops] * program.num_iterations + program.microbatch[ops]
    num_syncs = np.bincount(of_worker)[of_worker]
    found[ops[num_syncs == 1]] = ops[num_syncs == 1] - 1
    last_slot = (program.microbatch[ops] + 1) * program.num_microbatches - 1
    by_stage = np.maximum(program.op_index[Kind.B], program.op_index[Kind.W])  # each has one of them
    ends = by_stage[program.op_worker[ops] // program.num_ranks, program.stage[ops], last_slot]
    found[ops[num_syncs > 1]] = ends[num_syncs > 1]
    return found


def asking_transfer(program: Program, transfers: Ints) -> int:
    """Of those that use one hop: the first that the Program sends, of the lowest boundary, forward if any is."""
    direction = np.unravel_index(transfers, program.transfer_shape)[0]
    first = transfers[direction == FORWARD] if (direction == FORWARD).any() else transfers
    boundary = np.unravel_index(first, program.transfer_shape)[2]
    first = first[boundary == boundary.min()]
    return int(first[np.argmin(program.transfer_src[first])])
