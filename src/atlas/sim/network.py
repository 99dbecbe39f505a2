"""The event heap and the network for numba: the links of both compiled engines.

`push` puts an event, packed into one integer, into the heap; `offer` gives a transfer to its link, `wake` processes a
link's event; finished transfers are left in `delivered` for the caller. The rules are exactly those of
`simulate.reference`. `rows` defines the arrays and columns. Private to `sim`: import it only if numba is needed.
"""

from __future__ import annotations

import math

import numpy as np

from atlas.cost.table import FAIR, PRIVATE
from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints, before
from atlas.jit import inlined, njit
from atlas.sim.lower import FUTURE, UNKNOWN
from atlas.sim.rows import (
    L_ACTIVE,
    L_CHANGING,
    L_EXPECTED,
    L_NUM_ACTIVE,
    L_POLICY,
    L_QUANTUM,
    L_QUEUE,
    L_QUEUED,
    L_SERVER,
    L_SERVERS_END,
    L_SERVING,
    L_SINCE,
    L_TRACE,
    L_TRACE_END,
    L_UNTIL,
    T_ARRIVE,
    T_BEGUN,
    T_CHANNEL,
    T_LATENCY,
    T_LINK,
    T_SENT,
    T_TURN,
    T_WORK,
    TR_AT,
    TR_LATENCY,
    X_CAPACITY,
    X_SERVICE,
    Floats,
)

# ---- the heap ------------------------------------------------------------------------------------------------------
OP, OFFER, LINK, ARRIVE = (np.int64(kind) for kind in (*FUTURE, 3))
"""What an event is. Not plain integers: of those numba makes a type each, and compiles `push` for every one."""

WHAT_SHIFT, SEQUENCE_SHIFT = 60, 26
"""An event packs (what, sequence, which) into one integer, which also orders events of the same nanosecond; that of a
link packs (what, which, sequence): links decide in their own order, not in that in which they were woken."""
LINK_SHIFT = WHAT_SHIFT - SEQUENCE_SHIFT
WHICH_MASK = (1 << SEQUENCE_SHIFT) - 1
SEQUENCE_MASK = (1 << LINK_SHIFT) - 1

SEQUENCE, SIZE, DELIVERED = range(3)
"""Places in `counters`: events scheduled so far, events in the heap, and transfers that a link has just sent."""


@njit
def push(time: Ints, events: Ints, counters: Ints, when: int, what: np.int64, which: int) -> int:
    """Schedule an event; returns its sequence number."""
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


# ---- the links -----------------------------------------------------------------------------------------------------
@njit
def _span(trace: Ints, row: Ints, now: int) -> int:
    low: int = row[L_TRACE]
    high: int = row[L_TRACE_END]
    while high - low > 1:
        middle = (low + high) // 2
        if trace[middle, TR_AT] <= now:
            low = middle
        else:
            high = middle
    return low


@njit
def _finish(trace: Ints, rate: Floats, row: Ints, start: int, work: float, share: float) -> int:
    last = row[L_TRACE_END]
    if row[L_TRACE] == last:
        return start + math.ceil(work / share)
    now, left = start, work
    k = _span(trace, row, start)
    while True:
        speed = rate[k] * share
        if k + 1 == last or left <= (trace[k + 1, TR_AT] - now) * speed:
            end: int = now + math.ceil(left / speed)
            return end
        left -= (trace[k + 1, TR_AT] - now) * speed
        now = trace[k + 1, TR_AT]
        k += 1


@njit
def _done(trace: Ints, rate: Floats, row: Ints, start: int, end: int, share: float) -> float:
    last = row[L_TRACE_END]
    if row[L_TRACE] == last:
        return (end - start) * share
    now, work = start, 0.0
    for k in range(_span(trace, row, start), last):
        until = end
        if k + 1 < last and trace[k + 1, TR_AT] < end:
            until = trace[k + 1, TR_AT]
        work += (until - now) * rate[k] * share
        now = until
        if now == end:
            break
    return work


@njit
def _extra_latency(trace: Ints, row: Ints, now: int) -> int:
    if row[L_TRACE] == row[L_TRACE_END]:
        return 0
    late: int = trace[_span(trace, row, now), TR_LATENCY]
    return late


@njit
def _delivered(times: Ints, counters: Ints, delivered: Ints, transfer: int, arrive: int) -> None:
    times[transfer, T_ARRIVE] = arrive
    delivered[counters[DELIVERED]] = transfer
    counters[DELIVERED] += 1


