"""Varuna (EuroSys'22): backward before recompute before forward, and a forward pulled ahead where a gradient is late.

A stage's list comes from unit-time list scheduling: when the next stage is half through the backward of a microbatch,
this one recomputes it, and what was recomputed is finished before anything else is begun. The last stage goes from
forward straight to backward. At run time a stage whose next recompute has no gradient yet pulls the next forward of its
list ahead. Over a WAN no reading of the rule is always the best one, so `varuna` simulates three under the real costs,
the list and the bare rule twice, and uses the fastest: the strongest Varuna we can build.
"""

from __future__ import annotations

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.ir.assemble import default_turns
from atlas.ir.program import Ints, Kind, Layout, Memory, Program
from atlas.schedules.order import positions
from atlas.schedules.setting import Progress, Setting
from atlas.sim.policy import ON_ARRIVAL, WHEN_NEXT_STARTS, PlayedOrder, Rule, freeze, play, priority_keys


def varuna(setting: Setting, progress: Progress | None = None) -> Program:
    """The fastest of the three readings, frozen."""
    layout, memory = setting.layout, setting.memory
    rule, played = min(variants(layout, setting.apart, memory, setting.recompute), key=lambda v: v[1].makespan_ns)
    return freeze("varuna", layout, rule, played, memory=memory, turn=default_turns(layout), sharing=False)


def variants(layout: Layout, costs: Costs, memory: Memory, recompute: bool) -> list[tuple[Rule, PlayedOrder]]:
    """(rule, what was played) of: the list with pulled forwards, the rule on arrival, the rule a step ahead."""
    turn, by_rule = default_turns(layout), rule_keys(layout)
    rules = [
        (Rule(recompute, gate=ON_ARRIVAL, hold=True, in_order=True), list_keys(layout, memory, recompute)),
        (Rule(recompute, gate=ON_ARRIVAL, hold=True), by_rule),
        (Rule(recompute, gate=WHEN_NEXT_STARTS, hold=True), by_rule),
    ]
    return [(rule, play(layout, costs, rule, memory, keys, turn)) for rule, keys in rules]


def rule_keys(layout: Layout) -> Ints:
    """Backward before recompute before forward, microbatches in ascending order."""
    return priority_keys(layout, (Kind.B, Kind.R, Kind.F, Kind.W))


def list_keys(layout: Layout, memory: Memory, recompute: bool) -> Ints:
    """The position of every op in the unit-time list of its stage."""
    unit = kind_costs(forward_ns=1, backward_ns=2, recompute_ns=1)
    costs = uniform_costs(layout.num_pipelines, layout.num_stages, unit)
    rule = Rule(recompute, gate=WHEN_NEXT_STARTS, hold=True)
    played = play(layout, costs, rule, memory, rule_keys(layout), default_turns(layout))
    return positions(played)
