"""Prefills from admission to delivery. A placement becomes tasks for the workers of its lane; their KV blocks are put
together, and the caller gets keys, values and logits. An admitted prefill is finished or handed back, never dropped:
after the loss of a worker it starts again on another lane or waits for one, and is handed back if none comes in time.

The planner decides where a prefill runs. `PrefillRun.sent` records which workers got its tasks: it decides what is
lost with a worker, and which workers get a cancel when the plan moves a prefill to another lane.

Everything runs on the event loop. Knows workers, admission and memory; not HTTP, not text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from atlas.errors import WorkerError
from bubbletea.admit.fit import NEVER
from bubbletea.admit.records import Placement, PrefillRequest
from bubbletea.constants import SECOND
from bubbletea.handoff.kv_store import KEEP_S, KvStore, Parcel
from bubbletea.kv_blocks import KvBlock
from bubbletea.prefill.job import HEAD, PrefillTask
from bubbletea.serve.admission import TICK_S, Admission
from bubbletea.serve.connections import ConnectedWorker, WorkerConnections
from bubbletea.serve.metrics import ServiceMetrics
from bubbletea.serve.planner import Planner
from bubbletea.serve.prefills import RESTART_NS, HandedBack, Prefilled, PrefillRun, Prompt
from bubbletea.serve.prefix_store import PrefixStore
from bubbletea.serve.slowdown_limit import SlowdownLimit

log = logging.getLogger("bubbletea.serve")
LATE_NS = 50_000_000
"""A prefill this far behind its plan is placed again."""
STUCK_S, STUCK_PERIODS = 1.0, 3
"""A prefill that is due and makes no progress for this long moves to another lane: the waits of a worker may be too
short or too uncertain for it, and those of another one not."""
SILENT_NS, SILENT_PERIODS = SECOND, 2
"""A worker that has sent nothing for this long is silent: it reports its waits in every period."""
MAX_FAILURES = 4
"""Of one prefill; then it is handed back to its client."""
LANE_S = 60.0
"""An admitted prefill that has waited this long for a lane is handed back."""
OWED_NS = 60 * SECOND
"""An online request may use the share of waits that it was admitted with for this long."""


class Dispatcher:
    """`patience_s`: a prefill that is due and makes no progress for this long and two periods of training is restarted;
    `lane_s`: longest wait for a lane; `limit`: the limit for training, if there is training."""

    def __init__(
        self,
        connections: WorkerConnections,
        planner: Planner,
        store: KvStore,
        prefixes: PrefixStore,
        metrics: ServiceMetrics,
        patience_s: float = 30.0,
        lane_s: float = LANE_S,
        limit: SlowdownLimit | None = None,
    ) -> None:
        self.connections, self.planner, self.store, self.prefixes = connections, planner, store, prefixes
        self.metrics, self.patience_s, self.lane_s = metrics, patience_s, lane_s
        self.limit, self._paused = limit, False
        self.admission = Admission(planner, store, metrics, limit)
        self._jobs = itertools.count(1)
        self._runs: dict[int, PrefillRun] = {}
        self._by_request: dict[str, PrefillRun] = {}
        self._ticker: asyncio.Task[None] | None = None
        self.on_lanes: Callable[[int], None] = lambda num_lanes: None
        """Called with the number of usable lanes when it may have changed."""
        connections.listener = self

    def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Hands back all unfinished prefills."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for run in list(self._runs.values()):
            self._hand_back(run, "the service is closing")

    @property
    def has_baseline(self) -> bool:
        """Iterations of training without prefill were measured: workers need not leave their first steps alone."""
        return self.limit is not None and self.limit.iteration_s > 0

    @property
    def num_running(self) -> int:
        return sum(run.first_ns > 0 for run in self._runs.values())

    @property
    def num_waiting(self) -> int:
        return len(self._runs) - self.num_running

    # ---- requests ----------------------------------------------------------------------------------------------
    def check(self, least: Prompt, num_tokens: int, likely_tokens: int) -> None:
        """Raises Refused if a prompt of at least this length would be refused; called before tokenizing."""
        now_ns = time.monotonic_ns()
        request = PrefillRequest(secrets.token_hex(16), least.tenant, num_tokens, now_ns, least.deadline_ns)
        self.admission.check(request, num_tokens + least.num_new, least.key, likely_tokens)

    async def prefill(self, prompt: Prompt) -> Prefilled:
        """Raises Refused or HandedBack. The caller releases the parcel."""
        now_ns, ticket = time.monotonic_ns(), secrets.token_hex(16)
        hashes = self._hashes(prompt)
        request = PrefillRequest(
            ticket, prompt.tenant, len(prompt.tokens), now_ns, prompt.deadline_ns, prompt.kind, hashes
        )
        num_tokens = len(prompt.tokens) + prompt.num_new
        found, request = await self.admission.admit(request, num_tokens, prompt.key)
        parcel = self.store.reserve(ticket, len(prompt.tokens), num_tokens, prompt.tenant, at_workers=prompt.hands_off)
        assert parcel is not None, "there was room a moment ago"
        run = PrefillRun(next(self._jobs), prompt, request, parcel, asyncio.get_running_loop().create_future(), now_ns)
        share = self.planner.forecast.share if prompt.kind == "online" else 0.0
        run.since_ns, run.share = request.arrival_ns, share
        self._runs[run.job] = self._by_request[ticket] = run
        try:
            if found is not None:
                self._send(run, found)
            return await run.future
        except BaseException:
            self.store.release(ticket)
            raise
        finally:
            self._forget(run)

    def _hashes(self, prompt: Prompt) -> tuple[bytes, ...]:
        """Of its blocks; none if computing its cached part is faster than moving it to the workers."""
        hashes = self.prefixes.hashes(prompt.tokens, prompt.tenant, prompt.cache_salt)
        num_tokens = self.prefixes.longest(hashes, len(prompt.tokens) - 1)
        compute_ns = self.planner.costs.layer(num_tokens, 0) * self.store.served.config.num_layers
        return hashes if not num_tokens or self.prefixes.times.pays(num_tokens, compute_ns) else ()

    # ---- tasks -------------------------------------------------------------------------------------------------
    def _send(self, run: PrefillRun, placement: Placement) -> None:
        """Sends the tasks of a placement to the workers of its lane."""
        hashes, request, lane = run.request.block_hashes, placement.request, placement.lane
        run.cached = min(placement.cached_tokens, self.prefixes.longest(hashes, request.prompt_tokens))
        began_ns = time.monotonic_ns()
        cached = self.prefixes.take(hashes, run.cached) if run.cached else []
        for layer, kv in enumerate(cached):
            if run.prompt.hands_off:
                run.parcel.mark(layer, 0, run.cached)
            else:
                run.parcel.put(KvBlock(run.parcel.ticket, run.parcel.model, layer, 0, run.cached, kv))
        # Postponed requests are placed as offline work.
        run.due_ns = request.deadline_ns or NEVER - 1 if request.kind == "online" else NEVER
        ends = tuple(end for end in placement.ends if end > run.cached)
        self._expect(run, placement.delivered_ns)
        run.sent = self.connections.of_lane(lane)
        run.stay(time.monotonic_ns())
        ticket = run.parcel.ticket if run.prompt.hands_off else ""
        peers = tuple(member.transport for member in run.sent)
        rest = (run.due_ns, peers, placement.delivered_ns, ticket, began_ns)
        length = len(run.prompt.tokens)
        if not run.attempt:
            self.metrics.cached(run.cached, length)
        for stage, member in enumerate(run.sent):
            task = PrefillTask(run.job, run.attempt, length, run.cached, ends, stage, *rest)
            first, end = lane.layers(stage)
            self.connections.send(member, task, run.prompt.tokens, cached[first:end])

    def _recall(self, run: PrefillRun) -> None:
        """Cancels its tasks on the workers that have them."""
        for member in run.sent:
            self.connections.cancel(member, run.job, run.attempt)
        run.attempt, run.logits, run.sent = run.attempt + 1, None, ()
        run.parcel.restart()

    def _expect(self, run: PrefillRun, delivered_ns: int) -> None:
        """Sets the expected delivery, and with it when its memory will be free."""
        run.expected_ns = delivered_ns
        run.parcel.expected_s = delivered_ns / SECOND + run.prompt.kept_s

    def _again(self, run: PrefillRun, why: str, *, is_loss: bool = False, elsewhere: bool = False) -> None:
        """Restarts it as soon as there is a lane; hands it back after too many failures. `elsewhere`: on another lane,
        and this is not a failure."""
        if run.future.done():
            return
        now_ns = time.monotonic_ns()
        log.info("prefill %d, attempt %d, is restarted: %s", run.job, run.attempt, why)
        self._recall(run)
        run.since_ns = now_ns
        if not elsewhere and (not is_loss or now_ns >= run.lost_ns + RESTART_NS):
            run.num_failures += 1
            run.lost_ns = now_ns if is_loss else run.lost_ns
        if run.num_failures >= MAX_FAILURES:
            self._hand_back(run, f"it failed {run.num_failures} times, the last time because {why}")
        else:
            self.planner.again(run.request.id, now_ns, elsewhere=elsewhere)

    def _is_stuck(self, run: PrefillRun, now_ns: int, stuck_s: float) -> bool:
        """Whether it moves to another lane: it is late and makes no progress, although prefill is allowed."""
        period_s = self.planner.forecast.period_ns / SECOND
        may_run = self.limit is None or self.limit.allowed > 0
        is_late = bool(run.sent) and min(run.planned_ns, run.expected_ns) + LATE_NS < now_ns
        return is_late and may_run and self.planner.num_lanes > 1 and stuck_s > STUCK_S + STUCK_PERIODS * period_s

    def _leave_stuck(self, run: PrefillRun, now_ns: int) -> None:
        """It moves to another lane. If its workers have sent nothing for some periods, and others have, all prefills of
        its lane move, and the lane gets no others until its workers send again."""
        why = "it made no progress on this copy of the model"
        since_ns = now_ns - SILENT_NS - SILENT_PERIODS * self.planner.forecast.period_ns
        is_heard = {member: member.heard_ns > since_ns for member in self.connections.members.values()}
        silent = [member for member in run.sent if not is_heard[member]]
        if not silent or not any(is_heard.values()):
            self._again(run, why, elsewhere=True)
            return
        for member in silent:
            member.is_silent = True
            log.warning("worker %s sends nothing: its prefills move to other workers", member.name)
        for other in [other for other in self._runs.values() if not set(silent).isdisjoint(other.sent)]:
            self._again(other, why, elsewhere=True)
        self._update_lanes()

    def _hand_back(self, run: PrefillRun, why: str) -> None:
        if not run.future.done():
            self.metrics.handed_back.inc()
            run.future.set_exception(HandedBack(why))

    def _forget(self, run: PrefillRun) -> None:
        if self._runs.pop(run.job, None) is None:
            return
        del self._by_request[run.request.id]
        if not run.future.done() or run.future.cancelled() or run.future.exception() is not None:
            self._recall(run)
            self.planner.cancel(run.request.id, time.monotonic_ns())

    # ---- from the workers -----------------------------------------------------------------------------------------
    def joined(self, member: ConnectedWorker) -> None:
        self.metrics.joined(member.name)
        self._update_lanes()

    def left(self, member: ConnectedWorker) -> None:
        for run in [run for run in self._runs.values() if member in run.sent]:
            self._again(run, f"worker {member.name} is gone", is_loss=True)
        self._update_lanes()

    def _update_lanes(self) -> None:
        now_ns = time.monotonic_ns()
        self.planner.set_alive((m.worker for m in self.connections.members.values() if m.is_usable), now_ns)
        self.metrics.lanes.set(self.planner.num_lanes)
        self.on_lanes(self.planner.num_lanes)
        self._follow(self.planner.advance(now_ns))

    def block(self, job: int, attempt: int, block: KvBlock) -> None:
        self._progress(job, attempt, lambda parcel: parcel.put(block))

    def kept(self, job: int, attempt: int, layer: int, start: int, stop: int) -> None:
        """A block of keys and values is complete, and stays at its worker."""
        self._progress(job, attempt, lambda parcel: parcel.mark(layer, start, stop))

    def _progress(self, job: int, attempt: int, note: Callable[[Parcel], None]) -> None:
        run = self._runs.get(job)
        if run is None or run.attempt != attempt:
            return
        run.stay(time.monotonic_ns())
        run.first_ns = run.first_ns or run.since_ns
        try:
            note(run.parcel)
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

    def loaded(self, num_tokens: int, took_ns: int) -> None:
        """A worker has received its layers of a cached prefix."""
        self.prefixes.times.loaded(num_tokens, took_ns)

    def _finish(self, run: PrefillRun) -> None:
        if run.logits is None or run.future.done() or not run.parcel.is_complete:
            return
        now_ns = time.monotonic_ns()
        self._expect(run, now_ns)
        self.planner.complete(run.request.id, now_ns)
        if run.prompt.hands_off:
            self._lease(run)
        else:
            self.prefixes.add(run.request.block_hashes, run.parcel.slabs, run.prompt.tenant)
        parts = tuple(member.part for member in run.sent if member.part is not None)
        times = run.admitted_ns, run.first_ns or now_ns, now_ns
        run.future.set_result(Prefilled(run.parcel, run.logits, run.cached, *times, parts))

    def _lease(self, run: PrefillRun) -> None:
        """Its workers keep it for decode engines until it is released or has expired here."""
        members, ticket = run.sent, run.parcel.ticket
        for member in members:
            self.connections.lease(member, run.job, run.attempt, KEEP_S)
        run.parcel.on_release = partial(self.connections.drop, members, ticket)
        self.store.keep(ticket, KEEP_S)

    def reported(self, member: ConnectedWorker, ran: list[list[int]], waits: list[list[int]]) -> None:
        """Pieces [job, attempt, layer, first, last, predicted, took], waits [step, op, began, ended, filled]."""
        for _, _, layer, first, last, predicted_ns, took_ns in ran:
            if layer != HEAD:
                self.planner.ran(last - first, first, took_ns)
            self.metrics.ran(member.name, predicted_ns, took_ns)
        for step, op, began_ns, ended_ns, filled_ns in waits:
            self.planner.waited(member.worker, step, op, began_ns, ended_ns)
            if self.limit is not None:
                self.limit.waited(member.worker, step, began_ns, filled_ns, len(self.connections.members))
            self.metrics.waited(member.name, ended_ns - began_ns, filled_ns)

    # ---- time --------------------------------------------------------------------------------------------------
    def _follow(self, placements: Sequence[Placement]) -> None:
        """Carries out a changed plan: sends tasks, moves them to another lane, or changes their expected time."""
        for placement in placements:
            run = self._by_request.get(placement.request.id)
            if run is None or run.future.done():
                continue
            if run.sent == self.connections.of_lane(placement.lane):
                self._expect(run, placement.delivered_ns)
                continue
            if run.sent:
                self._recall(run)
            self._send(run, placement)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._pass_time(time.monotonic_ns())
            except Exception:  # one error must not stop the loop for all requests
                log.exception("an error in the scheduler; it continues")
                self.metrics.trouble.inc()

    def _pass_time(self, now_ns: int) -> None:
        if self.limit is not None:
            self.planner.forecast.use(self.limit.share)
        self.admission.pass_time(now_ns)
        self._follow(self.planner.advance(now_ns))
        if self.limit is not None:  # when overcommitted, admitted online requests are finished and offline ones wait
            is_due = any(run.request.kind == "online" for run in self._runs.values())
            self._paused = self.limit.overcommitted and not is_due
            recent = (run.share for run in self._runs.values() if now_ns < run.admitted_ns + OWED_NS)
            self.limit.owe(max(recent, default=0.0))
            self.connections.share(0.0 if self._paused else self.limit.allowed)
        urgent: dict[tuple[ConnectedWorker, ...], PrefillRun] = {}
        for run in self._runs.values():
            if run.sent and not run.future.done():
                first = urgent.setdefault(run.sent, run)
                urgent[run.sent] = min(first, run, key=lambda one: (one.due_ns, one.job))
        for run in list(self._runs.values()):
            if not run.future.done():
                self._look_after(run, now_ns, is_first=urgent.get(run.sent) is run)
        self.store.drop_expired()
        self.metrics.gauges(self)

    def _look_after(self, run: PrefillRun, now_ns: int, *, is_first: bool) -> None:
        """`is_first`: it is the most urgent prefill of its workers, so it should make progress."""
        waits = not run.sent and self.planner.is_waiting(run.request.id)
        if not waits and (self._paused or not is_first):
            run.stay(now_ns)  # others go first
        stuck_s = (now_ns - run.since_ns) / SECOND
        if waits and stuck_s > self.lane_s:
            self._hand_back(run, f"no worker has had room for it for {self.lane_s:g} s")
        elif run.sent and stuck_s > self.patience_s + 2 * self.planner.forecast.period_ns / SECOND:
            self._again(run, f"it made no progress in {stuck_s:.0f} s")
        elif self._is_stuck(run, now_ns, stuck_s):
            self._leave_stuck(run, now_ns)
        elif run.sent and run.expected_ns + LATE_NS < now_ns:
            done = min(run.parcel.num_complete, run.request.prompt_tokens - 1)  # all but the logits
            self._follow(self.planner.late(run.request.id, done, now_ns))
