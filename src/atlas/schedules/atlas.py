"""Atlas: the pipelines of a DP-cell take turns on the WAN, the backward is split where that helps, and the order is
searched at reference settings (`search`, `grid`). It is never slower than another schedule within the same memory:
those are tried too, with and without turns, and the fastest of all is returned. One of them is interleaved 1F1B: with
few microbatches on a fast WAN no order of one stage per worker fills and drains a pipeline as fast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atlas.errors import ProgramError
from atlas.ir.program import Program
from atlas.schedules.classic import gpipe, interleaved, one_f_one_b
from atlas.schedules.eager import fastest_warm_up
from atlas.schedules.grid import SLACK, prices, tighter_limits
from atlas.schedules.order import Order
from atlas.schedules.search import Family, found_on_grid
from atlas.schedules.setting import Progress, Setting
from atlas.schedules.varuna import varuna
from atlas.schedules.zero_bubble import zero_bubble_order

SEARCHED = 0.75
"""Share of the budget for the search over all families; zero bubble's own search has half of the budget."""
MANY_EVENTS = 200_000
"""Of larger Programs one order of a grid point is kept, and none is remembered: each is many megabytes."""
LIMITS, POINTS = 8, 2
"""Tighter limits of memory under which orders are searched as well, and the grid points of each. A point has as many
tries as under the own limit, so a setting with that limit begins its search in the same way."""
MANY_TRIES, FEW_EVENTS = 72, 20_000
"""Searches with a smaller budget or of larger Programs have no time for tighter limits."""

REMEMBERED = 64
"""Settings whose fastest order without a search is remembered."""
_plain: dict[Any, tuple[int, Program]] = {}


def atlas(setting: Setting, progress: Progress | None = None) -> Program:
    """The fastest order that was found within the setting's budget and memory."""
    fastest_ns, fastest = _without_search(setting)
    order = _searched(setting, fastest_ns + 1, progress=progress)
    # Without these a setting with less memory could be faster: its search may find an order that this one missed.
    if setting.budget >= MANY_TRIES and setting.layout.about_events(split=True) < FEW_EVENTS:
        best_ns = fastest_ns + 1 if order is None else order.closed_ns(setting)
        for tighter in tighter_limits(setting, best_ns, LIMITS):
            found = _searched(tighter, best_ns, POINTS)
            if found is not None:
                order, best_ns = found, found.closed_ns(setting)
    return fastest if order is None else order.program("atlas", setting)


def _searched(
    setting: Setting, below_ns: int, most: int | None = None, progress: Progress | None = None
) -> Order | None:
    """The fastest order that the two searches find, if faster than `below_ns`."""
    sharings = (False,) if setting.turns is None else (True, False)
    budget, keep = max(1, round(SEARCHED * setting.budget)), 1 if _is_large(setting) else 4
    # Zero bubble's own search is not cut off by SLACK, so that Atlas is never slower than zero bubble alone.
    split = zero_bubble_order(setting, below_ns / (1 - SLACK), most)
    split = None if split is None or split.closed_ns(setting) >= below_ns else split
    below_ns = below_ns if split is None else split.closed_ns(setting)
    family = Family((True, False), sharings)
    order = found_on_grid(setting, family, budget, keep=keep, below_ns=below_ns, most=most, progress=progress)
    return order or split


def _is_large(setting: Setting) -> bool:
    return setting.layout.about_events(split=True) >= MANY_EVENTS


def _without_search(setting: Setting) -> tuple[int, Program]:
    """The fastest of what would be run without Atlas, within the same memory, as it is and taking turns. Remembered:
    plans search the same setting with few tries first, then with all."""
    key = (_key(setting), setting.interleaved and _key(setting.interleaved))
    found = _plain.get(key) or _fastest_plain(setting)
    if not _is_large(setting) and key not in _plain:
        if len(_plain) >= REMEMBERED:
            _plain.pop(next(iter(_plain)))
        _plain[key] = found
    return found


def _key(setting: Setting) -> tuple[Any, ...]:
    both = [setting.apart, *([] if setting.turns is None else [setting.turns])]
    links = tuple((costs.links, costs.channel_link.tobytes(), costs.circuits) for costs in both)
    return (setting.layout, setting.memory, setting.recompute, prices(setting), links)


def _fastest_plain(setting: Setting) -> tuple[int, Program]:
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
    fastest = replace(fastest, memory=setting.memory)
    if setting.interleaved is not None:
        fastest_ns, fastest = _interleaved(setting.interleaved, fastest_ns) or (fastest_ns, fastest)
    return fastest_ns, replace(fastest, name="atlas")


def _interleaved(setting: Setting, below_ns: int) -> tuple[int, Program] | None:
    """Interleaved 1F1B, if it is faster than `below_ns` and keeps to the memory."""
    try:
        program = interleaved(setting.layout, recompute=setting.recompute)
    except ProgramError:  # the microbatches are not a multiple of its rounds
        return None
    if program.peak_held(setting.memory) > setting.memory.cap:
        return None
    ns = setting.simulated_ns(program, compiled=True)
    return (ns, replace(program, memory=setting.memory)) if ns < below_ns else None
