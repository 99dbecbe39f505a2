"""Sailor's judge: the iteration time of a plan by its formula, as its own simulator computes it.

    N = ceil(G / (mbs D))                                 C_i = slowest replica's forward + backward
    comm_0 = A_0 (2 A_0 if P > 3), comm_i = A_i + B_i, comm_last = 2 B_last
    T = (N - 1) max(C_i + comm_i) + sum comm + sum C + max update + T_sync
    T_sync = slowest stage and pair of neighbouring replicas: sum over 500 MB buckets b of 2 (D - 1) t(b / D)

It leaves out latency, overlap of transfers with compute, and that links are shared: `events` shows what they change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from atlas.sailor.inputs import Inputs
from atlas.sailor.links import BandwidthFit
from atlas.sailor.plan_file import Replica, SailorPlan

FLOAT_BYTES = 4
BUCKET_BYTES = 500_000_000
"""Gradients are summed in buckets of this size."""
MAX_RING_TP = 4
"""A ring carries a stage's gradients divided by its tp; Sailor's simulator divides by this at most."""
SHORT_PIPELINE = 3
"""Up to this many stages Sailor's simulator counts the first stage's transfers once, beyond it twice."""
STATE_BYTES_PER_PARAM = 24
"""Adam's two moments, the weights, two more copies, gradients and a communication buffer, in fp32."""
RESERVED_BYTES, RESERVED_TP_BYTES = 2_000_000_000, 3_000_000_000
"""Memory for CUDA's context and NCCL's buffers, without and with tensor parallelism: from Sailor's simulator."""


@dataclass(frozen=True)
class Verdict:
    """The parts of the formula, all in seconds."""

    iteration_s: float
    num_microbatches: int
    compute_s: tuple[float, ...]
    """By stage, one microbatch."""
    comm_s: tuple[float, ...]
    """By stage, one microbatch."""
    update_s: float
    sync_s: float


def judge(inputs: Inputs, plan: SailorPlan) -> Verdict:
    """The iteration time of a plan that `check` accepts."""
    return PlanJudge(inputs, plan).verdict(plan.ends)


class PlanJudge:
    """Judges plans with the same replicas and any layers. What it says of a stage, or of a border between two, is
    computed once for each run of layers."""

    def __init__(self, inputs: Inputs, plan: SailorPlan) -> None:
        self.inputs, self.plan, self.num_replicas = inputs, plan, plan.num_replicas
        self.num_microbatches = math.ceil(inputs.global_batch / (plan.mbs * plan.num_replicas))
        self._columns = [list(zip(*pair, strict=True)) for pair in pairwise(plan.replicas)]
        self._sends = [
            ({sending_fit(inputs, a, b) for a, b in pairs}, {sending_fit(inputs, b, a) for a, b in pairs})
            for pairs in map(set, self._columns)
        ]
        self._kinds = [{(replica.gpu, replica.tp) for replica in stage} for stage in plan.replicas]
        self._rings = [{_ringing(inputs, a, b) for a, b in set(pairwise(stage))} for stage in plan.replicas]
        self._stage, self._border = cache(self._one_stage), cache(self._one_border)

    def verdict(self, ends: Sequence[int]) -> Verdict:
        """`ends`: of each stage, the layer after its last."""
        parts = [self._stage(i, a, b) for i, (a, b) in enumerate(pairwise([0, *ends]))]
        borders = [self._border(i, end) for i, end in enumerate(ends[:-1])]
        compute, update, sync = zip(*parts, strict=True)
        comm = combined_comm_s([*(onward for onward, _ in borders), 0.0], [0.0, *(back for _, back in borders)])
        slowest = max(c + t for c, t in zip(compute, comm, strict=True))
        total = (self.num_microbatches - 1) * slowest + sum(comm) + sum(compute) + max(update) + max(sync)
        return Verdict(total, self.num_microbatches, compute, tuple(comm), max(update), max(sync))

    def sync_s(self, stage: int, start: int, end: int) -> float:
        """The gradient ring of one stage over its slowest pair of neighbouring replicas."""
        num_bytes = self._ring_bytes(stage, start, end)
        return max((float(all_reduce_s(fit, num_bytes, self.num_replicas)) for fit in self._rings[stage]), default=0.0)

    def _one_stage(self, stage: int, start: int, end: int) -> tuple[float, float, float]:
        """Compute, update and ring of the slowest replica."""
        times = [self.inputs.times[gpu, self.plan.mbs, tp] for gpu, tp in self._kinds[stage]]
        compute = max(sum(t.forward_s[layer] + t.backward_s[layer] for layer in range(start, end)) for t in times)
        return compute, max(t.update_s[start] for t in times), self.sync_s(stage, start, end)

    def _one_border(self, stage: int, end: int) -> tuple[float, float]:
        """A and B over the slowest pair of facing replicas."""
        sizes = (activation_bytes(self.inputs, layer, self.plan.mbs) for layer in (end - 1, end))
        onward_s, back_s = (
            max(float(fit.seconds(size)) for fit in fits) for fits, size in zip(self._sends[stage], sizes, strict=True)
        )
        return onward_s, back_s

    def _ring_bytes(self, stage: int, start: int, end: int) -> float:
        return stage_bytes(self.inputs, start, end) / min(MAX_RING_TP, *(tp for _, tp in self._kinds[stage]))

    # ---- money -----------------------------------------------------------------------------------------------
    def egress_usd(self, ends: Sequence[int]) -> float:
        """Price of every byte that leaves its zone in one iteration: activations and gradients of every replica and
        microbatch, and the gradient ring."""
        border_usd, ring_usd = self._prices
        sent = [activation_bytes(self.inputs, end - 1, self.plan.mbs) * self.num_microbatches for end in ends[:-1]]
        held = [stage_bytes(self.inputs, a, b) for a, b in pairwise([0, *ends])]
        rings = sum(usd * size for usd, size in zip(ring_usd, held, strict=True))
        share = 2 * (self.num_replicas - 1) / self.num_replicas
        return sum(usd * size for usd, size in zip(border_usd, sent, strict=True)) + rings * share

    @cached_property
    def _prices(self) -> tuple[list[float], list[float]]:
        """USD of a byte there and back over each border, and once around each ring."""
        price = self.inputs.egress.usd_per_byte
        borders = [sum(price(a.zone, b.zone) + price(b.zone, a.zone) for a, b in pairs) for pairs in self._columns]
        rings = [pairwise([*stage, stage[0]]) for stage in self.plan.replicas]
        return borders, [sum(price(a.zone, b.zone) for a, b in ring) for ring in rings]

    # ---- clamps ----------------------------------------------------------------------------------------------
    def clamps(self) -> list[str]:
        """Pairs whose fitted bandwidth was clamped for this plan."""
        return list(
            dict.fromkeys(
                f"{a.zone}/{a.gpu} to {b.zone}/{b.gpu}: the fitted bandwidth for {num_bytes / 1e6:.3g} MB is "
                f"{fit.raw_gb_per_s(num_bytes):.3g} GB/s; clamped to {fit.floor_gb_per_s:.3g} GB/s (1 % of its maximum)"
                for a, b, fit, num_bytes in self._messages()
                if fit.clamped(num_bytes)
            )
        )

    def _messages(self) -> Iterator[tuple[Replica, Replica, BandwidthFit, float]]:
        """Every kind of message of the plan: sender, receiver, bandwidth and size."""
        inputs, ends = self.inputs, self.plan.ends
        for end, pairs in zip(ends[:-1], self._columns, strict=True):
            onward, back = (activation_bytes(inputs, layer, self.plan.mbs) for layer in (end - 1, end))
            for a, b in dict.fromkeys(pairs):
                yield a, b, sending_fit(inputs, a, b), onward
                yield b, a, sending_fit(inputs, b, a), back
        for i, (stage, span) in enumerate(zip(self.plan.replicas, pairwise([0, *ends]), strict=True)):
            whole = self._ring_bytes(i, *span)
            for a, b in dict.fromkeys(pairwise(stage)):
                for bucket in {min(BUCKET_BYTES, whole), whole % BUCKET_BYTES}:
                    yield a, b, _ringing(inputs, a, b), bucket / self.num_replicas


