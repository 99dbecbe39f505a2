"""Program + Costs -> Timeline, with either engine. The plain one is here: Python, and integer nanoseconds.

Rules, which the compiled engine follows event for event:

    A worker runs its ops in the Program's order, each when the previous one has ended and its input has arrived.
    A collective starts when its last member is ready and, on photonic rails, its circuits are there (`sim.gates`).
    The end of an op makes its transfer ready; the transfer's link decides when it moves:
      PRIVATE serves first come, first served, at most `servers` at once;
      FAIR serves one transfer of every channel at once, all slowed equally beyond its capacity;
      TURNS serves the smallest turn first, one at a time, switches only at chunk boundaries, and never idles
      while a transfer is ready.
    Within one nanosecond, ops end first, then transfers reach their links, then links decide, in the order of
    their numbers: the result never depends on the order in which simultaneous events are processed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from atlas.cost.table import FAIR, PRIVATE, TURNS, Costs, kind_costs, uniform_costs
from atlas.errors import AtlasError
from atlas.ir.assemble import assemble
from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Kind, Layout, Op, Program, before
from atlas.ir.timeline import Timeline
from atlas.sim.gates import GateKeeper
from atlas.sim.lower import LINK, OFFER, OP, UNKNOWN, Events, Pace, SeededNoise, Tables, lower, require_all_done
from atlas.sim.phases import fabric_rows

MAX_TOTAL_NS = 9e18
"""Nearly all that 64 bits hold: 285 years."""
SMALL = 60_000
"""Up to this many events the plain engine is faster than loading the compiled one."""


def simulate(
    program: Program,
    costs: Costs,
    *,
    jitter: SeededNoise | None = None,
    engine: str = "auto",
    meta: Mapping[str, object] | None = None,
) -> Timeline:
    """When everything happens. `engine` is "reference", "compiled", or "auto": the faster for this size. `meta` is kept
    with the Timeline, and with it `engine_s`, the CPU seconds of the engine alone."""
    tables = lower(program, costs, jitter)
    play = _engine(tables, engine)
    began = time.process_time()
    events = play(tables)
    return timeline(program, costs, tables, events, {**(meta or {}), "engine_s": time.process_time() - began})


def run(tables: Tables, engine: str = "auto") -> Events:
    """The events of lowered tables."""
    return _engine(tables, engine)(tables)


def _engine(tables: Tables, engine: str) -> Callable[[Tables], Events]:
    if engine not in ("auto", "reference", "compiled"):
        raise AtlasError(f"no engine is called {engine!r}: use auto, reference or compiled")
    _require_countable(tables)
    is_small = len(tables.op_ns) + len(tables.transfer_dst) <= SMALL and not compiled_engine.cache_info().currsize
    return reference if engine == "reference" or (engine == "auto" and is_small) else compiled_engine().run


@cache
def compiled_engine() -> Any:
    """The compiled engine, loaded and compiled. Where it is loaded already, it is the faster one for every size."""
    from atlas.sim import compiled  # numba: half a second

    program = assemble("warm-up", Layout.even(1, 2, 1), [[Op(Kind.F, s, 0), Op(Kind.B, s, 0)] for s in range(2)])
    compiled.run(lower(program, uniform_costs(1, 2, kind_costs(forward_ns=1, backward_ns=1))))
    return compiled


def _require_countable(tables: Tables) -> None:
    """Everything one after the other, links at the rate that their traces end with, must stay within 64 bits."""
    last = tables.trace_ptr[1:][np.diff(tables.trace_ptr) > 0] - 1
    slowest = float(tables.trace_rate[last].min(initial=1.0))
    transfers_ns = tables.transfer_work_ns.sum(dtype=np.float64) / slowest + float(tables.trace_at_ns[last].sum())
    late_ns = tables.transfer_latency_ns + tables.transfer_before_ns + tables.trace_latency_ns.max(initial=0)
    if tables.op_ns.sum(dtype=np.float64) + transfers_ns + late_ns.sum(dtype=np.float64) > MAX_TOTAL_NS:
        raise AtlasError(
            f"all ops and transfers together take more than {MAX_TOTAL_NS / 1e9:.1g} s, more than the simulator "
            "can count: check the units of rates and latencies, in traces too"
        )


def timeline(program: Program, costs: Costs, tables: Tables, events: Events, meta: dict[str, object]) -> Timeline:
    """Make a Timeline of an engine's arrays."""
    return Timeline(
        program=program,
        source="simulated",
        op_start_ns=events.op_start_ns,
        op_end_ns=events.op_end_ns,
        transfer_ready_ns=events.ready_ns,
        transfer_start_ns=events.start_ns,
        transfer_sent_ns=events.sent_ns,
        transfer_arrive_ns=events.arrive_ns,
        transfer_link=tables.channel_link[tables.transfer_channel].astype(np.int32),
        links=tuple(link.name for link in costs.links),
        meta=meta if tables.gates is None else {**meta, "fabric": fabric_rows(program, costs.circuits, events.gate_ns)},
    )


