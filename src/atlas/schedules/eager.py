"""Eager 1F1B: the warm-up is as long as the way to the end and back.

Plain 1F1B holds P - s microbatches at stage s, enough where transfers are free. Over a WAN a gradient is away for
longer, so here stage s runs `ceil(away / period)` forwards ahead, as far as memory allows, and then takes forwards and
backwards in turn. It is written down without trying anything: the planner compares its candidates under it, a score
of them at the price of a score of simulations. It comes within 5 to 15 % of what `schedules.atlas` finds by searching.
"""

from __future__ import annotations

import math

import numpy as np

from atlas.cost.table import FAIR, Costs
from atlas.ir.assemble import assemble
from atlas.ir.ops import Kind, Op
from atlas.ir.program import BACKWARD, FORWARD, Ints, Layout, Memory, Program
from atlas.schedules.classic import with_recompute
from atlas.schedules.setting import Progress, Setting

NAME = "1f1b-eager"


def eager_of(setting: Setting, progress: Progress | None = None) -> Program:
    """The Program of a setting, its pipelines taking turns on the WAN wherever they may."""
    sharing = setting.turns is not None
    costs = setting.costs_of_sharing(sharing)
    return eager(setting.layout, costs, setting.memory, recompute=setting.recompute, sharing=sharing)


def eager(layout: Layout, costs: Costs, memory: Memory, *, recompute: bool, sharing: bool) -> Program:
    """The Program of one cell."""
    num_mb, depth = layout.num_microbatches, layout.num_stages
    room = (memory.cap - memory.acquire[Kind.R]) // memory.acquire[Kind.F] if memory.acquire[Kind.F] else num_mb
    wanted = ahead_of(costs, recompute)
    orders = []
    for stage in range(depth):
        ahead = wanted[stage]
        if wanted[0] > max(room - 1, 0):
            # Cut in proportion: neighbours that run equally far ahead go in lockstep, so no long row of them may.
            ahead = wanted[stage] * max(room - 1, 0) // wanted[0]
        ahead = min(num_mb, ahead)
        order = [Op(Kind.F, stage, m) for m in range(ahead)]
        for m in range(num_mb):
            if ahead + m < num_mb:
                order.append(Op(Kind.F, stage, ahead + m))
            order.append(Op(Kind.B, stage, m))
        orders.append(with_recompute(order, depth - 1) if recompute else order)
    return assemble(NAME, layout, orders, memory=memory, sharing=sharing)


def ahead_of(costs: Costs, recompute: bool) -> list[int]:
    """By stage: forwards that fit before the first gradient can be back, at least one more than the next stage."""
    stage_ns = costs.compute_ns[0].astype(np.int64)
    again = stage_ns[:, Kind.R] * recompute
    again[-1] = 0
    work = stage_ns[:, Kind.F] + again + stage_ns[:, Kind.B]
    period = max(int(work.max()), _busiest_link_ns(costs), 1)
    way = (costs.before_ns + costs.work_ns + costs.latency_ns)[:, 0, :]
    ahead, away = [0], 0
    for s in reversed(range(costs.num_stages - 1)):
        away += int(way[FORWARD, s] + work[s + 1] + way[BACKWARD, s])
        ahead.append(max(ahead[-1] + 1, math.ceil(away / period)))
    return ahead[::-1]


def _busiest_link_ns(costs: Costs) -> int:
    """What one microbatch of every pipeline keeps the busiest link occupied for."""
    load: Ints = np.zeros(len(costs.links), np.int64)
    np.add.at(load, costs.channel_link.ravel(), costs.work_ns.ravel())
    fair = [link.capacity if link.policy == FAIR else 1.0 for link in costs.links]
    return int((load / np.array(fair)).max(initial=0))
