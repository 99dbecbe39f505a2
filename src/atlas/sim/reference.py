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

import math
from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from atlas.cost.table import FAIR, PRIVATE, TURNS
from atlas.errors import ProgramError
from atlas.ir.program import Ints, before
from atlas.sim.lower import NONE, Tables

UNKNOWN = -1
"""A time that has not been settled yet."""
OP, OFFER, LINK = 0, 1, 2
"""What a foreseen event is, and in which order events of the same nanosecond happen: an op ends, a transfer reaches
its link, a link decides (something is done, its chunk is over, or it was idle and something came)."""


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
            before_ns = self.before_ns[transfer]
            if before_ns:
                self.foresee(now + before_ns, OFFER, transfer)
            else:
                self.link_of[self.channel[transfer]].offer(transfer, now)
        self._advance(worker, now)

    def _require_all_done(self) -> None:
        stuck = [w for w, op in enumerate(self.next_op) if op != self.last_op[w]]
        if stuck:
            raise ProgramError(
                f"the Program deadlocks: {len(stuck)} workers never finish, the first of them worker {stuck[0]} "
                f"at its op {self.next_op[stuck[0]] - int(self.tables.worker_ptr[stuck[0]])}; "
                "`atlas.ir.assemble` names the circle"
            )


# ---- the links ---------------------------------------------------------------------------------------------
class Pace:
    """A link's rate over time: how long work takes, how much is done, what latency holds."""

    def __init__(self, at_ns: list[int], rate: list[float], latency_ns: list[int]) -> None:
        self.at_ns, self.rate, self.latency_ns = at_ns, rate, latency_ns

    def _span(self, now: int) -> int:
        k = 0
        while k + 1 < len(self.at_ns) and self.at_ns[k + 1] <= now:
            k += 1
        return k

    def finish(self, start_ns: int, work_ns: float, share: float) -> int:
        """When `work_ns` begun at `start_ns` is done with `share` of the link."""
        if not self.at_ns:
            return start_ns + math.ceil(work_ns / share)
        now, left = start_ns, float(work_ns)
        for k in range(self._span(start_ns), len(self.at_ns)):
            speed = self.rate[k] * share
            if k + 1 == len(self.at_ns) or left <= (self.at_ns[k + 1] - now) * speed:
                return now + math.ceil(left / speed)
            left -= (self.at_ns[k + 1] - now) * speed
            now = self.at_ns[k + 1]
        raise AssertionError("the last span of a trace has no end")

    def done(self, start_ns: int, end_ns: int, share: float) -> float:
        """How much work is done between two moments with `share` of the link."""
        if not self.at_ns:
            return (end_ns - start_ns) * share
        now, work = start_ns, 0.0
        for k in range(self._span(start_ns), len(self.at_ns)):
            until = end_ns if k + 1 == len(self.at_ns) else min(end_ns, self.at_ns[k + 1])
            work += (until - now) * self.rate[k] * share
            now = until
            if now == end_ns:
                break
        return work

    def latency(self, now: int) -> int:
        return self.latency_ns[self._span(now)] if self.at_ns else 0


class Private:
    """One channel's own link."""

    def __init__(self, engine: Engine, link: int) -> None:
        self.engine, self.pace = engine, engine.pace(link)
        self.free_ns = [0] * int(engine.tables.link_servers[link])

    def offer(self, transfer: int, now: int) -> None:
        engine = self.engine
        server = self.free_ns.index(min(self.free_ns))
        start = max(now, self.free_ns[server])
        sent = self.pace.finish(start, engine.work_ns[transfer], 1.0)
        self.free_ns[server] = sent
        engine.start_ns[transfer] = start
        engine.deliver(transfer, sent, sent + engine.latency_ns[transfer] + self.pace.latency(start))

    def wake(self, version: int, now: int) -> None:
        raise AssertionError("a private link never has to decide")


