"""The event heap for numba: future events, each packed into one integer, ordered by time.

Private to `sim`: import it only if numba is needed.
"""

from __future__ import annotations

import numpy as np

from atlas.ir.program import Ints
from atlas.sim.jit import njit
from atlas.sim.lower import FUTURE

OP, OFFER, LINK, ARRIVE = (np.int64(kind) for kind in (*FUTURE, 3))
"""What an event is. Not plain integers: of those numba makes a type each, and compiles `push` for every one."""

WHAT_SHIFT, SEQUENCE_SHIFT = 60, 26
"""An event packs (what, sequence, which) into one integer, which also orders events of the same nanosecond; that of a
link packs (what, which, sequence): links decide in their own order, not in that in which they were woken."""
LINK_SHIFT = WHAT_SHIFT - SEQUENCE_SHIFT
WHICH_MASK = (1 << SEQUENCE_SHIFT) - 1
SEQUENCE_MASK = (1 << LINK_SHIFT) - 1

SEQUENCE, SIZE, DELIVERED = range(3)
"""Places in `counters`: events foreseen so far, events in the heap, and transfers that a link has just let through."""


@njit
def push(time: Ints, events: Ints, counters: Ints, when: int, what: np.int64, which: int) -> int:
    """Foresee an event; returns its sequence number."""
    counters[SEQUENCE] += 1
    sequence: int = counters[SEQUENCE]
    event = (what << WHAT_SHIFT) | (sequence << SEQUENCE_SHIFT) | which
    if what == LINK:
        event = (what << WHAT_SHIFT) | (which << LINK_SHIFT) | sequence
    k = counters[SIZE]
    counters[SIZE] = k + 1
    while k > 0:
        parent = (k - 1) >> 1
        if time[parent] < when or (time[parent] == when and events[parent] < event):
            break
        time[k], events[k] = time[parent], events[parent]
        k = parent
    time[k], events[k] = when, event
    return sequence


@njit
def drop_first(time: Ints, events: Ints, counters: Ints) -> None:
    """Take the earliest event out of the heap."""
    size = counters[SIZE] - 1
    counters[SIZE] = size
    when, event = time[size], events[size]
    k, child = 0, 1
    while child < size:
        right = child + 1
        if right < size and (
            time[right] < time[child] or (time[right] == time[child] and events[right] < events[child])
        ):
            child = right
        if when < time[child] or (when == time[child] and event < events[child]):
            break
        time[k], events[k] = time[child], events[child]
        k, child = child, 2 * child + 1
    time[k], events[k] = when, event
