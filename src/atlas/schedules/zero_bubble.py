"""Zero bubble (ICLR'24): backwards split into input gradient and weight gradient; the latter fills idle time.

The order is searched among the orders with a split backward, each pipeline on its own paths, and scored by the time
from one iteration to the next. Several iterations overlap at their ends, as in the paper, so the score is the longest
time that any one worker needs from its first op to its last. Of the best orders of the reference settings (`grid`), the
one with the shortest iteration is used.
"""

from __future__ import annotations

from dataclasses import replace

from atlas.ir.program import Program
from atlas.schedules.order import Order
from atlas.schedules.search import Family, found_on_grid, period_ns
from atlas.schedules.setting import Progress, Setting


def zero_bubble(setting: Setting, progress: Progress | None = None) -> Program:
    """The best split-backward order without turn-taking."""
    return zero_bubble_orders(setting, progress)[0].program("zero-bubble", setting)


def zero_bubble_orders(setting: Setting, progress: Progress | None = None) -> list[Order]:
    """The best order of every reference setting, priced for this one, fastest first. Half of the tries: Atlas
    looks at these orders too, and at three more families."""
    family = Family(splits=(True,), sharings=(False,))
    own = replace(setting, turns=None)
    return found_on_grid(own, family, max(1, setting.budget // 2), keep=4, score=period_ns, progress=progress)
