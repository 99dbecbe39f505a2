"""Floors: seconds that no order of a pipeline's ops can beat, for many pipelines at once.

The arguments of `cost.table.lower_bound`, in closed form over arrays, so that a search can order tens of thousands of
candidates by them and stop where no floor is lower than the best plan found. A searched order is mostly within a few
per cent of its floor. A floor assumes what a real order may not have: a link without other traffic, and a split
backward.

Index legend: v variant, s stage, b boundary between s = b and s = b + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas.cost.cluster_arrays import Floats, Ints
from atlas.planner.circuit_waits import CircuitWaits


@dataclass(frozen=True, eq=False)
class Floors:
    """What the floors of one batch are made of."""

    sort: Ints
    """[v]: the row of the seconds of a variant."""
    forward_s: Floats
    recompute_s: Floats
    input_s: Floats
    weight_s: Floats
    """[row, s]: of one microbatch."""
    way_s: Floats
    """[v, b]: the fastest transfer to the next stage; the way back is the same."""
    load_s: Floats
    """[v, b]: time for which one microbatch of each pipeline of the cell occupies a link, one way; 0 inside a
    datacenter."""
    closing_s: Floats
    """[v, s]: all-reduce and optimizer, and the change to the ring where it is asked for after the last backward."""
    held: Ints
    """[v]: microbatches that memory holds at once."""
    waits: CircuitWaits | None
    """None where no circuits change."""

    def done_s(self, v: Ints, num_mb: Ints) -> Floats:
        """[., s]: when a stage can have finished its last backward at the earliest, with `num_mb` microbatches, and has
        the circuits of its gradient ring."""
        u = self.sort[v]
        forward, again, inner, weight = (a[u] for a in (self.forward_s, self.recompute_s, self.input_s, self.weight_s))
        way, load, depth = self.way_s[v], self.load_s[v], forward.shape[1]
        count = num_mb[:, None].astype(np.float64)
        held = np.minimum(self.held[v], num_mb)[:, None]
        head = np.zeros_like(forward)
        head[:, 1:] = np.cumsum(forward[:, :-1] + way, axis=1)
        away = np.zeros_like(forward)
        for s in range(depth - 2, -1, -1):
            loop = 2 * way[:, s] + forward[:, s + 1] + away[:, s + 1] + inner[:, s + 1]
            away[:, s] = np.maximum(loop, again[:, s])
        first = head + forward + away  # the first gradient can be there
        if self.waits is not None:
            head = self.waits.heads_s(v, forward, way)
            back = np.zeros_like(forward)
            back[:, :-1] = np.cumsum((inner[:, 1:] + way)[:, ::-1], axis=1)[:, ::-1]
            first = np.maximum(head + forward + away, head[:, -1:] + forward[:, -1:] + back)
        work = forward + again + inner + weight
        # When the last gradient has left a stage: it computes all the while, or the last microbatch still travels.
        left = head + count * (forward + again + inner)
        left = np.maximum(left, head + count * forward + (count - held) * (again + inner) + away + inner)
        if depth > 1:
            there = head[:, :-1] + forward[:, :-1] + count * load + forward[:, 1:] + away[:, 1:] + inner[:, 1:]
            left[:, 1:] = np.maximum(left[:, 1:], there)
            left[:, :-1] = np.maximum(left[:, :-1], first[:, 1:] + inner[:, 1:] + count * load + inner[:, :-1])
        for s in range(depth - 2, -1, -1):
            left[:, s] = np.maximum(left[:, s], left[:, s + 1] + way[:, s] + inner[:, s])
        done = np.maximum(left + weight, head + count * work)
        done = np.maximum(done, first + count * work - held * (forward + again))
        stay = forward + away + inner
        done = np.maximum(done, head + count * stay / held + weight)
        return np.asarray(done if self.waits is None else np.maximum(done, self.waits.rings_s(v, left, way)))

    def most_microbatches(self, below_s: float) -> Ints:
        """[v]: an upper limit of the microbatches per pipeline with which an order takes less than this. Only of the
        argument that each stage computes without a pause."""
        work = (self.forward_s + self.recompute_s + self.input_s + self.weight_s)[self.sort]
        return np.asarray(np.floor((below_s - self.closing_s) / work).min(axis=1).clip(0), np.int64)

    def iteration_s(self, v: Ints, num_mb: Ints, between_s: Floats | float = 0.0) -> Floats:
        """[.]: with the all-reduce, the optimizer, and `between_s` [., s] for the sum between several groups."""
        return np.asarray((self.done_s(v, num_mb) + self.closing_s[v] + between_s).max(axis=1))
