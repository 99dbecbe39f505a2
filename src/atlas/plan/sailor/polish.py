"""The last step: small changes that the judge itself approves. Layers move between stages, one or a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from atlas.errors import InfeasibleError
from atlas.plan.sailor.check import check
from atlas.plan.sailor.inputs import Inputs
from atlas.plan.sailor.judge import Verdict
from atlas.plan.sailor.plan_file import SailorPlan

Judged = Callable[[SailorPlan], tuple[float, Verdict]]


def polished(inputs: Inputs, plan: SailorPlan, judged: Judged) -> tuple[float, SailorPlan, Verdict]:
    """The plan after every change that helps, none of which breaks a rule."""
    score, verdict = judged(plan)
    while True:
        for other in _changes(plan):
            new_score, new_verdict = judged(other)
            if new_score < score - 1e-12 and _feasible(inputs, other):
                score, plan, verdict = new_score, other, new_verdict
                break
        else:
            return score, plan, verdict


def _changes(plan: SailorPlan) -> Iterator[SailorPlan]:
    """Borders i..j shifted together by one layer either way."""
    ends = [stage[-1] + 1 for stage in plan.layers[:-1]]
    num_layers = plan.layers[-1][-1] + 1
    for i in range(len(ends)):
        for j in range(i, len(ends)):
            for step in (-1, 1):
                moved = [end + step if i <= k <= j else end for k, end in enumerate(ends)]
                borders = [0, *moved, num_layers]
                if all(a < b for a, b in pairwise(borders)):
                    layers = tuple(tuple(range(a, b)) for a, b in pairwise(borders))
                    yield replace(plan, layers=layers)


def _feasible(inputs: Inputs, plan: SailorPlan) -> bool:
    try:
        check(inputs, plan)
    except InfeasibleError:
        return False
    return True
