"""Prefills from admission to delivery: a placement becomes tasks for the lane's workers, their blocks are put together,
and who waits for it gets keys, values and logits. What was admitted is finished or handed back, never dropped: when a
worker is lost, its prefills begin anew elsewhere, and when there is no elsewhere they are handed back in time.

Everything happens on the event loop. Knows workers, admission and memory; not HTTP, not text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from atlas.errors import WorkerError
from bubbletea.admit.words import Class, Placement, Refusal, Request
from bubbletea.handoff.blocks import Block
from bubbletea.handoff.store import Parcel, Store
from bubbletea.prefill.job import HEAD, Task
from bubbletea.serve.crew import Crew, Member
from bubbletea.serve.metrics import Metrics
from bubbletea.serve.planner import Planner
from bubbletea.serve.prefixes import Prefixes

log = logging.getLogger("bubbletea.serve")
TICK_S = 0.02
NEVER_DUE = 2**62
LATE_NS = 50_000_000
"""A prefill this far behind its plan is placed anew."""
UNKNOWN_S = 1.0
"""To ask again after, where nobody knows when memory will be free: all of it waits for bubbles that are left over."""
MAX_ATTEMPTS = 4
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Prompt:
    """What is to be prefilled."""

    tokens: Sequence[int]
    tenant: str
    num_new: int
    """Tokens that will be decoded behind it."""
    deadline_ns: int | None = None
    kind: Class = "online"
    kept_s: float = 0.0
    """How long its keys and values are expected to be needed once they are there."""


@dataclass(frozen=True)
class Prefilled:
    parcel: Parcel
    logits: Tensor
    cached_tokens: int
    admitted_ns: int
    first_ns: int
    """When the first piece's result came."""
    done_ns: int


class Refused(Exception):  # noqa: N818
    """Not let in; `retry_s` from now it would be, None: never as it is."""

    def __init__(self, reason: str, retry_s: float | None) -> None:
        super().__init__(reason)
        self.reason, self.retry_s = reason, retry_s


class HandedBack(Exception):  # noqa: N818
    """Let in, but the workers that would have done it are gone."""

    def __init__(self, why: str, retry_s: float = 1.0) -> None:
        super().__init__(why)
        self.retry_s = retry_s


@dataclass(eq=False)
class _Run:
    job: int
    prompt: Prompt
    request: Request
    parcel: Parcel
    future: asyncio.Future[Prefilled]
    admitted_ns: int
    attempt: int = 0
    placement: Placement | None = None
    cached: int = 0
    logits: Tensor | None = None
    first_ns: int = 0
    heard_ns: int = 0
    """When something last came of it."""
    why: list[str] = field(default_factory=list)


