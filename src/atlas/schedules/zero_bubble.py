"""Zero bubble (ICLR'24): backwards split into input gradient and weight gradient; the latter fills idle time.

The order is searched among the orders with a split backward, each pipeline on its own paths, and scored by the time
from one iteration to the next. Several iterations overlap at their ends, as in the paper, so the score is the longest
time that any one worker needs from its first op to its last. Of the best orders of the reference settings (`grid`), the
one with the shortest iteration is used.
"""

from __future__ import annotations

import math
from dataclasses import replace

from atlas.ir.program import Program
from atlas.schedules.order import Order
from atlas.schedules.search import Family, found_on_grid, period_ns
from atlas.schedules.setting import Progress, Setting


def zero_bubble(setting: Setting, progress: Progress | None = None) -> Program:
    """The best split-backward order without turn-taking."""
    order = zero_bubble_order(setting, progress=progress)
    assert order is not None, "some order keeps to the memory"
    return order.program("zero-bubble", setting)


def zero_bubble_order(
    setting: Setting, below_ns: float = math.inf, most: int | None = None, progress: Progress | None = None
) -> Order | None:
    """The fastest of the best orders of the reference settings, if faster than `below_ns`. Half of the tries: Atlas
    looks at these orders too, and at three more families."""
    family = Family(splits=(True,), sharings=(False,))
    own, budget = replace(setting, turns=None), max(1, setting.budget // 2)
    return found_on_grid(own, family, budget, keep=4, score=period_ns, below_ns=below_ns, most=most, progress=progress)