# ---- the plain engine ----------------------------------------------------------------------------------------------
def reference(tables: Tables) -> Events:
    """Simulate in plain Python."""
    return Engine(tables).run()


class Engine:
    """One run. `foresee` schedules an event, `run` processes all events in the order of time."""

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
        self.gates = None if tables.gates is None else GateKeeper(self, tables.gates)

    def foresee(self, when: int, what: int, which: int, version: int = 0) -> None:
        self.sequence += 1
        order = which if what == LINK else self.sequence
        heappush(self.future, (when, what, order, which, version))

    def run(self) -> Events:
        if self.gates is not None:
            self.gates.begin()
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
        require_all_done(np.array(self.next_op), self.tables)
        times = (self.op_start, self.op_end, self.ready_ns, self.start_ns, self.sent_ns, self.arrive_ns)
        op_start, op_end, ready, start, sent, arrive = (np.array(each, np.int64) for each in times)
        gate_ns = np.zeros((0, 2), np.int64) if self.gates is None else self.gates.table()
        return Events(op_start, op_end, ready, start, sent, arrive, gate_ns)

    def deliver(self, transfer: int, sent: int, arrive: int) -> None:
        """A transfer is finished; a worker that waits for it starts then."""
        self.sent_ns[transfer], self.arrive_ns[transfer] = sent, arrive
        if self.gates is not None:
            self.gates.arrived(transfer, arrive)
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
                start = now if self.gates is None else self.gates.assembled(group, now)
                if start != UNKNOWN:
                    self.start_group(group, start)
        elif transfer == NONE:
            self._start(op, now)
        elif self.arrive_ns[transfer] != UNKNOWN:
            self._start(op, max(now, self.arrive_ns[transfer]))
        else:
            self.stands_waiting[worker] = True

    def start_group(self, group: int, now: int) -> None:
        """All members of a collective start."""
        members = self.tables.group_ops[slice(*self.tables.group_ptr[group : group + 2])].tolist()
        for member in members:
            self._start(member, now)
        if self.gates is not None:
            self.gates.ended(group, now + max(self.op_ns[member] for member in members))

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
            if self.gates is not None and self.gates.offer(transfer, now + before_ns):
                pass
            elif before_ns:
                self.foresee(now + before_ns, OFFER, transfer)
            else:
                self.link_of[self.channel[transfer]].offer(transfer, now)
        self._advance(worker, now)


# ---- the links ---------------------------------------------------------------------------------------------
class Private:
    """One channel's own link."""

    def __init__(self, engine: Engine, link: int) -> None:
        self.engine, self.pace = engine, Pace(engine.tables, link)
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
        self.engine, self.link, self.pace = engine, link, Pace(engine.tables, link)
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
        self.engine, self.link, self.pace = engine, link, Pace(engine.tables, link)
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
