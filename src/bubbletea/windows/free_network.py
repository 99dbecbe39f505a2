"""The network bandwidth that training leaves for KV on each worker: residual bytes over one period, from a Timeline.

Training goes first. Its gradient all-reduce takes the whole network of a worker; an activation inside the datacenter
takes it while it is sent; one that crosses the WAN in turns takes, on the sender, its own slice and the slices it
scatters, and on every peer of the cell the slice it relays and, at the other end, gathers. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atlas.cost.arrange import Arrangement
from atlas.cost.cluster_arrays import worker_bps
from atlas.ir.program import FORWARD, Ints, Kind
from atlas.ir.timeline import Timeline
from atlas.spec.job import Job
from bubbletea.windows.bubbles import span


@dataclass(frozen=True, eq=False)
class Residual:
    """Residual bytes of each worker's network, cumulated over the period. Steps of worker w are
    `ptr[w] : ptr[w + 1]`, the first at 0 and the last at the period; between two steps the rate is constant."""

    period_ns: int
    ptr: Ints
    at_ns: Ints
    bytes: NDArray[np.float64]
    """Residual bytes from the start of the period to each step."""

    def replicated(self, cells: int) -> Residual:
        count = len(self.at_ns)
        ptr = np.append((np.arange(cells)[:, None] * count + self.ptr[None, :-1]).ravel(), cells * count)
        return Residual(self.period_ns, ptr.astype(np.int64), np.tile(self.at_ns, cells), np.tile(self.bytes, cells))

    def share(self, rate_bytes_per_s: float) -> float:
        """The share of all workers' bandwidth that training leaves."""
        left = self.bytes[self.ptr[1:] - 1].sum()
        return float(left / (rate_bytes_per_s * self.period_ns / 1e9 * (len(self.ptr) - 1)))


def free_network(num_workers: int, period_ns: int, bytes_per_s: float) -> Residual:
    """Workers whose network training does not use."""
    at = np.tile(np.array([0, period_ns], np.int64), num_workers)
    left = np.tile(np.array([0.0, period_ns * bytes_per_s / 1e9]), num_workers)
    return Residual(period_ns, np.arange(num_workers + 1, dtype=np.int64) * 2, at, left)


def residual_of(timeline: Timeline, job: Job, arrangement: Arrangement) -> Residual:
    """From the last period of a Timeline."""
    program = timeline.program
    low_ns, high_ns = span(timeline)
    sync = np.flatnonzero(program.kind == Kind.SYNC)
    sums = _used(program.op_worker[sync], timeline.op_start_ns[sync], timeline.op_end_ns[sync], 1.0)
    net_bps, index = worker_bps(arrangement.cluster, job.tp), arrangement.cluster.index
    rates = [float(net_bps[index[program.worker_dc(w)]]) / 8 for w in range(program.num_workers)]
    return _cumulated([sums, *_transfers(timeline, job, arrangement)], low_ns, high_ns, rates)


_Use = tuple[Ints, Ints, Ints, NDArray[np.float64]]
"""Spans in which training takes a share of a worker's outgoing network: worker, start, end, share."""


def _used(worker: Ints, start_ns: Ints, end_ns: Ints, share: float) -> _Use:
    return worker, start_ns, end_ns, np.full(len(worker), share)


def _transfers(timeline: Timeline, job: Job, arrangement: Arrangement) -> Iterator[_Use]:
    program = timeline.program
    if not program.num_transfers:
        return
    shape = (2, program.num_pipelines, program.num_stages - 1, program.num_slots)
    direction, pipeline, boundary, _ = np.unravel_index(np.arange(program.num_transfers), shape)
    rank = np.array(program.stage_rank, np.int64)
    first, second = rank[boundary], rank[boundary + 1]
    forward = direction == FORWARD
    src, dst = np.where(forward, first, second), np.where(forward, second, first)
    start, end = timeline.transfer_start_ns, timeline.transfer_sent_ns
    known = np.flatnonzero(src != dst)
    local = known[~program.transfer_crosses[known]]
    yield _used(pipeline[local] * program.num_ranks + src[local], start[local], end[local], 1.0)
    wan = known[program.transfer_crosses[known]]
    net_bps = worker_bps(arrangement.cluster, job.tp)[arrangement.stage_dc[0, : job.pp]]
    for peer in range(program.num_pipelines) if program.sharing else ():
        rate = job.activation_bytes * 8e9 / np.maximum(1, end[wan] - start[wan]) / program.num_pipelines
        own = pipeline[wan] == peer
        slices = np.where(own, program.num_pipelines, 1)
        for rows, at, count in ((src, wan, slices), (dst, wan, np.where(own, 0, 1))):
            share = np.minimum(1.0, count * rate / net_bps[rows[at]])
            yield peer * program.num_ranks + rows[at], start[at], end[at], share
    if not program.sharing:
        share = np.minimum(1.0, job.activation_bytes * 8e9 / np.maximum(1, end[wan] - start[wan]) / net_bps[src[wan]])
        yield pipeline[wan] * program.num_ranks + src[wan], start[wan], end[wan], share


def _cumulated(uses: list[_Use], low_ns: int, high_ns: int, bytes_per_s: list[float]) -> Residual:
    worker, start, end, share = (np.concatenate(column) for column in zip(*uses, strict=True))
    start, end = np.clip(start, low_ns, high_ns) - low_ns, np.clip(end, low_ns, high_ns) - low_ns
    order = np.argsort(worker, kind="stable")
    worker, start, end, share = worker[order], start[order], end[order], share[order]
    cut = np.searchsorted(worker, np.arange(len(bytes_per_s) + 1))
    period, ptr, ats, lefts = high_ns - low_ns, [0], [], []
    for w in range(len(bytes_per_s)):
        own = slice(int(cut[w]), int(cut[w + 1]))
        at, inverse = np.unique(np.concatenate([[0, period], start[own], end[own]]), return_inverse=True)
        change = np.zeros(len(at))
        np.add.at(change, inverse[2:], np.concatenate([share[own], -share[own]]))
        free = np.clip(1.0 - np.cumsum(change), 0.0, 1.0)[:-1] * bytes_per_s[w] / 1e9
        ats.append(at.astype(np.int64))
        lefts.append(np.concatenate([[0.0], np.cumsum(free * np.diff(at))]))
        ptr.append(ptr[-1] + len(at))
    return Residual(period, np.array(ptr, np.int64), np.concatenate(ats), np.concatenate(lefts))
