"""The dispatcher for numba: runs a DP-cell from its first op to its last; every worker chooses by its keys.

`sim.policy` describes it, makes the arrays and reads them afterwards. A row of `ops` holds what an op acquires,
releases, needs and sends, so this module is independent of stages, directions and models of memory. numba's compile
time grows with every index and branch, so rules are bits and rows hold related values. Private to `sim`: import it only
if numba is needed.
"""

from __future__ import annotations

from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints
from atlas.jit import entry, inlined, njit
from atlas.sim.network import (
    ARRIVE,
    DELIVERED,
    LINK_SHIFT,
    OFFER,
    OP,
    SEQUENCE_MASK,
    SIZE,
    WHAT_SHIFT,
    WHICH_MASK,
    drop_first,
    offer,
    push,
    wake,
)
from atlas.sim.rows import T_ARRIVE, T_BEFORE, T_DST, Floats

SLOT_F, SLOT_R, SLOT_B, SLOT_W = range(4)
"""What a worker chooses from: a backward in one piece and the input half of a split one share a slot."""

# Columns of `ops` [w, slot]. NEEDS and SENDS are the transfer of microbatch 0, or NONE.
O_NS, O_TAKES, O_GIVES, O_FREES, O_COUNT, O_NEEDS, O_SENDS, O_GATE_NS = range(8)
# Columns of `state` [w]; the first four count what is done of each slot.
W_DOING, W_STARTED, W_ROOM, W_SPARE, W_GATE, W_PULLED, W_TOUCHED = range(4, 11)

RECOMPUTES, HOLDS, IN_ORDER, W_FIRST, OPENS_ON_ARRIVAL, OPENS_WITH_NEXT = (1 << bit for bit in range(6))
"""Bits of a rule, as `policy.Rule` explains them; W_FIRST: time runs backwards and backwards are split."""


@njit
def _has_room(w: int, stash: int, ops: Ints, state: Ints) -> bool:
    """Room for one more stash and, beyond all stashes, for one recompute: or nothing could ever be finished."""
    fits: bool = ops[w, SLOT_F, O_TAKES] <= state[w, W_ROOM] and stash <= state[w, W_SPARE]
    return fits


@njit
def _is_ready(w: int, slot: int, rule: int, stash: int, ops: Ints, state: Ints, arrived: Ints) -> bool:
    """Whether the worker could start the next op of this slot now, if there is one."""
    n, needs = state[w, slot], ops[w, slot, O_NEEDS]
    if needs != NONE and not arrived[needs + n]:
        return False
    ready: bool
    if slot == SLOT_B:
        ready = n < state[w, SLOT_F] and (not rule & RECOMPUTES or n < state[w, SLOT_R])
    elif slot == SLOT_W:
        ready = ops[w, slot, O_TAKES] <= state[w, W_ROOM] if rule & W_FIRST else n < state[w, SLOT_B]
    elif rule & HOLDS and state[w, SLOT_R] > state[w, SLOT_B]:
        ready = False
    elif slot == SLOT_R:
        ready = n < state[w, SLOT_F] and n < state[w, W_GATE] and ops[w, slot, O_TAKES] <= state[w, W_ROOM]
    elif rule & W_FIRST:
        ready = n < state[w, SLOT_W]
    else:
        ready = _has_room(w, stash, ops, state)
    return ready


@inlined
def _choose(w: int, rule: int, stash: int, ops: Ints, keys: Ints, state: Ints, arrived: Ints) -> int:
    """The slot of the ready op with the smallest key, or NONE."""
    if rule & RECOMPUTES and not ops[w, SLOT_R, O_COUNT] and state[w, SLOT_F] > state[w, SLOT_B]:
        return SLOT_B  # the last stage: its activations are still there, and nothing comes in between
    best, smallest = NONE, 0
    for slot in range(4):
        n = state[w, slot]
        if n == ops[w, slot, O_COUNT]:
            continue
        key = keys[w, slot, n]
        if (best == NONE or key < smallest) and (
            rule & IN_ORDER or _is_ready(w, slot, rule, stash, ops, state, arrived)
        ):
            best, smallest = slot, key
    if not rule & IN_ORDER or best == NONE:
        return best
    if best == SLOT_R and state[w, W_GATE] <= state[w, SLOT_R] and _has_room(w, stash, ops, state):
        state[w, W_PULLED] = 1  # and keeps this choice, even if the gradient arrives before the forward's input
    if state[w, W_PULLED] and state[w, SLOT_F] < ops[w, SLOT_F, O_COUNT]:
        best = SLOT_F
    if not _is_ready(w, best, rule, stash, ops, state, arrived):
        return NONE
    state[w, W_PULLED] = 0
    return best


