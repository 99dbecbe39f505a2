"""The fast engine, for numba. A test checks that it equals `simulate.reference` to the nanosecond.

It computes the same times in another way. A worker's order is fixed and a private link is first come, first served, so
a worker can be advanced until it needs a transfer whose arrival is not known. The order of events matters only where
links choose between transfers; only those events go through a heap. When no worker can be advanced, the earliest event
is processed: everything that it can cause is later. Import this module only if needed: numba is slow to load.

Where no circuits change, `gates` and its arrays are None: numba then leaves out `if gates is not None`, a fifth of what
it compiles. Jobs with photonic rails compile the engine once more.
"""

from __future__ import annotations

import numpy as np

from atlas.cost.table import PRIVATE
from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints
from atlas.jit import entry, njit
from atlas.sim.gate_rows import (
    G_END,
    G_FIRST,
    G_GROUP,
    G_GROUP_AT,
    G_LAST,
    G_START,
    GT_AT,
    GT_NEXT,
    arrived,
    free_gate,
    gate_arrays,
    hold,
    hold_group,
    settle,
)
from atlas.sim.lower import UNKNOWN, Events, Tables, require_all_done
from atlas.sim.network import (
    DELIVERED,
    LINK_SHIFT,
    OFFER,
    SEQUENCE_MASK,
    SIZE,
    WHAT_SHIFT,
    WHICH_MASK,
    drop_first,
    offer,
    push,
    wake,
)
from atlas.sim.rows import (
    L_POLICY,
    L_SERVER,
    L_SERVERS_END,
    L_TRACE,
    L_TRACE_END,
    T_ARRIVE,
    T_BEFORE,
    T_BEGUN,
    T_DST,
    T_LATENCY,
    T_LINK,
    T_READY,
    T_SENT,
    T_WORK,
    Floats,
    network,
)

# Columns of the packed rows.
OP_NS, OP_INPUT, OP_OUTPUT, OP_GROUP, OP_WORKER = range(5)
OP_START, OP_END = range(2)
W_LAST, W_NEXT, W_FREE, W_WAITING = range(4)


@njit
def _begin_group(
    ops: Ints, op_time: Ints, workers: Ints, group_ptr: Ints, group_ops: Ints, able: Ints, num_able: int,
    gates: Ints | None, frees_ptr: Ints, frees: Ints, opened: Ints, group: int, start: int,
) -> int:  # fmt: skip
    """A collective starts for all its members. Returns the new `num_able`."""
    last_end = start
    for k in range(group_ptr[group], group_ptr[group + 1]):
        op = group_ops[k]
        worker = ops[op, OP_WORKER]
        end = start + ops[op, OP_NS]
        op_time[op, OP_START], op_time[op, OP_END] = start, end
        workers[worker, W_FREE], workers[worker, W_NEXT] = end, op + 1
        last_end = max(last_end, end)
        able[num_able] = worker
        num_able += 1
    if gates is not None:
        for k in range(frees_ptr[group], frees_ptr[group + 1]):
            free_gate(gates, opened, frees[k], last_end)
    return num_able


@njit
def _assemble(
    ops: Ints, op_time: Ints, workers: Ints, group_ptr: Ints, group_ops: Ints, assembled: Ints, able: Ints,
    num_able: int, gates: Ints | None, group_gate: Ints, frees_ptr: Ints, frees: Ints, completes: Ints, opened: Ints,
    group: int,
) -> int:  # fmt: skip
    """One more member of a collective is ready; the last one starts it for all. Returns the new `num_able`."""
    assembled[group] += 1
    first, last = group_ptr[group], group_ptr[group + 1]
    if assembled[group] < last - first:
        return num_able
    start = 0
    for k in range(first, last):
        start = max(start, workers[ops[group_ops[k], OP_WORKER], W_FREE])
    if gates is not None:
        asked = 0
        for k in range(first, last):
            if completes[group_ops[k]] != NONE:
                asked = max(asked, op_time[completes[group_ops[k]], OP_END])
        start = hold_group(gates, group_gate, opened, group, asked, start)
        if start == UNKNOWN:
            return num_able
    return _begin_group(
        ops, op_time, workers, group_ptr, group_ops, able, num_able, gates, frees_ptr, frees, opened, group, start
    )  # fmt: skip


