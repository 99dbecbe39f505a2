"""The links of the readable engine: what each sharing policy does with the transfers it is offered.

The rules are described in `sim.reference`, which processes events in time order and wakes each link.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from atlas.ir.program import before
from atlas.sim.lower import NONE

if TYPE_CHECKING:
    from atlas.sim.reference import Engine

UNKNOWN = -1
"""A time that has not been settled yet."""
OP, OFFER, LINK = 0, 1, 2
"""What a foreseen event is, and in which order events of the same nanosecond happen: an op ends, a transfer reaches
its link, a link decides (something is done, its chunk is over, or it was idle and something came)."""


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
