"""Atlas: the pipelines of a DP-cell take turns on the WAN, the backward is split where that pays, and the order is
searched (`search`). Never slower than the classics within the same memory: they are tried too, as they are and with
turns, and the fastest of all is what is returned.
"""

from __future__ import annotations

from dataclasses import replace

from atlas.ir.program import Program
from atlas.schedules.bound import lower_bound
from atlas.schedules.classic import one_f_one_b
from atlas.schedules.setting import Progress, Setting
from atlas.schedules.varuna import varuna


def atlas(setting: Setting, progress: Progress | None = None) -> Program:
    """The fastest order that was found within the setting's budget and memory."""
    from atlas.schedules.search import Family, search
    from atlas.sim import simulate

    sharings = (False,) if setting.turns is None else (True, False)
    costs = setting.costs_of_sharing(setting.turns is not None)
    num_mb = setting.layout.num_microbatches
    bound = lower_bound(costs, num_mb, setting.memory, recompute=setting.recompute)
    order = search(setting, Family(splits=(True, False), sharings=sharings), stop_ns=bound.ns, progress=progress)
    rivals = [(simulate(rival, setting.costs_of(rival)).makespan_ns, rival) for rival in _baselines(setting)]
    fastest_ns, fastest = min(rivals, key=lambda rival: rival[0])
    return order.program("atlas", setting) if order.makespan_ns <= fastest_ns else fastest


def _baselines(setting: Setting) -> list[Program]:
    """What would be run without Atlas, within the same memory, as it is and taking turns."""
    programs = [varuna(setting)]
    plain = one_f_one_b(setting.layout, recompute=setting.recompute)
    if fits(plain, setting):
        programs.append(plain)
    if setting.turns is not None:
        programs += [replace(program, sharing=True) for program in programs]
    return [replace(program, name="atlas", memory=setting.memory) for program in programs]


def fits(program: Program, setting: Setting) -> bool:
    """Whether a Program keeps to the setting's memory."""
    from atlas.ir.check import peak_memory

    return peak_memory(program, setting.memory) <= setting.memory.cap
