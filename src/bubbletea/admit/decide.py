"""The decisions: admit a request or return when it would fit; and how events change the placements.

    online     tried on the lanes that would finish first, and on one with its longest prefix. On each it is placed
               after all more urgent requests (earliest deadline first), if need be at the end of a chunk, and only if
               all requests that it delays still meet their deadlines
    offline    waits in the backlog; placed when a lane is about to become idle, least served tenant first
    late       online, but cannot meet its deadline: if the operator's `Aims` allow it, placed when windows are ample

An admitted request keeps its deadline unless windows turn out shorter than forecast (`late`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import Ints
from bubbletea.admit import fit
from bubbletea.admit.aims import PLENTY, RETRY_NS
from bubbletea.admit.fit import FREE
from bubbletea.admit.queue import QueueCut, again, again_at_any_cost, cut_at, cut_for
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest, Reason
from bubbletea.admit.state import AdmissionState, QueueEntry, TokenRange

TRIED = 3
"""Lanes on which a placement is computed exactly, best estimates first."""
LOOKED = 6
"""With a goal: lanes computed exactly before one is chosen, among the fastest and among the slowest."""
LOOSE = 0.9
"""Of the time to a deadline: a lane with a longer estimate is not tried, since estimates are too short."""
POUR_NS = 50_000_000
"""Offline work is placed on a lane that becomes idle within this: early enough to reach the worker, late enough not to
delay online requests."""
AHEAD_NS = 10_000_000_000
"""Of accelerator time: a tenant that was served this much more than a waiting one is refused when it would queue."""

Changes = tuple[Placement, ...]
"""Placements that replace the earlier ones of their requests."""


class Trial(NamedTuple):
    """A request placed on a lane on trial: the lane's queue and Track with it."""

    lane: int
    own: QueueEntry
    entries: list[QueueEntry]
    moved: list[QueueEntry]
    track: Ints


# ---- requests ----------------------------------------------------------------------------------------------------
def admit(
    state: AdmissionState, request: PrefillRequest, now_ns: int, kept_ns: int = 0
) -> Placement | AdmissionRefusal | None:
    """Place an online request or refuse it at once. None: it is offline and joined the backlog, or it may be late and
    was postponed. `kept_ns`: time of the lanes that is kept for refused requests until they come back; a request that
    would wait, waits behind them."""
    refusal = refused_by_length(state, request)
    if refusal is not None:
        return refusal
    if request.kind == "offline":
        state.backlog.push(request)
        return None
    trial = quote(state, request, now_ns)
    if trial is None:
        return AdmissionRefusal(request, "too-long")
    in_queue = waits(trial, now_ns)
    delivered, deadline = trial.own.delivered_ns + (kept_ns if in_queue else 0), request.deadline_ns
    by = None if deadline is None else deadline - (_kept_ns(state, trial, deadline - now_ns) if in_queue else 0)
    if by is not None and delivered > by:
        if state.postponed.takes(request):
            state.postponed.push(request)
            state.postponed.count()
            return None
        return refused(state, trial, "deadline", delivered, now_ns + delivered - by)
    ahead = state.shares.ahead(request.tenant, state.tenants()) - AHEAD_NS if in_queue else 0
    if ahead > 0:
        catch_up_ns = now_ns + round(ahead / len(state.lanes))  # the others, at the earliest
        return refused(state, trial, "share", delivered, max(trial.own.start_ns, catch_up_ns))
    state.postponed.count()
    return _commit(state, trial)


