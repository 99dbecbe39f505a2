"""The network as arrays, for the compiled engines: the columns, and the initial state.

Rows are packed by object (transfer, link), because a call passes every array separately, and numba's compile time grows
with each. `sim.network` changes them. Private to `sim`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Ints
from atlas.sim.lower import UNKNOWN, Tables

Floats = NDArray[np.float64]

# Columns of the packed rows.
T_DST, T_CHANNEL, T_LINK, T_WORK, T_BEFORE, T_LATENCY, T_TURN = range(7)
T_READY, T_BEGUN, T_SENT, T_ARRIVE = range(4)
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
        np.zeros(3, np.int64),  # counters
        np.empty(num_channels + 1, np.int64),  # delivered
    )


def started(net: tuple[Any, ...], turn: Ints) -> tuple[Any, ...]:
    """A network at rest with these turns, ready for one run. Scratch arrays are shared between runs: a run fills what
    it reads, and no two are in the compiled code at once."""
    transfers, times, links, fluids, free, *scratch, fifo_ends, trace, rate, time, events, _, delivered = net
    transfers = transfers.copy()
    transfers[:, T_TURN] = turn
    return (
        transfers, np.full_like(times, UNKNOWN), links.copy(), fluids.copy(), np.zeros_like(free), *scratch,
        fifo_ends.copy(), trace, rate, time, events, np.zeros(3, np.int64), delivered,
    )  # fmt: skip


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
