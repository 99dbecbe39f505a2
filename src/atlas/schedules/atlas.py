"""Atlas: the pipelines of a DP-cell take turns on the WAN, the backward is split where that helps, and the order is
searched at reference settings (`search`, `grid`). It is never slower than another schedule with one stage per worker
within the same memory: those are tried too, with and without turns, and the fastest of all is returned.
"""

from __future__ import annotations

from dataclasses import replace

from atlas.ir.program import Program
from atlas.schedules.classic import gpipe, one_f_one_b
from atlas.schedules.eager import fastest_warm_up
from atlas.schedules.grid import tighter_limits
from atlas.schedules.order import Order
from atlas.schedules.search import Family, found_on_grid
from atlas.schedules.setting import Progress, Setting
from atlas.schedules.varuna import varuna
from atlas.schedules.zero_bubble import zero_bubble_order

SEARCHED = 0.75
"""Share of the budget for the search over all families; zero bubble's own search has a third of the budget."""
MANY_EVENTS = 200_000
"""In larger Programs one order of a grid point is kept: each is many megabytes."""
LIMITS, TRIES = 8, 24
"""Tighter limits of memory under which orders are searched as well, and the budget of each."""
MANY_TRIES = 72
"""A search with a smaller budget has no time for tighter limits."""


def atlas(setting: Setting, progress: Progress | None = None) -> Program:
    """The fastest order that was found within the setting's budget and memory."""
    fastest_ns, fastest = _without_search(setting)
    order = _searched(setting, fastest_ns + 1, progress)
    # Without these a setting with less memory could be faster: its search may find an order that this one missed.
    if setting.budget >= MANY_TRIES:
        best_ns = fastest_ns + 1 if order is None else order.closed_ns(setting)
        for tighter in tighter_limits(setting, best_ns, LIMITS):
            found = _searched(replace(tighter, budget=TRIES), best_ns)
            if found is not None:
                order, best_ns = found, found.closed_ns(setting)
    return fastest if order is None else order.program("atlas", setting)


def _searched(setting: Setting, below_ns: int, progress: Progress | None = None) -> Order | None:
    """The fastest order that the two searches find, if faster than `below_ns`."""
    sharings = (False,) if setting.turns is None else (True, False)
    layout = setting.layout
    events = 6 * layout.num_pipelines * layout.num_stages * layout.num_microbatches
    budget, keep = max(1, round(SEARCHED * setting.budget)), 4 if events < MANY_EVENTS else 1
    split = zero_bubble_order(setting, below_ns)
    below_ns = below_ns if split is None else split.closed_ns(setting)
    order = found_on_grid(
        setting, Family((True, False), sharings), budget, keep=keep, below_ns=below_ns, progress=progress
    )
    return order or split


def _without_search(setting: Setting) -> tuple[int, Program]:
    """The fastest of what would be run without Atlas, within the same memory, as it is and taking turns."""
    plain = [
        one_f_one_b(setting.layout, recompute=setting.recompute),
        gpipe(setting.layout, recompute=setting.recompute),
    ]
    programs = [
        varuna(setting),
        *(program for program in plain if program.peak_held(setting.memory) <= setting.memory.cap),
    ]
    if setting.turns is not None:
        programs += [replace(program, sharing=True) for program in programs]
    found = [(setting.simulated_ns(program, compiled=True), program) for program in programs]
    fastest_ns, fastest = min(found, key=lambda one: one[0])
    fastest_ns, fastest = fastest_warm_up(setting, fastest_ns - 1, compiled=True) or (fastest_ns, fastest)
    return fastest_ns, replace(fastest, name="atlas", memory=setting.memory)
