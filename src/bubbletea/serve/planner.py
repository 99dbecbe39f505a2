"""Admission in the service: the pure functions of `admit` for the lanes whose workers are connected, with windows and
costs learnt from the workers' reports. The only part of the service that knows bubbles.

When workers join or leave, or costs change, all requests are placed again. An admitted request is always in one of four
states: placed on a lane, in the backlog, postponed, or waiting for a lane. Not thread-safe: used on the event loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bubbletea.admit.aims import Aims, Postponed
from bubbletea.admit.decide import (
    admit,
    advance,
    complete,
    late,
    quote,
    reforecast,
    refused,
    refused_by_length,
    restore,
    waits,
    withdraw,
)
from bubbletea.admit.fair import TenantShares
from bubbletea.admit.fit import FREE
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillLane, PrefillRequest
from bubbletea.admit.state import AdmissionState
from bubbletea.constants import SECOND
from bubbletea.costs import LayerTime, PrefillCosts, measured
from bubbletea.serve.observed_periods import ObservedPeriods
from bubbletea.windows.bubbles import Forecast

POINTS = 256
"""Measured pieces that costs are fitted to."""
CATCH_UP_NS = 100_000_000
"""Shortest time between two attempts to move requests up."""
AHEAD_NS = 500_000_000
"""Offline work is sent to workers this long before its planned start."""
AGAIN_NS = 2 * SECOND
"""Deadline, after the loss of its worker, that an offline request gets."""
HALVINGS = 12
"""Costs are halved at most this often until a request fits a window. If it still does not, windows are too short."""
FEW_POINTS = 8
"""Measured pieces that correct halved costs."""
TRUST = 0.15
"""Costs with a larger error are fitted again."""


class Planner:
    """`window_of[worker][op]` is the window of the Pattern that ends when that op's input arrives."""

    def __init__(
        self,
        forecast: Forecast,
        costs: PrefillCosts,
        lanes: Sequence[PrefillLane],
        window_of: Sequence[Mapping[int, int]],
        chunks: Sequence[int],
        *,
        learns_costs: bool = True,
        weights: Mapping[str, float] | None = None,
        aims: Aims | None = None,
    ) -> None:
        """`weights`: of the tenants' shares."""
        self.forecast, self.costs, self.lanes = forecast, costs, tuple(lanes)
        self._measured, self._halvings = costs, 0
        """Costs as they were fitted last, and how often they have been halved since."""
        self.periods = ObservedPeriods(forecast, window_of)
        self.chunks, self.learns_costs, self.weights = tuple(chunks), learns_costs, weights
        self.aims = aims or Aims()
        self.postponed = Postponed(self.aims)
        """Kept when the state is rebuilt."""
        self.alive: frozenset[int] = frozenset()
        self._admitted: dict[str, PrefillRequest] = {}
        self._waiting: dict[str, PrefillRequest] = {}
        """Admitted requests that no lane can take now."""
        self._avoided: dict[str, tuple[int, ...]] = {}
        """By request: the workers of a lane that made no progress with it."""
        self._moved: set[str] = set()
        """Requests placed again since the last `advance`."""
        self._retry_ns = self._halved_ns = 0
        """When waiting requests are tried next; when costs were last halved for one of them."""
        self._shares = TenantShares(weights)
        self._points: deque[tuple[int, int, float]] = deque(maxlen=POINTS)
        self._gone_early, self._caught_up_ns = False, 0
        self._state: AdmissionState | None = None
        self._built_on, self._costs_moved = forecast.version, False

    @property
    def num_lanes(self) -> int:
        return len(self._live)

    @property
    def _live(self) -> list[PrefillLane]:
        return [lane for lane in self.lanes if self.alive.issuperset(lane.workers)]

    @property
    def num_backlog(self) -> int:
        return len(self._state.backlog) if self._state is not None else 0

    def is_waiting(self, request_id: str) -> bool:
        """Whether it is admitted, but has no lane now."""
        return request_id in self._waiting or self._state is None

    # ---- decisions ---------------------------------------------------------------------------------------------
    def admit(self, request: PrefillRequest, now_ns: int, kept_ns: int = 0) -> Placement | AdmissionRefusal | None:
        """`kept_ns`: time of the lanes that is kept for refused requests until they come back."""
        state = self._ready(now_ns)
        if state is None:
            return AdmissionRefusal(request, "no-lane")
        if request.kind == "offline":
            refusal = self.quote(request, now_ns)
            if refusal is not None and refusal.reason != "deadline":
                return refusal
        found = admit(state, request, now_ns, kept_ns)
        if isinstance(found, AdmissionRefusal) and found.reason == "too-long":
            refusal = refused_by_length(state, request) or self._no_window(request, now_ns)
            if refusal is not None:
                return refusal
            found = admit(self._current(now_ns), request, now_ns, kept_ns)
        if not isinstance(found, AdmissionRefusal):
            self._admitted[request.id] = request
        return self._placed(found) if isinstance(found, Placement) else found

    def quote(self, request: PrefillRequest, now_ns: int, kept_ns: int = 0) -> AdmissionRefusal | None:
        """The refusal that `admit` would return for this or a longer prompt; changes nothing."""
        state = self._ready(now_ns)
        if state is None:
            return AdmissionRefusal(request, "no-lane")
        refusal = refused_by_length(state, request)
        if refusal is not None:
            return refusal
        trial = quote(state, request, now_ns)
        if trial is None:
            refusal = self._no_window(request, now_ns)
            trial = quote(self._current(now_ns), request, now_ns)
        if refusal is not None or trial is None:
            return refusal
        delivered_ns, deadline_ns = trial.own.delivered_ns, request.deadline_ns
        delivered_ns += kept_ns if waits(trial, now_ns) else 0
        if deadline_ns is not None and delivered_ns > deadline_ns and not self.postponed.may_take(request):
            return refused(state, trial, "deadline", delivered_ns, now_ns + delivered_ns - deadline_ns)
        return None

    def _no_window(self, request: PrefillRequest, now_ns: int) -> AdmissionRefusal | None:
        """The refusal if no window is long enough for a layer of it. Costs are learnt only from admitted requests:
        costs with which it fits no window are halved until it does, and measured again when it runs."""
        for _ in range(HALVINGS + 1 if self.learns_costs else 1):
            if quote(self._current(now_ns), request, now_ns) is not None:
                return None
            self._halve_costs()
        at_ns = now_ns + max(SECOND, self.forecast.period_ns)
        return AdmissionRefusal(request, "deadline", at_ns, at_ns)

    def _halve_costs(self) -> None:
        """After all halvings, costs are the measured ones again: windows are the reason, not costs."""
        if self.learns_costs:
            self._halvings = (self._halvings + 1) % (HALVINGS + 1)
            self._set_costs(self._measured.layer.times(0.5**self._halvings))

    def _set_costs(self, layer: LayerTime) -> None:
        self.costs, self._costs_moved = replace(self.costs, layer=layer), True
        self._points.clear()

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A prompt of this length counts for its tenant's share; a negative number takes that back."""
        self._shares.charge(tenant, math.copysign(self.costs.prompt_ns(abs(num_tokens)), num_tokens))

    def claim(self, request: PrefillRequest) -> None:
        """Admits a request for which time was kept, even if windows have become shorter or a lane was lost since: it
        is placed where it is delivered first, or waits for a lane."""
        self._admitted[request.id] = self._waiting[request.id] = request
        self._retry_ns = 0

    def advance(self, now_ns: int) -> list[Placement]:
        """The placements that are new or changed: of requests that waited for a lane, that were placed again because
        lanes joined or left, that move up because others finished early, and of offline requests."""
        state = self._ready(now_ns)
        if state is None:
            return []
        if self._waiting and now_ns >= self._retry_ns:
            self._restore_waiting(state, now_ns)
        moved = self._catch_up(state, now_ns)
        # Offline work is placed early, after all other work, so that a worker ahead of its plan does not idle.
        poured = advance(state, now_ns + AHEAD_NS)
        names, self._moved = self._moved, set()
        changed = {placement.request.id: placement for placement in (*moved, *poured)}
        changed |= {name: state.placement(name) for name in names if name in state.lane_of and name not in changed}
        return [self._placed(placement) for placement in changed.values()]

    def late(self, request_id: str, token: int, now_ns: int) -> list[Placement]:
        """It is behind its plan; returns its new placement and those of later requests."""
        if self._state is None or request_id not in self._state.lane_of:
            return []
        return [self._placed(p) for p in late(self._state, request_id, token, now_ns)]

    def _catch_up(self, state: AdmissionState, now_ns: int) -> Sequence[Placement]:
        if not self._gone_early or now_ns < self._caught_up_ns + CATCH_UP_NS:
            return ()
        self._gone_early, self._caught_up_ns = False, now_ns
        for lane, queue in enumerate(state.queues):
            if not queue:
                state.put(lane, [], np.zeros_like(state.tracks[lane]))  # nothing is placed there: it is free now
        return reforecast(state, now_ns)

    def cancel(self, request_id: str, now_ns: int) -> None:
        """Removes a request whose tasks were cancelled on the workers; its windows are free at once."""
        self.postponed.remove(request_id)
        self._avoided.pop(request_id, None)
        if self._admitted.pop(request_id, None) is not None:
            self._take_out(request_id, now_ns)

    def again(self, request_id: str, now_ns: int, *, elsewhere: bool = False) -> None:
        """Its worker was lost: it is placed again as an online request as soon as there is a lane. `elsewhere`: on
        another lane than before, if there is one."""
        request, state = self._admitted[request_id], self._state
        if elsewhere and state is not None and request_id in state.lane_of:
            self._avoided[request_id] = state.lanes[state.lane_of[request_id]].workers
        self._take_out(request_id, now_ns)
        self.postponed.remove(request_id)
        deadline_ns = request.deadline_ns or now_ns + AGAIN_NS
        self._waiting[request_id] = replace(request, kind="online", deadline_ns=deadline_ns)
        self._retry_ns = 0

    def _take_out(self, request_id: str, now_ns: int) -> None:
        self._waiting.pop(request_id, None)
        if self._state is not None:
            withdraw(self._state, request_id, now_ns)
            self._gone_early = True

    def complete(self, request_id: str, now_ns: int) -> None:
        state = self._state
        if self._admitted.pop(request_id, None) is None:
            return
        if state is not None and request_id in state.lane_of:
            complete(state, request_id, now_ns)
            self._gone_early = True
        else:
            self._take_out(request_id, now_ns)

    def _placed(self, placement: Placement) -> Placement:
        """With the service's index of the lane."""
        lane = next(lane for lane in self.lanes if lane.workers == placement.lane.workers)
        return replace(placement, lane=lane)

    # ---- what is there -----------------------------------------------------------------------------------------
    def set_alive(self, workers: Iterable[int], now_ns: int) -> None:
        before, self.alive = self._live, frozenset(workers)
        if self._live != before:
            self._rebuild(now_ns, frees=True)
            self.periods.forget()

    def warm_up(self) -> None:
        """Compiles the functions of admission before the first request."""
        self.set_alive((w for lane in self.lanes for w in lane.workers), 0)
        self.admit(PrefillRequest("warm-up", "", 1, 0), 0)
        self.complete("warm-up", 0)
        self.advance(0)
        self.set_alive((), 0)

    def _current(self, now_ns: int) -> AdmissionState:
        """There are lanes."""
        state = self._ready(now_ns)
        assert state is not None
        return state

    def _ready(self, now_ns: int) -> AdmissionState | None:
        if self._costs_moved:
            self._rebuild(now_ns)
        elif self._state is not None and self._built_on != self.forecast.version:
            self._built_on = self.forecast.version
            self._moved.update(placement.request.id for placement in reforecast(self._state, now_ns))
        return self._state

    def _rebuild(self, now_ns: int, *, frees: bool = False) -> None:
        """Places all admitted requests again on the current lanes, windows and costs. `frees`: requests that have not
        started may change their lane, because lanes joined or left."""
        lanes = [replace(lane, index=index) for index, lane in enumerate(self._live)]
        self._built_on, self._costs_moved = self.forecast.version, False
        before, self._state = self._state, None
        kept = self._set_free(before, now_ns, frees) if before is not None else []
        if not lanes:
            return
        weights, aims = self.weights, self.aims
        state = AdmissionState(
            self.forecast, self.costs, lanes, chunks=self.chunks, weights=weights, aims=aims, shares=self._shares
        )
        if before is not None and before.lanes == state.lanes:
            state.cache = before.cache
        state.postponed = self.postponed
        self._state, index_of = state, {lane.workers: lane.index for lane in lanes}
        for request, workers in kept:
            self._restore(state, request, now_ns, index_of[workers])
        self._restore_waiting(state, now_ns)

    def _set_free(
        self, state: AdmissionState, now_ns: int, frees: bool
    ) -> list[tuple[PrefillRequest, tuple[int, ...]]]:
        """The requests that stay on their lane, in order. All other placed requests and the backlog wait for a lane."""
        kept: dict[str, tuple[PrefillRequest, tuple[int, ...]]] = {}
        live = {lane.workers for lane in self._live}
        for lane, queue in zip(state.lanes, state.queues, strict=True):
            for entry in queue:
                request, stays = entry.request, not frees or entry.start_ns < now_ns or entry.request.kind == "offline"
                if request.id in kept or (stays and lane.workers in live):
                    kept[request.id] = request, lane.workers
                else:
                    self._waiting[request.id] = request
        self._waiting.update({request.id: request for request in state.backlog})
        return list(kept.values())

    def _restore_waiting(self, state: AdmissionState, now_ns: int) -> None:
        """The most urgent first."""
        self._retry_ns = now_ns + CATCH_UP_NS
        for request in sorted(self._waiting.values(), key=lambda one: (one.urgency, one.arrival_ns)):
            if request.kind == "offline" and request.prompt_tokens <= state.max_tokens:
                state.backlog.push(self._waiting.pop(request.id))
            elif request.kind == "online":
                self._restore(state, request, now_ns)

    def _restore(self, state: AdmissionState, request: PrefillRequest, now_ns: int, lane: int | None = None) -> None:
        self._waiting.pop(request.id, None)
        avoided = self._avoided.pop(request.id, ())
        others = [other.index for other in state.lanes if other.workers != avoided]
        if avoided and lane is None and others:
            lane = min(others, key=lambda index: (int(state.tracks[index, FREE, 0]), index))
        if restore(state, request, now_ns, lane) is not None:
            self._moved.add(request.id)
            return
        self._waiting[request.id] = request
        if request.prompt_tokens <= state.max_tokens and now_ns >= self._halved_ns + SECOND:
            self._halved_ns = now_ns
            self._halve_costs()

    # ---- what happened -----------------------------------------------------------------------------------------
    def ran(self, tokens: int, context: int, took_ns: int) -> None:
        """Records the time of one layer over a chunk."""
        self._points.append((tokens, context, took_ns / 1e9))
        if not self.learns_costs or len(self._points) < (FEW_POINTS if self._halvings else POINTS):
            return
        pieces_ns = [(seconds * 1e9, self.costs.layer(tokens, context)) for tokens, context, seconds in self._points]
        if self._halvings:  # too few pieces to fit them; on a busy host, one of them may take many times its usual time
            layer = self.costs.layer.times(float(np.median([took / predicted for took, predicted in pieces_ns])))
        elif abs(sum(predicted for _, predicted in pieces_ns) / sum(took for took, _ in pieces_ns) - 1) > TRUST:
            layer = measured(self.costs, list(self._points)).layer
        else:
            return
        self._set_costs(layer)
        self._measured, self._halvings = self.costs, 0

    def waited(self, worker: int, step: int, op: int, began_ns: int, ended_ns: int) -> None:
        """Records one wait of a training worker."""
        if self.periods.waited(worker, step, op, began_ns, ended_ns):
            self._costs_moved = True
