"""The fast engine: `sim.reference` once more, for numba. A test holds the two equal event for event.

Same rules, same events, same tie-breaking; read the reference to learn what happens, and this to see it done in
arrays. Deliberately repeats the rules instead of sharing code with the reference: two independent engines are
what makes either believable. Rows are packed by thing (op, transfer, link) because a function call hands over
every array it names; numba charges for each. Import this module only when you need it: numba is slow to load.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from atlas.cost.table import FAIR, PRIVATE
from atlas.errors import ProgramError
from atlas.ir.program import Ints
from atlas.sim.lower import NONE, Tables
from atlas.sim.reference import LINK, OFFER, OP, UNKNOWN, Events

Floats = NDArray[np.float64]

WHICH_BITS, WHAT_BITS = 26, 2

# Columns of the packed rows.
OP_NS, OP_INPUT, OP_OUTPUT, OP_GROUP, OP_WORKER = range(5)
OP_START, OP_END = range(2)
T_DST, T_CHANNEL, T_LINK, T_WORK, T_BEFORE, T_LATENCY, T_TURN = range(7)
T_READY, T_BEGUN, T_SENT, T_ARRIVE = range(4)
W_LAST, W_NEXT, W_WAITING = range(3)
SEQUENCE, SIZE = range(2)
(
    L_POLICY,
    L_QUANTUM,
    L_SERVER,  # first of its servers in `free`
    L_SERVERS_END,
    L_QUEUE,  # first of its places in `queue`
    L_QUEUED,
    L_SERVING,
    L_SINCE,
    L_UNTIL,
    L_EXPECTED,  # sequence number of the one LINK event that counts; earlier ones are stale
    L_CHANGING,
    L_ACTIVE,  # first of its places in `active`
    L_NUM_ACTIVE,
    L_TRACE,
    L_TRACE_END,
) = range(15)
X_CAPACITY, X_SERVICE = range(2)
TR_AT, TR_LATENCY = range(2)


@njit(cache=True)
def _push(time: Ints, events: Ints, counters: Ints, when: int, what: int, which: int) -> int:
    """Foresee an event; returns its sequence number."""
    counters[SEQUENCE] += 1
    sequence = counters[SEQUENCE]
    k = counters[SIZE]
    counters[SIZE] = k + 1
    while k > 0:
        parent = (k - 1) >> 1
        if time[parent] <= when:  # at the same time, what was foreseen earlier goes first
            break
        time[k], events[k] = time[parent], events[parent]
        k = parent
    time[k], events[k] = when, (((sequence << WHICH_BITS) | which) << WHAT_BITS) | what
    return int(sequence)


@njit(cache=True)
def _drop_first(time: Ints, events: Ints, counters: Ints) -> None:
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


@njit(cache=True)
def _span(trace: Ints, row: Ints, now: int) -> int:
    k = row[L_TRACE]
    while k + 1 < row[L_TRACE_END] and trace[k + 1, TR_AT] <= now:
        k += 1
    return int(k)


@njit(cache=True)
def _finish(trace: Ints, rate: Floats, row: Ints, start: int, work: float, share: float) -> int:
    last = row[L_TRACE_END]
    if row[L_TRACE] == last:
        return start + int(math.ceil(work / share))
    now, left = start, work
    k = _span(trace, row, start)
    while True:
        speed = rate[k] * share
        if k + 1 == last or left <= (trace[k + 1, TR_AT] - now) * speed:
            return int(now + int(math.ceil(left / speed)))
        left -= (trace[k + 1, TR_AT] - now) * speed
        now = trace[k + 1, TR_AT]
        k += 1


@njit(cache=True)
def _done(trace: Ints, rate: Floats, row: Ints, start: int, end: int, share: float) -> float:
    last = row[L_TRACE_END]
    if row[L_TRACE] == last:
        return (end - start) * share
    now, work = start, 0.0
    for k in range(_span(trace, row, start), last):
        until = end if k + 1 == last else min(end, trace[k + 1, TR_AT])
        work += (until - now) * rate[k] * share
        now = until
        if now == end:
            break
    return work


@njit(cache=True)
def _extra_latency(trace: Ints, row: Ints, now: int) -> int:
    if row[L_TRACE] == row[L_TRACE_END]:
        return 0
    return int(trace[_span(trace, row, now), TR_LATENCY])


@njit(cache=True)
def _deliver(
    ops: Ints, op_time: Ints, transfers: Ints, times: Ints, workers: Ints,
    time: Ints, events: Ints, counters: Ints, transfer: int, sent: int, arrive: int,
) -> None:  # fmt: skip
    times[transfer, T_SENT], times[transfer, T_ARRIVE] = sent, arrive
    op = transfers[transfer, T_DST]
    worker = ops[op, OP_WORKER]
    if workers[worker, W_WAITING] and workers[worker, W_NEXT] == op:
        workers[worker, W_WAITING] = 0
        op_time[op, OP_START] = arrive
        _push(time, events, counters, arrive + ops[op, OP_NS], OP, op)


@njit(cache=True)
def _offer_private(
    transfers: Ints, times: Ints, row: Ints, free: Ints, trace: Ints, rate: Floats, transfer: int, now: int
) -> tuple[int, int]:
    """The general case of a private link: several servers, a rate that varies. Returns (sent, arrive)."""
    server = row[L_SERVER]
    for k in range(row[L_SERVER] + 1, row[L_SERVERS_END]):
        if free[k] < free[server]:
            server = k
    start = max(now, free[server])
    sent = _finish(trace, rate, row, start, transfers[transfer, T_WORK], 1.0)
    free[server] = sent
    times[transfer, T_BEGUN] = start
    return sent, sent + transfers[transfer, T_LATENCY] + _extra_latency(trace, row, start)


@njit(cache=True)
def _before(transfers: Ints, a: int, b: int) -> bool:
    turn_a, turn_b = transfers[a, T_TURN], transfers[b, T_TURN]
    return turn_a < turn_b or (turn_a == turn_b and a < b)


@njit(cache=True)
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


@njit(cache=True)
def _queue_pop(transfers: Ints, row: Ints, queue: Ints) -> int:
    first, size = row[L_QUEUE], row[L_QUEUED] - 1
    row[L_QUEUED] = size
    top, last = queue[first], queue[first + size]
    k, child = 0, 1
    while child < size:
        if child + 1 < size and _before(transfers, queue[first + child + 1], queue[first + child]):
            child += 1
        if _before(transfers, last, queue[first + child]):
            break
        queue[first + k] = queue[first + child]
        k, child = child, 2 * child + 1
    queue[first + k] = last
    return int(top)


@njit(cache=True)
def _turns_serve(
    transfers: Ints, times: Ints, left: Floats, row: Ints, queue: Ints, trace: Ints, rate: Floats,
    time: Ints, events: Ints, counters: Ints, link: int, now: int,
) -> None:  # fmt: skip
    row[L_CHANGING] = 0
    row[L_EXPECTED] = row[L_SERVING] = NONE
    if row[L_QUEUED]:
        transfer = _queue_pop(transfers, row, queue)
        row[L_SERVING], row[L_SINCE] = transfer, now
        if times[transfer, T_BEGUN] == UNKNOWN:
            times[transfer, T_BEGUN] = now
        row[L_UNTIL] = _finish(trace, rate, row, now, left[transfer], 1.0)
        row[L_EXPECTED] = _push(time, events, counters, row[L_UNTIL], LINK, link)


@njit(cache=True)
def _turns_offer(
    transfers: Ints, times: Ints, left: Floats, row: Ints, queue: Ints, trace: Ints, rate: Floats,
    time: Ints, events: Ints, counters: Ints, link: int, transfer: int, now: int,
) -> None:  # fmt: skip
    _queue_push(transfers, row, queue, transfer)
    left[transfer] = transfers[transfer, T_WORK]
    serving, quantum = row[L_SERVING], row[L_QUANTUM]
    if serving == NONE:
        _turns_serve(transfers, times, left, row, queue, trace, rate, time, events, counters, link, now)
    elif quantum and not row[L_CHANGING] and transfers[transfer, T_TURN] < transfers[serving, T_TURN]:
        chunks = max(1, -(-(now - row[L_SINCE]) // quantum))
        boundary = row[L_SINCE] + chunks * quantum
        if boundary < row[L_UNTIL]:
            row[L_CHANGING] = 1
            row[L_EXPECTED] = _push(time, events, counters, boundary, LINK, link)


@njit(cache=True)
def _fair_share(row: Ints, fluid: Floats) -> float:
    return min(1.0, fluid[X_CAPACITY] / row[L_NUM_ACTIVE]) if row[L_NUM_ACTIVE] else 1.0


@njit(cache=True)
def _fair_catch_up(row: Ints, fluid: Floats, trace: Ints, rate: Floats, now: int) -> None:
    fluid[X_SERVICE] += _done(trace, rate, row, row[L_SINCE], now, _fair_share(row, fluid))
    row[L_SINCE] = now


@njit(cache=True)
def _fair_begin(
    transfers: Ints, times: Ints, row: Ints, fluid: Floats, active: Ints, done_at: Floats, transfer: int, now: int
) -> None:
    times[transfer, T_BEGUN] = now
    k = row[L_ACTIVE] + row[L_NUM_ACTIVE]
    active[k], done_at[k] = transfer, fluid[X_SERVICE] + transfers[transfer, T_WORK]
    row[L_NUM_ACTIVE] += 1


@njit(cache=True)
def _fair_foresee(
    row: Ints, fluid: Floats, done_at: Floats, trace: Ints, rate: Floats,
    time: Ints, events: Ints, counters: Ints, link: int, now: int,
) -> None:  # fmt: skip
    row[L_EXPECTED] = NONE
    if row[L_NUM_ACTIVE]:
        least = done_at[row[L_ACTIVE] : row[L_ACTIVE] + row[L_NUM_ACTIVE]].min()
        left = max(0.0, least - fluid[X_SERVICE])
        end = _finish(trace, rate, row, now, left, _fair_share(row, fluid))
        row[L_EXPECTED] = _push(time, events, counters, end, LINK, link)


@njit(cache=True)
def _fair_ended(row: Ints, fluid: Floats, active: Ints, done_at: Floats) -> Ints:
    """Take what is done off the list of active transfers, in order of start."""
    first, count = row[L_ACTIVE], row[L_NUM_ACTIVE]
    fluid[X_SERVICE] = max(fluid[X_SERVICE], done_at[first : first + count].min())
    ended = np.empty(count, np.int64)
    num_ended, kept = 0, 0
    for k in range(first, first + count):
        if done_at[k] <= fluid[X_SERVICE]:
            ended[num_ended] = active[k]
            num_ended += 1
        else:
            active[first + kept], done_at[first + kept] = active[k], done_at[k]
            kept += 1
    row[L_NUM_ACTIVE] = kept
    return ended[:num_ended]


@njit(cache=True)
def _pass_time(
    ops: Ints, op_time: Ints, transfers: Ints, times: Ints, workers: Ints, group_ptr: Ints, group_ops: Ints,
    assembled: Ints, links: Ints, fluids: Floats, free: Ints, queue: Ints, left: Floats, active: Ints,
    done_at: Floats, fifo: Ints, fifo_ends: Ints, trace: Ints, rate: Floats, time: Ints, events: Ints, counters: Ints,
) -> None:  # fmt: skip
    for worker in range(len(workers)):
        # An event before the beginning for every worker: "the op before your first has ended".
        _push(time, events, counters, 0, OP, (1 << WHICH_BITS) - 1 - worker)
    while counters[SIZE]:
        now, event = time[0], events[0]
        _drop_first(time, events, counters)
        what = event & ((1 << WHAT_BITS) - 1)
        which = (event >> WHAT_BITS) & ((1 << WHICH_BITS) - 1)
        worker, transfer, link = NONE, NONE, NONE
        if what == OP:
            if which < len(ops):
                op_time[which, OP_END] = now
                worker = ops[which, OP_WORKER]
                workers[worker, W_NEXT] = which + 1
                transfer = ops[which, OP_OUTPUT]
            else:
                worker = (1 << WHICH_BITS) - 1 - which
            if transfer != NONE:
                times[transfer, T_READY] = now
                if transfers[transfer, T_BEFORE]:
                    _push(time, events, counters, now + transfers[transfer, T_BEFORE], OFFER, transfer)
                    transfer = NONE
        elif what == OFFER:
            transfer = which
        else:
            link = which
            row = links[link]
            if row[L_EXPECTED] != event >> (WHICH_BITS + WHAT_BITS):
                continue
            if row[L_POLICY] == FAIR:
                fluid = fluids[link]
                _fair_catch_up(row, fluid, trace, rate, now)
                for ended in _fair_ended(row, fluid, active, done_at):
                    arrive = (
                        now + transfers[ended, T_LATENCY] + _extra_latency(trace, row, times[ended, T_BEGUN])
                    )
                    _deliver(ops, op_time, transfers, times, workers, time, events, counters, ended, now, arrive)
                    ends = fifo_ends[transfers[ended, T_CHANNEL]]
                    ends[0] += 1
                    if ends[0] < ends[1]:
                        _fair_begin(transfers, times, row, fluid, active, done_at, fifo[ends[0]], now)
                _fair_foresee(row, fluid, done_at, trace, rate, time, events, counters, link, now)
            else:
                serving = row[L_SERVING]
                if row[L_CHANGING]:
                    left[serving] -= _done(trace, rate, row, row[L_SINCE], now, 1.0)
                    _queue_push(transfers, row, queue, serving)
                else:
                    arrive = now + transfers[serving, T_LATENCY] + _extra_latency(trace, row, now)
                    _deliver(ops, op_time, transfers, times, workers, time, events, counters, serving, now, arrive)
                _turns_serve(transfers, times, left, row, queue, trace, rate, time, events, counters, link, now)

        if transfer != NONE:  # offer it to its link
            link = transfers[transfer, T_LINK]
            policy = links[link, L_POLICY]
            if policy == PRIVATE:
                if links[link, L_SERVER] + 1 == links[link, L_SERVERS_END] and (
                    links[link, L_TRACE] == links[link, L_TRACE_END]
                ):  # nine transfers in ten
                    begun = max(now, free[links[link, L_SERVER]])
                    sent = begun + transfers[transfer, T_WORK]
                    free[links[link, L_SERVER]] = sent
                    times[transfer, T_BEGUN] = begun
                    arrive = sent + transfers[transfer, T_LATENCY]
                else:
                    sent, arrive = _offer_private(transfers, times, links[link], free, trace, rate, transfer, now)
                _deliver(ops, op_time, transfers, times, workers, time, events, counters, transfer, sent, arrive)
            elif policy == FAIR:
                ends = fifo_ends[transfers[transfer, T_CHANNEL]]
                fifo[ends[1]] = transfer
                ends[1] += 1
                if ends[1] - ends[0] == 1:
                    row, fluid = links[link], fluids[link]
                    _fair_catch_up(row, fluid, trace, rate, now)
                    _fair_begin(transfers, times, row, fluid, active, done_at, transfer, now)
                    _fair_foresee(row, fluid, done_at, trace, rate, time, events, counters, link, now)
            else:
                _turns_offer(
                    transfers, times, left, links[link], queue, trace, rate, time, events, counters, link,
                    transfer, now,
                )  # fmt: skip

        if worker != NONE and workers[worker, W_NEXT] != workers[worker, W_LAST]:  # it is free: its next op
            op = workers[worker, W_NEXT]
            group, transfer = ops[op, OP_GROUP], ops[op, OP_INPUT]
            if group != NONE:
                assembled[group] += 1
                if assembled[group] == group_ptr[group + 1] - group_ptr[group]:
                    for k in range(group_ptr[group], group_ptr[group + 1]):
                        member = group_ops[k]
                        op_time[member, OP_START] = now
                        _push(time, events, counters, now + ops[member, OP_NS], OP, member)
            elif transfer != NONE and times[transfer, T_ARRIVE] == UNKNOWN:
                workers[worker, W_WAITING] = 1
            else:
                start = now if transfer == NONE else max(now, times[transfer, T_ARRIVE])
                op_time[op, OP_START] = start
                _push(time, events, counters, start + ops[op, OP_NS], OP, op)


def run(tables: Tables) -> Events:
    """Simulate with numba. The first call of a fresh installation compiles (seconds); later ones load the cache."""
    t = tables
    num_ops, num_transfers, num_workers = len(t.op_ns), len(t.transfer_dst), len(t.worker_ptr) - 1
    assert max(num_ops, num_transfers) + num_workers < 1 << WHICH_BITS, "more ops than an event can name"
    ops = np.column_stack([t.op_ns, t.op_input, t.op_output, t.op_group, t.op_worker])
    workers = np.column_stack([t.worker_ptr[1:], t.worker_ptr[:-1], np.zeros(num_workers, np.int64)])
    op_time = np.full((num_ops, 2), UNKNOWN, np.int64)
    net = network(t, num_workers)
    assembled = np.zeros(len(t.group_ptr), np.int64)
    transfers, times = net[0], net[1]
    _pass_time(ops, op_time, transfers, times, workers, t.group_ptr, t.group_ops, assembled, *net[2:])
    if (stuck := np.flatnonzero(workers[:, W_NEXT] != workers[:, W_LAST])).size:
        raise ProgramError(
            f"the Program deadlocks: {stuck.size} workers never finish, the first of them worker {stuck[0]} "
            f"at its op {workers[stuck[0], W_NEXT] - t.worker_ptr[stuck[0]]}; `atlas.ir.check` names the circle"
        )
    return Events(op_time[:, OP_START], op_time[:, OP_END], *(times[:, column] for column in range(4)))


def network(t: Tables, num_workers: int) -> tuple[Any, ...]:
    """The state of the network before time passes, in the order in which the jitted functions take it."""
    num_transfers, num_links, num_channels = len(t.transfer_work_ns), len(t.link_policy), len(t.channel_link)
    transfers = np.column_stack(
        [
            t.transfer_dst,
            t.transfer_channel,
            t.channel_link[t.transfer_channel],
            t.transfer_work_ns,
            t.transfer_before_ns,
            t.transfer_latency_ns,
            t.transfer_turn,
        ]
    )
    slots = num_transfers // max(1, num_channels)
    room = 2 * num_workers + num_links + 4 * num_transfers + 1
    return (
        transfers,
        np.full((num_transfers, 4), UNKNOWN, np.int64),  # times
        _link_rows(t, slots),
        np.column_stack([t.link_capacity, np.zeros(num_links)]),  # fluids
        np.zeros(int(t.link_servers.sum()), np.int64),  # free
        np.empty(num_transfers + 1, np.int64),  # queue
        np.empty(num_transfers, np.float64),  # left
        np.empty(num_channels, np.int64),  # active
        np.empty(num_channels, np.float64),  # done_at
        np.empty(num_transfers, np.int64),  # fifo
        np.repeat((np.arange(num_channels) * slots)[:, None], 2, axis=1),  # fifo_ends
        np.column_stack([t.trace_at_ns, t.trace_latency_ns]),  # trace
        t.trace_rate,
        np.empty(room, np.int64),  # heap: time
        np.empty(room, np.int64),  # heap: events
        np.zeros(2, np.int64),  # heap: counters
    )


def _link_rows(t: Tables, slots: int) -> Ints:
    num_links = len(t.link_policy)
    channels = np.bincount(t.channel_link, minlength=num_links)

    def starts(sizes: Ints) -> Ints:
        return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)

    rows = np.zeros((num_links, 15), np.int64)
    rows[:, L_POLICY], rows[:, L_QUANTUM] = t.link_policy, t.link_quantum_ns
    rows[:, L_SERVER] = starts(t.link_servers)
    rows[:, L_SERVERS_END] = rows[:, L_SERVER] + t.link_servers
    rows[:, L_QUEUE], rows[:, L_ACTIVE] = starts(channels * slots), starts(channels)
    rows[:, L_SERVING] = rows[:, L_EXPECTED] = NONE
    rows[:, L_TRACE], rows[:, L_TRACE_END] = t.trace_ptr[:-1], t.trace_ptr[1:]
    return rows