def sending_fit(inputs: Inputs, a: Replica, b: Replica) -> BandwidthFit:
    """For activations and their gradients."""
    return inputs.network.fit(a.zone_gpu, a.sending_gpus, b.zone_gpu, b.sending_gpus)


def _ringing(inputs: Inputs, a: Replica, b: Replica) -> BandwidthFit:
    return inputs.network.fit(a.zone_gpu, 1, b.zone_gpu, 1)


def stage_bytes(inputs: Inputs, start: int, end: int) -> int:
    """Gradients of a run of layers."""
    return sum(inputs.sizes[1].params[start:end]) * FLOAT_BYTES


def stage_memory_bytes(inputs: Inputs, layers: tuple[int, ...], tp: int, mbs: int, stages_after: int) -> int:
    """What a GPU of this stage holds; `stages_after` counts the stage itself."""
    sizes = inputs.sizes[tp]
    params = sum(sizes.params[layer] for layer in layers)
    acts = sum(sizes.act_memory[layer] for layer in layers)
    return STATE_BYTES_PER_PARAM * params + FLOAT_BYTES * acts * mbs * stages_after + reserved_bytes(tp)


def reserved_bytes(tp: int) -> int:
    return RESERVED_BYTES if tp == 1 else RESERVED_TP_BYTES


def activation_bytes(inputs: Inputs, layer: int, mbs: int) -> int:
    return inputs.sizes[1].act_output[layer] * FLOAT_BYTES * mbs


def combined_comm_s(forward_s: list[float], backward_s: list[float]) -> list[float]:
    """comm_i from A_i (what stage i sends on) and B_i (what it sends back)."""
    last = len(forward_s) - 1
    comm = [a + b for a, b in zip(forward_s, backward_s, strict=True)]
    comm[0] = forward_s[0] if last < SHORT_PIPELINE else 2 * forward_s[0]
    comm[last] = 2 * backward_s[last]
    return comm


def all_reduce_s(fit: BandwidthFit, stage_bytes: Any, num_replicas: Any) -> Any:
    """A ring over the slowest pair, bucket after bucket; of numbers or of arrays of them."""
    whole, rest = divmod(stage_bytes, BUCKET_BYTES)
    buckets_s = whole * fit.seconds(BUCKET_BYTES / num_replicas) if np.any(whole) else 0.0
    return 2 * (num_replicas - 1) * (buckets_s + fit.seconds(rest / num_replicas))
