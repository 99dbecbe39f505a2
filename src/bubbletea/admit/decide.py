"""The decisions: let a request in or say when it would fit; and what an event does to what was promised.

    online     tried on the lanes that would be done first, and on one that holds its longest prefix; on each it goes
               behind everything more urgent (earliest deadline first), at a chunk's end if need be, and only if all
               that it pushes back still makes its own deadline
    offline    waits in the backlog; poured in when a lane is about to run dry, least served tenant first
    late       online, but does not fit in time: where the operator's `Aims` allow it, taken up when bubbles are plenty

What was let in keeps its deadline unless a window breaks its word (`late`).
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
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest
from bubbletea.admit.state import QueueEntry, State, TokenRange, urgency

TRIED = 3
"""Lanes on which a placement is worked out exactly, of those that look best."""
LOOKED = 6
"""Where there is a goal: lanes looked at exactly before one is chosen, of the quick and of the slow."""
LOOSE = 0.9
"""Of what is left until a deadline: a lane whose estimate is longer is not in time, since estimates are short."""
POUR_NS = 50_000_000
"""Offline work is placed on a lane that runs dry within this: early enough to reach the worker, late enough not to
stand in anybody's way."""
AHEAD_NS = 10_000_000_000
"""Of accelerator time: a tenant that had this much more than another who waits gets no further ahead."""

Changes = tuple[Placement, ...]
"""Placements that replace the earlier ones of their requests."""


class Trial(NamedTuple):
    """A lane with the request on it: what it would hold then, and its Track."""

    lane: int
    own: QueueEntry
    entries: list[QueueEntry]
    moved: list[QueueEntry]
    track: Ints


# ---- requests ----------------------------------------------------------------------------------------------------
def admit(state: State, request: PrefillRequest, now_ns: int) -> Placement | AdmissionRefusal | None:
    """Place an online request or refuse it at once. None: it was offline and joined the backlog, or may be late and was
    postponed."""
    refusal = refused_by_length(state, request)
    if refusal is not None:
        return refusal
    if request.kind == "offline":
        state.backlog.push(request)
        return None
    trial = quote(state, request, now_ns)
    if trial is None:
        return AdmissionRefusal(request, "too-long")
    delivered, deadline = trial.own.delivered_ns, request.deadline_ns
    waits = trial.own.start_ns > now_ns + POUR_NS
    by = None if deadline is None else deadline - (_kept_ns(state, trial, deadline - now_ns) if waits else 0)
    if by is not None and delivered > by:
        if state.postponed.takes(request):
            state.postponed.push(request)
            state.postponed.count()
            return None
        return AdmissionRefusal(request, "deadline", delivered, now_ns + delivered - by)
    if waits and state.shares.ahead(request.tenant, state.tenants()) > AHEAD_NS:
        return AdmissionRefusal(request, "share", delivered, trial.own.start_ns)
    state.postponed.count()
    return _commit(state, trial)


def restore(state: State, request: PrefillRequest, now_ns: int, lane: int | None = None) -> Placement | None:
    """Place a request that was let in before, on a lane or where it is delivered first, whatever its deadline is by
    now: nobody pays for it twice. None when no window takes a layer of it."""
    if request.prompt_tokens > state.max_tokens:
        return None
    if lane is None:
        trial = quote(state, request, now_ns)
    else:
        tries = ((chunk, in_turn) for in_turn in (True, False) for chunk in state.chunks)
        trials = (_tried(state, lane, request, chunk, now_ns, in_turn) for chunk, in_turn in tries)
        trial = next((found for found in trials if found is not None), None)
    return None if trial is None else _commit(state, trial, charge=False)


def _kept_ns(state: State, trial: Trial, patience_ns: int) -> int:
    """How long before its deadline a request that waits must be done: a prompt that runs for longer than what is kept
    has all of its patience, a short one leaves the end of it to those."""
    runs_ns = trial.own.delivered_ns - trial.own.start_ns
    return max(0, round(state.kept * patience_ns) - runs_ns)


