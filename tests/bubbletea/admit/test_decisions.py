"""Single decisions whose answer can be worked out by hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from admission_scenes import COSTS, MS, pattern, state_of

from atlas.errors import AtlasError
from atlas.jit import cache_folder, digest
from bubbletea.admit import fit
from bubbletea.admit.decide import admit, advance, cancel, complete, late, reforecast
from bubbletea.admit.lanes import build_lanes, deal, need_bytes
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest
from bubbletea.windows.free_network import Residual

OPEN = [[(0, 100 * MS)], [(0, 100 * MS)]]


def ask(
    name: str, tokens: int, now: int = 0, deadline: int | None = None, tenant: str = "t", **more: object
) -> PrefillRequest:
    return PrefillRequest(name, tenant, tokens, now, deadline, **more)  # type: ignore[arg-type]


def placed(found: Placement | AdmissionRefusal | None) -> Placement:
    assert isinstance(found, Placement)
    return found


def test_an_idle_worker_takes_a_prompt_as_long_as_its_layers_take() -> None:
    found = placed(admit(state_of(pattern(OPEN, 100 * MS), 1), ask("a", 200), 0))
    work = 6 * COSTS.layer(200, 0) + COSTS.head_ns
    assert found.computed_ns == found.slices[0].start_ns + work


def test_chunks_overlap_on_the_workers_of_a_lane() -> None:
    narrow = placed(admit(state_of(pattern(OPEN, 100 * MS), 1, chunks=(100,)), ask("a", 800), 0))
    wide = placed(admit(state_of(pattern(OPEN, 100 * MS), 2, chunks=(100,)), ask("a", 800), 0))
    first = [s for s in wide.slices if s.worker == wide.lane.workers[0]]
    second = [s for s in wide.slices if s.worker == wide.lane.workers[1]]
    assert first[1].start_ns < second[0].end_ns
    assert wide.computed_ns < 0.7 * narrow.computed_ns


def test_layers_that_do_not_fit_go_on_in_the_next_bubble() -> None:
    one = COSTS.layer(200, 0)
    found = placed(admit(state_of(pattern([[(0, 3 * one + 150_000)]], 50 * MS), 1), ask("a", 200), 0))
    assert [(s.first_layer, s.end_layer) for s in found.slices] == [(0, 3), (3, 6), (6, 6)]
    assert found.slices[1].start_ns - found.slices[0].start_ns == 50 * MS


def test_a_layer_is_cut_to_the_rest_of_a_bubble() -> None:
    one, part, rest = COSTS.layer(200, 0), COSTS.layer(75, 0), COSTS.layer(125, 75)
    found = placed(admit(state_of(pattern([[(0, 2 * one + part + 110_000)]], 50 * MS), 1), ask("a", 200), 0))
    first = [(s.first_layer, s.end_layer, s.first_token, s.end_token) for s in found.slices[:4]]
    assert first == [(0, 2, 0, 200), (2, 3, 0, 75), (2, 3, 75, 200), (3, 4, 0, 200)]
    assert found.ends == (200,)
    assert [s.end_ns - s.start_ns for s in found.slices[:4]] == [2 * one, part, rest, one]
    assert found.slices[2].start_ns - found.slices[0].start_ns == 50 * MS


def test_the_more_urgent_goes_first_and_the_other_meets_its_deadline() -> None:
    state = state_of(pattern([[(0, 100 * MS)]], 100 * MS), 1)
    admit(state, ask("running", 2000), 0)
    patient = placed(admit(state, ask("patient", 1000, deadline=10_000 * MS), 0))
    hurried = placed(admit(state, ask("hurried", 100, deadline=40 * MS), 0))
    assert hurried.delivered_ns < patient.start_ns + COSTS.prompt_ns(100) + 10 * MS
    assert state.placement("patient").start_ns >= hurried.computed_ns


def test_the_last_part_before_a_deadline_is_kept_for_long_prompts() -> None:
    found = {}
    for kept in (0.0, 0.2):
        state = state_of(pattern([[(0, 200 * MS)]], 200 * MS), 1, kept=kept)
        for k in range(36):  # 72 ms of work
            placed(admit(state, ask(f"before{k}", 100, deadline=100 * MS), 0))
        placed(admit(state, ask("long", 1500, deadline=100 * MS), 0))
        found[kept] = admit(state, ask("short", 50, deadline=100 * MS), 0)
    assert isinstance(found[0.0], Placement)
    refusal = found[0.2]
    assert isinstance(refusal, AdmissionRefusal)
    assert refusal.reason == "deadline"
    assert refusal.fits_at_ns == found[0.0].delivered_ns


def test_no_request_is_delayed_past_its_deadline() -> None:
    state = state_of(pattern([[(0, 100 * MS)]], 100 * MS), 1)
    first = placed(admit(state, ask("first", 2000, deadline=30 * MS), 0))
    tight = placed(admit(state, ask("tight", 1000, deadline=first.delivered_ns + 25 * MS), 0))
    found = admit(state, ask("hurried", 2000, deadline=tight.request.deadline_ns - MS), 0)  # type: ignore[operator]
    assert isinstance(found, AdmissionRefusal)
    assert state.placement("tight").delivered_ns <= tight.request.deadline_ns  # type: ignore[operator]


def test_online_work_goes_before_offline_work_that_has_not_started() -> None:
    state = state_of(pattern([[(0, 100 * MS)]], 100 * MS), 1, chunks=(100,))
    for k in range(3):
        assert admit(state, ask(f"bulk{k}", 3000, kind="offline"), 0) is None
    assert [p.request.id for p in advance(state, 0)] == ["bulk0"], "one lane, about to run dry: one is poured"
    now = 10 * MS
    found = placed(admit(state, ask("chat", 100, now), now))
    assert found.start_ns < now + 2 * COSTS.prompt_ns(100)
    rest = state.placement("bulk0")
    assert rest.slices[-1].end_token == 3000
    assert rest.computed_ns > found.computed_ns


def test_tenants_take_turns_in_the_backlog() -> None:
    state = state_of(pattern([[(0, 100 * MS)]], 100 * MS), 1)
    for k in range(6):
        admit(state, ask(f"greedy{k}", 1000, tenant="greedy", kind="offline"), 0)
    for k in range(2):
        admit(state, ask(f"modest{k}", 1000, tenant="modest", kind="offline"), 0)
    order, now = [], 0
    while len(state.backlog):
        order += [p.request.tenant for p in advance(state, now)]
        now += 10 * MS
    assert order[:4].count("modest") == 2


def test_a_prefix_that_was_delivered_is_not_computed_again() -> None:
    state = state_of(pattern(OPEN, 100 * MS), 1)
    hashes = ("x", "y")
    first = placed(admit(state, ask("a", 1100, block_hashes=hashes), 0))
    complete(state, "a", first.delivered_ns)
    now = first.delivered_ns
    again = placed(admit(state, ask("b", 1300, now, block_hashes=hashes), now))
    assert (again.cached_tokens, again.lane) == (1024, first.lane)
    assert again.slices[0].first_token == 1024
    stranger = placed(admit(state, ask("c", 1300, now, block_hashes=("p", "q")), now))
    assert stranger.cached_tokens == 0


def test_kv_waits_for_the_network_that_training_uses() -> None:
    at, rate = 50 * MS, 0.0125 * 1e9 / 1e9  # nothing until half of the period, then 12.5 MB/s
    residual = Residual(
        100 * MS, np.array([0, 3], np.int64), np.array([0, at, 100 * MS], np.int64), np.array([0.0, 0.0, at * rate])
    )
    state = state_of(pattern([[(0, 100 * MS)]], 100 * MS), 1, residual=residual)
    found = placed(admit(state, ask("a", 200), 0))
    kv = 200 * 6 * COSTS.kv_bytes
    assert found.computed_ns < at
    assert found.delivered_ns == pytest.approx(at + kv / rate, rel=1e-3)


def test_two_prompts_that_do_not_fit_together_take_turns_in_memory() -> None:
    room = need_bytes(COSTS, 3, 256, first=True, last=False) + need_bytes(COSTS, 3, 256, first=False, last=True)
    made = pattern(OPEN, 100 * MS, memory_bytes=room)
    state = state_of(made, 2)
    most = state.max_tokens
    first, second = (placed(admit(state, ask(name, most - 10), 0)) for name in ("a", "b"))
    worker = first.lane.workers[0]
    ends = max(s.end_ns for s in first.slices if s.worker == worker)
    begins = min(s.start_ns for s in second.slices if s.worker == worker)
    assert begins > ends, "its KV is copied out first"
    assert isinstance(admit(state, ask("c", most + 1), 0), AdmissionRefusal)


def test_a_late_request_is_placed_after_started_ones() -> None:
    state = state_of(pattern([[(0, 100 * MS)]], 100 * MS), 1, chunks=(100,))
    admit(state, ask("a", 400), 0)
    now = 30 * MS
    changed = late(state, "a", 200, now)
    assert [p.request.id for p in changed] == ["a"]
    assert all(s.start_ns >= now for s in changed[0].slices if s.first_token >= 200)


def test_moved_windows_move_requests_that_have_not_started() -> None:
    state = state_of(pattern([[(0, 20 * MS)]], 100 * MS), 1)
    before = placed(admit(state, ask("a", 100, 30 * MS), 30 * MS))
    opened = np.array([40 * MS], np.int64)
    state.forecast.observe(0, opened, np.array([60 * MS], np.int64))
    after = reforecast(state, 30 * MS)
    assert before.start_ns >= 100 * MS
    assert after[0].start_ns >= 40 * MS


def test_a_cancelled_backlog_request_is_removed() -> None:
    state = state_of(pattern(OPEN, 100 * MS), 1)
    admit(state, ask("a", 100, kind="offline"), 0)
    cancel(state, "a", 0)
    assert advance(state, 0) == ()


def test_layers_are_distributed_by_the_length_of_windows() -> None:
    assert deal(32, [100, 100, 100, 100]) == [8, 8, 8, 8]
    assert deal(32, [300, 100]) == [24, 8]
    assert deal(2, [1, 1, 1]) is None


def test_a_model_that_fits_no_lane_names_the_missing_memory_by_datacenter() -> None:
    need = need_bytes(COSTS, COSTS.model.layers, 256, first=True, last=True)
    some = pattern([[(0, 90 * MS)]] * 2, 100 * MS, memory_bytes=need - 2**29, dcs=2)
    with pytest.raises(
        AtlasError,
        match=r"no copy of the prefill model fits on 1 worker: dc0 lacks 0\.5 GiB on each worker \(1 per copy\), dc1",
    ):
        build_lanes(some, COSTS, split=1, num_ranks=1, chunk=256)
    with pytest.raises(AtlasError, match=r"dc0 lacks 1 GiB on each worker"):  # four bytes per element
        build_lanes(some, COSTS, split=1, num_ranks=1, chunk=256, scale=2.0)
    with pytest.raises(AtlasError, match=r"fits on 2 workers: dc0 has too few workers"):
        build_lanes(some, COSTS, split=2, num_ranks=1, chunk=256)


def test_compiled_code_of_a_changed_source_is_not_loaded(tmp_path: Path) -> None:
    """An index that names a class which was renamed since cannot be unpickled."""
    source = tmp_path / "fit.py"
    digests = set()
    for text in ("class Ground: ...", "class WorkerArrays: ..."):
        source.write_text(text)
        digests.add(digest(source))
    assert len(digests) == 2
    kept = fit.place._cache.cache_path  # type: ignore[attr-defined]
    assert Path(kept).is_relative_to(cache_folder(Path(fit.__file__))) or os.environ.get("NUMBA_CACHE_DIR")