@njit
def _launch(
    ops: Ints, transfers: Ints, times: Ints, workers: Ints, able: Ints, num_able: int, links: Ints, free: Ints,
    time: Ints, events: Ints, counters: Ints, gates: Ints | None, gated: Ints, opened: Ints, transfer: int, at: int,
) -> int:  # fmt: skip
    """A transfer reaches its link at a known time. Returns the new `num_able`."""
    link = transfers[transfer, T_LINK]
    if links[link, L_POLICY] != SIMPLE:
        push(time, events, counters, at, OFFER, transfer)
        return num_able
    begun = max(at, free[links[link, L_SERVER]])
    sent = begun + transfers[transfer, T_WORK]
    free[links[link, L_SERVER]] = sent
    times[transfer, T_BEGUN], times[transfer, T_SENT] = begun, sent
    times[transfer, T_ARRIVE] = sent + transfers[transfer, T_LATENCY]
    if gates is not None:
        arrived(gates, gated, opened, transfer, times[transfer, T_ARRIVE])
    target = transfers[transfer, T_DST]
    peer = ops[target, OP_WORKER]
    if workers[peer, W_WAITING] and workers[peer, W_NEXT] == target:
        workers[peer, W_WAITING] = 0
        able[num_able] = peer
        num_able += 1
    return num_able


@njit
def _open(
    ops: Ints, op_time: Ints, transfers: Ints, times: Ints, workers: Ints, group_ptr: Ints, group_ops: Ints, able: Ints,
    num_able: int, links: Ints, free: Ints, time: Ints, events: Ints, counters: Ints, gates: Ints, gated: Ints,
    frees_ptr: Ints, frees: Ints, opened: Ints,
) -> int:  # fmt: skip
    """The circuits of one reconfiguration have a known time: all that waits for them goes on then."""
    gate = opened[opened[0]]
    opened[0] -= 1
    end = gates[gate, G_END]
    transfer = gates[gate, G_FIRST]
    gates[gate, G_FIRST] = gates[gate, G_LAST] = NONE
    while transfer != NONE:
        following = gated[transfer, GT_NEXT]
        num_able = _launch(
            ops, transfers, times, workers, able, num_able, links, free, time, events, counters, gates, gated, opened,
            transfer, max(gated[transfer, GT_AT], end),
        )  # fmt: skip
        transfer = following
    group = gates[gate, G_GROUP]
    if group != NONE:
        gates[gate, G_GROUP] = NONE
        num_able = _begin_group(
            ops, op_time, workers, group_ptr, group_ops, able, num_able, gates, frees_ptr, frees, opened, group,
            max(gates[gate, G_GROUP_AT], end),
        )  # fmt: skip
    return num_able


@njit
def _run_ahead(
    ops: Ints, op_time: Ints, transfers: Ints, times: Ints, workers: Ints, group_ptr: Ints, group_ops: Ints,
    assembled: Ints, able: Ints, num_able: int, links: Ints, free: Ints, time: Ints, events: Ints, counters: Ints,
    gates: Ints | None, gated: Ints, group_gate: Ints, frees_ptr: Ints, frees: Ints, completes: Ints, opened: Ints,
) -> None:  # fmt: skip
    """Let every worker that can do so go on until all wait for a link that has to choose."""
    while num_able or opened[0]:
        if gates is not None and opened[0]:
            num_able = _open(
                ops, op_time, transfers, times, workers, group_ptr, group_ops, able, num_able, links, free, time,
                events, counters, gates, gated, frees_ptr, frees, opened,
            )  # fmt: skip
            continue
        num_able -= 1
        worker = able[num_able]
        op, last, now = workers[worker, W_NEXT], workers[worker, W_LAST], workers[worker, W_FREE]
        while op < last:
            transfer = ops[op, OP_INPUT]
            if transfer != NONE:
                arrive = times[transfer, T_ARRIVE]
                if arrive == UNKNOWN:
                    workers[worker, W_WAITING] = 1
                    break
                now = max(now, arrive)
            if ops[op, OP_GROUP] != NONE:
                break
            op_time[op, OP_START] = now
            now += ops[op, OP_NS]
            op_time[op, OP_END] = now
            transfer = ops[op, OP_OUTPUT]
            op += 1
            if transfer == NONE:
                continue
            times[transfer, T_READY] = now
            at = now + transfers[transfer, T_BEFORE]
            if gates is not None:
                at = hold(gates, gated, opened, transfer, at)
                if at == UNKNOWN:
                    continue
            num_able = _launch(
                ops, transfers, times, workers, able, num_able, links, free, time, events, counters, gates, gated,
                opened, transfer, at,
            )  # fmt: skip
        workers[worker, W_NEXT], workers[worker, W_FREE] = op, now
        if op < last and not workers[worker, W_WAITING]:
            num_able = _assemble(
                ops, op_time, workers, group_ptr, group_ops, assembled, able, num_able, gates, group_gate, frees_ptr,
                frees, completes, opened, ops[op, OP_GROUP],
            )  # fmt: skip


