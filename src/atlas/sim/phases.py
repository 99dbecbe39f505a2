"""Reconfigurations of photonic rails, from a Program: what both engines and the control plane carry out.

A worker with too few circuits has either those of its pipeline hops or those of its gradient ring. Both phases follow
from the Program, iteration by iteration, so every reconfiguration is known ahead of time:

    to the ring   of one rank: removes the hops of this rank in all pipelines, so it waits for all their transfers of
                  the iteration to arrive; SYNC of the rank waits for it
    to a hop      between two ranks of one pipeline: removes two rings, so it waits for SYNC of both ranks; the next
                  iteration's transfers between the two wait for it

The first iteration starts with the ring of the iteration before, whose SYNC ended NORM and STEP earlier. NORM is a
scalar and uses no circuit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atlas.cost.table import Circuits
from atlas.ir.program import FORWARD, Ints, Kind, Program

NONE = -1  # as in `lower`, which imports this module


class Gates(NamedTuple):
    """Reconfigurations of photonic rails. A gate opens when its circuits carry data.

    It is released when everything on the circuits that it removes has ended. It opens `delay_ns` after its release or,
    on demand, `delay_ns` after both its release and the first request for it."""

    delay_ns: Ints
    left: Ints
    """Transfers and collectives that must end before it is released."""
    released_ns: Ints
    """Earliest release; negative where the circuits were free before the run."""
    on_demand: Ints
    """Whether it waits until it is asked for."""
    asker: Ints
    """The transfer that asks for it, or NONE where a collective does."""
    transfer_gate: Ints
    """By transfer: the gate that it waits for."""
    transfer_frees: Ints
    """[transfer, 2]: the gates that its arrival frees."""
    group_gate: Ints
    """By collective: the gate that it waits for."""
    group_frees_ptr: Ints
    group_frees: Ints
    """By collective: the gates that its end frees."""


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


def reconfigurations(program: Program, circuits: Circuits) -> list[Reconfiguration]:
    """All of a Program, in the order of gates."""
    pairs = hop_pairs(program, circuits)
    if not pairs or not bool((program.kind == Kind.SYNC).any()):
        return []
    ranks = sorted({rank for pair in pairs for rank in pair})
    found = []
    for i in range(program.num_iterations):
        found += [Reconfiguration("hop", i, pair, c) for pair in pairs for c in range(program.num_pipelines)]
        found += [Reconfiguration("ring", i, (rank,), NONE) for rank in ranks]
    return found


def hop_pairs(program: Program, circuits: Circuits) -> dict[tuple[int, int], list[int]]:
    """Ranks of one datacenter that exchange activations over circuits that change, and the boundaries between them."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for boundary in range(program.num_stages - 1):
        a, b = sorted((program.stage_rank[boundary], program.stage_rank[boundary + 1]))
        if a != b and program.rank_dc[a] == program.rank_dc[b] and circuits.switches[a]:
            pairs.setdefault((a, b), []).append(boundary)
    return pairs


def build_gates(program: Program, circuits: Circuits, op_ns: Ints, op_group: Ints, num_groups: int) -> Gates | None:
    """The tables of both engines; None where no circuits change."""
    found = reconfigurations(program, circuits)
    if not found:
        return None
    pairs, number = hop_pairs(program, circuits), {one: g for g, one in enumerate(found)}
    sync = _sync_groups(program, op_group)
    transfer_gate = np.full(program.num_transfers, NONE, np.int64)
    transfer_frees = np.full((program.num_transfers, 2), NONE, np.int64)
    by_place = np.arange(program.num_transfers).reshape(program.transfer_shape)
    left, released, asker = (np.zeros(len(found), np.int64) for _ in range(3))
    asker[:] = NONE
    group_gate = np.full(num_groups, NONE, np.int64)
    freed: list[list[int]] = [[] for _ in range(num_groups)]
    for g, one in enumerate(found):
        slots = slice(one.iteration * program.num_microbatches, (one.iteration + 1) * program.num_microbatches)
        if one.to == "ring":
            group_gate[sync[one.ranks[0], one.iteration]] = g
            continue
        through = by_place[:, one.pipeline, pairs[one.ranks[0], one.ranks[1]], slots].ravel()
        transfer_gate[through] = g
        for side, rank in enumerate(one.ranks):
            ring = number[Reconfiguration("ring", one.iteration, (rank,), NONE)]
            transfer_frees[through, side] = ring
            left[ring] += len(through)
            if one.iteration:
                freed[sync[rank, one.iteration - 1]].append(g)
                left[g] += 1
        first = by_place[FORWARD, one.pipeline, min(pairs[one.ranks[0], one.ranks[1]]), slots]
        asker[g] = first[np.argmin(program.transfer_src[first])]
        if not one.iteration:
            released[g] = -min(_closing_ns(program, op_ns, rank) for rank in one.ranks)
    lead = [one.ranks[0] for one in found]
    return Gates(
        delay_ns=np.array(circuits.delay_ns, np.int64)[lead],
        left=left,
        released_ns=released,
        on_demand=1 - np.array(circuits.provision, np.int64)[lead],
        asker=asker,
        transfer_gate=transfer_gate,
        transfer_frees=transfer_frees,
        group_gate=group_gate,
        group_frees_ptr=np.cumsum([0, *map(len, freed)]).astype(np.int64),
        group_frees=np.array([g for gates in freed for g in gates], np.int64),
    )


def _sync_groups(program: Program, op_group: Ints) -> dict[tuple[int, int], int]:
    """The collective of each rank's SYNC, by iteration."""
    ops = np.flatnonzero(program.kind == Kind.SYNC)
    ranks = program.op_worker[ops] % program.num_ranks
    groups = op_group[ops]
    return dict(zip(zip(ranks.tolist(), program.microbatch[ops].tolist(), strict=True), groups.tolist(), strict=True))


def _closing_ns(program: Program, op_ns: Ints, rank: int) -> int:
    """How long the rank is busy after its SYNC of an iteration: NORM and STEP."""
    of_rank = (program.op_worker % program.num_ranks == rank) & (program.microbatch == 0)
    closing = of_rank & ((program.kind == Kind.NORM) | (program.kind == Kind.STEP))
    return int(op_ns[closing].sum()) // program.num_pipelines


def fabric_rows(program: Program, circuits: Circuits | None, gate_ns: Ints) -> list[dict[str, object]]:
    """The reconfigurations of a run with their times, for `ir.analysis` and the views."""
    assert circuits is not None
    return [
        {
            "dc": program.rank_dc[one.ranks[0]],
            "to": one.to,
            "ranks": list(one.ranks),
            "pipeline": one.pipeline,
            "iteration": one.iteration,
            "start_ns": start,
            "end_ns": end,
        }
        for one, (start, end) in zip(reconfigurations(program, circuits), gate_ns.tolist(), strict=True)
    ]
