"""The search: good rules first, then many small changes to the best of them, the best kept. `found_on_grid` searches
at reference settings (`grid`) and prices what it finds for the setting at hand.

An order is written as keys (smallest first, on workers and on WAN queues) and tried by simulating it with the
dispatcher, which takes about 0.2 us per event; so hundreds of orders cost a second or two. A change modifies the start
times of the best order so far at random and uses the result as new keys. Everything is drawn from one seeded generator
and counted in tries, never in seconds: the same input gives the same schedule on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from atlas.cost.table import TURNS, Costs, lower_bound
from atlas.errors import ProgramError
from atlas.ir.assemble import default_turns
from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints, Kind
from atlas.schedules.grid import Grid, prices
from atlas.schedules.order import Order, positions
from atlas.schedules.setting import Progress, Setting
from atlas.sim.cell import SLOT_B, SLOT_F
from atlas.sim.policy import ANYTIME, Rule, play, play_reversed, priority_keys

FIRST = ((Kind.F, Kind.B, Kind.R, Kind.W), (Kind.B, Kind.F, Kind.R, Kind.W), (Kind.F, Kind.R, Kind.B, Kind.W))
"""Priorities that most often win, tried before the rest."""

# The search's constants were chosen by hand on the cells of bench/schedules.py; no result hangs on their exact values.
KEEP_TURNS = 0.3
"""Share of slanted rules that take over the WAN turns of the best order."""
TURN_SLANTED, TURN_SHAKEN = 1.1, 1.02
"""A new order within this factor of the best is worth moving back and forth in time."""
SHAKEN_WORKERS = (0.1, 0.3, 1.0)
"""Shares of the workers whose start times are shaken."""
SHAKE_POWERS = (-2.0, 1.5)
"""Start times are shaken by 4 to a power between these, in forwards: by 1/16 to 8 of them, small changes as often as
large ones."""
RESTART = 0.02
"""Probability that a walk of moves starts again: half the time from the best order, half from another elite one."""
HEAT = 0.02
"""A move may make an order worse by this share, at the start; less as the tries run out."""
ELITE = 4
"""Best orders so far that are kept."""
SWAP_REACH = 4
"""An op may change places with this many ops before it, in its stretch of the critical path."""
KEY_SCALE = 1 << 20
"""Keys are integers; slanted rules need fractions of a microbatch."""


@dataclass(frozen=True)
class Family:
    """Which orders a search may look at."""

    splits: tuple[bool, ...]
    """Whether backwards are cut in two."""
    sharings: tuple[bool, ...]
    """Whether pipelines take turns on the WAN."""


Score = Callable[[Order, Setting], int]
_known: dict[Any, list[Order]] = {}
BOUNDED = 30
"""With fewer tries a grid point is not worth its lower bound, at which a search may stop early."""
REMEMBERED = 64
"""Grid points whose orders are remembered."""


def makespan_ns(order: Order, setting: Setting) -> int:
    return order.makespan_ns


def period_ns(order: Order, setting: Setting) -> int:
    """The longest time any worker needs from its first op to its last; of equals the shorter iteration."""
    first = order.played.start_ns[:, 0].min(axis=1)
    return int((order.ends_ns(setting) - first).max()) * 1000 + order.makespan_ns // 1000


def search(setting: Setting, family: Family, score: Score = makespan_ns, stop_ns: int = 0) -> list[Order]:
    """The best few orders found within the setting's budget of tries, the best last. Stops early at `stop_ns`, a proven
    bound."""
    tries = _Tries(setting, family.splits, score)
    share = max(1, setting.budget // 2 // (len(family.splits) * len(family.sharings)))
    for split in family.splits:
        for sharing in family.sharings:
            tries.rules(Rule(setting.recompute, split, ANYTIME), sharing, share)
    rng = np.random.default_rng(setting.seed)
    while tries.left and tries.score(tries.best) > stop_ns:
        [tries.slanted, tries.shaken, tries.moved][tries.phase](rng)
    return tries.elite


def found_on_grid(
    setting: Setting,
    family: Family,
    budget: int,
    *,
    keep: int,
    score: Score = makespan_ns,
    below_ns: float = math.inf,
    most: int | None = None,
    progress: Progress | None = None,
) -> Order | None:
    """The fastest of the orders found at the setting's grid points (the nearest `most` of them), priced for the setting
    itself; None where none is faster than `below_ns`."""
    grid = Grid(setting, budget, family.sharings, below_ns, most)
    fastest, tries = None, 0
    for point in grid.points():
        if progress is not None:
            progress(min(tries, setting.budget), setting.budget)
        tries += point.budget
        for order in _elite_at(point, family, keep, score):
            priced = priced_at(setting, order)
            if priced is not None and (closed_ns := priced.closed_ns(setting)) < grid.best_ns:
                fastest, grid.best_ns = priced, closed_ns
    if progress is not None:
        progress(setting.budget, setting.budget)
    return fastest


def _elite_at(point: Setting, family: Family, keep: int, score: Score) -> list[Order]:
    """The best few orders of a grid point; remembered, so that schedules of one job search the same point once."""
    memory = (point.memory, point.recompute, point.budget, point.seed)
    layout = point.layout
    shape = (layout.num_pipelines, layout.num_stages, layout.num_microbatches)
    key = (shape, prices(point), memory, family, keep, score.__name__)
    if key not in _known:
        stop_ns = 0
        if score is makespan_ns and point.budget >= BOUNDED:
            costs = point.costs_of_sharing(True)
            stop_ns = lower_bound(costs, layout.num_microbatches, point.memory, recompute=point.recompute).ns
        found = search(point, family, score, stop_ns)
        if len(_known) >= REMEMBERED:
            _known.pop(next(iter(_known)))
        _known[key] = found[-keep:]
    return _known[key]


def priced_at(setting: Setting, order: Order) -> Order | None:
    """The same order of everything, played with the setting's prices."""
    rule, keys = order.rule._replace(in_order=True), positions(order.played)
    turn = order.played.transfer_start_ns
    try:
        played = play(setting.layout, setting.costs_of_sharing(order.sharing), rule, setting.memory, keys, turn)
    except ProgramError:
        return None
    return Order(rule, order.sharing, keys, turn, played)


