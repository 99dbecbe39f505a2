"""Reconfigurations of photonic rails: when the changes of `ir.circuit_phases` may start and what waits for them, as
tables that both engines and the control plane carry out.

    to the ring   of one rank: waits for all transfers on its hops to arrive; SYNC of the rank waits for it
    to a hop      between two ranks of one pipeline: waits for the last use of both rings; the transfers between the two
                  wait for it

The run starts with the ring of the iteration before, whose SYNC ended NORM and STEP earlier. With ZeRO-1, STEP ends
with an exchange of weights over the ring.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atlas.cost.table import Circuits
from atlas.ir.circuit_phases import (
    NONE,
    CircuitPhases,
    Reconfiguration,
    asking_transfer,
    circuit_phases,
    completing_ops,
    grouped,
)
from atlas.ir.program import Ints, Kind, Program


class Gates(NamedTuple):
    """Reconfigurations of photonic rails. A gate opens when its circuits carry data.

    It is released when everything on the circuits that it removes has ended. It opens `delay_ns` after its release or,
    on demand, `delay_ns` after both its release and the first request for it. A ring is requested when the gradients
    of all pipelines are complete, also where a worker does other work before its SYNC."""

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
    completes: Ints
    """By op that takes part in a SYNC: the op after which its ring is asked for."""


def phases_of(program: Program, circuits: Circuits) -> CircuitPhases | None:
    """None where no circuits change."""
    return circuit_phases(program, circuits.switches, until_step=circuits.until_step)


def reconfigurations(program: Program, circuits: Circuits) -> tuple[Reconfiguration, ...]:
    """All of a Program, in the order of gates."""
    phases = phases_of(program, circuits)
    return () if phases is None else phases.changes


def build_gates(program: Program, circuits: Circuits, op_ns: Ints, op_group: Ints, num_groups: int) -> Gates | None:
    """The tables of both engines; None where no circuits change."""
    phases = phases_of(program, circuits)
    if phases is None:
        return None
    num = len(phases.changes)
    left, released, asker = np.zeros(num, np.int64), np.zeros(num, np.int64), np.full(num, NONE, np.int64)
    np.add.at(left, phases.transfer_frees[phases.transfer_frees >= 0], 1)
    group_gate = np.full(num_groups, NONE, np.int64)
    uses = np.flatnonzero(phases.op_change >= 0)
    group_gate[op_group[uses]] = phases.op_change[uses]
    freed: list[list[int]] = [[] for _ in range(num_groups)]
    for op, hops in phases.op_frees.items():
        freed[op_group[op]] += hops
        np.add.at(left, list(hops), 1)
    closing_ns = _closing_ns(program, circuits, op_ns)
    for g, ranks in phases.initial.items():
        released[g] = -min(closing_ns[rank] for rank in ranks)
    for g, users in enumerate(grouped(phases.transfer_change, num)):
        if len(users):
            asker[g] = asking_transfer(program, users)
    lead = [one.ranks[0] for one in phases.changes]
    return Gates(
        delay_ns=np.array(circuits.delay_ns, np.int64)[lead],
        left=left,
        released_ns=released,
        on_demand=1 - np.array(circuits.provision, np.int64)[lead],
        asker=asker,
        transfer_gate=phases.transfer_change,
        transfer_frees=phases.transfer_frees,
        group_gate=group_gate,
        group_frees_ptr=np.cumsum([0, *map(len, freed)]).astype(np.int64),
        group_frees=np.array([g for gates in freed for g in gates], np.int64),
        completes=completing_ops(program),
    )


def _closing_ns(program: Program, circuits: Circuits, op_ns: Ints) -> list[int]:
    """By rank: how long it is busy after the last use of its ring in an iteration, with NORM and STEP."""
    if circuits.until_step:
        return [0] * program.num_ranks
    closing = np.flatnonzero(np.isin(program.kind, (Kind.NORM, Kind.STEP)) & (program.microbatch == 0))
    total = np.zeros(program.num_ranks, np.int64)
    np.add.at(total, program.op_worker[closing] % program.num_ranks, op_ns[closing])
    return (total // program.num_pipelines).tolist()


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
