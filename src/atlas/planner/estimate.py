"""Seconds and dollars of many pipelines at once, in closed form: what a search ranks by before it simulates.

    iteration = fill + (M - 1) x period + closing
    fill      one microbatch through every stage and back: forwards, backwards, both ways over every hop, and the
              wait for one's turn where a cell shares the WAN
    period    the slower of a stage's forward, recompute and backward, and a link's bytes; stretched where memory holds
              fewer microbatches than a round trip wants
    closing   the all-reduce and the optimizer of whichever stage ends last

Made of the same pieces as `cost.price` (a test holds the two together). What it leaves out is how an order meets
these limits at once: it is a few per cent low, most where hops are long and microbatches few. Knows no order.

Index legend: n pipeline shape, v variant of one (replicas, pipelines per cell), s stage, b boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, Flags, Floats, Ints, Speeds
from atlas.cost.price import ring_bps
from atlas.cost.runtimes import RUNTIMES
from atlas.ir.dispatch import QUANTUM_NS
from atlas.planner.shapes import Shape
from atlas.planner.space import Space
from atlas.planner.split import Sizes, in_flight, split_layers

LOCKSTEP = 1.5
"""Periods that a microbatch takes at least where memory is short; measured on `schedules.eager`, not derived."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Pipelines of one tp, microbatch size and depth."""

    tp: int
    microbatch: int
    depth: int
    shapes: list[Shape]
    shape: Ints
    """[v]"""
    replicas: Ints
    cell: Ints
    """[v]: pipelines that take turns; 1 where each has its own path."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """By variant."""

    fill_s: Floats
    period_s: Floats
    closing_s: Floats
    """What the all-reduce and the optimizer add after the last backward."""
    num_microbatches: Ints
    iteration_s: Floats
    usd: Floats
    """Of one iteration: rent and egress."""
    usd_per_s: Floats
    """Rent."""
    fits: Flags
    layers: Ints
    """[n, s]"""


def estimate(space: Space, cluster: ClusterArrays, speeds: Speeds, sizes: Sizes, batch: Batch) -> Estimate:
    """Every variant of a batch."""
    job, v = space.job, batch.shape
    dc = np.array([[i for i, stages in shape for _ in range(stages)] for shape in batch.shapes], np.int64)
    layers, fits = split_layers(job, cluster, speeds, sizes, dc)
    forward_s, again_s, backward_s, update_s = _stage_times(speeds, dc, layers)
    held = in_flight(job, cluster, sizes, dc, layers)
    fits &= held >= 1
    hops = _Hops(space, cluster, batch, dc)
    runtime = RUNTIMES[job.runtime]
    work_s = forward_s + again_s + backward_s
    through_s = (forward_s + backward_s).sum(axis=1)[v] + hops.way_s.sum(axis=1) + hops.turn_s
    # From a stage's forward to its backward's end: everything behind it, and the way there and back.
    behind_s = np.cumsum(work_s[:, ::-1], axis=1)[:, ::-1][v]
    behind_s[:, :-1] += np.cumsum(hops.way_s[:, ::-1], axis=1)[:, ::-1]
    slots = space.slots(batch.microbatch)
    num_mb = -(-slots // batch.replicas)
    period_s = work_s.max(axis=1)[v]
    if batch.depth > 1 and runtime.sender_waits:
        sends_s = (2 if runtime.receiver_waits else 1) * hops.load_s
        held_s = work_s[v]
        held_s[:, :-1] += sends_s
        held_s[:, 1:] += sends_s
        period_s = held_s.max(axis=1)
    elif batch.depth > 1:
        period_s = np.maximum(period_s, hops.load_s.max(axis=1))
    # Where memory holds fewer microbatches than a round trip wants, neighbours go in lockstep: more than in proportion.
    short = behind_s.max(axis=1) / (np.maximum(held[v], 1) * period_s)
    stalls = (short > 1) & (num_mb > held[v])
    period_s = np.where(stalls, period_s * np.maximum(LOCKSTEP, 1.1 * short), period_s)
    closing_s = sync_s(job.model.tied_embeddings, cluster, sizes, batch, dc, layers) + update_s[v]
    # A stage's all-reduce hides behind the gradients that still travel to stage 0.
    drain_s = np.zeros((len(v), batch.depth))
    drain_s[:, 1:] = np.cumsum(backward_s[v][:, :-1] + hops.back_s, axis=1)
    closing_s = np.max(closing_s - drain_s, axis=1)
    iteration_s = through_s + (num_mb - 1) * period_s + closing_s
    usd_per_s = cluster.usd_per_gpu_s[dc].sum(axis=1)[v] * batch.replicas * batch.tp
    egress = 2 * slots * _activation_bytes(space, batch.microbatch) * hops.usd_per_byte
    return Estimate(
        through_s,
        period_s,
        closing_s,
        num_mb,
        iteration_s,
        iteration_s * usd_per_s + egress,
        usd_per_s,
        fits[v],
        layers,
    )


def _activation_bytes(space: Space, microbatch: int) -> float:
    model = space.job.model
    return float(microbatch * model.seq_len * model.hidden * space.job.element_bytes)


def _stage_times(speeds: Speeds, dc: Ints, layers: Ints) -> list[Floats]:
    """[n, s] forward, recompute, backward, update. The last stage goes straight on to its backward."""
    per_layer = (speeds.forward_s, speeds.again_s, speeds.backward_s, speeds.update_s)
    times = [layers * of[dc] for of in per_layer]
    for k, time_s in enumerate(times):
        time_s[:, 0] += speeds.first[k, dc[:, 0]]
        time_s[:, -1] += speeds.last[k, dc[:, -1]]
    times[1][:, -1] = 0.0
    return times


def sync_s(tied: bool, cluster: ClusterArrays, sizes: Sizes, batch: Batch, dc: Ints, layers: Ints) -> Floats:
    """[v, s]: the ring all-reduce of each stage inside its datacenter. Tied embeddings are left to the simulator."""
    params = layers * sizes.gradient_per_layer
    params[:, 0] += sizes.gradient_first
    params[:, -1] += sizes.gradient_last
    at, replicas = dc[batch.shape], batch.replicas[:, None]
    nodes, per_node, net_bps = cluster.nodes[at], cluster.gpus_per_node[at], cluster.net_bps[at]
    packed = RUNTIMES[cluster.job.runtime].packs_replicas
    rate_bps, is_inside = ring_bps(replicas, batch.tp, nodes, per_node, net_bps, cluster.peer_bps[at], packed=packed)
    ring_s = (replicas - 1) / replicas * (params * 8)[batch.shape] / rate_bps
    ring_s += np.where(is_inside, 0.0, cluster.net_latency_s[at] * (replicas - 1))
    return np.asarray(2 * ring_s, np.float64)


class _Hops:
    """[v, b]: what one microbatch meets on its way to the next stage and back. Few boundaries cross a WAN; what that
    costs is worked out for those alone, and put in place."""

    def __init__(self, space: Space, cluster: ClusterArrays, batch: Batch, dc: Ints) -> None:
        whole = RUNTIMES[space.job.runtime].sends_whole
        bits = 8 * _activation_bytes(space, batch.microbatch) * (batch.tp if whole else 1)
        net_bps, shape = cluster.worker_bps(batch.tp), batch.shape
        lan_s = bits / net_bps[dc[:, :-1]] + bits / net_bps[dc[:, 1:]]
        lan_s += cluster.net_latency_s[dc[:, :-1]] + cluster.net_latency_s[dc[:, 1:]]
        self.way_s: Floats = lan_s[shape]
        self.back_s: Floats = self.way_s / 2
        self.load_s: Floats = self.way_s / 2
        self.turn_s: Floats = np.zeros(len(shape))
        self.usd_per_byte: Floats = np.zeros(len(shape))
        at = np.nonzero((dc[:, :-1] != dc[:, 1:])[shape])
        v, boundary = at
        a, b = dc[shape[v], boundary], dc[shape[v], boundary + 1]
        replicas, cell = batch.replicas[v], batch.cell[v]
        slower_bps = np.minimum(net_bps[a], net_bps[b])
        crowd = np.ceil(replicas / np.minimum(cluster.nodes[a], cluster.nodes[b]))
        pair_bps = np.minimum(cluster.pair_bps[a, b] / crowd, slower_bps)
        if space.tcp == "one":
            pair_bps = np.minimum(pair_bps, cluster.stream_bps[a, b])
        trunk_bps = cluster.trunk_bps[a, b] * cell / replicas
        spread_bps = np.where(cell > 1, slower_bps * cell / np.maximum(cell - 1, 1), np.inf)
        rate_bps = np.minimum(np.minimum(cell * pair_bps, trunk_bps), spread_bps)
        work_s = bits / rate_bps
        chunk_bits = np.minimum(bits, rate_bps * QUANTUM_NS / 1e9) * (cell - 1) / cell
        ends_s = chunk_bits / net_bps[a] + chunk_bits / net_bps[b]
        ends_s += np.where(cell > 1, cluster.net_latency_s[a] + cluster.net_latency_s[b], 0.0)
        one_way_s = work_s + ends_s + cluster.latency_s[a, b]
        self.way_s[at], self.back_s[at], self.load_s[at] = 2 * one_way_s, one_way_s, cell * work_s
        np.maximum.at(self.turn_s, v, (cell - 1) * work_s)
        np.add.at(self.usd_per_byte, v, cluster.usd_per_byte[a, b])
