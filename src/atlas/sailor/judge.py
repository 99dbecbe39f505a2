"""Sailor's judge: the iteration time of a plan by its formula, as its own simulator computes it.

    N = ceil(G / (mbs D))                                 C_i = slowest replica's forward + backward
    comm_0 = A_0 (2 A_0 if P > 3), comm_i = A_i + B_i, comm_last = 2 B_last
    T = (N - 1) max(C_i + comm_i) + sum comm + sum C + max update + T_sync
    T_sync = slowest stage and pair of neighbouring replicas: sum over 500 MB buckets b of 2 (D - 1) t(b / D)

It leaves out latency, overlap of transfers with compute, and that links are shared: `events` shows what they change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from atlas.sailor.inputs import Inputs
from atlas.sailor.links import Fit
from atlas.sailor.plan_file import Replica, SailorPlan

FLOAT_BYTES = 4
BUCKET_BYTES = 500_000_000
STATE_BYTES_PER_PARAM = 24
"""Adam's two moments, the weights, two more copies, gradients and a communication buffer, in fp32."""


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
    clamps: tuple[str, ...]
    """Pairs whose fitted bandwidth was clamped for this plan."""


def judge(inputs: Inputs, plan: SailorPlan) -> Verdict:
    """The iteration time of a plan that `check` accepts."""
    clamps: dict[str, None] = {}
    num_microbatches = math.ceil(inputs.global_batch / (plan.mbs * plan.num_replicas))
    compute, update = [], 0.0
    for layers, stage in zip(plan.layers, plan.replicas, strict=True):
        kinds = {(replica.gpu, replica.tp) for replica in stage}
        compute.append(max(stage_compute_s(inputs, gpu, plan.mbs, tp, layers) for gpu, tp in kinds))
        update = max(update, *(inputs.times[gpu, plan.mbs, tp].update_s[layers[0]] for gpu, tp in kinds))
    comm = _comm_s(inputs, plan, clamps)
    sync = max(stage_sync_s(inputs, plan, i, clamps) for i in range(plan.num_stages))
    slowest = max(c + t for c, t in zip(compute, comm, strict=True))
    total = (num_microbatches - 1) * slowest + sum(comm) + sum(compute) + update + sync
    return Verdict(total, num_microbatches, tuple(compute), tuple(comm), update, sync, tuple(clamps))


def stage_compute_s(inputs: Inputs, gpu: str, mbs: int, tp: int, layers: tuple[int, ...]) -> float:
    """Forward and backward of one microbatch through a run of layers."""
    times = inputs.times[gpu, mbs, tp]
    return sum(times.forward_s[layer] + times.backward_s[layer] for layer in layers)


def stage_memory_bytes(inputs: Inputs, layers: tuple[int, ...], tp: int, mbs: int, stages_after: int) -> int:
    """What a GPU of this stage holds; `stages_after` counts the stage itself."""
    sizes = inputs.sizes[tp]
    params = sum(sizes.params[layer] for layer in layers)
    acts = sum(sizes.act_memory[layer] for layer in layers)
    return STATE_BYTES_PER_PARAM * params + FLOAT_BYTES * acts * mbs * stages_after + reserved_bytes(tp)


def reserved_bytes(tp: int) -> int:
    """CUDA context and NCCL's buffers, more of them with tensor parallelism: the constants of Sailor's simulator."""
    return 2_000_000_000 if tp == 1 else 3_000_000_000


def activation_bytes(inputs: Inputs, layer: int, mbs: int) -> int:
    return inputs.sizes[1].act_output[layer] * FLOAT_BYTES * mbs


def combined_comm_s(forward_s: list[float], backward_s: list[float]) -> list[float]:
    """comm_i from A_i (what stage i sends on) and B_i (what it sends back)."""
    last = len(forward_s) - 1
    comm = [a + b for a, b in zip(forward_s, backward_s, strict=True)]
    comm[0] = forward_s[0] if last < 3 else 2 * forward_s[0]
    comm[last] = 2 * backward_s[last]
    return comm


