"""Reconfigurations as arrays, for the compiled engine: the columns, the initial state, and when a gate's time is known.

The rules are those of `sim.phases`. A gate whose time has become known is put on the stack `opened` (its size is
`opened[0]`), and the engine then lets everything that waits for it go on. Private to `sim`: needs numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints
from atlas.jit import njit
from atlas.sim.lower import UNKNOWN
from atlas.sim.phases import Gates

# Columns of `gates`.
(
    G_DELAY,
    G_LEFT,
    G_RELEASED,
    G_ON_DEMAND,
    G_ASKER,
    G_ASKED,
    G_START,
    G_END,
    G_FIRST,  # first and last transfer that wait for it
    G_LAST,
    G_GROUP,  # the collective that waits for it
    G_GROUP_AT,
) = range(12)
# Columns of `gated` [transfer]: its gate, the two that it frees, when it was ready, the next that waits with it.
GT_GATE, GT_FREES_A, GT_FREES_B, GT_AT, GT_NEXT = range(5)


def gate_arrays(gates: Gates | None) -> tuple[Any, ...]:
    """gates, gated, group_gate, frees_ptr, frees, completes, opened; all but the last None where no circuits change."""
    if gates is None:
        return *[None] * 6, np.zeros(1, np.int64)
    rows = np.full((len(gates.left), 12), NONE, np.int64)
    rows[:, G_DELAY], rows[:, G_LEFT], rows[:, G_RELEASED] = gates.delay_ns, gates.left, gates.released_ns
    rows[:, G_ON_DEMAND], rows[:, G_ASKER] = gates.on_demand, gates.asker
    gated = np.full((len(gates.transfer_gate), 5), NONE, np.int64)
    gated[:, GT_GATE], gated[:, GT_FREES_A : GT_FREES_B + 1] = gates.transfer_gate, gates.transfer_frees
    opened = np.zeros(len(rows) + 1, np.int64)
    return rows, gated, gates.group_gate, gates.group_frees_ptr, gates.group_frees, gates.completes, opened


@njit
def settle(gates: Ints, opened: Ints, gate: int) -> None:
    """If all is known: when the reconfiguration starts and ends."""
    row = gates[gate]
    if row[G_LEFT] or row[G_END] != UNKNOWN or (row[G_ON_DEMAND] and row[G_ASKED] == UNKNOWN):
        return
    start = row[G_RELEASED]
    if row[G_ON_DEMAND] and row[G_ASKED] > start:
        start = row[G_ASKED]
    row[G_START] = start
    row[G_END] = max(0, start + row[G_DELAY])
    opened[0] += 1
    opened[opened[0]] = gate


@njit
def free_gate(gates: Ints, opened: Ints, gate: int, when: int) -> None:
    """Something on the circuits that the gate removes has ended."""
    gates[gate, G_LEFT] -= 1
    if when > gates[gate, G_RELEASED]:
        gates[gate, G_RELEASED] = when
    settle(gates, opened, gate)


@njit
def arrived(gates: Ints, gated: Ints, opened: Ints, transfer: int, when: int) -> None:
    for column in range(GT_FREES_A, GT_FREES_B + 1):
        gate = gated[transfer, column]
        if gate != NONE:
            free_gate(gates, opened, gate, when)


@njit
def hold(gates: Ints, gated: Ints, opened: Ints, transfer: int, at: int) -> int:
    """When a transfer that is ready `at` reaches its link; UNKNOWN where it has to wait for its gate."""
    gate = gated[transfer, GT_GATE]
    if gate == NONE:
        return at
    row = gates[gate]
    if row[G_ASKER] == transfer:
        row[G_ASKED] = at
        settle(gates, opened, gate)
    if row[G_END] != UNKNOWN and row[G_FIRST] == NONE:
        found: int = max(at, row[G_END])
        return found
    gated[transfer, GT_AT] = at  # behind those that wait already, in the order of their sender
    if row[G_FIRST] == NONE:
        row[G_FIRST] = transfer
    else:
        gated[row[G_LAST], GT_NEXT] = transfer
    row[G_LAST] = transfer
    return UNKNOWN


@njit
def hold_group(gates: Ints, group_gate: Ints, opened: Ints, group: int, asked: int, start: int) -> int:
    """When a collective that is ready at `start` starts; UNKNOWN where it has to wait for its gate. `asked`: when its
    gradients were complete."""
    gate = group_gate[group]
    if gate == NONE:
        return start
    row = gates[gate]
    if row[G_END] == UNKNOWN:
        row[G_ASKED] = asked
        settle(gates, opened, gate)
    if row[G_END] == UNKNOWN:
        row[G_GROUP], row[G_GROUP_AT] = group, start
        return UNKNOWN
    found: int = max(start, row[G_END])
    return found
