"""Which of many candidates are kept: a larger cluster keeps everything that a smaller one keeps.

If the best few by score were kept, a larger cluster could lose the plan of a smaller one: candidates that need the
additional nodes would take its place. So a candidate is kept if fewer than a given number of candidates are better and
need no more workers in any datacenter. These fit into every cluster into which the candidate fits, so nodes that it
does not use change nothing. With many datacenters nearly every candidate would be kept; callers then pass no workers,
and the best few are kept. Knows scores and workers, no plans.
"""

from __future__ import annotations

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Floats, Ints
from atlas.planner.shapes import PipelineShape


def undominated(score: Floats, used: Ints, count: int, most: int) -> Ints:
    """The indices of the finite scores that are kept, lowest first; equal scores in the order given. `used` [v, i]:
    workers by datacenter; with no columns, the best `count` are kept. Only the best `most` are looked at: in a large
    cluster thousands of candidates need workers in different datacenters."""
    most = most if used.shape[1] else count
    finite = np.flatnonzero(np.isfinite(score))
    if len(finite) > most:
        finite = finite[score[finite] <= np.partition(score[finite], most - 1)[most - 1]]
    order = finite[np.argsort(score[finite], kind="stable")][:most]
    if len(order) <= count:
        return order
    _, sort = np.unique(used[order], axis=0, return_inverse=True)
    found: list[int] = []
    before = np.empty((len(order), used.shape[1]), used.dtype)
    full: set[int] = set()
    for v, which in zip(order.tolist(), sort.ravel().tolist(), strict=True):
        if which in full:  # those that were better than one with the same workers are better than this one too
            continue
        if np.count_nonzero((before[: len(found)] <= used[v]).all(axis=1)) < count:
            before[len(found)] = used[v]
            found.append(v)
        else:
            full.add(which)
    return np.array(found, np.int64)


def workers_used(cluster: ClusterArrays, shapes: list[PipelineShape], shape: Ints, replicas: Ints) -> Ints:
    """[v, i]: workers by datacenter of `replicas[v]` pipelines of the shape `shapes[shape[v]]`."""
    stages = np.zeros((len(shapes), cluster.num_dcs), np.int64)
    for row, one in zip(stages, shapes, strict=True):
        for i, count in one:
            row[i] = count
    return np.asarray(stages[shape] * replicas[:, None])
