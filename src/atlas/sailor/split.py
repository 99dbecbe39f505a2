"""Layers to stages, when everything else is decided: the slowest stage as fast as can be, within memory.

Greedy under a limit, and the limit raised to the next value at which some stage could take one layer more: exact,
because a longer run is never faster nor smaller. Many placements at once, along the leading axis.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atlas.sailor.tables import Bools, Floats, Ints, LayerTables

ROUNDING = 1e-12
"""A sum may exceed its limit by this, relative and absolute."""


class Stages(NamedTuple):
    """What is to be split; one entry for each placement."""

    num_stages: Ints
    kinds: Ints
    """(placement, GPU type, stage): a row of `LayerTables`."""
    present: Bools
    """(placement, GPU type, stage): whether the stage has this type."""
    head_alone: Bools
    """A head whose output is large is alone on the last stage or shares it: what it sends differs."""

    def take(self, which: Ints) -> Stages:
        return Stages._make(field[which] for field in self)


class StageLimit(NamedTuple):
    """Something of which no stage may have more than a limit: seconds, or bytes of gradients."""

    prefix: Floats
    """(row of `LayerTables`, layer): prefix sums."""
    fixed: Floats
    """(placement, stage): what is added, independent of the layers."""
    limit: Floats
    """(placement)."""

    def take(self, which: Ints) -> StageLimit:
        return StageLimit(self.prefix, self.fixed[which], self.limit[which])


def balanced(
    layers: LayerTables, stages: Stages, measure: StageLimit, cap: StageLimit | None = None
) -> tuple[Ints, Bools]:
    """Where each stage ends (exclusive) so that the most of `measure` is least, and whether that is possible at all.

    The search begins at the measure's limit; `cap` holds besides.
    """
    ends = np.zeros(measure.fixed.shape, dtype=np.int64)
    done = np.zeros(len(ends), dtype=bool)
    active = np.arange(len(ends))
    while active.size:
        found, ok, limit = _under(layers, stages, measure, cap)
        ends[active[ok]], done[active[ok]] = found[ok], True
        again = np.flatnonzero(~ok & np.isfinite(limit))
        active, stages, cap = active[again], stages.take(again), None if cap is None else cap.take(again)
        measure = StageLimit(measure.prefix, measure.fixed[again], limit[again])
    return ends, done


def _under(
    layers: LayerTables, stages: Stages, measure: StageLimit, cap: StageLimit | None
) -> tuple[Ints, Bools, Floats]:
    """The splits under the limits, which of them hold all layers, and the next limits to try."""
    num_layers, num_stages = layers.num_layers, stages.num_stages
    tail = np.where((num_stages > 1) & layers.head_is_heavy & ~stages.head_alone, 2, 1)
    start = np.zeros(len(num_stages), dtype=np.int64)
    ends = np.zeros(measure.fixed.shape, dtype=np.int64)
    alive, following = np.ones(len(start), dtype=bool), np.full(len(start), np.inf)
    for i in range(int(num_stages.max())):
        after = num_stages - i
        inside = after >= 1
        alive &= ~stages.head_alone | (after != 1) | (start >= num_layers - 1)
        end = np.where(after > 1, num_layers - (after - 2 + tail), num_layers)
        most = end
        for kind in range(stages.kinds.shape[1]):
            row, here = stages.kinds[:, kind, i], stages.present[:, kind, i] & alive & inside
            held = np.minimum(layers.furthest[row, np.maximum(after, 0), start], most)
            if cap is not None:
                held = np.minimum(held, _reach(cap, row, start, i))
            reach = _reach(measure, row, start, i)
            next_end = np.minimum(np.maximum(reach, start) + 1, num_layers)
            raised = measure.prefix[row, next_end] - measure.prefix[row, start] + measure.fixed[:, i]
            following = np.where(here & (reach < held), np.minimum(raised, following), following)
            end = np.where(here, np.minimum(np.minimum(reach, held), end), end)
        alive &= ~inside | (end > start)
        start = np.where(alive & inside, end, start)
        ends[:, i] = start
    return ends, alive & (start == num_layers), following


def _reach(measure: StageLimit, row: Ints, start: Ints, stage: int) -> Ints:
    """The end of the longest run from `start` within the limit."""
    limit = measure.limit * (1 + ROUNDING) + ROUNDING - measure.fixed[:, stage] + measure.prefix[row, start]
    reached: Ints = (measure.prefix[row] <= limit[:, None]).sum(axis=1)
    return reached - 1


def totals(measure: StageLimit, stages: Stages, ends: Ints) -> Floats:
    """(placement, stage): what each stage has of a measure, the most of its GPU types, without what is fixed."""
    starts = np.concatenate([np.zeros((len(ends), 1), dtype=np.int64), ends[:, :-1]], axis=1)
    taken = measure.prefix[stages.kinds, ends[:, None]] - measure.prefix[stages.kinds, starts[:, None]]
    most: Floats = np.where(stages.present, taken, 0.0).max(axis=1)
    return most