class _Tries:
    """The budget, and the best order so far."""

    def __init__(self, setting: Setting, splits: tuple[bool, ...], score: Score) -> None:
        self.setting = setting
        self.score: Callable[[Order], int] = lambda order: score(order, setting)
        self.left = setting.budget
        self.splits = splits
        self.after_rules: int | None = None
        self._best: Order | None = None
        self.current: Order | None = None
        self.elite: list[Order] = []

    @property
    def best(self) -> Order:
        assert self._best is not None, "rules come before changes"
        return self._best

    def rules(self, rule: Rule, sharing: bool, share: int) -> None:
        """Fixed priorities among the kinds, the usual winners first, while this family's share of the tries lasts."""
        kinds = [Kind.F, Kind.B] + [Kind.R] * rule.recompute + [Kind.W] * rule.split
        usual = [tuple(k for k in order if k in kinds) for order in FIRST]
        every = dict.fromkeys([*usual, *permutations(kinds)])
        turn = default_turns(self.setting.layout)
        until = self.left - share
        for order in every:
            tried = self._try(rule, sharing, priority_keys(self.setting.layout, order), turn)
            if self.left <= until:
                return
            if tried is not None:
                self.turned(tried)

    @property
    def phase(self) -> int:
        """Of what the fixed rules left: a third for slanted rules, one for random changes to the best, one for moving
        ops."""
        if self.after_rules is None:
            self.after_rules = self.left
        return min(2, 3 - -(-3 * self.left // self.after_rules))

    def slanted(self, rng: np.random.Generator) -> None:
        """A rule between the fixed priorities: a kind's microbatch m is as urgent as another's m + lead.

        The leads may change from the first stage to the last, as the warm-up of 1F1B does.
        """
        layout, best = self.setting.layout, self.best
        num_workers, num_mb = layout.num_pipelines * layout.num_stages, layout.num_microbatches
        reach = min(num_mb, 2 * layout.num_stages + 2)
        slope = np.arange(num_workers) % layout.num_stages / max(1, layout.num_stages - 1)
        lead = rng.uniform(-reach, reach, (4, 1)) + rng.uniform(-reach, reach, (4, 1)) * slope
        keys = (np.arange(num_mb) + lead.T[:, :, None]) * KEY_SCALE
        turn = default_turns(layout)
        if rng.random() < KEEP_TURNS:
            turn = best.turn
        rule = best.rule._replace(split=bool(rng.choice(self.splits)))
        tried = self._try(rule, best.sharing, keys.astype(np.int64), turn)
        if tried is not None and self.score(tried) <= TURN_SLANTED * self.score(self.best):
            self.turned(tried)

    def shaken(self, rng: np.random.Generator) -> None:
        """The best order so far with random changes to its start times: large or small, on all workers or a few."""
        best = self.best
        start, num_workers = best.played.start_ns, len(best.played.start_ns)
        typical_ns = float(self.setting.apart.compute_ns[:, :, Kind.F].mean())
        size_ns = typical_ns * 4.0 ** rng.uniform(*SHAKE_POWERS)
        touched = rng.random(num_workers) < rng.choice(SHAKEN_WORKERS)
        noise = rng.normal(0.0, size_ns, start.shape) * touched[:, None, None]
        turn_noise = rng.normal(0.0, size_ns * rng.choice([0.0, 1.0]), best.turn.shape)
        keys = start + noise.astype(np.int64)
        # Microbatches of a kind stay in order: a key only decides when the next one of its kind runs.
        keys = np.maximum.accumulate(keys, axis=2)
        turn = best.played.transfer_start_ns + turn_noise.astype(np.int64)
        tried = self._try(best.rule._replace(in_order=False), best.sharing, keys, turn)
        if tried is not None and self.score(tried) <= TURN_SHAKEN * self.score(best):
            self.turned(tried)

    def turned(self, order: Order) -> None:
        """Back and forth in time from an order, as long as it helps: as late as possible, then as early as possible."""
        rule, costs = order.rule._replace(in_order=False), self.setting.costs_of_sharing(order.sharing)
        while self.left:
            try:
                late = play_reversed(self.setting.layout, costs, rule, self.setting.memory, order.played)
            except ProgramError:
                return
            self.left -= 1
            again = None
            for in_order in (True, False):
                keys = positions(late) if in_order else late.start_ns
                tried = self._try(rule._replace(in_order=in_order), order.sharing, keys, late.transfer_start_ns)
                if tried is not None and (again is None or self.score(tried) < self.score(again)):
                    again = tried
            if again is None or self.score(again) >= self.score(order):
                return
            order = again

    def moved(self, rng: np.random.Generator) -> None:
        """An op on the critical path goes elsewhere in its stretch of work, and workers then keep to their lists.

        This finds orders in which a worker should wait, which random start times do not find.
        """
        if self.current is None or rng.random() < RESTART:
            self.current = self.elite[int(rng.integers(len(self.elite)))] if rng.random() < 0.5 else self.best
        current = self.current
        moves = critical_moves(self.setting, current)
        if not moves:
            self.left -= 1
            return
        keys, turn = positions(current.played), current.played.transfer_start_ns.copy()
        for _ in range(int(rng.integers(1, 4))):
            worker, first, second = moves[int(rng.integers(len(moves)))]
            if worker == NONE:
                turn[first], turn[second] = turn[second], turn[first]
            elif rng.random() < 0.5:
                _shift(keys[worker], first, second)
            else:
                _shift(keys[worker], second, first)
        order = self._try(current.rule._replace(in_order=True), current.sharing, keys, turn)
        heat = 1.0 + HEAT * rng.random() * self.left / self.setting.budget
        if order is not None and self.score(order) <= self.score(current) * heat:
            self.current = order

    def _try(self, rule: Rule, sharing: bool, keys: Ints, turn: Ints) -> Order | None:
        if (sharing and self.setting.turns is None) or (not self.left and self._best is not None):
            return None
        costs = self.setting.costs_of_sharing(sharing)
        self.left = max(0, self.left - 1)
        try:
            played = play(self.setting.layout, costs, rule, self.setting.memory, keys, turn)
        except ProgramError:
            return None  # a list that waits for itself
        order = Order(rule, sharing, keys, turn, played)
        if self._best is None or self.score(order) < self.score(self._best):
            self._best = order
            self.elite = [*self.elite[1 - ELITE :], order]
        return order


Move = tuple[int, Any, Any]
"""(worker, op, op) as (slot, microbatch), or (NONE, transfer, transfer): two that may change places."""


def _shift(keys: Ints, op: tuple[int, int], to: tuple[int, int]) -> None:
    """Put `op` where `to` is in a worker's list of positions, everything between moving up by one."""
    at, target = int(keys[op]), int(keys[to])
    if at < target:
        keys[(keys > at) & (keys <= target)] -= 1
    else:
        keys[(keys >= target) & (keys < at)] += 1
    keys[op] = target


def critical_moves(setting: Setting, order: Order) -> list[Move]:
    """Along one critical path: the pairs of ops in a stretch without pause, and of transfers in a WAN queue."""
    played, layout = order.played, setting.layout
    num_mb, num_stages = layout.num_microbatches, layout.num_stages
    slots = [Kind.F, Kind.R, Kind.I if order.rule.split else Kind.B, Kind.W]
    costs = setting.costs_of_sharing(order.sharing)
    lengths = costs.compute_ns.reshape(-1, costs.compute_ns.shape[2])[:, slots]
    start, place = played.start_ns, positions(played)
    ends = np.where(start == NONE, 0, start + lengths[:, :, None])
    worker, slot, m = (int(v) for v in np.unravel_index(int(ends.argmax()), ends.shape))
    half = layout.num_pipelines * (num_stages - 1) * num_mb
    moves: list[Move] = []
    stretch = [(slot, m)]
    while True:
        position = int(place[worker, slot, m])
        if position:
            before = (int(played.kinds[worker, position - 1]), int(played.microbatches[worker, position - 1]))
            if ends[worker][before] == start[worker, slot, m]:
                moves += [
                    (worker, before, op) for op in stretch[-SWAP_REACH:] if op[0] != before[0] and op[1] != before[1]
                ]
                stretch.append(before)
                slot, m = before
                continue
        stage, c = worker % num_stages, worker // num_stages
        if slot == SLOT_F and stage:
            transfer, worker = (c * (num_stages - 1) + stage - 1) * num_mb + m, worker - 1
        elif slot == SLOT_B and stage < num_stages - 1:
            transfer, worker = half + (c * (num_stages - 1) + stage) * num_mb + m, worker + 1
        else:
            return moves
        moves += _queue_pair(setting, order, costs, transfer)
        stretch = [(slot, m)]


def _queue_pair(setting: Setting, order: Order, costs: Costs, transfer: int) -> list[Move]:
    """The transfer and the one served just before it on its link, if the link takes turns."""
    num_mb = setting.layout.num_microbatches
    link_of = costs.channel_link.ravel()
    link = int(link_of[transfer // num_mb])
    if costs.links[link].policy != TURNS:
        return []
    begun = order.played.transfer_start_ns
    same = np.flatnonzero(np.repeat(link_of == link, num_mb) & (begun < begun[transfer]))
    return [(NONE, int(same[begun[same].argmax()]), transfer)] if same.size else []
