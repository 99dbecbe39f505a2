"""On a slow path what waits waits in the outbox: chunks leave at the path's pace, slices go over all paths alike, and
small receives are announced only where credit is scarce."""

from __future__ import annotations

import time

import pytest

from atlas.wan.cell_relay import paths
from atlas.wan.cell_relay.paths import STAGED_SLICES, RelayPath, SliceSender
from atlas.wan.cell_relay.slices import NoteKind, RelayNote, RelaySlice
from atlas.wan.congestion.inflight_limit import LEAD_S, PACE, InflightLimit
from atlas.wan.transport.base import Handle, Tag
from atlas.wan.transport.inbox import FULL, SMALL, Inbox
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.wire import FrameHeader, FrameKind

KB = 1024
SLOW_BPS = 8e6


def paced(rate_bps: float = SLOW_BPS) -> InflightLimit:
    limit = InflightLimit(0.02)
    limit.learn(rate_bps, 16 * KB)
    return limit


def test_chunks_of_a_slow_path_leave_one_after_the_other() -> None:
    limit, took_s = paced(), 16 * KB * 8 / SLOW_BPS / PACE
    assert limit.pause_s(100.0) <= 0
    limit.left(16 * KB, 100.0)
    assert limit.pause_s(100.0) == pytest.approx(took_s - LEAD_S)
    assert limit.pause_s(100.0 + took_s) <= 0
    limit.left(16 * KB, 100.0 + took_s - LEAD_S)  # ahead of the first by the lead: it counts from the first's end
    assert limit.pause_s(100.0 + took_s) == pytest.approx(took_s - LEAD_S)


def test_a_fast_path_is_not_paced() -> None:
    limit = paced(500e6)
    limit.left(1 << 20, 100.0)
    assert limit.pause_s(100.0) <= 0


def test_a_quick_chunk_raises_a_pace_that_is_too_slow() -> None:
    limit = paced(2e6)
    limit.came_back(0.02 + 16 * KB * 8 / SLOW_BPS, 100.0, 16 * KB)
    assert limit.pace_bps == pytest.approx(PACE * SLOW_BPS, rel=0.01)


def test_a_quick_chunk_counts_for_a_while_and_on_slow_paths_only() -> None:
    limit, fast = paced(2e6), paced(500e6)
    limit.came_back(0.02 + 16 * KB * 8 / SLOW_BPS, 100.0, 16 * KB)
    for at in (105.0, 111.0, 112.0):
        limit.came_back(0.2, at, 16 * KB)
        assert limit.rate_bps == pytest.approx(SLOW_BPS, rel=0.01)
    for at in (122.0, 133.0):
        limit.came_back(0.2, at, 16 * KB)
    assert limit.rate_bps == 2e6
    fast.came_back(0.0201, 100.0, 1 << 20)
    assert fast.rate_bps == 500e6


def test_a_slower_path_is_found_by_its_acknowledgements_while_everything_is_late() -> None:
    limit, now = InflightLimit(0.04), 0.0
    limit.learn(100e6)

    def carry(rate_bps: float, took_s: float, seconds: float) -> None:
        nonlocal now
        end = now + seconds
        while now < end:
            limit.came_back(took_s, now := now + 62_500 * 8 / rate_bps, 62_500)

    carry(100e6, 0.05, 1.0)
    carry(100e6, 0.09, 2.0)
    assert limit.fallen_bps() is None, "late by its own queue, at its full rate"
    carry(25e6, 0.05, 1.0)
    assert limit.fallen_bps() is None, "not late: there was no more to send"
    carry(25e6, 0.2, 0.3)
    assert limit.fallen_bps() is None, "not for long enough"
    carry(25e6, 0.2, 0.4)
    assert limit.fallen_bps() == pytest.approx(25e6, rel=0.25)
    assert limit.fallen_bps() is None, "returned once"
    now += 10.0
    carry(25e6, 0.2, 0.3)
    assert limit.fallen_bps() is None, "nothing was in flight for ten seconds"


def test_the_outbox_keeps_the_pace() -> None:
    box = Outbox(chunk_bytes=16 * KB, num_streams=1)
    box.freed(0, 1 << 20)
    box.inflight = paced()
    box.put((0, 0, 0, 0), memoryview(bytes(64 * KB)), 0, Handle())
    began = time.monotonic()
    assert box.pull("s", 0, 0.0) is not None
    early = box.pull("s", 0, 0.0)
    assert early is None or time.monotonic() - began > 0.008  # a busy host may have waited for us
    assert early is not None or box.pull("s", 0, 60.0) is not None
    assert time.monotonic() - began > 0.008


