"""List scheduling: of its ready ops, every worker runs the one with the smallest key; the order is then frozen.

This is the dispatch rule of `ir.program` applied to a whole DP-cell, over the same links as the engines. It produces
Varuna's policy, the zero-bubble order and every candidate of the Atlas search: `play` returns the order in which ops
ran, and that order becomes a Program. One stage per worker.

Within one kind a worker takes its microbatches in ascending order, so that gradients are always added in the same
order. The keys only decide which kind is next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from atlas.cost.table import Costs
from atlas.errors import ProgramError
from atlas.ir.assemble import assemble
from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints, Kind, Layout, Memory, Op, Program
from atlas.sim import cell
from atlas.sim.cell import SLOT_B, SLOT_F, SLOT_R, SLOT_W, play_cell
from atlas.sim.lower import network_tables
from atlas.sim.rows import T_BEGUN, network, started

ANYTIME, WHEN_NEXT_STARTS, ON_ARRIVAL = range(3)
"""When a recompute may start: after its forward; when the next stage is half through its backward (Varuna's
schedule); when the gradient is there (Varuna's own simulator)."""


UNLIMITED = np.iinfo(np.int64).max // 2
MANY_TRANSFERS = 50_000
"""Larger networks are not kept for the next order: they are many megabytes, and made in less time than they run."""


class Rule(NamedTuple):
    """What a worker may do, in addition to the keys."""

    recompute: bool = False
    split: bool = False
    """Whether backwards are cut into I and W."""
    gate: int = ANYTIME
    hold: bool = False
    """Whether a recomputed microbatch must be finished before anything else is begun (Varuna)."""
    in_order: bool = False
    """Whether a worker waits for the op with the smallest key even while others are ready, except that a forward
    is pulled ahead of a recompute whose gradient is not there yet (Varuna's runtime)."""
    reverse: bool = False
    """Whether time runs backwards: see `play_reversed`."""


@dataclass(frozen=True, eq=False)
class PlayedOrder:
    """What was done, in which order, and when."""

    kinds: Ints
    """[w, position]: slot of the op, NONE beyond the end."""
    microbatches: Ints
    start_ns: Ints
    """[w, slot, m]"""
    transfer_start_ns: Ints
    makespan_ns: int


def priority_keys(layout: Layout, order: Sequence[Kind]) -> Ints:
    """Keys [w, slot, m] that put one kind before another always, and older microbatches first within a kind."""
    num_workers, num_mb = layout.num_pipelines * layout.num_stages, layout.num_microbatches
    slot_of = {Kind.F: SLOT_F, Kind.R: SLOT_R, Kind.B: SLOT_B, Kind.I: SLOT_B, Kind.W: SLOT_W}
    keys = np.zeros((num_workers, 4, num_mb), np.int64)
    for rank, kind in enumerate(order):
        keys[:, slot_of[kind], :] = rank * num_mb + np.arange(num_mb)
    return keys


def play(layout: Layout, costs: Costs, rule: Rule, memory: Memory, keys: Ints, turn: Ints) -> PlayedOrder:
    """Let every worker and every WAN queue follow its keys. [w, slot, m] and [transfer]."""
    slots = [Kind.F, Kind.R, Kind.I if rule.split else Kind.B, Kind.W]
    held = [memory.cap, *(memory.acquire[k] for k in slots), *(memory.release[k] for k in slots)]
    return _run(layout, costs, rule, slots, held, keys, turn)


def play_reversed(layout: Layout, costs: Costs, rule: Rule, memory: Memory, forward: PlayedOrder) -> PlayedOrder:
    """Play the iteration from its end to its beginning, whatever ended last in `forward` going first.

    Backwards in time a weight gradient comes first, then the input gradients travel from the first stage to the
    last, and forwards travel back. What comes out, read forwards, starts everything as late as possible: other
    orders than those that start everything as early as possible, and often better ones to start from.
    Slots and microbatches are those of `forward`; start times are read forwards.
    """
    backward = Kind.I if rule.split else Kind.B
    slots = [backward, Kind.R, Kind.F, Kind.W]
    held = [memory.cap, *(memory.release[k] for k in slots), *(memory.acquire[k] for k in slots)]
    num_mb = layout.num_microbatches
    swap = [SLOT_B, SLOT_R, SLOT_F, SLOT_W]
    lengths = costs.compute_ns.reshape(-1, costs.compute_ns.shape[2])[:, slots]
    ends = forward.start_ns[:, swap, ::-1] + lengths[:, :, None]
    by_channel = forward.transfer_start_ns.reshape(2, -1, num_mb)[::-1, :, ::-1].reshape(-1)
    played = _run(layout, _mirrored(costs), rule._replace(reverse=True), slots, held, -ends, -by_channel)
    start = played.makespan_ns - played.start_ns - lengths[:, :, None]
    start[played.start_ns == NONE] = NONE
    begun = played.makespan_ns - played.transfer_start_ns
    count = (played.kinds != NONE).sum(axis=1)
    kinds, microbatches = np.full_like(played.kinds, NONE), np.zeros_like(played.microbatches)
    for w, n in enumerate(count.tolist()):
        kinds[w, :n] = np.array(swap)[played.kinds[w, :n][::-1]]
        microbatches[w, :n] = num_mb - 1 - played.microbatches[w, :n][::-1]
    return PlayedOrder(
        kinds,
        microbatches,
        np.ascontiguousarray(start[:, swap, ::-1]),
        np.ascontiguousarray(begun.reshape(2, -1, num_mb)[::-1, :, ::-1].reshape(-1)),
        played.makespan_ns,
    )


@lru_cache(maxsize=4)
def _mirrored(costs: Costs) -> Costs:
    """With forward and backward traffic exchanged; the same object for the same costs."""
    return Costs(
        costs.compute_ns, costs.links, costs.channel_link[::-1], costs.work_ns[::-1], costs.latency_ns[::-1],
        costs.before_ns[::-1],
    )  # fmt: skip


def _run(
    layout: Layout, costs: Costs, rule: Rule, slots: list[Kind], held: list[int], keys: Ints, turn: Ints
) -> PlayedOrder:
    """`held`: the cap, then by slot what an op takes, then by slot what it gives back."""
    num_workers, num_mb = layout.num_pipelines * layout.num_stages, layout.num_microbatches
    find = _network if len(turn) < MANY_TRANSFERS else _network.__wrapped__
    net = started(find(layout, costs), turn)
    state = _idle(num_workers, num_mb, rule, held)
    order = np.full((num_workers, 4 * num_mb), NONE, np.int64)
    begun = np.full((num_workers, 4, num_mb), NONE, np.int64)
    makespan = play_cell(
        _bits(rule), held[1 + SLOT_F], _rows(layout, costs, rule, slots, held), np.ascontiguousarray(keys), state,
        np.zeros(len(turn), np.int64), begun, order, np.arange(num_workers), *net,
    )  # fmt: skip
    if (state[:, SLOT_B] != num_mb).any() or (rule.split and (state[:, SLOT_W] != num_mb).any()):
        raise ProgramError(
            f"no schedule fits: a worker has {held[0]} units of memory, but one microbatch in progress takes "
            f"{held[1] + held[2]}; raise the memory cap or shrink the microbatch"
        )
    kinds, microbatches = np.where(order == NONE, NONE, order & 3), np.where(order == NONE, 0, order >> 2)
    return PlayedOrder(kinds, microbatches, begun, net[1][:, T_BEGUN], makespan)


@lru_cache(maxsize=4)
def _network(layout: Layout, costs: Costs) -> tuple[Any, ...]:
    """The network at rest. A search plays hundreds of orders on the same links: with turns and without, and both
    backwards in time."""
    num_mb = layout.num_microbatches
    tables = network_tables(costs, num_mb, np.zeros(costs.channel_link.size * num_mb, np.int64))
    return network(tables._replace(transfer_dst=_receivers(layout)), layout.num_pipelines * layout.num_stages)


def _bits(rule: Rule) -> int:
    return (
        cell.RECOMPUTES * rule.recompute
        | cell.HOLDS * rule.hold
        | cell.IN_ORDER * rule.in_order
        | cell.W_FIRST * (rule.reverse and rule.split)
        | cell.OPENS_ON_ARRIVAL * (rule.gate == ON_ARRIVAL)
        | cell.OPENS_WITH_NEXT * (rule.gate == WHEN_NEXT_STARTS)
    )


def _receivers(layout: Layout) -> Ints:
    """By transfer, the worker that waits for it: forwards go to the next stage, gradients to the one before."""
    worker = np.arange(layout.num_pipelines * layout.num_stages).reshape(layout.num_pipelines, -1)
    channels = np.concatenate([worker[:, 1:].ravel(), worker[:, :-1].ravel()])
    return np.repeat(channels, layout.num_microbatches)


def _idle(num_workers: int, num_mb: int, rule: Rule, held: list[int]) -> Ints:
    """Workers that have done nothing yet. Backwards in time no room is kept free for a recompute."""
    state = np.zeros((num_workers, 11), np.int64)
    state[:, cell.W_DOING] = NONE
    state[:, cell.W_ROOM] = held[0]
    kept = held[1 + SLOT_R] if rule.recompute else 0
    state[:, cell.W_SPARE] = UNLIMITED if rule.reverse else held[0] - kept
    state[:, cell.W_GATE] = num_mb if rule.gate == ANYTIME else 0
    state[:, cell.W_TOUCHED] = 1
    return state


def _rows(layout: Layout, costs: Costs, rule: Rule, slots: list[Kind], held: list[int]) -> Ints:
    """[w, slot, column]: all that a worker's ops are to the dispatcher."""
    num_pipelines, num_stages, num_mb = layout.num_pipelines, layout.num_stages, layout.num_microbatches
    rows = np.zeros((num_pipelines, num_stages, 4, 8), np.int64)
    rows[..., cell.O_NS] = costs.compute_ns[:, :, slots]
    rows[..., cell.O_GATE_NS] = costs.compute_ns[:, :, Kind.I, None]
    rows[..., cell.O_TAKES], rows[..., cell.O_GIVES] = held[1:5], held[5:9]
    rows[:, :, SLOT_W if rule.split else SLOT_B, cell.O_FREES] = held[1 + SLOT_F]
    rows[..., cell.O_COUNT] = np.array([1, rule.recompute, 1, rule.split]) * num_mb
    rows[:, -1, SLOT_R, cell.O_COUNT] = 0  # what it recomputes, it never gave away
    if rule.recompute and rule.reverse:
        rows[:, -1, SLOT_B, cell.O_GIVES] += held[5 + SLOT_R]
    elif rule.recompute:
        rows[:, -1, SLOT_F, cell.O_TAKES] += held[1 + SLOT_R]
    rows[..., cell.O_NEEDS] = rows[..., cell.O_SENDS] = NONE
    forward, backward = np.arange(costs.channel_link.size).reshape(costs.channel_link.shape) * num_mb
    rows[:, 1:, SLOT_F, cell.O_NEEDS] = rows[:, :-1, SLOT_F, cell.O_SENDS] = forward
    rows[:, :-1, SLOT_B, cell.O_NEEDS] = rows[:, 1:, SLOT_B, cell.O_SENDS] = backward
    return rows.reshape(num_pipelines * num_stages, 4, 8)


def freeze(
    name: str, layout: Layout, rule: Rule, played: PlayedOrder, *, memory: Memory, turn: Ints, sharing: bool
) -> Program:
    """The order that was played, as a Program."""
    kinds = (Kind.F, Kind.R, Kind.I if rule.split else Kind.B, Kind.W)
    orders = []
    for w in range(len(played.kinds)):
        stage = w % layout.num_stages
        slots, microbatches = played.kinds[w].tolist(), played.microbatches[w].tolist()
        orders.append([Op(kinds[k], stage, m) for k, m in zip(slots, microbatches, strict=True) if k != NONE])
    return assemble(name, layout, orders, sharing=sharing, turn=turn, memory=memory)
