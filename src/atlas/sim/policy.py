"""Scheduling on the fly, to be frozen: every worker does, of what is ready, the op with the smallest key.

This is the dispatch rule of `ir.dispatch` let loose on a whole DP-cell, over the same links as the engines. It is
how Varuna's policy, the zero-bubble order and every candidate of the Atlas search come into being: `play` returns
the order in which things were done, and from then on that order is a Program like any other. One stage per worker.

Within one kind a worker takes its microbatches in ascending order, so that gradients always add up in the same
order; what is left to choose is which kind goes next, and that is what the keys say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atlas.cost.table import Costs
from atlas.errors import ProgramError
from atlas.ir.ops import Kind, Op
from atlas.ir.program import Ints, Layout, Memory, Program, assemble
from atlas.sim.jit import entry, njit
from atlas.sim.lower import NONE, network_tables
from atlas.sim.network import (
    DELIVERED,
    LINK_SHIFT,
    SEQUENCE_MASK,
    SIZE,
    T_ARRIVE,
    T_BEFORE,
    T_BEGUN,
    WHAT_SHIFT,
    WHICH_MASK,
    Floats,
    drop_first,
    network,
    offer,
    push,
    wake,
)
from atlas.sim.reference import OFFER, OP

ARRIVE = 3
SLOT_F, SLOT_R, SLOT_B, SLOT_W = range(4)
"""Columns of the keys: a backward in one piece and the input half of a split one share a slot."""

ANYTIME, WHEN_NEXT_STARTS, ON_ARRIVAL = range(3)
"""When a recompute may start: after its forward; when the next stage is half through its backward (Varuna's
schedule); when the gradient is there (Varuna's own simulator)."""


class Rule(NamedTuple):
    """What a worker may do, besides the keys."""

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
class Played:
    """What was done, in which order, and when."""

    kinds: Ints
    """[w, position]: slot of the op, NONE beyond the end."""
    microbatches: Ints
    start_ns: Ints
    """[w, slot, m]"""
    transfer_start_ns: Ints
    makespan_ns: int


W_BUSY, W_MEM, W_STASH, W_COUNT, W_LAST_SLOT, W_PULLED = range(6)
R_RECOMPUTE, R_SPLIT, R_GATE, R_HOLD, R_IN_ORDER, R_REVERSE = range(6)


@njit
def _has_room(w: int, last: bool, rule: Ints, memory: Ints, state: Ints) -> bool:
    """Room for one more stash and, beyond all stashes, for one recompute: or nothing could ever be finished."""
    if rule[R_REVERSE]:
        return bool(memory[1 + (SLOT_W if rule[R_SPLIT] else SLOT_F)] <= memory[0] - state[w, W_MEM])
    reserve = memory[1 + SLOT_R] if rule[R_RECOMPUTE] else 0
    need = memory[1 + SLOT_F] + (reserve if last else 0)
    fits = need <= memory[0] - state[w, W_MEM]
    return bool(fits and state[w, W_STASH] + memory[1 + SLOT_F] + reserve <= memory[0])


@njit
def _is_ready(
    slot: int, w: int, num_stages: int, num_mb: int, rule: Ints, memory: Ints, done: Ints, state: Ints,
    arrived: Ints, gate_open: Ints,
) -> bool:  # fmt: skip
    """Whether the worker could start the next op of this slot now."""
    recompute, split = rule[R_RECOMPUTE], rule[R_SPLIT]
    first, last = w % num_stages == 0, w % num_stages == num_stages - 1
    n_f, n_r, n_b, n_w = done[w, SLOT_F], done[w, SLOT_R], done[w, SLOT_B], done[w, SLOT_W]
    if slot == SLOT_B:
        recomputed = n_r > n_b or not recompute or last
        return bool(n_b < n_f and recomputed and (last or arrived[1, w, n_b] == 1))
    if slot == SLOT_W:
        if rule[R_REVERSE]:
            return split == 1 and n_w < num_mb and _has_room(w, last, rule, memory, state)
        return bool(split == 1 and n_w < n_b)
    if rule[R_HOLD] and n_r > n_b:
        return False
    room = memory[0] - state[w, W_MEM]
    if slot == SLOT_R:
        gate = gate_open[w] > n_r
        return bool(recompute == 1 and not last and n_r < n_f and gate and memory[1 + SLOT_R] <= room)
    here = first or (n_f < num_mb and arrived[0, w, n_f] == 1)
    if rule[R_REVERSE] and split:
        return n_f < n_w and here
    return n_f < num_mb and here and _has_room(w, last, rule, memory, state)


@njit
def _choose(
    w: int, num_stages: int, num_mb: int, rule: Ints, memory: Ints, keys: Ints, done: Ints, state: Ints,
    arrived: Ints, gate_open: Ints,
) -> int:  # fmt: skip
    """The slot of the ready op with the smallest key, or NONE."""
    last = w % num_stages == num_stages - 1
    if rule[R_RECOMPUTE] and last and done[w, SLOT_F] > done[w, SLOT_B]:
        return SLOT_B  # its activations are still there: no recompute, but nothing in between either
    in_order = rule[R_IN_ORDER]
    best = NONE
    for slot in range(4):
        n = done[w, slot]
        exists = (
            n < num_mb and (slot != SLOT_R or (rule[R_RECOMPUTE] and not last)) and (slot != SLOT_W or rule[R_SPLIT])
        )
        if not exists or (best != NONE and keys[w, slot, n] >= keys[w, best, done[w, best]]):
            continue
        if in_order or _is_ready(slot, w, num_stages, num_mb, rule, memory, done, state, arrived, gate_open):
            best = slot
    if in_order and best != NONE:
        if best == SLOT_R and gate_open[w] <= done[w, SLOT_R] and _has_room(w, last, rule, memory, state):
            state[w, W_PULLED] = 1  # and stands by it, even if the gradient comes before the forward's input
        if state[w, W_PULLED] and done[w, SLOT_F] < num_mb:
            best = SLOT_F
        if not _is_ready(best, w, num_stages, num_mb, rule, memory, done, state, arrived, gate_open):
            return NONE
        state[w, W_PULLED] = 0
    return best


@njit
def _ended(w: int, num_stages: int, num_mb: int, rule: Ints, memory: Ints, done: Ints, state: Ints) -> int:
    """The worker's op is over: gives back what it held. Returns the transfer that it made ready, or NONE."""
    c, stage, slot = w // num_stages, w % num_stages, state[w, W_LAST_SLOT]
    m = done[w, slot]
    done[w, slot] += 1
    state[w, W_BUSY] = 0
    state[w, W_MEM] -= memory[5 + slot]
    if slot == SLOT_W or (slot == SLOT_B and not rule[R_SPLIT]):
        state[w, W_STASH] -= memory[1 + SLOT_F]
    if rule[R_REVERSE] and rule[R_RECOMPUTE] and slot == SLOT_B and stage == num_stages - 1:
        state[w, W_MEM] -= memory[5 + SLOT_R]
    if slot == SLOT_F and stage < num_stages - 1:
        return int((c * (num_stages - 1) + stage) * num_mb + m)
    if slot == SLOT_B and stage > 0:
        half = len(done) // num_stages * (num_stages - 1) * num_mb
        return int(half + (c * (num_stages - 1) + stage - 1) * num_mb + m)
    return NONE


@njit
def _received(transfer: int, num_stages: int, num_mb: int, rule: Ints, arrived: Ints, gate_open: Ints) -> int:
    """A transfer is there. Returns the worker that it was meant for."""
    half = len(gate_open) // num_stages * (num_stages - 1) * num_mb
    direction = 1 if transfer >= half else 0
    channel, m = (transfer - direction * half) // num_mb, transfer % num_mb
    c, boundary = channel // (num_stages - 1), channel % (num_stages - 1)
    w = c * num_stages + boundary + (1 - direction)
    arrived[direction, w, m] = 1
    if direction == 1 and rule[R_GATE] == ON_ARRIVAL:
        gate_open[w] = max(gate_open[w], m + 1)
    return w


@njit
def _begin(
    w: int, slot: int, num_stages: int, rule: Ints, memory: Ints, done: Ints, state: Ints, out_slot: Ints, out_mb: Ints
) -> int:
    """The worker takes an op and what it needs to hold. Returns its microbatch."""
    m = done[w, slot]
    state[w, W_BUSY] = 1
    state[w, W_LAST_SLOT] = slot
    state[w, W_MEM] += memory[1 + slot]
    if slot == SLOT_F:
        state[w, W_STASH] += memory[1 + SLOT_F]
        if rule[R_RECOMPUTE] and not rule[R_REVERSE] and w % num_stages == num_stages - 1:
            state[w, W_MEM] += memory[1 + SLOT_R]
    out_slot[w, state[w, W_COUNT]], out_mb[w, state[w, W_COUNT]] = slot, m
    state[w, W_COUNT] += 1
    return int(m)


@entry
def _play(
    num_stages: int, num_mb: int, rule: Ints, memory: Ints, durations: Ints, gate_ns: Ints, keys: Ints,
    out_slot: Ints, out_mb: Ints, op_start: Ints, arrived: Ints,
    done: Ints, state: Ints, gate_open: Ints, touched: Ints, is_touched: Ints,
    transfers: Ints, times: Ints, links: Ints, fluids: Floats, free: Ints, queue: Ints, left: Floats, active: Ints,
    done_at: Floats, fifo: Ints, fifo_ends: Ints, trace: Ints, rate: Floats, time: Ints, events: Ints, counters: Ints,
    delivered: Ints,
) -> int:  # fmt: skip
    """The whole cell from first op to last; returns the makespan. `touched` lists who may have something new to do."""
    num_workers = len(durations)
    num_touched = num_workers
    now = makespan = counters[SIZE]  # zero; written as 0 it has a type of its own, and the network is compiled twice
    while True:
        # ---- everything that happens at this moment
        while counters[SIZE] and time[0] == now:
            event = events[0]
            drop_first(time, events, counters)
            what, which = event >> WHAT_SHIFT, event & WHICH_MASK
            offered = woken = NONE
            if what == OP and which >= num_workers:
                woken = which - num_workers
                gate_open[woken] += 1
            elif what == OP:
                woken, makespan = which, now
                offered = _ended(which, num_stages, num_mb, rule, memory, done, state)
                if offered != NONE and transfers[offered, T_BEFORE]:
                    push(time, events, counters, now + transfers[offered, T_BEFORE], OFFER, offered)
                    offered = NONE
            elif what == OFFER:
                offered = which
            elif what == ARRIVE:
                woken = _received(which, num_stages, num_mb, rule, arrived, gate_open)
            else:
                wake(
                    transfers, times, links, fluids, free, queue, left, active, done_at, fifo, fifo_ends, trace, rate,
                    time, events, counters, delivered, (event >> LINK_SHIFT) & WHICH_MASK, event & SEQUENCE_MASK, now,
                )  # fmt: skip
            if offered != NONE:
                offer(
                    transfers, times, links, fluids, free, queue, left, active, done_at, fifo, fifo_ends, trace, rate,
                    time, events, counters, delivered, offered, now,
                )  # fmt: skip
            for k in range(counters[DELIVERED]):
                push(time, events, counters, times[delivered[k], T_ARRIVE], ARRIVE, delivered[k])
            counters[DELIVERED] = 0
            if woken != NONE and not is_touched[woken]:
                is_touched[woken] = 1
                touched[num_touched] = woken
                num_touched += 1
        # ---- then whoever is free and concerned decides
        for k in range(num_touched):
            w = touched[k]
            is_touched[w] = 0
            slot = NONE
            if not state[w, W_BUSY]:
                slot = _choose(w, num_stages, num_mb, rule, memory, keys, done, state, arrived, gate_open)
            if slot == NONE:
                continue
            m = _begin(w, slot, num_stages, rule, memory, done, state, out_slot, out_mb)
            op_start[w, slot, m] = now
            push(time, events, counters, now + durations[w, slot], OP, w)
            if slot == SLOT_B and rule[R_GATE] == WHEN_NEXT_STARTS and w % num_stages > 0:
                push(time, events, counters, now + gate_ns[w], OP, num_workers + w - 1)
        num_touched = 0
        if not counters[SIZE]:
            return int(makespan)
        now = time[0]


def priority_keys(layout: Layout, order: Sequence[Kind]) -> Ints:
    """Keys [w, slot, m] that put one kind before another always, and older microbatches first within a kind."""
    num_workers, num_mb = layout.num_pipelines * layout.num_stages, layout.num_microbatches
    slot_of = {Kind.F: SLOT_F, Kind.R: SLOT_R, Kind.B: SLOT_B, Kind.I: SLOT_B, Kind.W: SLOT_W}
    keys = np.zeros((num_workers, 4, num_mb), np.int64)
    for rank, kind in enumerate(order):
        keys[:, slot_of[kind], :] = rank * num_mb + np.arange(num_mb)
    return keys


def play(layout: Layout, costs: Costs, rule: Rule, memory: Memory, keys: Ints, turn: Ints) -> Played:
    """Let every worker and every WAN queue follow its keys. [w, slot, m] and [transfer]."""
    slots = [Kind.F, Kind.R, Kind.I if rule.split else Kind.B, Kind.W]
    held = [memory.cap, *(memory.acquire[k] for k in slots), *(memory.release[k] for k in slots)]
    return _run(layout, costs, rule, slots, held, keys, turn)


def play_reversed(layout: Layout, costs: Costs, rule: Rule, memory: Memory, forward: Played) -> Played:
    """Play the iteration from its end to its beginning, whatever ended last in `forward` going first.

    Backwards in time a weight gradient comes first, then the input gradients travel from the first stage to the
    last, and forwards travel back. What comes out, read forwards, starts everything as late as possible: other
    orders than those that start everything as early as possible, and often better ones to start from.
    Slots and microbatches are those of `forward`; start times are read forwards.
    """
    backward = Kind.I if rule.split else Kind.B
    slots = [backward, Kind.R, Kind.F, Kind.W]
    held = [memory.cap, *(memory.release[k] for k in slots), *(memory.acquire[k] for k in slots)]
    mirrored = Costs(
        costs.compute_ns, costs.links, costs.channel_link[::-1], costs.work_ns[::-1], costs.latency_ns[::-1],
        costs.before_ns[::-1],
    )  # fmt: skip
    num_mb = layout.num_microbatches
    swap = [SLOT_B, SLOT_R, SLOT_F, SLOT_W]
    lengths = costs.compute_ns.reshape(-1, costs.compute_ns.shape[2])[:, slots]
    ends = forward.start_ns[:, swap, ::-1] + lengths[:, :, None]
    by_channel = forward.transfer_start_ns.reshape(2, -1, num_mb)[::-1, :, ::-1].reshape(-1)
    played = _run(layout, mirrored, rule._replace(reverse=True), slots, held, -ends, -by_channel)
    start = played.makespan_ns - played.start_ns - lengths[:, :, None]
    start[played.start_ns == NONE] = NONE
    begun = played.makespan_ns - played.transfer_start_ns
    count = (played.kinds != NONE).sum(axis=1)
    kinds, microbatches = np.full_like(played.kinds, NONE), np.zeros_like(played.microbatches)
    for w, n in enumerate(count.tolist()):
        kinds[w, :n] = np.array(swap)[played.kinds[w, :n][::-1]]
        microbatches[w, :n] = num_mb - 1 - played.microbatches[w, :n][::-1]
    return Played(
        kinds,
        microbatches,
        np.ascontiguousarray(start[:, swap, ::-1]),
        np.ascontiguousarray(begun.reshape(2, -1, num_mb)[::-1, :, ::-1].reshape(-1)),
        played.makespan_ns,
    )


def _run(
    layout: Layout, costs: Costs, rule: Rule, slots: list[Kind], held: list[int], keys: Ints, turn: Ints
) -> Played:
    num_workers, num_mb = layout.num_pipelines * layout.num_stages, layout.num_microbatches
    durations = costs.compute_ns.reshape(num_workers, -1)
    net = network(network_tables(costs, num_mb, turn), num_workers)
    length = 4 * num_mb
    out_slot = np.full((num_workers, length), NONE, np.int64)
    out_mb = np.zeros((num_workers, length), np.int64)
    op_start = np.full((num_workers, 4, num_mb), NONE, np.int64)
    done = np.zeros((num_workers, 4), np.int64)
    gate_open = np.full(num_workers, num_mb if rule.gate == ANYTIME else 0, np.int64)
    everybody = np.arange(num_workers)
    makespan = _play(
        layout.num_stages,
        num_mb,
        np.array(rule, np.int64),
        np.array(held, np.int64),
        np.ascontiguousarray(durations[:, slots]),
        np.ascontiguousarray(durations[:, Kind.I]),
        np.ascontiguousarray(keys),
        out_slot,
        out_mb,
        op_start,
        np.zeros((2, num_workers, num_mb), np.int64),
        done,
        np.zeros((num_workers, 6), np.int64),
        gate_open,
        everybody,
        np.ones(num_workers, np.int64),
        *net,
    )
    if (done[:, SLOT_B] != num_mb).any() or (rule.split and (done[:, SLOT_W] != num_mb).any()):
        raise ProgramError(
            f"no schedule fits: a worker may hold {held[0]}, but one microbatch in progress takes "
            f"{held[1] + held[2]}; raise the memory cap or shrink the microbatch"
        )
    return Played(out_slot, out_mb, op_start, net[1][:, T_BEGUN], makespan)


def freeze(
    name: str, layout: Layout, rule: Rule, played: Played, *, memory: Memory, turn: Ints, sharing: bool
) -> Program:
    """The order that was played, as a Program."""
    kinds = (Kind.F, Kind.R, Kind.I if rule.split else Kind.B, Kind.W)
    orders = []
    for w in range(len(played.kinds)):
        stage = w % layout.num_stages
        slots, microbatches = played.kinds[w].tolist(), played.microbatches[w].tolist()
        orders.append([Op(kinds[k], stage, m) for k, m in zip(slots, microbatches, strict=True) if k != NONE])
    return assemble(name, layout, orders, sharing=sharing, turn=turn, memory=memory)
