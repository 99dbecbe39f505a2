"""Eager 1F1B: the warm-up is as long as the round trip through the pipeline.

Plain 1F1B holds P - s microbatches at stage s, which is enough if transfers are free. Over a WAN a gradient takes
longer to return, so stage s runs more forwards ahead, within memory, and then alternates forwards and backwards.
`eager` takes `ceil(away / period)` of them without a search: the planner compares its candidates with it, at one
simulation each. The schedule `1f1b-eager` is the fastest of a fixed set of warm-ups. It is within 5 to 15 % of what
`schedules.atlas` finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from atlas.cost.table import FAIR, Costs, lower_bound
from atlas.ir.assemble import assemble
from atlas.ir.program import BACKWARD, FORWARD, Ints, Kind, Layout, Memory, Program
from atlas.schedules.classic import alternating
from atlas.schedules.grid import slow_boundaries
from atlas.schedules.setting import Progress, Setting

NAME = "1f1b-eager"
EXTRA = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
"""Forwards ahead for every slow boundary, beyond those of 1F1B."""
MANY_EVENTS = 1_000_000
"""Of all warm-ups together: larger jobs try fewer of them."""
CUT_EVENTS = 1_000_000
"""Of all warm-ups that are cut to less memory than the job has: larger jobs try none."""


def eager_of(setting: Setting, progress: Progress | None = None) -> Program:
    """The fastest of the fixed warm-ups, its pipelines taking turns on the WAN wherever they may."""
    found = fastest_warm_up(setting)
    assert found is not None, "nothing is faster than no limit"
    return found[1]


def fastest_warm_up(
    setting: Setting, at_most_ns: float = math.inf, *, compiled: bool = False
) -> tuple[int, Program] | None:
    """The fastest of the warm-ups with its iteration, the shortest of equals; None where none is within `at_most_ns`.
    Longest first: where the bound of a warm-up is above the best, so is that of every shorter one."""
    layout, sharing, best = setting.layout, setting.turns is not None, None
    costs, num_mb = setting.costs_of_sharing(sharing), layout.num_microbatches
    for ahead in sorted(warm_ups(setting), reverse=True):
        in_flight = Memory(ahead[0] + 1)
        bound_ns = lower_bound(costs, num_mb, in_flight, recompute=setting.recompute, closing=True).ns
        if bound_ns > at_most_ns:
            break
        program = written(layout, ahead, setting.memory, recompute=setting.recompute, sharing=sharing)
        if (ns := setting.simulated_ns(program, compiled=compiled)) <= at_most_ns:
            at_most_ns, best = ns, (ns, program)
    return best


def warm_ups(setting: Setting) -> list[tuple[int, ...]]:
    """By stage the forwards ahead, for a fixed set of warm-ups: those of 1F1B, and so many more for every slow boundary
    ahead. The set does not depend on how slow the boundaries are, so a faster link never makes the best one slower."""
    layout = setting.layout
    slow = slow_boundaries(layout).tolist()
    events = layout.about_events(split=False)
    wanted = (
        [layout.num_stages - 1 - s + math.ceil(extra * sum(slow[s:])) for s in range(layout.num_stages)]
        for extra in EXTRA[:: max(1, -(-len(EXTRA) * events // MANY_EVENTS))]
    )
    return list(dict.fromkeys(shorter for one in wanted for shorter in _and_tighter(one, setting)))


def _and_tighter(wanted: list[int], setting: Setting) -> Iterator[tuple[int, ...]]:
    """A warm-up within memory, and within every tighter memory that cuts it: a short one can be the fastest, and more
    memory never loses one. Large jobs try none of them."""
    layout = setting.layout
    room = _room(setting.memory, layout.num_microbatches)
    yield _cut(wanted, layout, room)
    if len(EXTRA) * layout.num_microbatches * layout.about_events(split=False) <= CUT_EVENTS:
        yield from (_cut(wanted, layout, less) for less in range(1, min(room, wanted[0] + 1)))


def eager(layout: Layout, costs: Costs, memory: Memory, *, recompute: bool, sharing: bool) -> Program:
    """The Program of one cell, its warm-up as long as the way to the end and back; written down without trying."""
    ahead = within(ahead_of(costs, recompute), layout, memory)
    return written(layout, ahead, memory, recompute=recompute, sharing=sharing)


def within(wanted: list[int], layout: Layout, memory: Memory) -> tuple[int, ...]:
    """By stage: the forwards ahead that memory has room for."""
    return _cut(wanted, layout, _room(memory, layout.num_microbatches))


def _room(memory: Memory, num_mb: int) -> int:
    """How many microbatches fit."""
    return (memory.cap - memory.acquire[Kind.R]) // memory.acquire[Kind.F] if memory.acquire[Kind.F] else num_mb


def _cut(wanted: list[int], layout: Layout, room: int) -> tuple[int, ...]:
    """By stage: the forwards ahead, with at most `room` microbatches in flight."""
    if wanted[0] > max(room - 1, 0):
        # Cut in proportion: neighbours that run equally far ahead go in lockstep, so no long row of them may.
        wanted = [ahead * max(room - 1, 0) // wanted[0] for ahead in wanted]
    return tuple(min(layout.num_microbatches, ahead) for ahead in wanted)


def written(layout: Layout, aheads: Sequence[int], memory: Memory, *, recompute: bool, sharing: bool) -> Program:
    """Every stage's forwards ahead, then forwards and backwards in turn."""
    orders = alternating(layout.num_microbatches, aheads, recompute)
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
