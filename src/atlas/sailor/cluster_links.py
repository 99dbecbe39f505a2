"""Links between clusters from best to worst, and which clusters the best k links connect, for lower bounds.

Whatever a plan uses is connected, by transfers or by gradient rings. So a plan with more GPUs than the clusters that
the best k links connect needs one of the other links. Knows clusters and tables, no outlines.
"""

from __future__ import annotations

from functools import cached_property
from itertools import combinations

import numpy as np

from atlas.sailor.tables import Floats, Ints, SailorTables


class ClusterLinks:
    """Pairs of clusters, the fastest transfers first, and what the first k of them connect.

    Level k has the links from the k-th on: what does not fit the clusters that the first k connect needs one of them.
    """

    def __init__(self, tables: SailorTables) -> None:
        self.tables = tables
        send, back = tables.send_s, tables.back_s
        both_s = (send + back)[:, :, 0, 0]
        pairs = combinations(range(len(tables.clusters)), 2)
        self.pairs = sorted(pairs, key=lambda pair: (float(both_s[pair]), pair))
        self.forward_s, self.backward_s = send.min(axis=(0, 1)), back.min(axis=(0, 1))
        """(run, next run): over any pair."""
        self.connected_gpus = self._connected(tables.cluster_gpus[:, None])[:, 0]
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
        return self._connected(self.tables.cluster_gpus[:, None] // gpus)

    def by_level(self, table: Floats) -> Floats:
        """(a, b, ...) to (level, ...): the least over the links of a level and beyond."""
        rows = np.array([np.minimum(table[a, b], table[b, a]) for a, b in self.pairs])
        return np.minimum.accumulate(rows[::-1])[::-1]

    @cached_property
    def extra_s(self) -> Floats:
        """(level, first run, second run): what a crossing adds at least to the transfers, there and back."""
        return self.by_level(self.tables.crossing_s[0])

    @cached_property
    def wait_s(self) -> Floats:
        """(level, first run, second run): what a stage beside a crossing takes at least."""
        return self.by_level(self.tables.crossing_s[1])