SIMPLE = -1
"""Policy of a private link with one server and a constant rate, whose transfers can be timed on the spot."""


@entry
def _pass_time(
    ops: Ints, op_time: Ints, transfers: Ints, times: Ints, workers: Ints, group_ptr: Ints, group_ops: Ints,
    assembled: Ints, able: Ints, links: Ints, fluids: Floats, free: Ints, queue: Ints, left: Floats, active: Ints,
    done_at: Floats, fifo: Ints, fifo_ends: Ints, trace: Ints, rate: Floats, time: Ints, events: Ints, counters: Ints,
    delivered: Ints, gates: Ints | None, gated: Ints, group_gate: Ints, frees_ptr: Ints, frees: Ints, completes: Ints,
    opened: Ints,
) -> None:  # fmt: skip
    num_able = len(workers)
    for worker in range(num_able):
        able[worker] = worker
    if gates is not None:
        for gate in range(len(gates)):
            settle(gates, opened, gate)
    while True:
        _run_ahead(
            ops, op_time, transfers, times, workers, group_ptr, group_ops, assembled, able, num_able, links, free,
            time, events, counters, gates, gated, group_gate, frees_ptr, frees, completes, opened,
        )  # fmt: skip
        num_able = 0
        if not counters[SIZE]:
            return
        now, event = time[0], events[0]
        drop_first(time, events, counters)
        if event >> WHAT_SHIFT == OFFER:
            offer(
                transfers, times, links, fluids, free, queue, left, active, done_at, fifo, fifo_ends, trace, rate,
                time, events, counters, delivered, event & WHICH_MASK, now,
            )  # fmt: skip
        else:
            wake(
                transfers, times, links, fluids, free, queue, left, active, done_at, fifo, fifo_ends, trace, rate,
                time, events, counters, delivered, (event >> LINK_SHIFT) & WHICH_MASK, event & SEQUENCE_MASK, now,
            )  # fmt: skip
        for k in range(counters[DELIVERED]):
            if gates is not None:
                arrived(gates, gated, opened, delivered[k], times[delivered[k], T_ARRIVE])
            target = transfers[delivered[k], T_DST]
            worker = ops[target, OP_WORKER]
            if workers[worker, W_WAITING] and workers[worker, W_NEXT] == target:
                workers[worker, W_WAITING] = 0
                able[num_able] = worker
                num_able += 1
        counters[DELIVERED] = 0


def run(tables: Tables) -> Events:
    """Simulate with numba. The first call of a fresh installation compiles (seconds); later ones load the cache."""
    t = tables
    num_ops, num_transfers, num_workers = len(t.op_ns), len(t.transfer_dst), len(t.worker_ptr) - 1
    assert max(num_ops, num_transfers) <= WHICH_MASK, "more transfers than an event can name"
    ops = np.column_stack([t.op_ns, t.op_input, t.op_output, t.op_group, t.op_worker])
    idle = np.zeros(num_workers, np.int64)
    workers = np.column_stack([t.worker_ptr[1:], t.worker_ptr[:-1], idle, idle])
    op_time = np.full((num_ops, 2), UNKNOWN, np.int64)
    transfers, times, links, *rest = network(t, num_workers)
    simple = (links[:, L_POLICY] == PRIVATE) & (links[:, L_TRACE] == links[:, L_TRACE_END])
    simple &= links[:, L_SERVERS_END] - links[:, L_SERVER] == 1
    simple &= np.bincount(t.channel_link, minlength=len(links)) == 1  # its transfers come in its sender's order
    links[simple, L_POLICY] = SIMPLE
    assembled = np.zeros(len(t.group_ptr), np.int64)
    able = np.empty(num_workers + 1, np.int64)
    gates = gate_arrays(t.gates)
    _pass_time(
        ops, op_time, transfers, times, workers, t.group_ptr, t.group_ops, assembled, able, links, *rest, *gates
    )  # fmt: skip
    require_all_done(workers[:, W_NEXT], t)
    ready, begun, sent, arrive = times.T
    gate_ns = np.zeros((0, 2), np.int64) if gates[0] is None else gates[0][:, [G_START, G_END]]
    return Events(op_time[:, OP_START], op_time[:, OP_END], ready, begun, sent, arrive, gate_ns)
