"""Converts a Program, before it runs, to a list of circuit changes: what triggers each, and the circuits that it sets
up.

Every rail of a datacenter does the same: a worker of `tp` GPUs has a GPU on `tp` rails. A circuit joins two ports,
written `p0.s1/1` (worker, port). Port 0 leads to the previous stage, port 1 to the next stage; a ring goes from port 1
of a replica to port 0 of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas.cost.table import Circuits
from atlas.ir.circuit_phases import NONE, CircuitPhases, Reconfiguration, grouped
from atlas.ir.program import Program
from atlas.sim.phases import phases_of

Circuit = tuple[str, str]


@dataclass(frozen=True)
class CircuitChange:
    """One change of circuits."""

    number: int
    dc: str
    what: Reconfiguration
    circuits: tuple[Circuit, ...]
    """The circuits that it sets up. Other circuits of these ports are removed."""
    after: tuple[str, ...]
    """The ops whose results must have arrived before it starts; empty: before the run."""

    def row(self) -> dict[str, Any]:
        return {
            "change": self.number,
            "dc": self.dc,
            "to": self.what.to,
            "iteration": self.what.iteration,
            "after": list(self.after),
            "circuits": [list(circuit) for circuit in self.circuits],
        }


def circuit_plan(program: Program, circuits: Circuits | None) -> list[CircuitChange]:
    """All changes of a Program, in the order of the simulator's gates; none where no circuits change."""
    phases = None if circuits is None else phases_of(program, circuits)
    if phases is None:
        return []
    after = _after(program, phases)
    return [
        CircuitChange(g, program.rank_dc[one.ranks[0]], one, _hop(program, one) or _ring(program, one), after[g])
        for g, one in enumerate(phases.changes)
    ]


def _hop(program: Program, one: Reconfiguration) -> tuple[Circuit, ...]:
    if one.to != "hop":
        return ()
    a, b = one.ranks if one.ranks[1] == one.ranks[0] + 1 else one.ranks[::-1]  # the last rank leads to the first
    first, second = (program.worker_name(one.pipeline * program.num_ranks + rank) for rank in (a, b))
    return ((f"{first}/1", f"{second}/0"),)


def _ring(program: Program, one: Reconfiguration) -> tuple[Circuit, ...]:
    names = [program.worker_name(c * program.num_ranks + one.ranks[0]) for c in range(program.num_pipelines)]
    if len(names) == 1:  # its replicas are in other cells
        return ((f"{names[0]}/1", f"{names[0]}/0@next-cell"),)
    return tuple((f"{name}/1", f"{names[(c + 1) % len(names)]}/0") for c, name in enumerate(names))


def _after(program: Program, phases: CircuitPhases) -> list[tuple[str, ...]]:
    """By change: the last op of each worker on the circuits that are removed."""
    found: list[set[int]] = [set() for _ in phases.changes]
    for op, hops in phases.op_frees.items():
        same = (program.kind == program.kind[op]) & (program.stage == program.stage[op])
        everyone = np.flatnonzero(same & (program.microbatch == program.microbatch[op])).tolist()
        for g in hops:
            found[g].update(everyone)
    for side in range(2):
        for g, transfers in enumerate(grouped(phases.transfer_frees[:, side], len(phases.changes))):
            channel = transfers // program.num_slots
            last = np.flatnonzero(np.diff(channel, append=NONE))  # transfers of a channel are in order
            found[g].update(program.transfer_src[transfers[last]].tolist())
    return [tuple(program.describe(op) for op in sorted(ops)) for ops in found]