def _comm_s(inputs: Inputs, plan: SailorPlan, clamps: dict[str, None]) -> list[float]:
    forward, backward = [0.0] * plan.num_stages, [0.0] * plan.num_stages
    for i in range(plan.num_stages - 1):
        here, there = plan.replicas[i], plan.replicas[i + 1]
        onward = activation_bytes(inputs, plan.layers[i][-1], plan.mbs)
        back = activation_bytes(inputs, plan.layers[i + 1][0], plan.mbs)
        for a, b in set(zip(here, there, strict=True)):
            forward[i] = max(forward[i], _send_s(inputs, a, b, onward, clamps))
            backward[i + 1] = max(backward[i + 1], _send_s(inputs, b, a, back, clamps))
    return combined_comm_s(forward, backward)


def _send_s(inputs: Inputs, a: Replica, b: Replica, num_bytes: int, clamps: dict[str, None]) -> float:
    key = (a, b, num_bytes)
    if key not in inputs.memo:
        fit = inputs.network.fit(a.end, a.sending_gpus, b.end, b.sending_gpus)
        inputs.memo[key] = float(fit.seconds(num_bytes)), _clamp_notes(fit, a, b, [num_bytes])
    return _noted(inputs, key, clamps)


def stage_sync_s(inputs: Inputs, plan: SailorPlan, stage: int, clamps: dict[str, None] | None = None) -> float:
    """The gradient ring of one stage over its slowest pair of neighbouring replicas."""
    clamps = {} if clamps is None else clamps
    replicas = plan.replicas[stage]
    tp = min(4, *(replica.tp for replica in replicas))
    stage_bytes = sum(inputs.sizes[1].params[layer] for layer in plan.layers[stage]) * FLOAT_BYTES / tp
    slowest = 0.0
    for a, b in set(pairwise(replicas)):
        slowest = max(slowest, _ring_s(inputs, a, b, stage_bytes, len(replicas), clamps))
    return slowest


def _ring_s(
    inputs: Inputs, a: Replica, b: Replica, stage_bytes: float, num_replicas: int, clamps: dict[str, None]
) -> float:
    key = (a, b, stage_bytes, num_replicas)
    if key not in inputs.memo:
        fit = inputs.network.fit(a.end, 1, b.end, 1)
        buckets = {min(BUCKET_BYTES, stage_bytes), stage_bytes % BUCKET_BYTES}
        notes = _clamp_notes(fit, a, b, [bucket / num_replicas for bucket in buckets])
        inputs.memo[key] = float(all_reduce_s(fit, stage_bytes, num_replicas)), notes
    return _noted(inputs, key, clamps)


def _noted(inputs: Inputs, key: tuple[object, ...], clamps: dict[str, None]) -> float:
    """The seconds of a transfer or a ring; what was clamped for it is added to `clamps`."""
    seconds, notes = inputs.memo[key]
    if notes:
        clamps.update(dict.fromkeys(notes))
    return seconds


def all_reduce_s(fit: Fit, stage_bytes: Any, num_replicas: Any) -> Any:
    """A ring over the slowest pair, bucket after bucket; of numbers or of arrays of them."""
    whole, rest = divmod(stage_bytes, BUCKET_BYTES)
    buckets_s = whole * fit.seconds(BUCKET_BYTES / num_replicas) if np.any(whole) else 0.0
    return 2 * (num_replicas - 1) * (buckets_s + fit.seconds(rest / num_replicas))


def _clamp_notes(fit: Fit, a: Replica, b: Replica, sizes: Sequence[float]) -> tuple[str, ...]:
    return tuple(
        f"{a.zone}/{a.gpu} to {b.zone}/{b.gpu}: the fitted bandwidth for {num_bytes / 1e6:.3g} MB is "
        f"{fit.raw_gb_per_s(num_bytes):.3g} GB/s; clamped to {fit.floor_gb_per_s:.3g} GB/s (1 % of its maximum)"
        for num_bytes in sizes
        if fit.clamped(num_bytes)
    )
