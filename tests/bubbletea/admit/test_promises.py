"""What admission must never do, over random windows and requests."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from admission_scenes import COSTS, MODEL, MS, patterns, requests, state_of
from forecast_windows import ahead
from hypothesis import given, settings
from hypothesis import strategies as st

from bubbletea.admit import lanes
from bubbletea.admit.aims import Aims
from bubbletea.admit.decide import admit, advance, cancel, complete, late, reforecast
from bubbletea.admit.lanes import KV_TOKENS, need_bytes
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest, PrefillSlice
from bubbletea.admit.state import AdmissionState
from bubbletea.costs import grain_of
from bubbletea.windows.bubbles import Pattern

SPLITS = st.sampled_from([1, 2])
SHORTER = st.sampled_from([0.0, 0.5, 0.95, 1.0])
AIMS = st.sampled_from([Aims(), Aims(goal_s=0.02, late=0.5)])


def play(state: AdmissionState, arriving: list[PrefillRequest]) -> list[Placement]:
    """Everything let in, as finally placed."""
    for request in arriving:
        admit(state, request, request.arrival_ns)
        advance(state, request.arrival_ns)
    return [state.placement(name) for name in state.lane_of]


def snapshot(state: AdmissionState) -> object:
    """All placements."""
    queues = [
        [(e.request.id, e.first_token, e.end_token, e.slices.tolist(), e.delivered_ns) for e in queue]
        for queue in state.queues
    ]
    return queues, state.tracks.tolist(), len(state.postponed), len(state.backlog)


def fits(state: AdmissionState, piece: PrefillSlice) -> bool:
    return any(
        w.start_ns <= piece.start_ns and piece.end_ns <= w.end_ns
        for w in ahead(state.forecast, piece.worker, piece.start_ns, piece.end_ns)
    )


@settings(max_examples=30)
@given(patterns(), SPLITS, requests(), AIMS)
def test_slices_stay_in_their_windows_and_do_not_overlap(
    made: Pattern, split: int, arriving: list[PrefillRequest], aims: Aims
) -> None:
    state = state_of(made, split, aims=aims)
    by_worker = defaultdict(list)
    for placement in play(state, arriving):
        for piece in placement.slices:
            assert fits(state, piece)
            assert piece.start_ns >= placement.request.arrival_ns
            by_worker[piece.worker].append(piece)
    for pieces in by_worker.values():
        pieces.sort()
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(pieces))


@settings(max_examples=30)
@given(patterns(), SPLITS, requests(), AIMS)
def test_layers_and_chunks_come_in_order_and_all_of_them(
    made: Pattern, split: int, arriving: list[PrefillRequest], aims: Aims
) -> None:
    state = state_of(made, split, aims=aims)
    for placement in play(state, arriving):
        lane, starts = placement.lane, (placement.cached_tokens, *placement.ends)
        assert placement.ends[-1] == placement.request.prompt_tokens
        done = {first: (0, first, 0) for first in starts[:-1]}
        """By chunk: layer and token that come next, and the end of what came before."""
        for piece in placement.slices:
            at = bisect_right(starts, piece.first_token) - 1
            layer, token, free_ns = done[starts[at]]
            assert piece.start_ns >= free_ns, "a layer starts when the one before has ended"
            assert piece.first_layer == layer, "layers of a chunk come one after the other"
            first, end = lane.layers(lane.workers.index(piece.worker))
            assert first <= piece.first_layer <= piece.end_layer <= end
            if piece.end_layer > layer:
                assert piece.first_token == token, "parts of a layer come one after the other"
                whole = (piece.first_token, piece.end_token) == (starts[at], starts[at + 1])
                assert whole or piece.end_layer == layer + 1, "only one layer at a time is cut"
            if piece.end_token == starts[at + 1]:
                done[starts[at]] = piece.end_layer, starts[at], piece.end_ns
            else:
                assert (piece.end_token - starts[at]) % grain_of(max(np.diff(starts))) == 0
                done[starts[at]] = layer, piece.end_token, piece.end_ns
        assert {(layer, token - first) for first, (layer, token, _) in done.items()} == {(lane.num_layers, 0)}
        assert placement.delivered_ns >= placement.computed_ns >= max(s.end_ns for s in placement.slices)


@settings(max_examples=30)
@given(patterns(), SPLITS, requests(), st.integers(1600, 4000))
def test_memory_is_never_exceeded(made: Pattern, split: int, arriving: list[PrefillRequest], tokens: int) -> None:
    share = MODEL.layers // split
    ends = need_bytes(COSTS, share, 256, first=True, last=split == 1)
    room = ends + (tokens - KV_TOKENS) * share * COSTS.kv_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "KV_TOKENS", 0)
        state = state_of(replace(made, memory_bytes=np.full(made.num_workers, room, np.int64)), split)
    play(state, arriving)
    for lane, queue in enumerate(state.queues):
        for worker, depth in zip(state.lanes[lane].workers, np.diff(state.first_layer[lane]), strict=True):
            held = []
            for entry in queue:
                own = entry.slices[entry.slices[:, 0] == worker]
                size = entry.request.prompt_tokens * int(depth) * COSTS.kv_bytes
                held += [(int(own[0, 1]), size), (int(own[-1, 2]), -size)]
            peak = max(itertools.accumulate(size for _, size in sorted(held)), default=0)
            assert peak <= state.arrays.room_bytes[worker]


@settings(max_examples=30)
@given(patterns(), SPLITS, requests(), AIMS)
def test_admitted_requests_keep_their_deadline(
    made: Pattern, split: int, arriving: list[PrefillRequest], aims: Aims
) -> None:
    for placement in play(state_of(made, split, aims=aims), arriving):
        if placement.request.deadline_ns is not None and placement.request.kind == "online":
            assert placement.delivered_ns <= placement.request.deadline_ns


@settings(max_examples=30)
@given(patterns(), SPLITS, requests(), st.integers(1, 1500), st.sampled_from([None, 40, 5000]))
def test_an_immediately_cancelled_request_changes_nothing(
    made: Pattern, split: int, arriving: list[PrefillRequest], tokens: int, patience: int | None
) -> None:
    state = state_of(made, split)
    play(state, arriving)
    now = arriving[-1].arrival_ns + MS
    before = snapshot(state)
    deadline = None if patience is None else now + patience * MS
    found = admit(state, PrefillRequest("new", "c", tokens, now, deadline), now)
    if isinstance(found, Placement):
        cancel(state, "new", now)
    assert snapshot(state) == before


@settings(max_examples=30)
@given(patterns(), SPLITS, requests(), st.integers(1, 1500))
def test_a_refused_request_fits_at_its_retry_time(
    made: Pattern, split: int, arriving: list[PrefillRequest], tokens: int
) -> None:
    state = state_of(made, split)
    play(state, [r for r in arriving if r.kind == "online"])
    now = arriving[-1].arrival_ns
    found = admit(state, PrefillRequest("new", "a", tokens, now, now + MS), now)
    if isinstance(found, AdmissionRefusal) and found.reason == "deadline":
        assert found.fits_at_ns is not None
        assert found.retry_at_ns is not None
        assert found.fits_at_ns > now + MS
        again = admit(state, PrefillRequest("again", "a", tokens, now, found.fits_at_ns), now)
        assert isinstance(again, Placement)
        assert again.delivered_ns <= found.fits_at_ns


@settings(max_examples=30)
@given(patterns(), SPLITS, requests(), st.integers(0, 40))
def test_late_requests_are_placed_again(made: Pattern, split: int, arriving: list[PrefillRequest], when: int) -> None:
    state = state_of(made, split)
    play(state, arriving)
    now = arriving[-1].arrival_ns + when * MS
    for name in list(state.lane_of):
        placement = state.placement(name)
        if placement.delivered_ns <= now:
            complete(state, name, now)
        elif placement.start_ns < now:
            late(state, name, placement.slices[0].first_token, now)
            moved = state.placement(name)
            assert all(s.start_ns >= now for s in moved.slices)
    assert all(fits(state, s) for name in state.lane_of for s in state.placement(name).slices if s.start_ns >= now)


@settings(max_examples=30)
@given(patterns(), SPLITS, requests(6000), st.lists(st.tuples(st.integers(0, 60), SHORTER), min_size=1, max_size=4))
def test_windows_that_shrink_lose_no_request(
    made: Pattern, split: int, arriving: list[PrefillRequest], periods: list[tuple[int, float]]
) -> None:
    """As when workers restart: waits that were learnt become too short for a layer, on some lanes or on all."""
    state = state_of(made, split)
    play(state, arriving)
    admitted, now = {*state.lane_of, *(r.id for r in state.backlog)}, arriving[-1].arrival_ns
    phase = np.repeat(made.phase_ns, np.diff(made.ptr))
    for gap, shorter in periods:
        now += gap * MS
        late_ns = (shorter * (made.end_ns - made.start_ns)).astype(np.int64)
        state.forecast.observe(now, now + phase + made.start_ns + late_ns, now + phase + made.end_ns)
        reforecast(state, now)
        for name in list(state.lane_of):
            late(state, name, state.placement(name).cached_tokens, now)
        advance(state, now)
        for lane, queue in enumerate(state.queues):
            assert {entry.request.id for entry in queue} == {n for n, at in state.lane_of.items() if at == lane}
        assert {*state.lane_of, *(r.id for r in state.backlog)} == admitted
    for name in list(state.lane_of):
        cancel(state, name, now)
        if name in state.lane_of:
            complete(state, name, now)
    assert not state.lane_of