@inlined
def _decide(
    w: int, now: int, rule: int, stash: int, ops: Ints, keys: Ints, state: Ints, arrived: Ints, started: Ints,
    order: Ints, time: Ints, events: Ints, counters: Ints,
) -> None:  # fmt: skip
    """A free worker takes the op that it chooses, if any, and what the op needs to hold."""
    slot = _choose(w, rule, stash, ops, keys, state, arrived)
    if slot == NONE:
        return
    m = state[w, slot]
    state[w, W_DOING] = slot
    state[w, W_ROOM] -= ops[w, slot, O_TAKES]
    if slot == SLOT_F:
        state[w, W_SPARE] -= stash
    started[w, slot, m] = now
    order[w, state[w, W_STARTED]] = 4 * m + slot
    state[w, W_STARTED] += 1
    push(time, events, counters, now + ops[w, slot, O_NS], OP, w)
    if slot == SLOT_B and rule & OPENS_WITH_NEXT and ops[w, slot, O_SENDS] != NONE:
        push(time, events, counters, now + ops[w, slot, O_GATE_NS], OP, len(state) + w - 1)


@inlined
def _ended(w: int, ops: Ints, state: Ints) -> int:
    """The worker's op is over: gives back what it held. Returns the transfer that it made ready, or NONE."""
    slot = state[w, W_DOING]
    m = state[w, slot]
    state[w, slot] = m + 1
    state[w, W_DOING] = NONE
    state[w, W_ROOM] += ops[w, slot, O_GIVES]
    state[w, W_SPARE] += ops[w, slot, O_FREES]
    sends: int = ops[w, slot, O_SENDS]
    return sends if sends == NONE else sends + m


@inlined
def _received(transfer: int, rule: int, ops: Ints, state: Ints, arrived: Ints, transfers: Ints) -> int:
    """A transfer is there. Returns the worker that it was meant for."""
    w: int = transfers[transfer, T_DST]
    arrived[transfer] = 1
    gradients = ops[w, SLOT_B, O_NEEDS]
    if rule & OPENS_ON_ARRIVAL and NONE < gradients <= transfer:
        opened = transfer - gradients + 1
        if opened > state[w, W_GATE]:
            state[w, W_GATE] = opened
    return w


@entry
def play_cell(
    rule: int, stash: int, ops: Ints, keys: Ints, state: Ints, arrived: Ints, started: Ints, order: Ints, touched: Ints,
    transfers: Ints, times: Ints, links: Ints, fluids: Floats, free: Ints, queue: Ints, left: Floats, active: Ints,
    done_at: Floats, fifo: Ints, fifo_ends: Ints, trace: Ints, rate: Floats, time: Ints, events: Ints, counters: Ints,
    delivered: Ints,
) -> int:  # fmt: skip
    """Run the whole cell; returns the makespan. `touched` lists the workers that may have new work: at first all."""
    num_workers = len(state)
    num_touched = num_workers
    makespan: int = counters[SIZE]  # zero; a literal 0 has another type, and the network would be compiled twice
    now = makespan
    while True:
        # ---- everything that happens at this moment
        while counters[SIZE] and time[0] == now:
            event = events[0]
            drop_first(time, events, counters)
            what, which = event >> WHAT_SHIFT, event & WHICH_MASK
            offered = woken = NONE
            if what == OP and which >= num_workers:
                woken = which - num_workers
                state[woken, W_GATE] += 1
            elif what == OP:
                woken, makespan = which, now
                offered = _ended(which, ops, state)
                if offered != NONE and transfers[offered, T_BEFORE]:
                    push(time, events, counters, now + transfers[offered, T_BEFORE], OFFER, offered)
                    offered = NONE
            elif what == OFFER:
                offered = which
            elif what == ARRIVE:
                woken = _received(which, rule, ops, state, arrived, transfers)
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
            if woken != NONE and not state[woken, W_TOUCHED]:
                state[woken, W_TOUCHED] = 1
                touched[num_touched] = woken
                num_touched += 1
        # ---- then each touched worker that is free decides
        for k in range(num_touched):
            w = touched[k]
            state[w, W_TOUCHED] = 0
            if state[w, W_DOING] == NONE:
                _decide(w, now, rule, stash, ops, keys, state, arrived, started, order, time, events, counters)
        num_touched = 0
        if not counters[SIZE]:
            return makespan
        now = time[0]