def sender(handed: list[tuple[int, int]], num_paths: int = 3) -> SliceSender:
    """Notes (path, offset) of what it hands over."""
    box = Outbox(16 * KB, num_paths)
    box.freed(0, 1 << 20)

    def hand_over(path: RelayPath, one: RelaySlice, payload: memoryview) -> None:
        handed.append((path.index, one.offset))

    return SliceSender(box, 0, [("a", f"b{i}", "c") for i in range(num_paths)], hand_over)


def until(handed: list[tuple[int, int]], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(handed) < count and time.monotonic() < deadline:
        time.sleep(0.002)


def test_paths_take_slices_in_turn_and_a_full_path_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "LEAST_TURN_S", 60.0)  # no slice is sent again on a busy host
    handed: list[tuple[int, int]] = []
    source = sender(handed)
    try:
        source.outbox.put((0, 0, 0, 0), memoryview(bytes(16 * KB * 11)), 0, Handle())
        until(handed, 3)
        time.sleep(0.03)
        assert [path for path, _ in handed] == [1, 2, 0], "one each at first"
        source.departed(source.paths[1], [(1, handed[0][1])])
        until(handed, 5)
        time.sleep(0.03)
        assert [path for path, _ in handed[3:]] == [1, 1], "one more for each that departs"
    finally:
        source.close()


def test_a_slow_path_gets_few_slices() -> None:
    path, now = RelayPath(0, ("a", "b")), 1.0
    assert path.num_allowed == 1
    path.departed([(9, 0)], now)
    assert path.num_allowed == 2
    for gap_s, allowed in ((0.01, STAGED_SLICES), (0.042, 1), (0.01, STAGED_SLICES)):
        for i in range(3):
            path.departed([(i, 0)], now := now + gap_s)
        path.departed([(9, 0)], now := now + 1.0)
        assert path.num_allowed == allowed, "others had their turn for a second"
    path.departed([(10, 0), (11, 0), (12, 0)], now + 0.03)
    assert path.num_allowed == STAGED_SLICES, "one note about three"
    path.rest()
    assert path.num_allowed == 1


def test_a_lost_slice_is_sent_again_but_not_one_that_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paths, "LEAST_TURN_S", 60.0)  # a busy host may take a quarter of a second by itself
    handed: list[tuple[int, int]] = []
    source = sender(handed, 2)
    try:
        for path in source.paths:
            path.latency_s = 0.02
        source.outbox.put((0, 0, 0, 0), memoryview(bytes(16 * KB * 2)), 0, Handle())
        until(handed, 2)
        time.sleep(0.1)
        assert len(handed) == 2
        assert 0.1 > 1.3 * 0.02
        source.departed(source.paths[1], [(1, handed[0][1])])
        source.departed(source.paths[0], [(1, handed[1][1])])
        until(handed, 4)
        assert set(handed[2:4]) == {(0, handed[0][1]), (1, handed[1][1])}
        source.handle(RelayNote(NoteKind.ACK, ("a", "c"), 0, ((1, handed[0][1], 0), (1, handed[1][1], 0))))
        assert source.outbox.is_empty
    finally:
        source.close()


def test_small_receives_are_announced_only_when_credit_is_scarce() -> None:
    announced: list[Tag] = []
    inbox = Inbox("a", 0, 1 << 20, None)
    inbox.on_posted = announced.append
    small, large = int(SMALL * (1 << 20)), int(FULL * (1 << 20)) + 1
    inbox.post((1, 0, 0, 0), memoryview(bytearray(small)), Handle())
    assert announced == []
    inbox.post((2, 0, 0, 0), memoryview(bytearray(large)), Handle())
    assert announced == [(2, 0, 0, 0)]

    class Stream:
        def abort(self) -> None:
            raise AssertionError

    header = FrameHeader(FrameKind.CHUNK, 0, 0, 1, large, 0, large, (9, 0, 0, 0), True)
    assert inbox.claim(Stream(), header) is not None
    inbox.settle(header, filled=True)
    assert (1, 0, 0, 0) in announced
    inbox.post((3, 0, 0, 0), memoryview(bytearray(small)), Handle())
    assert (3, 0, 0, 0) in announced
