"""Zero bubble (ICLR'24): backwards cut into input gradient and weight gradient, the latter put where nothing else is.

The order is not written down by hand: it is searched among the orders with a split backward, each pipeline on its
own paths, and judged by the time from one iteration to the next. Several iterations overlap at their ends, as in
the paper, so what counts is the longest time any one worker needs from its first op to its last.
"""

from __future__ import annotations

import numpy as np

from atlas.ir.ops import Kind
from atlas.ir.program import Program
from atlas.schedules.setting import Progress, Setting


def zero_bubble(setting: Setting, progress: Progress | None = None) -> Program:
    """The best split-backward order without turn-taking."""
    from atlas.schedules.search import Family, Order, search

    lengths = setting.apart.compute_ns.reshape(-1, setting.apart.compute_ns.shape[2])
    lengths = lengths[:, [Kind.F, Kind.R, Kind.I, Kind.W]]

    def period_ns(order: Order) -> int:
        start = order.played.start_ns
        ends = np.where(start < 0, 0, start + lengths[:, :, None]).max(axis=(1, 2))
        first = start[:, 0].min(axis=1)
        # The makespan breaks ties: of two orders with the same period the shorter one.
        return int((ends - first).max()) * 1000 + order.makespan_ns // 1000

    best = search(setting, Family(splits=(True,), sharings=(False,)), score=period_ns, progress=progress)
    return best.program("zero-bubble", setting)
