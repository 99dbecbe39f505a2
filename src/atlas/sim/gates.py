"""How the plain engine holds transfers and collectives back until a reconfiguration has ended. `sim.phases` has the
rules; the compiled engine follows them in its own way."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints
from atlas.sim.lower import OFFER, UNKNOWN
from atlas.sim.phases import Gates

if TYPE_CHECKING:
    from atlas.sim.simulate import Engine


class GateKeeper:
    """Holds transfers and collectives back until their circuits are there."""

    def __init__(self, engine: Engine, gates: Gates) -> None:
        self.engine = engine
        self.delay_ns, self.left = gates.delay_ns.tolist(), gates.left.tolist()
        self.released_ns, self.on_demand = gates.released_ns.tolist(), gates.on_demand.tolist()
        self.asker, self.transfer_gate = gates.asker.tolist(), gates.transfer_gate.tolist()
        self.transfer_frees, self.group_gate = gates.transfer_frees.tolist(), gates.group_gate.tolist()
        ptr, frees = gates.group_frees_ptr.tolist(), gates.group_frees.tolist()
        self.group_frees = [frees[a:b] for a, b in pairwise(ptr)]
        self.completes = gates.completes.tolist()
        self.asked_ns = [UNKNOWN] * len(self.left)
        self.times: list[tuple[int, int]] = [(UNKNOWN, UNKNOWN)] * len(self.left)
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in self.left]
        self.collective: list[tuple[int, int] | None] = [None] * len(self.left)

    def begin(self) -> None:
        """What was free before the run."""
        for gate in range(len(self.left)):
            self._settle(gate)

    def offer(self, transfer: int, at: int) -> bool:
        """A transfer is ready for its link at this time. Returns whether a gate decides when it is offered."""
        gate = self.transfer_gate[transfer]
        if gate == NONE:
            return False
        if self.asker[gate] == transfer:
            self.asked_ns[gate] = at
            self._settle(gate)
        if self.times[gate][1] == UNKNOWN:
            self.waiting[gate].append((transfer, at))
        else:
            self.engine.foresee(max(at, self.times[gate][1]), OFFER, transfer)
        return True

    def arrived(self, transfer: int, when: int) -> None:
        for gate in self.transfer_frees[transfer]:
            if gate != NONE:
                self._free(gate, when)

    def assembled(self, group: int, now: int) -> int:
        """The last member of a collective is ready. Returns when it may start, or UNKNOWN: it is started later."""
        gate = self.group_gate[group]
        if gate == NONE or self.times[gate][1] != UNKNOWN:
            return now if gate == NONE else max(now, self.times[gate][1])
        members = self.engine.tables.group_ops[slice(*self.engine.tables.group_ptr[group : group + 2])].tolist()
        self.asked_ns[gate] = max(self.engine.op_end[op] for member in members if (op := self.completes[member]) >= 0)
        self._settle(gate)
        end: int = self.times[gate][1]
        if end == UNKNOWN:
            self.collective[gate] = (group, now)
            return UNKNOWN
        return max(now, end)

    def ended(self, group: int, when: int) -> None:
        for gate in self.group_frees[group]:
            self._free(gate, when)

    def _free(self, gate: int, when: int) -> None:
        self.left[gate] -= 1
        self.released_ns[gate] = max(self.released_ns[gate], when)
        self._settle(gate)

    def _settle(self, gate: int) -> None:
        """If all is known: when the reconfiguration starts and ends, and who goes on then."""
        asked = self.asked_ns[gate]
        if self.left[gate] or self.times[gate][1] != UNKNOWN or (self.on_demand[gate] and asked == UNKNOWN):
            return
        start = max(self.released_ns[gate], asked) if self.on_demand[gate] else self.released_ns[gate]
        end = max(0, start + self.delay_ns[gate])
        self.times[gate] = (start, end)
        for transfer, at in self.waiting[gate]:
            self.engine.foresee(max(at, end), OFFER, transfer)
        if (held := self.collective[gate]) is not None:
            group, now = held
            self.engine.start_group(group, max(now, end))

    def table(self) -> Ints:
        """[gate, 2]: start and end of each reconfiguration."""
        return np.array(self.times, np.int64).reshape(-1, 2)
