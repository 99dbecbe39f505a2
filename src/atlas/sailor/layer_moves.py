"""The last step: small changes that lower the judge's score. Layers move between stages, one or a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from atlas.errors import InfeasibleError
from atlas.sailor.check import check
from atlas.sailor.inputs import Inputs
from atlas.sailor.judge import PlanJudge
from atlas.sailor.plan_file import SailorPlan

MIN_GAIN = 1e-12
"""Changes that gain less are rounding."""
Goal = Callable[[PlanJudge, list[int]], float]
"""The score of a split, by the ends of its stages."""


def improved(inputs: Inputs, plan: SailorPlan, goal: Goal) -> SailorPlan:
    """The plan after every change that helps, none of which breaks a rule."""
    judge, ends = PlanJudge(inputs, plan), plan.ends
    score = goal(judge, ends)
    while True:
        for other in _changes(ends):
            new_score = goal(judge, other)
            if new_score < score - MIN_GAIN and _feasible(inputs, plan.split(other)):
                score, ends = new_score, other
                break
        else:
            return plan.split(ends)


def _changes(ends: list[int]) -> Iterator[list[int]]:
    """Borders i..j shifted together by one layer either way."""
    for i in range(len(ends) - 1):
        for j in range(i, len(ends) - 1):
            for step in (-1, 1):
                moved = [end + step if i <= k <= j else end for k, end in enumerate(ends)]
                if all(a < b for a, b in pairwise([0, *moved])):
                    yield moved


def _feasible(inputs: Inputs, plan: SailorPlan) -> bool:
    try:
        check(inputs, plan)
    except InfeasibleError:
        return False
    return True