def refused(state: AdmissionState, trial: Trial, reason: Reason, fits_at_ns: int, retry_at_ns: int) -> AdmissionRefusal:
    """With the time that it would keep the lanes busy."""
    lane_ns = trial.own.delivered_ns - trial.own.start_ns
    return AdmissionRefusal(trial.own.request, reason, fits_at_ns, retry_at_ns, lane_ns // len(state.lanes))


def waits(trial: Trial, now_ns: int) -> bool:
    """Whether other work goes first."""
    return trial.own.start_ns > now_ns + POUR_NS


def restore(state: AdmissionState, request: PrefillRequest, now_ns: int, lane: int | None = None) -> Placement | None:
    """Place an admitted request again, on `lane` or where it is delivered first, even if it misses its deadline. It is
    not charged again. None if no window is long enough for a layer of it."""
    if request.prompt_tokens > state.max_tokens:
        return None
    if lane is None:
        trial = quote(state, request, now_ns)
    else:
        tries = ((chunk, in_turn) for in_turn in (True, False) for chunk in state.chunks)
        trials = (_tried(state, lane, request, chunk, now_ns, in_turn) for chunk, in_turn in tries)
        trial = next((found for found in trials if found is not None), None)
    return None if trial is None else _commit(state, trial, charge=False)


def _kept_ns(state: AdmissionState, trial: Trial, patience_ns: int) -> int:
    """How long before its deadline a queued request must be done. Short prompts leave the end of the time to their
    deadline to long ones; a prompt that runs longer than that part may use all of it."""
    runs_ns = trial.own.delivered_ns - trial.own.start_ns
    return max(0, round(state.kept * patience_ns) - runs_ns)


def refused_by_length(state: AdmissionState, request: PrefillRequest) -> AdmissionRefusal | None:
    """Refusals that follow from the number of tokens alone."""
    if not state.lanes:
        return AdmissionRefusal(request, "no-lane")
    return AdmissionRefusal(request, "too-long") if request.prompt_tokens > state.max_tokens else None


def quote(state: AdmissionState, request: PrefillRequest, now_ns: int) -> Trial | None:
    """The placement that delivers first, or within the goal; does not change the state. None if no window is long
    enough for a layer of it."""
    best: Trial | None = None
    choices = _candidates(state, request, now_ns)
    for in_turn in (True, False):
        for lane, chunks in choices:
            for chunk in chunks:
                found = _tried(state, lane, request, chunk, now_ns, in_turn)
                if found is not None and (best is None or found.own.delivered_ns < best.own.delivered_ns):
                    best = found
                if found is not None and found.own.start_ns > now_ns + POUR_NS:
                    break  # in a queue, smaller chunks only add overhead
        if best is not None:
            return best
    return None


Choice = tuple[int, Sequence[int]]
"""A lane, and sizes of chunks to try on it."""


def _candidates(state: AdmissionState, request: PrefillRequest, now_ns: int) -> list[Choice]:
    """Lanes to compute exactly: those that would finish first, or those the goal selects; and one with the longest
    prefix."""
    if state.aims.goal_s is not None:
        chosen = _aimed(state, request, now_ns)
    else:
        lanes: list[int] = _ranked(state, request, now_ns, TRIED)[0].tolist()
        chosen = [(lane, state.chunks) for lane in lanes]
    _, holders = state.cache.longest(request.block_hashes, request.prompt_tokens - 1)
    if holders and not holders.intersection(lane for lane, _ in chosen):
        holder = min(holders, key=lambda lane: (int(state.tracks[lane, FREE, 0]), lane))
        chosen.append((holder, state.chunks))
    return chosen


def _aimed(state: AdmissionState, request: PrefillRequest, now_ns: int) -> list[Choice]:
    """The lane that delivers first, if that is within the goal. If none is but some meet the deadline: the slowest of
    those. Assumes that the request is placed at the end of each lane's queue."""
    assert state.aims.goal_s is not None
    lanes, when = _ranked(state, request, now_ns, len(state.leaders))
    found = _delivered(state, request, lanes[:LOOKED], now_ns)
    by_ns = request.deadline_ns or 0
    if len(found) and now_ns + round(state.aims.goal_s * 1e9) < found[0][2] <= by_ns:
        in_time = int(np.searchsorted(when, now_ns + LOOSE * (by_ns - now_ns), side="right"))
        slow = _delivered(state, request, lanes[max(LOOKED, in_time - LOOKED) : in_time], now_ns)
        found = [one for one in slow if one[2] <= by_ns][-1:] or found
    return [(lane, (chunk,)) for lane, chunk, _ in found[:1]]


def _delivered(state: AdmissionState, request: PrefillRequest, lanes: Ints, now_ns: int) -> list[list[int]]:
    """(lane, chunk, time), computed exactly, earliest delivery first."""
    where = (state.tracks, state.workers, state.first_layer, lanes)
    out, chunks = np.empty((len(lanes), 3), np.int64), np.array(state.chunks, np.int64)
    times = (now_ns, now_ns + POUR_NS)
    count = fit.delivered_on(state.arrays, *where, request.prompt_tokens, chunks, *times, out)
    found: list[list[int]] = out[:count].tolist()
    return found


def _ranked(
    state: AdmissionState, request: PrefillRequest, now_ns: int, count: int
) -> tuple[Ints, NDArray[np.float64]]:
    """The `count` lanes that would finish first, best first, and estimates of when."""
    best, when = np.empty(count, np.int64), np.empty(count)
    where = (state.tracks, state.workers, state.first_layer, state.leaders)
    tokens = (0, request.prompt_tokens)
    found = fit.best_lanes(state.arrays, *where, tokens, state.chunks[0], now_ns, best, when)
    return best[:found], when[:found]


def _tried(
    state: AdmissionState, lane: int, request: PrefillRequest, chunk: int, now_ns: int, in_turn: bool
) -> Trial | None:
    """The request on one lane, by urgency or after all others; None if another request would miss its deadline."""
    cached = state.cache.tokens(lane, request.block_hashes, request.prompt_tokens - 1)
    wanted = TokenRange(
        request, cached, request.prompt_tokens, cached, _even(request.prompt_tokens - cached, chunk), now_ns
    )
    behind = QueueCut(state.queues[lane], [], state.track(lane))
    cut = cut_for(state, lane, request.urgency, now_ns) if in_turn else behind
    own, track = state.fitted(lane, wanted, cut.track, now_ns)
    if own is None:
        return None
    moved = again(state, lane, cut.rest, track, now_ns)
    if moved is None:
        return None
    return Trial(lane, own, [*cut.head, own, *moved.entries], moved.entries, moved.track)


def _even(tokens: int, chunk: int) -> int:
    """The size of equal chunks no longer than `chunk`."""
    return -(-tokens // -(-tokens // chunk))


def _commit(state: AdmissionState, trial: Trial, *, charge: bool = True) -> Placement:
    request = trial.own.request
    state.put(trial.lane, trial.entries, trial.track)
    state.enter(request, trial.lane)
    if charge:
        state.shares.charge(request.tenant, float((trial.own.slices[:, 2] - trial.own.slices[:, 1]).sum()))
    return state.placement(request.id)


# ---- events ------------------------------------------------------------------------------------------------------
def advance(state: AdmissionState, now_ns: int) -> Changes:
    """Place postponed requests where windows are ample, and offline requests on lanes that are about to become idle."""
    poured, left = _taken_up(state, now_ns), list[PrefillRequest]()
    while len(state.backlog) and (lane := state.emptiest(now_ns + POUR_NS)) is not None:
        request = state.backlog.pop()
        sizes = (_tried(state, lane, request, chunk, now_ns, in_turn=False) for chunk in state.chunks)
        trial = next((found for found in sizes if found is not None), None) or quote(state, request, now_ns)
        if trial is None:
            left.append(request)
        else:
            poured.append(_commit(state, trial))
    for request in left:  # no window is long enough now; windows change
        state.backlog.push(request)
    return tuple(poured)


def _taken_up(state: AdmissionState, now_ns: int) -> list[Placement]:
    """Placed as offline work: all other requests go first."""
    taken, postponed = [], state.postponed
    while len(postponed) and now_ns >= postponed.look_ns:
        request, due = postponed.next(now_ns)
        trial = quote(state, replace(request, kind="offline"), now_ns)
        if trial is None or not (due or _plenty(state, trial, now_ns)):
            postponed.look_ns = now_ns + RETRY_NS
            break
        postponed.remove(request.id)
        taken.append(_commit(state, trial))
    return taken


def _plenty(state: AdmissionState, trial: Trial, now_ns: int) -> bool:
    """Whether a lane runs a prompt nearly as fast as without training."""
    lane = state.lanes[trial.lane]
    alone_ns = state.costs[lane.dc].prompt_ns(trial.own.request.prompt_tokens) / len(lane.workers)
    return trial.own.delivered_ns <= now_ns + PLENTY * alone_ns


def cancel(state: AdmissionState, request_id: str, now_ns: int) -> Changes:
    """Release the part that has not started; the rest stays until it is complete. Later requests move up."""
    if request_id not in state.lane_of:
        if not state.postponed.remove(request_id):
            state.backlog.remove(request_id)
        return ()
    lane = state.lane_of[request_id]
    own = [entry for entry in state.queues[lane] if entry.request.id == request_id]
    spent = float(sum((entry.slices[:, 2] - entry.slices[:, 1]).sum() for entry in own))
    cut = cut_at(state, lane, request_id, now_ns)
    kept = any(entry.request.id == request_id for entry in cut.head)
    if not kept:
        state.leave(request_id)
        state.shares.charge(own[0].request.tenant, -spent)
    return _moved(state, lane, cut, now_ns)


def withdraw(state: AdmissionState, request_id: str, now_ns: int) -> None:
    """Remove a request that no worker runs any more."""
    cancel(state, request_id, now_ns)
    lane = state.lane_of.get(request_id)
    if lane is not None:
        state.queues[lane] = [entry for entry in state.queues[lane] if entry.request.id != request_id]
        state.leave(request_id)


def late(state: AdmissionState, request_id: str, token: int, now_ns: int) -> Changes:
    """A request got only as far as `token`: its rest is placed again, after every other request that has started,
    later parts of it too, which need the KV of this one. Nothing changes if no window is long enough for it."""
    lane = state.lane_of[request_id]
    queue = state.queues[lane]
    at = next(k for k, entry in enumerate(queue) if entry.request.id == request_id and token < entry.end_token)
    entry, begun = queue[at], max((k for k, entry in enumerate(queue) if entry.start_ns < now_ns), default=at)
    done, track = [], entry.before
    if token > entry.first_token:
        part, track = state.fitted(lane, entry.wanted._replace(end_token=token), entry.before, entry.floor_ns)
        done = [part] if part is not None else []
    if begun > at:
        track = queue[begun + 1].before if begun + 1 < len(queue) else state.track(lane)
    rest = TokenRange(entry.request, token, entry.end_token, 0, entry.chunk, now_ns)
    started = queue[at + 1 : begun + 1]
    head = [*queue[:at], *done, *(entry for entry in started if entry.request.id != request_id)]
    parts = [entry for entry in started if entry.request.id == request_id]
    own, track = state.fitted(lane, rest, track, now_ns)
    if own is None:
        return ()  # no window is long enough any more: it stays until one is
    moved = again_at_any_cost(state, lane, [*parts, *queue[max(at, begun) + 1 :]], track, now_ns)
    state.put(lane, [*head, own, *moved.entries], moved.track)
    return tuple(state.placement(name) for name in dict.fromkeys(e.request.id for e in (own, *moved.entries)))


def complete(state: AdmissionState, request_id: str, now_ns: int) -> Changes:
    """Its KV was delivered: remove it; later requests may reuse its blocks."""
    lane = state.lane_of[request_id]
    request = next(entry.request for entry in state.queues[lane] if entry.request.id == request_id)
    state.queues[lane] = [entry for entry in state.queues[lane] if entry.request.id != request_id]
    state.leave(request_id)
    state.cache.add(lane, request.block_hashes)
    return ()


def reforecast(state: AdmissionState, now_ns: int) -> Changes:
    """The forecast has changed: everything that has not started is placed again in the current windows."""
    state.rebuild()
    changes: list[Placement] = []
    for lane, queue in enumerate(state.queues):
        begun = max((k + 1 for k, entry in enumerate(queue) if entry.start_ns < now_ns), default=0)
        if begun < len(queue):
            changes += _moved(state, lane, QueueCut(queue[:begun], queue[begun:], queue[begun].before), now_ns)
    return tuple(changes)


def _moved(state: AdmissionState, lane: int, cut: QueueCut, now_ns: int) -> Changes:
    """Places the entries after a cut again."""
    moved = again_at_any_cost(state, lane, cut.rest, cut.track, now_ns)
    state.put(lane, [*cut.head, *moved.entries], moved.track)
    return tuple(state.placement(name) for name in dict.fromkeys(entry.request.id for entry in cut.rest))