def refused_by_length(state: State, request: PrefillRequest) -> AdmissionRefusal | None:
    """What the number of tokens alone decides."""
    if not state.lanes:
        return AdmissionRefusal(request, "no-lane")
    return AdmissionRefusal(request, "too-long") if request.prompt_tokens > state.max_tokens else None


def quote(state: State, request: PrefillRequest, now_ns: int) -> Trial | None:
    """The placement that delivers first, or by the goal; the state left as it is. None when no window takes even a
    layer of it."""
    best: Trial | None = None
    choices = _candidates(state, request, now_ns)
    for in_turn in (True, False):
        for lane, chunks in choices:
            for chunk in chunks:
                found = _tried(state, lane, request, chunk, now_ns, in_turn)
                if found is not None and (best is None or found.own.delivered_ns < best.own.delivered_ns):
                    best = found
                if found is not None and found.own.start_ns > now_ns + POUR_NS:
                    break  # where there is a queue, smaller chunks would only waste time
        if best is not None:
            return best
    return None


Choice = tuple[int, Sequence[int]]
"""A lane, and sizes of chunks to try on it."""


def _candidates(state: State, request: PrefillRequest, now_ns: int) -> list[Choice]:
    """Lanes worth an exact look: those that would be done first, or what the goal says; and one with the longest
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


def _aimed(state: State, request: PrefillRequest, now_ns: int) -> list[Choice]:
    """The lane that delivers first if that is within the goal. Where none is, but some are in time: the slowest that
    is. Lanes are taken as if nobody on them would make way."""
    assert state.aims.goal_s is not None
    lanes, when = _ranked(state, request, now_ns, len(state.leaders))
    found = _delivered(state, request, lanes[:LOOKED], now_ns)
    by_ns = request.deadline_ns or 0
    if len(found) and now_ns + round(state.aims.goal_s * 1e9) < found[0][2] <= by_ns:
        in_time = int(np.searchsorted(when, now_ns + LOOSE * (by_ns - now_ns), side="right"))
        slow = _delivered(state, request, lanes[max(LOOKED, in_time - LOOKED) : in_time], now_ns)
        found = [one for one in slow if one[2] <= by_ns][-1:] or found
    return [(lane, (chunk,)) for lane, chunk, _ in found[:1]]


def _delivered(state: State, request: PrefillRequest, lanes: Ints, now_ns: int) -> list[list[int]]:
    """(lane, chunk, when) exactly, first delivered first."""
    where = (state.tracks, state.workers, state.first_layer, lanes)
    out, chunks = np.empty((len(lanes), 3), np.int64), np.array(state.chunks, np.int64)
    times = (now_ns, now_ns + POUR_NS)
    count = fit.delivered_on(state.ground, *where, request.prompt_tokens, chunks, *times, out)
    found: list[list[int]] = out[:count].tolist()
    return found


def _ranked(state: State, request: PrefillRequest, now_ns: int, count: int) -> tuple[Ints, NDArray[np.float64]]:
    """So many of the lanes that would be done first, best first, and when by a quick estimate."""
    best, when = np.empty(count, np.int64), np.empty(count)
    where = (state.tracks, state.workers, state.first_layer, state.leaders)
    tokens = (0, request.prompt_tokens)
    found = fit.best_lanes(state.ground, *where, tokens, state.chunks[0], now_ns, best, when)
    return best[:found], when[:found]


def _tried(state: State, lane: int, request: PrefillRequest, chunk: int, now_ns: int, in_turn: bool) -> Trial | None:
    """The request on one lane, in its turn or behind all others; None where somebody would miss a deadline."""
    cached = state.cache.tokens(lane, request.block_hashes, request.prompt_tokens - 1)
    wanted = TokenRange(
        request, cached, request.prompt_tokens, cached, _even(request.prompt_tokens - cached, chunk), now_ns
    )
    behind = QueueCut(state.queues[lane], [], state.track(lane))
    cut = cut_for(state, lane, urgency(request), now_ns) if in_turn else behind
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


def _commit(state: State, trial: Trial, *, charge: bool = True) -> Placement:
    request = trial.own.request
    state.put(trial.lane, trial.entries, trial.track)
    state.enter(request, trial.lane)
    if charge:
        state.shares.charge(request.tenant, float((trial.own.slices[:, 2] - trial.own.slices[:, 1]).sum()))
    return state.placement(request.id)


# ---- events ------------------------------------------------------------------------------------------------------
def advance(state: State, now_ns: int) -> Changes:
    """Take up those who are late where bubbles are plenty; pour offline work onto lanes that are about to run dry."""
    poured, left = _taken_up(state, now_ns), list[PrefillRequest]()
    while len(state.backlog) and (lane := state.emptiest(now_ns + POUR_NS)) is not None:
        request = state.backlog.pop()
        assert request is not None
        sizes = (_tried(state, lane, request, chunk, now_ns, in_turn=False) for chunk in state.chunks)
        trial = next((found for found in sizes if found is not None), None) or quote(state, request, now_ns)
        if trial is None:
            left.append(request)
        else:
            poured.append(_commit(state, trial))
    for request in left:  # no window takes a layer of it now: windows move
        state.backlog.push(request)
    return tuple(poured)


def _taken_up(state: State, now_ns: int) -> list[Placement]:
    """As offline work: everybody else goes before."""
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


def _plenty(state: State, trial: Trial, now_ns: int) -> bool:
    """Whether a lane runs a prompt at nearly the speed it would have without training."""
    lane = state.lanes[trial.lane]
    alone_ns = state.costs[lane.dc].prompt_ns(trial.own.request.prompt_tokens) / len(lane.workers)
    return trial.own.delivered_ns <= now_ns + PLENTY * alone_ns


def cancel(state: State, request_id: str, now_ns: int) -> Changes:
    """Release what has not begun; what has begun stays until it is complete. Others move up."""
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


def withdraw(state: State, request_id: str, now_ns: int) -> None:
    """Take a request out, begun or not: nothing of it runs any more."""
    cancel(state, request_id, now_ns)
    lane = state.lane_of.get(request_id)
    if lane is not None:
        state.queues[lane] = [entry for entry in state.queues[lane] if entry.request.id != request_id]
        state.leave(request_id)


def late(state: State, request_id: str, token: int, now_ns: int) -> Changes:
    """A request got no further than `token`: the rest of it is placed anew, behind whatever has begun. Nothing changes
    where no window is long enough for it."""
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
    head = [*queue[:at], *done, *queue[at + 1 : begun + 1]]
    own, track = state.fitted(lane, rest, track, now_ns)
    if own is None:
        return ()  # no window takes a layer of it any more: it stays until one does
    moved = again_at_any_cost(state, lane, queue[max(at, begun) + 1 :], track, now_ns)
    state.put(lane, [*head, own, *moved.entries], moved.track)
    return tuple(state.placement(name) for name in dict.fromkeys(e.request.id for e in (own, *moved.entries)))


def complete(state: State, request_id: str, now_ns: int) -> Changes:
    """Its KV was delivered: it leaves, and its blocks may be reused."""
    lane = state.lane_of[request_id]
    request = next(entry.request for entry in state.queues[lane] if entry.request.id == request_id)
    state.queues[lane] = [entry for entry in state.queues[lane] if entry.request.id != request_id]
    state.leave(request_id)
    state.cache.add(lane, request.block_hashes)
    return ()


def reforecast(state: State, now_ns: int) -> Changes:
    """The forecast has moved: everything that has not begun is placed anew in the windows as they are now."""
    state.rebuild()
    changes: list[Placement] = []
    for lane, queue in enumerate(state.queues):
        begun = max((k + 1 for k, entry in enumerate(queue) if entry.start_ns < now_ns), default=0)
        if begun < len(queue):
            changes += _moved(state, lane, QueueCut(queue[:begun], queue[begun:], queue[begun].before), now_ns)
    return tuple(changes)


def _moved(state: State, lane: int, cut: QueueCut, now_ns: int) -> Changes:
    """What comes behind a cut, placed anew."""
    moved = again_at_any_cost(state, lane, cut.rest, cut.track, now_ns)
    state.put(lane, [*cut.head, *moved.entries], moved.track)
    return tuple(state.placement(name) for name in dict.fromkeys(entry.request.id for entry in cut.rest))
