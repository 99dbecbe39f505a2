"""The readable engine: Program + Costs -> when everything happens, in plain Python and integer nanoseconds.

Rules, which the compiled engine follows event for event:

    A worker runs its ops in the Program's order, each when the previous one has ended and its input has arrived.
    A collective starts when its last member is ready.
    The end of an op makes its transfer ready; the transfer's link decides when it moves:
      PRIVATE serves first come, first served, at most `servers` at once;
      FAIR serves one transfer of every channel at once, all slowed equally beyond its capacity;
      TURNS serves the smallest turn first, one at a time, switches only at chunk boundaries, and never idles
      while a transfer is ready.
    Within one nanosecond, ops end first, then transfers reach their links, then links decide, in the order of
    their numbers: the result never depends on the order in which simultaneous events are processed.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from atlas.cost.table import FAIR, PRIVATE, TURNS
from atlas.errors import ProgramError
from atlas.ir.program import Ints
from atlas.sim.lower import NONE, Tables
from atlas.sim.reference_links import LINK, OFFER, OP, UNKNOWN, Fair, Pace, Private, Turns


class Events(NamedTuple):
    """What an engine returns: all in nanoseconds, by op and by transfer."""

    op_start_ns: Ints
    op_end_ns: Ints
    ready_ns: Ints
    start_ns: Ints
    sent_ns: Ints
    arrive_ns: Ints


class Engine:
    """One run. `foresee` puts an event into the future, `run` lets time pass."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.op_ns, self.op_input, self.op_output = (
            tables.op_ns.tolist(),
            tables.op_input.tolist(),
            tables.op_output.tolist(),
        )
        self.op_group, self.op_worker = tables.op_group.tolist(), tables.op_worker.tolist()
        self.dst, self.channel, self.turn = (
            tables.transfer_dst.tolist(),
            tables.transfer_channel.tolist(),
            tables.transfer_turn.tolist(),
        )
        self.work_ns, self.before_ns, self.latency_ns = (
            tables.transfer_work_ns.tolist(),
            tables.transfer_before_ns.tolist(),
            tables.transfer_latency_ns.tolist(),
        )
        num_ops, num_transfers = len(self.op_ns), len(self.dst)
        self.op_start, self.op_end = [UNKNOWN] * num_ops, [UNKNOWN] * num_ops
        self.ready_ns, self.start_ns = [UNKNOWN] * num_transfers, [UNKNOWN] * num_transfers
        self.sent_ns, self.arrive_ns = [UNKNOWN] * num_transfers, [UNKNOWN] * num_transfers
        self.next_op = tables.worker_ptr[:-1].tolist()
        self.last_op = tables.worker_ptr[1:].tolist()
        self.stands_waiting = [False] * len(self.next_op)
        self.assembled = [0] * (len(tables.group_ptr) - 1)
        self.future: list[tuple[int, int, int, int, int]] = []
        self.sequence = 0
        make: dict[int, type[Private] | type[Fair] | type[Turns]] = {PRIVATE: Private, FAIR: Fair, TURNS: Turns}
        self.links: list[Private | Fair | Turns] = [
            make[policy](self, link) for link, policy in enumerate(tables.link_policy.tolist())
        ]
        self.link_of = [self.links[link] for link in tables.channel_link.tolist()]

    def pace(self, link: int) -> Pace:
        first, last = self.tables.trace_ptr[link : link + 2]
        return Pace(
            self.tables.trace_at_ns[first:last].tolist(),
            self.tables.trace_rate[first:last].tolist(),
            self.tables.trace_latency_ns[first:last].tolist(),
        )

    def foresee(self, when: int, what: int, which: int, version: int = 0) -> None:
        self.sequence += 1
        order = which if what == LINK else self.sequence
        heappush(self.future, (when, what, order, which, version))

    def run(self) -> Events:
        for worker in range(len(self.next_op)):
            self._advance(worker, 0)
        while self.future:
            now, what, _, which, version = heappop(self.future)
            if what == OP:
                self._end(which, now)
            elif what == OFFER:
                self.link_of[self.channel[which]].offer(which, now)
            else:
                self.links[which].wake(version, now)
        self._require_all_done()
        return Events(
            *(
                np.array(times, np.int64)
                for times in (
                    self.op_start,
                    self.op_end,
                    self.ready_ns,
                    self.start_ns,
                    self.sent_ns,
                    self.arrive_ns,
                )
            )
        )

    def deliver(self, transfer: int, sent: int, arrive: int) -> None:
        """A transfer is finished; a worker that waits for it starts then."""
        self.sent_ns[transfer], self.arrive_ns[transfer] = sent, arrive
        op = self.dst[transfer]
        worker = self.op_worker[op]
        if self.stands_waiting[worker] and self.next_op[worker] == op:
            self.stands_waiting[worker] = False
            self._start(op, arrive)

    def _advance(self, worker: int, now: int) -> None:
        """The worker is free: start its next op, unless its input or its collective is not there yet."""
        op = self.next_op[worker]
        if op == self.last_op[worker]:
            return
        group, transfer = self.op_group[op], self.op_input[op]
        if group != NONE:
            first, last = self.tables.group_ptr[group : group + 2]
            self.assembled[group] += 1
            if self.assembled[group] == last - first:
                for member in self.tables.group_ops[first:last].tolist():
                    self._start(member, now)
        elif transfer == NONE:
            self._start(op, now)
        elif self.arrive_ns[transfer] != UNKNOWN:
            self._start(op, max(now, self.arrive_ns[transfer]))
        else:
            self.stands_waiting[worker] = True

    def _start(self, op: int, now: int) -> None:
        end = now + self.op_ns[op]
        self.op_start[op] = now
        self.sequence += 1
        heappush(self.future, (end, OP, self.sequence, op, 0))

    def _end(self, op: int, now: int) -> None:
        self.op_end[op] = now
        worker = self.op_worker[op]
        self.next_op[worker] = op + 1
        transfer = self.op_output[op]
        if transfer != NONE:
            self.ready_ns[transfer] = now
            before = self.before_ns[transfer]
            if before:
                self.foresee(now + before, OFFER, transfer)
            else:
                self.link_of[self.channel[transfer]].offer(transfer, now)
        self._advance(worker, now)

    def _require_all_done(self) -> None:
        stuck = [w for w, op in enumerate(self.next_op) if op != self.last_op[w]]
        if stuck:
            raise ProgramError(
                f"the Program deadlocks: {len(stuck)} workers never finish, the first of them worker {stuck[0]} "
                f"at its op {self.next_op[stuck[0]] - int(self.tables.worker_ptr[stuck[0]])}; "
                "`atlas.ir.check` names the circle"
            )


def run(tables: Tables) -> Events:
    """Simulate in plain Python."""
    return Engine(tables).run()