@inlined
def _offer_private(
    transfers: Ints, times: Ints, row: Ints, free: Ints, trace: Ints, rate: Floats, transfer: int, now: int
) -> int:
    """First come, first served. Returns when it arrives."""
    server = row[L_SERVER]
    for k in range(row[L_SERVER] + 1, row[L_SERVERS_END]):
        if free[k] < free[server]:
            server = k
    start = now if now > free[server] else free[server]
    sent = _finish(trace, rate, row, start, float(transfers[transfer, T_WORK]), 1.0)
    free[server] = sent
    times[transfer, T_BEGUN], times[transfer, T_SENT] = start, sent
    latency: int = transfers[transfer, T_LATENCY] + _extra_latency(trace, row, start)
    return sent + latency


_rank = njit(before)


@njit
def _before(transfers: Ints, a: int, b: int) -> bool:
    return _rank(transfers[a, T_TURN], a) < _rank(transfers[b, T_TURN], b)


@njit
def _queue_push(transfers: Ints, row: Ints, queue: Ints, transfer: int) -> None:
    first, k = row[L_QUEUE], row[L_QUEUED]
    row[L_QUEUED] += 1
    while k > 0:
        parent = (k - 1) >> 1
        if _before(transfers, queue[first + parent], transfer):
            break
        queue[first + k] = queue[first + parent]
        k = parent
    queue[first + k] = transfer


@inlined
def _queue_pop(transfers: Ints, row: Ints, queue: Ints) -> int:
    first, size = row[L_QUEUE], row[L_QUEUED] - 1
    row[L_QUEUED] = size
    top: int = queue[first]
    last = queue[first + size]
    k, child = 0, 1
    while child < size:
        if child + 1 < size and _before(transfers, queue[first + child + 1], queue[first + child]):
            child += 1
        if _before(transfers, last, queue[first + child]):
            break
        queue[first + k] = queue[first + child]
        k, child = child, 2 * child + 1
    queue[first + k] = last
    return top


