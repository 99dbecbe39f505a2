"""The input and output of every schedule; independent of any schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atlas.cost.table import Costs
from atlas.ir.program import Ints, Kind, Layout, Memory, Program
from atlas.sim.simulate import SMALL, simulate

Progress = Callable[[int, int], None]
"""Called by a search with (tries done, tries allowed)."""


@dataclass(frozen=True, eq=False)
class Setting:
    """One DP-cell to be scheduled."""

    layout: Layout
    apart: Costs
    """Costs when every pipeline uses its own paths, without turns."""
    turns: Costs | None
    """Costs with turns on the WAN; None where turns are not possible."""
    memory: Memory
    """What a worker may hold. GPipe and 1F1B ignore it; the others keep to it."""
    recompute: bool = False
    budget: int = 200
    """How many orders a search may try. The same budget and seed give the same schedule on any machine."""
    seed: int = 0
    interleaved: Setting | None = None
    """The same with several stages on each worker; None where that is not wanted or not possible."""

    def costs_of(self, program: Program) -> Costs:
        """The costs of a Program of this setting, with or without turns as the Program has them."""
        return self.costs_of_sharing(program.sharing)

    def closed_ns(self, ends_ns: Ints, sharing: bool) -> int:
        """The iteration with the all-reduce and the optimizer of each stage, once the last op of [w] is over."""
        ranks = slice(self.layout.num_ranks)
        closing = self.costs_of_sharing(sharing).compute_ns[:, ranks, [Kind.SYNC, Kind.STEP]].sum(axis=2)
        return int((ends_ns.reshape(closing.shape).max(axis=0) + closing.max(axis=0)).max())

    def simulated_ns(self, program: Program, *, compiled: bool = False) -> int:
        """The iteration of a Program that is not closed yet, closed. `compiled`: numba is loaded anyway. A schedule
        tries about ten Programs of one size; compiling takes as long as these, and several times as long at first."""
        engine = "compiled" if compiled or program.num_events > SMALL // 2 else "auto"
        timeline = simulate(program, self.costs_of(program), engine=engine)
        ends = np.zeros(program.num_workers, np.int64)
        np.maximum.at(ends, program.op_worker, timeline.op_end_ns)
        return self.closed_ns(ends, program.sharing)

    def costs_of_sharing(self, sharing: bool) -> Costs:
        return self.turns if sharing and self.turns is not None else self.apart


Builder = Callable[[Setting, Progress | None], Program]
"""A schedule: of a setting, its Program."""