class Fair:
    """Concurrent channels, each at most at its own cap, all slowed equally when the trunk is full."""

    def __init__(self, engine: Engine, link: int) -> None:
        self.engine, self.link, self.pace = engine, link, engine.pace(link)
        self.capacity = float(engine.tables.link_capacity[link])
        self.waiting: dict[int, deque[int]] = {}
        self.active: list[tuple[float, int]] = []  # (service at which it is done, transfer), in order of start
        self.service, self.since_ns, self.version = 0.0, 0, 0

    def offer(self, transfer: int, now: int) -> None:
        queue = self.waiting.setdefault(self.engine.channel[transfer], deque())
        queue.append(transfer)
        if len(queue) == 1:
            self._catch_up(now)
            self._begin(transfer, now)
            self._foresee(now)

    def wake(self, version: int, now: int) -> None:
        if version != self.version:
            return
        self._catch_up(now)
        self.service = max(self.service, min(done_at for done_at, _ in self.active))
        ended = [transfer for done_at, transfer in self.active if done_at <= self.service]
        self.active = [pair for pair in self.active if pair[0] > self.service]
        for transfer in ended:
            self.engine.deliver(
                transfer,
                now,
                now + self.engine.latency_ns[transfer] + self.pace.latency(self.engine.start_ns[transfer]),
            )
            queue = self.waiting[self.engine.channel[transfer]]
            queue.popleft()
            if queue:
                self._begin(queue[0], now)
        self._foresee(now)

    def _share(self) -> float:
        return min(1.0, self.capacity / len(self.active)) if self.active else 1.0

    def _catch_up(self, now: int) -> None:
        self.service += self.pace.done(self.since_ns, now, self._share())
        self.since_ns = now

    def _begin(self, transfer: int, now: int) -> None:
        self.engine.start_ns[transfer] = now
        self.active.append((self.service + self.engine.work_ns[transfer], transfer))

    def _foresee(self, now: int) -> None:
        self.version += 1
        if self.active:
            left = max(0.0, min(done_at for done_at, _ in self.active) - self.service)
            self.engine.foresee(self.pace.finish(now, left, self._share()), LINK, self.link, self.version)


class Turns:
    """The pipelines of a cell one after the other, each turn with the capacity of all their nodes."""

    def __init__(self, engine: Engine, link: int) -> None:
        self.engine, self.link, self.pace = engine, link, engine.pace(link)
        self.quantum_ns = int(engine.tables.link_quantum_ns[link])
        self.queue: list[tuple[int, int]] = []  # (turn, transfer)
        self.left_ns: dict[int, float] = {}
        self.serving, self.since_ns, self.until_ns, self.version = NONE, 0, 0, 0
        self.changing_over = False

    def offer(self, transfer: int, now: int) -> None:
        turn = self.engine.turn
        heappush(self.queue, before(turn[transfer], transfer))
        self.left_ns[transfer] = float(self.engine.work_ns[transfer])
        if self.serving == NONE:
            self._foresee(now)
        elif self.quantum_ns and not self.changing_over and turn[transfer] < turn[self.serving]:
            chunks = max(1, -(-(now - self.since_ns) // self.quantum_ns))
            boundary = self.since_ns + chunks * self.quantum_ns
            if boundary < self.until_ns:
                self.changing_over = True
                self._foresee(boundary)

    def wake(self, version: int, now: int) -> None:
        if version != self.version:
            return
        transfer = self.serving
        if self.changing_over:
            self.left_ns[transfer] -= self.pace.done(self.since_ns, now, 1.0)
            heappush(self.queue, before(self.engine.turn[transfer], transfer))
        elif transfer != NONE:
            late = self.pace.latency(self.engine.start_ns[transfer])
            self.engine.deliver(transfer, now, now + self.engine.latency_ns[transfer] + late)
        self.changing_over, self.serving = False, NONE
        if self.queue:
            _, transfer = heappop(self.queue)
            self.serving, self.since_ns = transfer, now
            if self.engine.start_ns[transfer] == UNKNOWN:
                self.engine.start_ns[transfer] = now
            self.until_ns = self.pace.finish(now, self.left_ns[transfer], 1.0)
            self._foresee(self.until_ns)

    def _foresee(self, when: int) -> None:
        self.version += 1
        self.engine.foresee(when, LINK, self.link, self.version)


def run(tables: Tables) -> Events:
    """Simulate in plain Python."""
    return Engine(tables).run()
