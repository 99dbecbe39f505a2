"""Seconds and dollars of many pipelines at once, in closed form: what a search ranks by before it simulates.

    iteration = fill + (M - 1) x period + closing
    fill      one microbatch through every stage and back: forwards, backwards, both ways over every hop, and the
              waits for one's turn where a cell shares the WAN and for circuits of photonic rails
    period    the slower of a stage's forward, recompute and backward, and a link's bytes; stretched where memory holds
              fewer microbatches than a round trip needs
    closing   the circuits, the all-reduce and the optimizer of whichever stage ends last

Made of the same pieces as `cost.price`: `cost.model_arrays`, `cost.cluster_arrays` and `cost.memory`. The estimate
ignores that an order must keep all these limits at once, so it is a few per cent too low, most where hops are long and
microbatches are few.

Index legend: n pipeline shape, v variant of one (replicas, pipelines per cell), s stage, b boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from atlas.cost.cluster_arrays import (
    ClusterArrays,
    Flags,
    Floats,
    Ints,
    lan_bps,
    ring_s,
    stages_beside,
    tied_s,
    wan_rate,
)
from atlas.cost.model_arrays import FORWARD, INPUT, RECOMPUTE, UPDATE, WEIGHT, ModelArrays
from atlas.cost.price import sent_bytes
from atlas.cost.runtimes import RUNTIMES
from atlas.planner.circuit_waits import CircuitWaits, circuit_waits, turn_changes_s
from atlas.planner.floor import Floors
from atlas.planner.shapes import PipelineShape
from atlas.planner.space import Space
from atlas.planner.split import Split, busy_seconds, split_layers

LOCKSTEP, STRETCH = 1.5, 1.1
"""Where memory holds fewer microbatches than a round trip needs: periods that a microbatch takes at least, and the
factor on round trip / microbatches held. Measured on `schedules.eager`, not derived."""


@dataclass(frozen=True, eq=False)
class PipelineBatch:
    """Pipelines of one tp, microbatch size and depth."""

    tp: int
    microbatch: int
    depth: int
    shapes: list[PipelineShape]
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
    """[u, s]: of the sorts of pipelines."""
    sort: Ints
    """[v]: which of u."""
    floors: Floors

    def layers_of(self, v: int) -> tuple[int, ...]:
        """Layers of each stage of one variant."""
        return tuple(self.layers[self.sort[v]].tolist())

    def floor_s(self, v: Ints) -> Floats:
        """[.]: no order of these variants is faster."""
        return self.floors.iteration_s(v, self.num_microbatches[v])


def estimate(space: Space, cluster: ClusterArrays, model: ModelArrays, batch: PipelineBatch) -> Estimate:
    """Every variant of a batch."""
    job, v = space.job, batch.shape
    dc = np.array([[i for i, stages in shape for _ in range(stages)] for shape in batch.shapes], np.int64)
    split, u = _split(cluster, model, batch, dc)
    seconds = busy_seconds(model, split.dc, split.layers)
    forward_s, backward_s, held = seconds[FORWARD], seconds[INPUT] + seconds[WEIGHT], split.held[u]
    hops = _HopSeconds(space, cluster, batch, dc)
    work_s = model.microbatch_s(seconds)
    through_s = (forward_s + backward_s).sum(axis=1)[u] + hops.way_s.sum(axis=1) + hops.turn_s
    # From a stage's forward to its backward's end: everything behind it, and the way there and back.
    behind_s = np.cumsum(work_s[:, ::-1], axis=1)[:, ::-1][u]
    behind_s[:, :-1] += np.cumsum(hops.way_s[:, ::-1], axis=1)[:, ::-1]
    total = space.total_microbatches(batch.microbatch)
    num_mb = -(-total // batch.replicas)
    period_s = _period_s(job.runtime, work_s, u, hops.load_s)
    # Where memory holds fewer microbatches than a round trip needs, neighbours go in lockstep: more than in proportion.
    short = behind_s.max(axis=1) / (np.maximum(held, 1) * period_s)
    stalls = (short > 1) & (num_mb > held)
    period_s = np.where(stalls, period_s * np.maximum(LOCKSTEP, STRETCH * short), period_s)
    own_closing_s = _sum_s(cluster, model, batch, dc, split, u) + seconds[UPDATE][u]
    # A stage's all-reduce hides behind the gradients that still travel to stage 0.
    drain_s = np.zeros((len(v), batch.depth))
    drain_s[:, 1:] = np.cumsum(backward_s[u][:, :-1] + hops.back_s, axis=1)
    waits = hops.circuit_waits(None if job.zero else seconds[UPDATE][u])
    if waits is not None:
        every = np.arange(len(v))
        there_s = forward_s[u][:, :-1].sum(axis=1) + hops.back_s.sum(axis=1)
        through_s += waits.heads_s(every, forward_s[u], hops.back_s)[:, -1] - there_s
        drain_s = np.minimum(drain_s, -waits.rings_s(every, -drain_s, hops.back_s))
        own_closing_s += waits.late_s
    closing_s = np.max(own_closing_s - drain_s, axis=1)
    iteration_s = through_s + (num_mb - 1) * period_s + closing_s
    usd_per_s = cluster.usd_per_gpu_s[dc].sum(axis=1)[v] * batch.replicas * batch.tp
    egress = 2 * (total * model.job.activation_bytes + model.job.tied_bytes) * hops.usd_per_byte
    return Estimate(
        through_s,
        period_s,
        closing_s,
        num_mb,
        iteration_s,
        iteration_s * usd_per_s + egress,
        usd_per_s,
        held >= 1,
        split.layers,
        u,
        Floors(
            u,
            forward_s,
            seconds[RECOMPUTE],
            seconds[INPUT],
            seconds[WEIGHT],
            hops.least_s,
            hops.wan_s,
            own_closing_s,
            split.stashed[u],
            waits,
        ),
    )


def _period_s(runtime: str, work_s: Floats, u: Ints, load_s: Floats) -> Floats:
    """[v]: of the slowest worker or link, where memory is not short."""
    how = RUNTIMES[runtime]
    if load_s.shape[1] == 0 or not how.sender_waits:
        return np.asarray(np.maximum(work_s.max(axis=1)[u], load_s.max(axis=1, initial=0.0)))
    sends_s = (2 if how.receiver_waits else 1) * load_s
    held_s = work_s[u]
    held_s[:, :-1] += sends_s
    held_s[:, 1:] += sends_s
    return np.asarray(held_s.max(axis=1))


def _split(cluster: ClusterArrays, model: ModelArrays, batch: PipelineBatch, dc: Ints) -> tuple[Split, Ints]:
    """The layers of each sort of pipelines, and the sort of each variant [v]. Memory depends on the shape; with ZeRO-1
    also on the number of replicas, which divide the optimizer state."""
    if not model.job.zero:
        split = split_layers(cluster, model, dc)
        return split, split.sort[batch.shape]
    pairs, row = np.unique(np.column_stack([batch.shape, batch.replicas]), axis=0, return_inverse=True)
    split = split_layers(cluster, model, dc[pairs[:, 0]], pairs[:, 1])
    return split, split.sort[row.ravel()]


def _sum_s(cluster: ClusterArrays, model: ModelArrays, batch: PipelineBatch, dc: Ints, split: Split, u: Ints) -> Floats:
    """[v, s]: the ring all-reduce of each stage inside its datacenter, and the exchange of tied embeddings."""
    end = np.cumsum(split.layers, axis=1)
    params = model.stage_params(split.dc, end - split.layers, end, one_worker=batch.depth == 1)
    gradients = (params * model.job.gradient_bytes)[u]
    found = np.asarray(ring_s(cluster, batch.tp, dc[batch.shape], batch.replicas[:, None], gradients))
    if model.job.tied_bytes and batch.depth > 1:
        found[:, [0, -1]] += tied_s(cluster, batch.tp, dc[batch.shape], batch.replicas, model.job.tied_bytes)[:, None]
    return found


class _HopSeconds:
    """[v, b]: seconds of one microbatch on its way to the next stage and back. Few boundaries cross a WAN: only those
    are priced as WAN transfers."""

    def __init__(self, space: Space, cluster: ClusterArrays, batch: PipelineBatch, dc: Ints) -> None:
        one = space.job.model_copy(update={"tp": batch.tp, "microbatch": batch.microbatch})
        bits, shape, stages = 8 * sent_bytes(one), batch.shape, stages_beside(dc)[batch.shape]
        dcs, workers = dc[shape], stages * batch.replicas[:, None]
        self._cluster, self._batch, self._dcs, self._stages = cluster, batch, dcs, stages
        lan_s = bits / lan_bps(cluster, batch.tp, dcs, workers) + cluster.net_latency_s[dcs]
        self.way_s: Floats = lan_s[:, :-1] + lan_s[:, 1:]
        self.back_s: Floats = self.way_s / 2
        self.load_s: Floats = self.way_s / 2
        self.turn_s: Floats = np.zeros(len(shape))
        self.least_s: Floats = self.back_s.copy()
        self.wan_s: Floats = np.zeros_like(self.back_s)
        self.usd_per_byte: Floats = np.zeros(len(shape))
        at = np.nonzero(dcs[:, :-1] != dcs[:, 1:])
        v, boundary = at
        (a, b), held = ((x[v, boundary], x[v, boundary + 1]) for x in (dcs, stages))
        replicas, cell = batch.replicas[v], np.where(space.tcp == "many", batch.cell[v], 1)
        wan = partial(wan_rate, cluster, batch.tp, a, b, bits, replicas=replicas, stages=held, tcp=space.tcp)
        rate = wan(cells=replicas // cell, turns=cell)
        work_s = bits / rate.rate_bps
        one_way_s = work_s + rate.before_s + rate.after_s + cluster.latency_s[a, b]
        if cluster.relays.any():
            change_s = self._turn_changes_s(v, boundary)
            away_s = 2 * change_s.max(axis=0) / cell  # once to the ring and back in a round of turns
            work_s, one_way_s = work_s + away_s, one_way_s + away_s + change_s.sum(axis=0)
        self.way_s[at], self.back_s[at], self.load_s[at] = 2 * one_way_s, one_way_s, cell * work_s
        # Without turns a transfer has one pair's path, and no slices to scatter: it may be the faster one.
        apart = wan(cells=replicas, turns=1)
        apart_s = bits / apart.rate_bps + cluster.latency_s[a, b]
        self.least_s[at] = np.minimum(one_way_s, apart_s)
        self.wan_s[at] = np.minimum(cell * work_s, bits / apart.rate_bps)
        np.maximum.at(self.turn_s, v, (cell - 1) * work_s)
        np.add.at(self.usd_per_byte, v, cluster.usd_per_byte[a, b])

    def _turn_changes_s(self, v: Ints, boundary: Ints) -> Floats:
        """[end, .]: for slices of turns over these boundaries between datacenters, at both ends."""
        cluster, batch, last = self._cluster, self._batch, self._dcs.shape[1] - 1
        found = np.zeros((2, len(v)))
        for end, away in ((0, -1), (1, 1)):
            stage = boundary + end
            here, held = self._dcs[v, stage], self._stages[v, stage]
            has_hops = here == self._dcs[v, np.clip(stage + away, 0, last)]
            has_hops &= (stage + away >= 0) & (stage + away <= last)
            changes_s = turn_changes_s(cluster, batch.tp, here, batch.replicas[v], held, has_hops)
            found[end] = np.where(batch.cell[v] > 1, changes_s, 0.0)
        return found

    def circuit_waits(self, step_s: Floats | None) -> CircuitWaits | None:
        """For hops and gradient rings inside datacenters; None where no circuits change."""
        return circuit_waits(self._cluster, self._batch.tp, self._dcs, self._batch.replicas, self._stages, step_s)