@inlined
def _turns_offer(
    transfers: Ints, left: Floats, row: Ints, queue: Ints, time: Ints, events: Ints, counters: Ints, link: int,
    transfer: int, now: int,
) -> None:  # fmt: skip
    _queue_push(transfers, row, queue, transfer)
    left[transfer] = transfers[transfer, T_WORK]
    serving, quantum = row[L_SERVING], row[L_QUANTUM]
    if serving == NONE:
        row[L_EXPECTED] = push(time, events, counters, now, LINK, link)
    elif quantum and not row[L_CHANGING] and transfers[transfer, T_TURN] < transfers[serving, T_TURN]:
        since = row[L_SINCE]
        boundary = since + -(-(now - since) // quantum) * quantum
        if now == since:
            boundary += quantum
        if boundary < row[L_UNTIL]:
            row[L_CHANGING] = 1
            row[L_EXPECTED] = push(time, events, counters, boundary, LINK, link)


@njit
def _fair_share(row: Ints, fluid: Floats) -> float:
    capacity, count = fluid[X_CAPACITY], row[L_NUM_ACTIVE]
    share: float = capacity / count if count > capacity else 1.0
    return share


@njit
def _fair_catch_up(row: Ints, fluid: Floats, trace: Ints, rate: Floats, now: int) -> None:
    fluid[X_SERVICE] += _done(trace, rate, row, row[L_SINCE], now, _fair_share(row, fluid))
    row[L_SINCE] = now


@njit
def _fair_begin(
    transfers: Ints, times: Ints, row: Ints, fluid: Floats, active: Ints, done_at: Floats, transfer: int, now: int
) -> None:
    times[transfer, T_BEGUN] = now
    k = row[L_ACTIVE] + row[L_NUM_ACTIVE]
    active[k], done_at[k] = transfer, fluid[X_SERVICE] + transfers[transfer, T_WORK]
    row[L_NUM_ACTIVE] += 1


@njit
def _least(row: Ints, done_at: Floats) -> float:
    """The service at which the first of the active transfers is done; a loop, because `min()` is slow to compile."""
    first = row[L_ACTIVE]
    least: float = done_at[first]
    for k in range(first + 1, first + row[L_NUM_ACTIVE]):
        if done_at[k] < least:
            least = done_at[k]
    return least


@njit
def _fair_foresee(
    row: Ints, fluid: Floats, done_at: Floats, trace: Ints, rate: Floats,
    time: Ints, events: Ints, counters: Ints, link: int, now: int,
) -> None:  # fmt: skip
    row[L_EXPECTED] = NONE
    if row[L_NUM_ACTIVE]:
        left = _least(row, done_at) - fluid[X_SERVICE]
        if left < 0.0:
            left = 0.0
        end = _finish(trace, rate, row, now, left, _fair_share(row, fluid))
        row[L_EXPECTED] = push(time, events, counters, end, LINK, link)


@inlined
def _fair_ended(
    transfers: Ints, times: Ints, row: Ints, fluid: Floats, active: Ints, done_at: Floats, trace: Ints, counters: Ints,
    delivered: Ints, now: int,
) -> None:  # fmt: skip
    """Deliver what is done, in order of start, and take it off the list of active transfers."""
    first = kept = row[L_ACTIVE]
    service = _least(row, done_at)
    if service < fluid[X_SERVICE]:
        service = fluid[X_SERVICE]
    fluid[X_SERVICE] = service
    for k in range(first, first + row[L_NUM_ACTIVE]):
        transfer = active[k]
        if done_at[k] <= service:
            times[transfer, T_SENT] = now
            late = _extra_latency(trace, row, times[transfer, T_BEGUN])
            _delivered(times, counters, delivered, transfer, now + transfers[transfer, T_LATENCY] + late)
        else:
            active[kept], done_at[kept] = transfer, done_at[k]
            kept += 1
    row[L_NUM_ACTIVE] = kept - first


@njit
def offer(
    transfers: Ints, times: Ints, links: Ints, fluids: Floats, free: Ints, queue: Ints, left: Floats, active: Ints,
    done_at: Floats, fifo: Ints, fifo_ends: Ints, trace: Ints, rate: Floats, time: Ints, events: Ints, counters: Ints,
    delivered: Ints, transfer: int, now: int,
) -> None:  # fmt: skip
    """A transfer reaches its link."""
    link = transfers[transfer, T_LINK]
    row = links[link]
    if row[L_POLICY] == PRIVATE:
        arrive = _offer_private(transfers, times, row, free, trace, rate, transfer, now)
        _delivered(times, counters, delivered, transfer, arrive)
    elif row[L_POLICY] == FAIR:
        ends = fifo_ends[transfers[transfer, T_CHANNEL]]
        fifo[ends[1]] = transfer
        ends[1] += 1
        if ends[1] - ends[0] == 1:
            fluid = fluids[link]
            _fair_catch_up(row, fluid, trace, rate, now)
            _fair_begin(transfers, times, row, fluid, active, done_at, transfer, now)
            _fair_foresee(row, fluid, done_at, trace, rate, time, events, counters, link, now)
    else:
        _turns_offer(transfers, left, row, queue, time, events, counters, link, transfer, now)


@njit
def wake(
    transfers: Ints, times: Ints, links: Ints, fluids: Floats, free: Ints, queue: Ints, left: Floats, active: Ints,
    done_at: Floats, fifo: Ints, fifo_ends: Ints, trace: Ints, rate: Floats, time: Ints, events: Ints, counters: Ints,
    delivered: Ints, link: int, sequence: int, now: int,
) -> None:  # fmt: skip
    """A link finishes something or changes over, unless the event is stale."""
    row = links[link]
    if row[L_EXPECTED] != sequence:
        return
    if row[L_POLICY] == FAIR:
        fluid = fluids[link]
        _fair_catch_up(row, fluid, trace, rate, now)
        _fair_ended(transfers, times, row, fluid, active, done_at, trace, counters, delivered, now)
        for k in range(counters[DELIVERED]):
            ends = fifo_ends[transfers[delivered[k], T_CHANNEL]]
            ends[0] += 1
            if ends[0] < ends[1]:
                _fair_begin(transfers, times, row, fluid, active, done_at, fifo[ends[0]], now)
        _fair_foresee(row, fluid, done_at, trace, rate, time, events, counters, link, now)
        return
    serving = row[L_SERVING]
    if row[L_CHANGING]:
        left[serving] -= _done(trace, rate, row, row[L_SINCE], now, 1.0)
        _queue_push(transfers, row, queue, serving)
    elif serving != NONE:
        times[serving, T_SENT] = now
        arrive = now + transfers[serving, T_LATENCY] + _extra_latency(trace, row, times[serving, T_BEGUN])
        _delivered(times, counters, delivered, serving, arrive)
    row[L_CHANGING] = 0
    row[L_EXPECTED] = row[L_SERVING] = NONE
    if row[L_QUEUED]:
        serving = _queue_pop(transfers, row, queue)
        row[L_SERVING], row[L_SINCE] = serving, now
        if times[serving, T_BEGUN] == UNKNOWN:
            times[serving, T_BEGUN] = now
        row[L_UNTIL] = _finish(trace, rate, row, now, left[serving], 1.0)
        row[L_EXPECTED] = push(time, events, counters, row[L_UNTIL], LINK, link)
