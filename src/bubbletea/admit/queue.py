"""Cuts a lane's queue where a request is inserted or removed, and places the entries after the cut again.

Cuts are between requests, or at the end of a chunk of the running one. Pure functions: nothing is changed in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from atlas.ir.program import Ints
from bubbletea.admit.fit import NEVER
from bubbletea.admit.state import LEAD_NS, AdmissionState, QueueEntry


class QueueCut(NamedTuple):
    """What stays, what may move, and the lane's Track between them."""

    head: list[QueueEntry]
    rest: list[QueueEntry]
    track: Ints


class PlacedQueue(NamedTuple):
    entries: list[QueueEntry]
    track: Ints


def cut_for(state: AdmissionState, lane: int, urgency: tuple[bool, float], now_ns: int) -> QueueCut:
    """Before everything that has not started and is less urgent."""
    queue, soon_ns = state.queues[lane], now_ns + LEAD_NS
    at = len(queue)
    while at and queue[at - 1].start_ns >= soon_ns and queue[at - 1].request.urgency > urgency:
        at -= 1
    last = queue[at - 1] if at else None
    if last and last.request.urgency > urgency and (parts := _parted(state, lane, last, soon_ns, now_ns)):
        begun, rest, track = parts
        return QueueCut([*queue[: at - 1], begun], [rest, *queue[at:]], track)
    return QueueCut(queue[:at], queue[at:], queue[at].before if at < len(queue) else state.track(lane))


def cut_at(state: AdmissionState, lane: int, request_id: str, now_ns: int) -> QueueCut:
    """The queue without the part of one request that has not started. Two parts of another request that it had
    separated are joined."""
    queue = state.queues[lane]
    at = next(k for k, entry in enumerate(queue) if entry.request.id == request_id)
    entry, others = queue[at], [entry for entry in queue[at + 1 :] if entry.request.id != request_id]
    if entry.start_ns >= now_ns:
        return _joined(queue[:at], others, entry.before)
    parts = _parted(state, lane, entry, now_ns, now_ns)
    if parts is None:  # all of it has started
        return QueueCut(queue, [], state.track(lane))
    return QueueCut([*queue[:at], parts[0]], others, parts[2])


def again(state: AdmissionState, lane: int, rest: list[QueueEntry], track: Ints, now_ns: int) -> PlacedQueue | None:
    """Places entries again after a Track, in their order; None if one would miss its deadline."""
    entries = []
    for entry in rest:
        moved, track = _refitted(state, lane, entry, track, now_ns)
        if moved is None or moved.delivered_ns > _promised_ns(entry):
            return None
        entries.append(moved)
    return PlacedQueue(entries, track)


def again_at_any_cost(
    state: AdmissionState, lane: int, rest: list[QueueEntry], track: Ints, now_ns: int
) -> PlacedQueue:
    """As `again`, but deadlines may be missed.

    Windows change: all of them may now be too short for a layer of an entry. It then keeps its placement, and is tried
    again whenever its lane is."""
    entries = []
    for entry in rest:
        moved, track = _refitted(state, lane, entry, track, now_ns)
        entries.append(moved or entry)
    return PlacedQueue(entries, track)


def _refitted(
    state: AdmissionState, lane: int, entry: QueueEntry, track: Ints, now_ns: int
) -> tuple[QueueEntry | None, Ints]:
    floor_ns = max(now_ns, entry.floor_ns) if entry.start_ns >= now_ns else entry.floor_ns
    return state.fitted(lane, entry.wanted, track, floor_ns)


def _promised_ns(entry: QueueEntry) -> int:
    """A new request must not delay it beyond this: its deadline, or its current placement if it is late already."""
    deadline = entry.request.deadline_ns
    if deadline is None:
        return NEVER
    if entry.delivered_ns > deadline:
        return entry.delivered_ns if entry.request.kind == "online" else NEVER
    return deadline


def _parted(
    state: AdmissionState, lane: int, entry: QueueEntry, soon_ns: int, now_ns: int
) -> tuple[QueueEntry, QueueEntry, Ints] | None:
    """Splits an entry after the last chunk that has started: (started, rest, Track between); None if all has."""
    token = entry.kept(soon_ns)
    if not entry.first_token < token < entry.end_token:
        return None
    begun, track = state.fitted(lane, entry.wanted._replace(end_token=token), entry.before, entry.floor_ns)
    if begun is None:
        return None
    rest = replace(entry, first_token=token, cached=0, ready_ns=now_ns, floor_ns=now_ns)
    return begun, rest, track


def _joined(head: list[QueueEntry], rest: list[QueueEntry], track: Ints) -> QueueCut:
    """Joins neighbours that are parts of one request."""
    if head and rest and head[-1].request.id == rest[0].request.id and head[-1].end_token == rest[0].first_token:
        whole = replace(head[-1], end_token=rest[0].end_token)
        return QueueCut(head[:-1], [whole, *rest[1:]], head[-1].before)
    return QueueCut(head, rest, track)
