"""Links between clusters from best to worst, and which clusters the best k links connect, for lower bounds.

Whatever a plan uses is connected, by transfers or by gradient rings. So what has no room in the clusters that the best
k links connect needs one of the other links. Knows clusters and tables, no outlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import combinations

import numpy as np

from atlas.sailor.tables import Floats, Ints, SailorTables

MESSAGE_BYTES = (5e5, 2e6, 8e6, 32e6, 128e6)
"""Which of two links is better depends on the size: bounds are made for the order at each of these."""


def links_by_size(tables: SailorTables) -> list[ClusterLinks]:
    """Links in each distinct order of their gradient rings and of their transfers."""
    pairs = list(combinations(range(len(tables.clusters)), 2))
    ring = tables.rings_s(np.array(MESSAGE_BYTES) * 2, np.full(len(MESSAGE_BYTES), 2))
    both = [*np.moveaxis(np.minimum(ring, ring.transpose(1, 0, 2)), 2, 0), (tables.send_s + tables.back_s)[:, :, 0, 0]]
    orders = dict.fromkeys(tuple(sorted(pairs, key=lambda pair: (float(table[pair]), pair))) for table in both)
    return [ClusterLinks(tables, order) for order in orders]


class ClusterLinks:
    """Pairs of clusters from best to worst, and what the best k of them connect.

    Level k has the links from the k-th on: what does not fit the clusters that the first k connect needs one of them.
    """

    def __init__(self, tables: SailorTables, pairs: Sequence[tuple[int, int]]) -> None:
        self.tables, self.pairs, self.num = tables, pairs, len(pairs)
        send, back = tables.send_s, tables.back_s
        self.forward_s, self.backward_s = send.min(axis=(0, 1)), back.min(axis=(0, 1))
        """(run, next run): over any pair."""
        self.room = self._connected(tables.rooms[:, None])[:, 0]
        """By number of links: GPUs that they connect."""

    def _connected(self, weights: Ints) -> Ints:
        """(number of links, ...): the most that clusters connected by this many links have together."""
        group = list(range(len(weights)))
        totals = {cluster: weights[cluster] for cluster in group}
        rows = [np.max(list(totals.values()), axis=0)]
        for a, b in self.pairs:
            old, new = group[b], group[a]
            if old != new:
                totals[new] = totals[new] + totals.pop(old)
                group = [new if g == old else g for g in group]
            rows.append(np.max(list(totals.values()), axis=0))
        return np.array(rows)

    @cached_property
    def whole_columns(self) -> Ints:
        """(number of links, GPUs of a column): columns that are whole in some cluster, of connected clusters."""
        gpus = np.maximum(1, np.arange(self.tables.num_gpus + 1))
        return self._connected(self.tables.rooms[:, None] // gpus)

    def by_level(self, table: Floats) -> Floats:
        """(a, b, ...) to (level, ...): the least over the links of a level and beyond."""
        if not self.pairs:
            return np.zeros((0, *table.shape[2:]))
        rows = np.array([np.minimum(table[a, b], table[b, a]) for a, b in self.pairs])
        return np.minimum.accumulate(rows[::-1])[::-1]

    @cached_property
    def border_extra_s(self) -> Floats:
        """(level, run, next run): what a crossing adds to the transfers, there and back."""
        tables = self.tables
        added = tables.send_s + tables.back_s - (self.forward_s + self.backward_s)
        return self.by_level(np.maximum(0.0, added))

    @cached_property
    def border_wait_s(self) -> Floats:
        """(level, run, next run): what a stage beside a crossing takes at least."""
        least_layer = float(np.diff(self.tables.layers.time_s, axis=1).min())
        return self.by_level(np.maximum(self.tables.send_s, self.tables.back_s)) + least_layer

    @cached_property
    def extra_s(self) -> Floats:
        """The same for stages of one run and then another, wherever they cross."""
        return least_of_borders(self.border_extra_s)

    @cached_property
    def both_s(self) -> Floats:
        """(run, other run): what a stage between two crossings takes at least, or one that pays a crossing twice."""
        least = least_of_borders(self.by_level(np.minimum(self.tables.send_s, self.tables.back_s)))[0]
        both: Floats = 2 * least + float(np.diff(self.tables.layers.time_s, axis=1).min())
        return both

    @cached_property
    def wait_s(self) -> Floats:
        """The same for stages of one run and then another, wherever they cross."""
        return least_of_borders(self.border_wait_s)


def least_of_borders(table: Floats) -> Floats:
    """(..., run, next run), for stages of one run and then another: the least between two of the first, two of the
    second, or one of each.
    """
    own = np.diagonal(table, axis1=-2, axis2=-1)
    return np.minimum(np.minimum(own[..., :, None], own[..., None, :]), table)
