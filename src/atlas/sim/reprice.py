"""Re-pricing: the same order of all events with other durations, in milliseconds.

After a simulation, the order in which links served their transfers is known. With this order fixed, the run is a
longest path over arrays, without a queue or a heap. Sweeps, sensitivities and Monte-Carlo runs over one order use it.
If other durations would make a link choose differently, simulate instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas.cost.table import FAIR
from atlas.errors import ProgramError
from atlas.ir.program import Ints
from atlas.sim.jit import entry
from atlas.sim.lower import NONE, Tables
from atlas.sim.reference import Events


@dataclass(frozen=True, eq=False)
class FixedOrder:
    """A topological order of ops, meetings and transfers, numbered in this sequence, and what each waits for."""

    order: Ints
    before: Ints
    """[node, 2]: up to two nodes that must have ended, or NONE."""
    num_ops: int
    num_meetings: int

    def price(self, tables: Tables) -> Events:
        """The times of everything under these tables' durations."""
        if (tables.trace_ptr[1:] != tables.trace_ptr[:-1]).any():
            raise ProgramError("a link whose rate varies over time cannot be re-priced: simulate instead")
        count = len(self.before)
        start, end = np.empty(count, np.int64), np.empty(count, np.int64)
        _longest_path(
            self.order, self.before, self.num_ops, self.num_ops + self.num_meetings, tables.op_ns,
            tables.transfer_work_ns, tables.transfer_before_ns, tables.transfer_latency_ns, start, end,
        )  # fmt: skip
        n, first = self.num_ops, self.num_ops + self.num_meetings
        sender = self.before[first:, 0]
        return Events(
            start[:n], end[:n], end[sender], start[first:], end[first:], end[first:] + tables.transfer_latency_ns
        )


def fix_order(tables: Tables, events: Events) -> FixedOrder:
    """The order that a simulation took. Refuses where there is none: fair sharing, or turns cut by another."""
    if (tables.link_policy == FAIR).any():
        raise ProgramError("a fairly shared link serves many at once: it has no order to re-price, simulate instead")
    num_ops, num_transfers = len(tables.op_ns), len(tables.transfer_dst)
    members = tables.group_ops
    num_meetings = len(members)
    first_transfer = num_ops + num_meetings
    before = np.full((first_transfer + num_transfers, 2), NONE, np.int64)
    follows = np.ones(num_ops, bool)
    follows[tables.worker_ptr[:-1][tables.worker_ptr[:-1] < num_ops]] = False
    before[:num_ops, 0] = np.where(follows, np.arange(num_ops) - 1, NONE)
    before[:num_ops, 1] = np.where(tables.op_input >= 0, first_transfer + tables.op_input, NONE)
    _meet(tables, before, num_ops)
    sender = np.empty(num_transfers, np.int64)
    emits = np.flatnonzero(tables.op_output >= 0)
    sender[tables.op_output[emits]] = emits
    before[first_transfer:, 0] = sender
    before[first_transfer:, 1] = _served_before(tables, events, sender, first_transfer)
    order = _topological(before)
    if len(order) != len(before):
        raise ProgramError("the Program deadlocks under this order of its links")
    fixed = FixedOrder(order, before, num_ops, num_meetings)
    if not all(np.array_equal(a, b) for a, b in zip(fixed.price(tables), events, strict=True)):
        raise ProgramError("a link changed over in the middle of a transfer: there is no fixed order, simulate instead")
    return fixed


def _meet(tables: Tables, before: Ints, num_ops: int) -> None:
    """Members of a collective wait for a chain of meetings, each also waiting for one member's predecessor."""
    for first, last in zip(tables.group_ptr[:-1].tolist(), tables.group_ptr[1:].tolist(), strict=True):
        for k in range(first, last):
            before[num_ops + k] = (before[tables.group_ops[k], 0], num_ops + k - 1 if k > first else NONE)
        before[tables.group_ops[first:last]] = (num_ops + last - 1, NONE)


def _served_before(tables: Tables, events: Events, sender: Ints, first_transfer: int) -> Ints:
    """By transfer: the one that held its server before it. Of those of no length in one instant, as they were sent."""
    link = tables.channel_link[tables.transfer_channel]
    sequence = np.lexsort((sender, events.sent_ns, events.start_ns, link))
    servers = tables.link_servers[link[sequence]]
    place = np.arange(len(sequence)) - servers
    same = (place >= 0) & (link[sequence[np.maximum(place, 0)]] == link[sequence])
    result = np.full(len(sequence), NONE, np.int64)
    result[sequence] = np.where(same, first_transfer + sequence[np.maximum(place, 0)], NONE)
    return result


@entry
def _topological(before: Ints) -> Ints:
    """Every node after those it waits for; shorter than all nodes if there is a circle."""
    n = len(before)
    first_user, next_user = np.full(n, NONE, np.int64), np.full((n, 2), NONE, np.int64)
    missing = np.zeros(n, np.int64)
    for node in range(n):
        for k in range(2):
            source = before[node, k]
            if source != NONE:
                missing[node] += 1
                next_user[node, k] = first_user[source]
                first_user[source] = 2 * node + k
    # Last in, first out: a worker's ops follow one another as long as they can, and memory is read in a row.
    order, ready = np.empty(n, np.int64), np.empty(n, np.int64)
    done, num_ready = 0, 0
    for node in range(n):
        if missing[node] == 0:
            ready[num_ready] = node
            num_ready += 1
    while num_ready:
        num_ready -= 1
        node = ready[num_ready]
        order[done] = node
        done += 1
        user = first_user[node]
        while user != NONE:
            waiting = user >> 1
            missing[waiting] -= 1
            if missing[waiting] == 0:
                ready[num_ready] = waiting
                num_ready += 1
            user = next_user[waiting, user & 1]
    return order[:done]


@entry
def _longest_path(
    order: Ints, before: Ints, num_ops: int, first_transfer: int, op_ns: Ints, work_ns: Ints, before_ns: Ints,
    latency_ns: Ints, start: Ints, end: Ints,
) -> None:  # fmt: skip
    for node in order:
        begin, length = 0, 0
        a, b = before[node, 0], before[node, 1]
        if a != NONE:
            begin = end[a]
        if node >= first_transfer:
            begin += before_ns[node - first_transfer]
            length = work_ns[node - first_transfer]
            if b != NONE:  # behind another on its link: it waits for the sending only, not for the latency
                begin = max(begin, end[b])
        else:
            if b != NONE:
                begin = max(begin, end[b] + (latency_ns[b - first_transfer] if b >= first_transfer else 0))
            if node < num_ops:
                length = op_ns[node]
        start[node] = begin
        end[node] = begin + length
