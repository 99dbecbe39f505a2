"""The last step: small changes that lower the judge's score. Layers move between stages, one or a few at a time.

Only layers change here, so what the judge says of a stage, or of a border between two, is computed once for each run
of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

from atlas.errors import InfeasibleError
from atlas.sailor.check import check
from atlas.sailor.inputs import Inputs
from atlas.sailor.judge import (
    FLOAT_BYTES,
    activation_bytes,
    all_reduce_s,
    combined_comm_s,
    stage_compute_s,
)
from atlas.sailor.plan_file import SailorPlan

Goal = Callable[[float, float], float]
"""The score of (seconds, USD of egress)."""


def polished(inputs: Inputs, plan: SailorPlan, goal: Goal) -> SailorPlan:
    """The plan after every change that helps, none of which breaks a rule."""
    stages = _Stages(inputs, plan, goal)
    ends = [stage[-1] + 1 for stage in plan.layers]
    score = stages.score(ends)
    while True:
        for other in _changes(ends):
            new_score = stages.score(other)
            if new_score < score - 1e-12 and _feasible(inputs, _with_ends(plan, other)):
                score, ends = new_score, other
                break
        else:
            return _with_ends(plan, ends)


def _changes(ends: list[int]) -> Iterator[list[int]]:
    """Borders i..j shifted together by one layer either way."""
    for i in range(len(ends) - 1):
        for j in range(i, len(ends) - 1):
            for step in (-1, 1):
                moved = [end + step if i <= k <= j else end for k, end in enumerate(ends)]
                if all(a < b for a, b in pairwise([0, *moved])):
                    yield moved


def _with_ends(plan: SailorPlan, ends: list[int]) -> SailorPlan:
    return replace(plan, layers=tuple(tuple(range(a, b)) for a, b in pairwise([0, *ends])))


def _feasible(inputs: Inputs, plan: SailorPlan) -> bool:
    try:
        check(inputs, plan)
    except InfeasibleError:
        return False
    return True


class _Stages:
    """The judge's score and the cost of plans with the same replicas."""

    def __init__(self, inputs: Inputs, plan: SailorPlan, goal: Goal) -> None:
        self.inputs, self.plan, self.goal = inputs, plan, goal
        self.num_microbatches = math.ceil(inputs.global_batch / (plan.mbs * plan.num_replicas))
        find, price = inputs.network.fit, inputs.egress.usd_per_byte
        columns = [list(zip(*pair, strict=True)) for pair in pairwise(plan.replicas)]
        self._fits = [
            (
                {find(a.end, a.sending_gpus, b.end, b.sending_gpus) for a, b in set(pairs)},
                {find(b.end, b.sending_gpus, a.end, a.sending_gpus) for a, b in set(pairs)},
            )
            for pairs in columns
        ]
        self._usd = [sum(price(a.zone, b.zone) + price(b.zone, a.zone) for a, b in pairs) for pairs in columns]
        self._kinds = [{(replica.gpu, replica.tp) for replica in stage} for stage in plan.replicas]
        self._rings = [{find(a.end, 1, b.end, 1) for a, b in set(pairwise(stage))} for stage in plan.replicas]
        self._ring_usd = [
            sum(price(a.zone, b.zone) for a, b in pairwise([*stage, stage[0]])) for stage in plan.replicas
        ]
        self._stage, self._border = cache(self._one_stage), cache(self._one_border)

    def score(self, ends: list[int]) -> float:
        parts = [self._stage(i, a, b) for i, (a, b) in enumerate(pairwise([0, *ends]))]
        borders = [self._border(i, end) for i, end in enumerate(ends[:-1])]
        compute, update, sync, ring_usd = zip(*parts, strict=True)
        comm = combined_comm_s([*(border[0] for border in borders), 0.0], [0.0, *(border[1] for border in borders)])
        slowest = max(c + t for c, t in zip(compute, comm, strict=True))
        seconds = (self.num_microbatches - 1) * slowest + sum(comm) + sum(compute) + max(update) + max(sync)
        return self.goal(seconds, sum(ring_usd) + sum(border[2] for border in borders))

    def _one_stage(self, stage: int, start: int, end: int) -> tuple[float, float, float, float]:
        """Compute, update and ring in seconds, and the ring's egress in USD."""
        inputs, mbs, num = self.inputs, self.plan.mbs, self.plan.num_replicas
        layers = tuple(range(start, end))
        compute = max(stage_compute_s(inputs, gpu, mbs, tp, layers) for gpu, tp in self._kinds[stage])
        update = max(inputs.times[gpu, mbs, tp].update_s[start] for gpu, tp in self._kinds[stage])
        num_bytes = sum(inputs.sizes[1].params[layer] for layer in layers) * FLOAT_BYTES
        tp = min(4, *(tp for _, tp in self._kinds[stage]))
        sync = max((float(all_reduce_s(fit, num_bytes / tp, num)) for fit in self._rings[stage]), default=0.0)
        return compute, update, sync, self._ring_usd[stage] * num_bytes * 2 * (num - 1) / num

    def _one_border(self, stage: int, end: int) -> tuple[float, float, float]:
        """A and B in seconds, and their egress in USD."""
        onward, back = (activation_bytes(self.inputs, layer, self.plan.mbs) for layer in (end - 1, end))
        forward, backward = self._fits[stage]
        usd = self._usd[stage] * onward * self.num_microbatches
        onward_s, back_s = (
            max(float(fit.seconds(size)) for fit in fits) for fits, size in ((forward, onward), (backward, back))
        )
        return onward_s, back_s, usd