class Dispatcher:
    """Listens to the crew. `patience_s`: how long an admitted prefill may make no progress before it is handed back."""

    def __init__(
        self, crew: Crew, planner: Planner, store: Store, prefixes: Prefixes, metrics: Metrics, patience_s: float = 30.0
    ) -> None:
        self.crew, self.planner, self.store, self.prefixes = crew, planner, store, prefixes
        self.metrics, self.patience_s = metrics, patience_s
        self._jobs = itertools.count(1)
        self._runs: dict[int, _Run] = {}
        self._by_request: dict[str, _Run] = {}
        self._ticker: asyncio.Task[None] | None = None
        crew.listener = self

    def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Hands back whatever is left."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for run in list(self._runs.values()):
            self._hand_back(run, "the service is closing")

    @property
    def num_running(self) -> int:
        return sum(run.first_ns > 0 for run in self._runs.values())

    @property
    def num_waiting(self) -> int:
        return len(self._runs) - self.num_running

    # ---- requests ----------------------------------------------------------------------------------------------
    def check(self, tenant: str, num_tokens: int, num_new: int, deadline_ns: int | None) -> None:
        """Raises Refused where a prompt of at least this length would be, before anybody has tokenized it."""
        request = Request(secrets.token_hex(8), tenant, num_tokens, time.monotonic_ns(), deadline_ns)
        self._require_memory(num_tokens + num_new)
        refusal = self.planner.quote(request, request.arrival_ns)
        if refusal is not None:
            raise self._refused(refusal)

    async def prefill(self, prompt: Prompt) -> Prefilled:
        """Raises Refused or HandedBack. The parcel is the caller's to release."""
        now_ns, ticket = time.monotonic_ns(), secrets.token_hex(16)
        hashes = self.prefixes.hashes(prompt.tokens, prompt.tenant)
        request = Request(ticket, prompt.tenant, len(prompt.tokens), now_ns, prompt.deadline_ns, prompt.kind, hashes)
        room = len(prompt.tokens) + prompt.num_new
        self._require_memory(room)
        found = self.planner.admit(request, now_ns)
        if isinstance(found, Refusal):
            raise self._refused(found)
        parcel = self.store.reserve(ticket, len(prompt.tokens), room)
        assert parcel is not None, "there was room a moment ago"
        run = _Run(next(self._jobs), prompt, request, parcel, asyncio.get_running_loop().create_future(), now_ns)
        run.heard_ns = now_ns
        self._runs[run.job] = self._by_request[ticket] = run
        try:
            if found is not None:
                self._place(run, found)
            return await run.future
        except BaseException:
            self.store.release(ticket)
            raise
        finally:
            self._forget(run)

    def _require_memory(self, num_tokens: int) -> None:
        if self.store.has_room(num_tokens):
            return
        self.metrics.refused("memory")
        if self.store.bytes_of(num_tokens) > self.store.budget_bytes:
            raise Refused("memory", None)
        at_s = self.store.room_at_s(num_tokens)
        raise Refused("memory", UNKNOWN_S if math.isinf(at_s) else max(TICK_S, at_s - time.monotonic()))

    def _refused(self, refusal: Refusal) -> Refused:
        self.metrics.refused(refusal.reason)
        now_ns = time.monotonic_ns()
        if refusal.reason == "no-lane":
            return Refused(refusal.reason, 1.0)
        at_ns = refusal.retry_at_ns
        return Refused(refusal.reason, None if at_ns is None else max(0.0, (at_ns - now_ns) / SECOND))

    # ---- placing -----------------------------------------------------------------------------------------------
    def _place(self, run: _Run, placement: Placement) -> None:
        """Sends the tasks of a placement to the workers of its lane."""
        hashes = run.request.block_hashes
        run.placement, run.cached = placement, min(placement.cached_tokens, self.prefixes.longest(hashes, NEVER_DUE))
        cached = self.prefixes.take(hashes, run.cached) if run.cached else []
        for layer, kv in enumerate(cached):
            run.parcel.put(Block(run.parcel.ticket, run.parcel.model, layer, 0, run.cached, kv))
        # Who was postponed is placed as offline work.
        due_ns = run.request.deadline_ns or NEVER_DUE - 1 if placement.request.kind == "online" else NEVER_DUE
        length = len(run.prompt.tokens)
        ends = tuple(end for end in placement.ends if end > run.cached)
        self._expect(run, placement.delivered_ns)
        lane = placement.lane
        peers = tuple(self.crew.members[worker].transport for worker in lane.workers)
        self.metrics.cached(run.cached, length)
        for stage, worker in enumerate(lane.workers):
            task = Task(run.job, run.attempt, length, run.cached, ends, stage, due_ns, peers)
            first, end = lane.layers(stage)
            self.crew.send(worker, task, run.prompt.tokens, cached[first:end])

    def _expect(self, run: _Run, delivered_ns: int) -> None:
        """When its memory will be back."""
        run.parcel.expected_s = delivered_ns / SECOND + run.prompt.kept_s

    def _again(self, run: _Run, why: str) -> None:
        """From the beginning on another attempt; handed back when that has gone wrong too often."""
        run.why.append(why)
        self._withdraw(run)
        run.attempt, run.logits, run.placement = run.attempt + 1, None, None
        if run.attempt >= MAX_ATTEMPTS:
            self._hand_back(run, f"it failed {run.attempt} times, at last because {why}")
            return
        self._try_place(run)

    def _try_place(self, run: _Run) -> None:
        """Its deadline has been promised once: it is not refused for it now."""
        now_ns = time.monotonic_ns()
        request = replace(run.request, arrival_ns=now_ns, deadline_ns=None, kind="online")
        found = self.planner.admit(request, now_ns)
        if isinstance(found, Placement):
            self._place(run, found)
        elif isinstance(found, Refusal) and found.reason == "too-long":
            self._hand_back(run, "no lane that is left has room for it")

    def _withdraw(self, run: _Run) -> None:
        self.planner.cancel(run.request.id, time.monotonic_ns())
        for worker in run.placement.lane.workers if run.placement else ():
            self.crew.cancel(worker, run.job, run.attempt)

    def _hand_back(self, run: _Run, why: str) -> None:
        if not run.future.done():
            self.metrics.handed_back()
            run.future.set_exception(HandedBack(why))

    def _forget(self, run: _Run) -> None:
        if self._runs.pop(run.job, None) is None:
            return
        del self._by_request[run.request.id]
        if not run.future.done() or run.future.cancelled() or run.future.exception() is not None:
            self._withdraw(run)

    # ---- from the crew -----------------------------------------------------------------------------------------
    def joined(self, member: Member) -> None:
        self._update_lanes()

    def left(self, member: Member) -> None:
        lost = [r for r in self._runs.values() if r.placement and member.worker in r.placement.lane.workers]
        self._update_lanes()
        for run in lost:
            self._again(run, f"worker {member.name} is gone")

    def _update_lanes(self) -> None:
        ready = (m.worker for m in self.crew.members.values() if m.ready)
        self.planner.set_alive(ready, time.monotonic_ns())
        self.metrics.lanes(self.planner.num_lanes)

    def block(self, job: int, attempt: int, block: Block) -> None:
        run = self._runs.get(job)
        if run is None or run.attempt != attempt:
            return
        run.heard_ns = time.monotonic_ns()
        run.first_ns = run.first_ns or run.heard_ns
        try:
            run.parcel.put(block)
        except WorkerError as error:
            self._again(run, str(error))
            return
        self._finish(run)

    def logits(self, job: int, attempt: int, logits: Tensor) -> None:
        run = self._runs.get(job)
        if run is not None and run.attempt == attempt:
            run.logits = logits
            self._finish(run)

    def failed(self, job: int, attempt: int, why: str) -> None:
        run = self._runs.get(job)
        if run is not None and run.attempt == attempt:
            self._again(run, why)

    def _finish(self, run: _Run) -> None:
        if run.logits is None or run.future.done() or not run.parcel.is_complete:
            return
        now_ns = time.monotonic_ns()
        self._expect(run, now_ns)
        self.planner.complete(run.request.id, now_ns)
        self.prefixes.add(run.request.block_hashes, run.parcel.slabs)
        run.future.set_result(
            Prefilled(run.parcel, run.logits, run.cached, run.admitted_ns, run.first_ns or now_ns, now_ns)
        )

    def reported(self, member: Member, ran: list[list[int]], waits: list[list[int]]) -> None:
        for _, _, layer, first, last, predicted_ns, took_ns in ran:
            if layer != HEAD:
                self.planner.ran(last - first, first, took_ns)
            self.metrics.ran(member.name, last - first, predicted_ns, took_ns)
        for step, op, began_ns, ended_ns, filled_ns in waits:
            self.planner.waited(member.worker, step, op, began_ns, ended_ns)
            self.metrics.waited(member.name, ended_ns - began_ns, filled_ns)

    # ---- time --------------------------------------------------------------------------------------------------
    def _follow(self, placements: Sequence[Placement]) -> None:
        """New places: offline requests begin, the others only know when they are now expected."""
        for placement in placements:
            run = self._by_request.get(placement.request.id)
            if run is None:
                continue
            if run.placement is None:
                self._place(run, placement)
            else:
                run.placement = placement
                self._expect(run, placement.delivered_ns)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._pass_time(time.monotonic_ns())
            except Exception:  # one bad moment must not end the clock for all who wait
                log.exception("the scheduler's clock goes on after an error")
                self.metrics.trouble()

    def _pass_time(self, now_ns: int) -> None:
        self._follow(self.planner.advance(now_ns))
        for run in list(self._runs.values()):
            if now_ns - run.heard_ns > self.patience_s * SECOND and run.request.kind == "online":
                self._hand_back(run, f"no progress in {self.patience_s:g} s")
            elif run.placement is None:
                if run.request.kind == "online" and run.request.id not in self.planner.postponed:
                    self._try_place(run)
            elif run.placement.delivered_ns + LATE_NS < now_ns:
                done = min(run.parcel.num_complete, run.request.prompt_tokens - 1)  # all but the logits
                self._follow(self.planner.late(run.request.id, done, now_ns))
        self.store.drop_expired()
        self.metrics.gauges(self)
