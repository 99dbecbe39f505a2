"""An order that a search tried: its keys, its simulated run, and its Program. Knows no search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas.cost.table import TURNS
from atlas.ir.assemble import default_turns
from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints, Kind, Program
from atlas.schedules.setting import Setting
from atlas.sim.policy import PlayedOrder, Rule, freeze


@dataclass(frozen=True, eq=False)
class Order:
    """One candidate: how it was made and its result."""

    rule: Rule
    sharing: bool
    keys: Ints
    turn: Ints
    played: PlayedOrder

    @property
    def makespan_ns(self) -> int:
        return self.played.makespan_ns

    def ends_ns(self, setting: Setting) -> Ints:
        """[w]: when a worker's last op is over."""
        start = self.played.start_ns
        lengths = setting.costs_of_sharing(self.sharing).compute_ns.reshape(len(start), -1)
        slots = [Kind.F, Kind.R, Kind.I if self.rule.split else Kind.B, Kind.W]
        ends: Ints = np.where(start == NONE, 0, start + lengths[:, slots, None]).max(axis=(1, 2))
        return ends

    def closed_ns(self, setting: Setting) -> int:
        """With what closes the iteration: the all-reduce and the optimizer of each stage, once its last op is over."""
        return setting.closed_ns(self.ends_ns(setting), self.sharing)

    def program(self, name: str, setting: Setting) -> Program:
        return freeze(
            name,
            setting.layout,
            self.rule,
            self.played,
            memory=setting.memory,
            turn=places(self.turn, setting),
            sharing=self.sharing,
        )


def positions(played: PlayedOrder) -> Ints:
    """Keys that reproduce exactly the played order."""
    keys = np.full(played.start_ns.shape, np.iinfo(np.int64).max, np.int64)
    worker, position = np.nonzero(played.kinds != NONE)
    keys[worker, played.kinds[worker, position], played.microbatches[worker, position]] = position
    return keys


def places(turn: Ints, setting: Setting) -> Ints:
    """The same turns as small numbers, places in the queue of each link, for people to read and diff."""
    costs = setting.costs_of_sharing(True)
    short = default_turns(setting.layout).reshape(-1, setting.layout.num_microbatches)
    given, link_of = turn.reshape(short.shape), costs.channel_link.ravel()
    for link, cost in enumerate(costs.links):
        if cost.policy == TURNS:
            members = np.flatnonzero(link_of == link)
            short[members] = np.unique(given[members], return_inverse=True)[1].reshape(len(members), -1)
    return short.ravel()
