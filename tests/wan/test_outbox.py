"""The WAN queue: order, credit, resending; and that it sends in the order of the simulator's links."""

from __future__ import annotations

import threading
from random import Random

import pytest
from connect_errors import until
from hypothesis import given
from hypothesis import strategies as st

from atlas.errors import WorkerError
from atlas.wan.congestion import inflight_limit
from atlas.wan.congestion.inflight_limit import FIRST_BYTES, InflightLimit
from atlas.wan.transport import inbox
from atlas.wan.transport.base import Handle
from atlas.wan.transport.inbox import ChunkBusyError, Inbox
from atlas.wan.transport.message import Chunk
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.wire import FrameHeader, FrameKind

KB = 1024


def outbox(staging_bytes: int = 1 << 30) -> Outbox:
    box = Outbox(chunk_bytes=64 * KB, num_streams=1)
    box.freed(0, staging_bytes)
    return box


def put(box: Outbox, number: int, num_bytes: int, turn: int = 0) -> Handle:
    handle = Handle(f"message {number}")
    box.put((number, 0, 0, 0), memoryview(bytes(num_bytes)), turn, handle)
    return handle


def pull(box: Outbox, stream: object = "s") -> Chunk | None:
    return box.pull(stream, 0, 0.0)


def test_the_smallest_turn_is_first_and_overtakes_at_a_chunk_boundary() -> None:
    box = outbox()
    put(box, 5, 256 * KB, turn=5)
    first = pull(box)
    put(box, 1, 100, turn=1)
    order = [first] + [pull(box) for _ in range(4)]
    assert [c.message.turn for c in order if c] == [5, 1, 5, 5, 5]
    assert pull(box) is None


def test_chunks_grow_at_the_beginning_of_a_message_and_shrink_towards_its_end() -> None:
    box = Outbox(128 * KB, 2, least_chunk_bytes=32 * KB, first_chunk_bytes=64 * KB)
    box.freed(0, 1 << 30)
    put(box, 1, 1 << 20)
    sizes = []
    while (chunk := pull(box)) is not None:
        sizes.append(chunk.num_bytes)
    top = sizes.index(max(sizes))
    assert sizes[0] == 64 * KB
    assert sizes[:top] == sorted(sizes[:top])
    assert max(sizes) > 100 * KB
    assert sizes[-1] < 48 * KB
    assert sum(sizes) == 1 << 20


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=12), st.integers())
def test_it_sends_in_the_simulators_order_and_loses_nothing(messages, seed: int) -> None:  # type: ignore[no-untyped-def]
    """Whatever is lost or acknowledged in between, every byte of every message is acknowledged once."""
    random, box, handles, out = Random(seed), outbox(), [], []
    for i, (turn, kilobytes) in enumerate(messages):
        handles.append(put(box, i, kilobytes * KB, turn))
    for _ in range(500):
        chunk = pull(box)
        if chunk is not None:
            waiting = [m.turn for m in box._live.values() if not m.all_taken]
            assert all(chunk.message.turn <= turn for turn in waiting)
            out.append(chunk)
        action = random.random()
        if out and (action < 0.5 or chunk is None):
            done = out.pop(random.randrange(len(out)))
            box.acknowledged("s", done.message.number, done.offset)
        elif action < 0.6:
            box.lost("s")
            out.clear()
    while (chunk := pull(box)) is not None:
        box.acknowledged("s", chunk.message.number, chunk.offset)
    for chunk in out:
        box.acknowledged("s", chunk.message.number, chunk.offset)
    assert all(handle.done and handle.error is None for handle in handles)
    assert box.delivered_bytes == sum(kilobytes * KB for _, kilobytes in messages)
    assert box._unacked_bytes == 0


def test_a_message_without_credit_does_not_block_one_with_credit() -> None:
    box = outbox(staging_bytes=400 * KB)
    put(box, 0, 250 * KB, turn=0)
    put(box, 1, 200 * KB, turn=1)
    put(box, 2, 10 * KB, turn=2)
    numbers = [c.message.tag[0] for _ in range(9) if (c := pull(box))]
    assert set(numbers) == {0, 2}
    box.posted((1, 0, 0, 0))
    assert (chunk := pull(box)) is not None
    assert chunk.message.tag[0] == 1
    assert not chunk.message.eager


def test_reserved_credit_is_for_turns_that_overtake() -> None:
    box = outbox(staging_bytes=400 * KB)
    put(box, 9, 290 * KB, turn=9)
    put(box, 10, 50 * KB, turn=10)
    put(box, 1, 50 * KB, turn=1)
    assert {c.message.tag[0] for _ in range(9) if (c := pull(box))} == {9, 1}


def test_a_late_chunk_is_sent_once_on_another_stream() -> None:
    box = outbox()
    handle = put(box, 0, 64 * KB)
    chunk = pull(box, "slow")
    assert chunk is not None
    assert box.steal("fast", 10.0) is None
    again = box.steal("fast", 0.0)
    assert again == chunk
    assert box.steal("fast", 0.0) is None
    assert box.acknowledged("fast", chunk.message.number, 0) is not None
    assert handle.done
    assert box.acknowledged("slow", chunk.message.number, 0) is None
    assert box.lost("slow") == 0


def test_chunks_of_a_paused_stream_are_sent_once_on_another() -> None:
    box = outbox()
    put(box, 0, 64 * KB)
    put(box, 1, 64 * KB)
    stuck, other = pull(box, "paused"), pull(box, "busy")
    assert stuck is not None
    assert other is not None
    assert box.steal("free", 10.0) is None
    assert box.steal("paused", 10.0, paused=["paused"]) is None, "it holds that itself"
    assert box.steal("free", 10.0, paused=["paused"], paused_s=5.0) is None
    assert box.steal("free", 10.0, paused=["paused"]) == stuck
    assert box.steal("third", 10.0, paused=["paused"]) is None, "one is enough"


def test_the_limit_holds_back_what_would_only_queue() -> None:
    box = outbox()
    box.inflight = InflightLimit(0.04)
    put(box, 0, 1 << 20)
    pulled = [c for _ in range(20) if (c := pull(box))]
    assert sum(c.num_bytes for c in pulled) == max(FIRST_BYTES, box.least_chunk_bytes)
    box.acknowledged("s", pulled[0].message.number, pulled[0].offset)
    assert pull(box) is not None


def test_a_slow_path_has_a_second_chunk_in_flight() -> None:
    """One that holds less than a chunk would else idle a round trip after each."""
    narrow = InflightLimit(0.04)
    narrow.learn(200_000, chunk_bytes=16_384)
    assert 16_384 < narrow.limit_bytes < 2 * 16_384
    narrow.learn(1e9, chunk_bytes=16_384)
    assert narrow.limit_bytes == int(1e9 / 8 * (1.25 * 0.04 + 0.012)), "a wide path is bounded as before"


def test_the_limit_finds_what_a_path_holds() -> None:
    """A path of 500 Mbit/s and 40 ms holds 2.5 MB; a queue behind it would hold anything."""
    path, now = InflightLimit(0.04), 0.0
    for _ in range(200):
        queue_s = max(0.0, path.limit_bytes / 62.5e6 - 0.04)
        path.filled()
        for _ in range(5):
            now += 0.012
            path.came_back(0.04 + queue_s, now)
    assert 2.4e6 < path.limit_bytes < 4.0e6


@pytest.mark.parametrize("queue_s", [0.0, 0.03])
def test_a_limit_at_which_nothing_is_late_is_too_low(queue_s: float) -> None:
    """The first of a burst is never late; if the last is not either, the path would take more."""
    path = InflightLimit(0.04)
    path.learn(29e6)
    for burst in range(3):
        path.filled()
        for i in range(10):
            path.came_back(0.04 + queue_s * i / 9, burst + 0.05 + i * 0.012)
        assert path.had_room() == (queue_s == 0.0)
        assert not path.had_room(), "nothing was sent since"


class Cable:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("first_is_late", [False, True])
def test_of_two_copies_of_a_chunk_the_one_that_is_complete_first_counts(
    first_is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "LATE_COPY_S", 0.05 if first_is_late else 60.0)
    box = Inbox("dc1/a", 0, 1 << 20, None)
    header = FrameHeader(FrameKind.CHUNK, number=1, total_bytes=4, num_bytes=4)
    old, new, views = Cable(), Cable(), []
    first = box.claim(old, header)
    assert first is not None
    with pytest.raises(ChunkBusyError):
        box.claim(new, header)
    assert not old.aborted, "the second copy has only begun to arrive"
    thread = threading.Thread(target=lambda: views.append(box.claim(new, header, has_copy=True)))
    thread.start()
    if first_is_late:
        until(lambda: old.aborted)
    else:
        first[:] = b"abcd"
    completed = box.settle(header, filled=not first_is_late)
    thread.join(60)
    if first_is_late:
        assert views[0] is not None
        views[0][:] = b"abcd"
        completed = box.settle(header, filled=True)
    else:
        assert views == [None]
        assert not old.aborted
    assert completed
    box.complete(header)
    assert box.claim(old, header) is None
    handle = Handle()
    box.post((0, 0, 0, 0), None, handle)
    assert handle.wait(60) == b"abcd"


def test_a_peer_that_sends_more_than_allowed_is_disconnected() -> None:
    box = Inbox("dc1/a", 0, 1000, None)
    box.claim(Cable(), FrameHeader(FrameKind.CHUNK, number=1, total_bytes=1900, num_bytes=4))
    with pytest.raises(WorkerError, match="more than the 1000 bytes"):
        box.claim(Cable(), FrameHeader(FrameKind.CHUNK, number=2, total_bytes=1900, num_bytes=4, tag=(1, 0, 0, 0)))


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits so long that a busy machine does not miss them."""
    monkeypatch.setattr(inflight_limit, "MOST_HOLD_S", 1.0)
    monkeypatch.setattr(inflight_limit, "MOST_TURN_S", 1.0)


def _slices_of(*turns: int) -> Outbox:
    """Slices of 1 MB on a path of 60 Mbit/s: a seventh of a second each."""
    outbox = Outbox()
    outbox.freed(0, 1 << 30)
    outbox.inflight = InflightLimit(0.04)
    outbox.inflight.learn(60e6, chunk_bytes=4 << 20)
    for turn in turns:
        outbox.put((turn, 0, 0, 0), memoryview(bytes(1 << 20)), turn, Handle("slice"), whole=True)
    return outbox


@pytest.mark.usefixtures("_patient")
def test_after_a_rest_a_slice_waits_a_moment_for_a_smaller_turn() -> None:
    outbox = _slices_of(7)
    assert outbox.pull("stream", 0, 0.0) is None
    outbox.put((3, 0, 0, 0), memoryview(bytes(1 << 20)), 3, Handle("slice"), whole=True)
    chunk = outbox.pull("stream", 0, 1.0)
    assert chunk is not None
    assert chunk.message.turn == 3


@pytest.mark.usefixtures("_patient")
def test_a_larger_turn_is_sent_only_before_the_path_runs_empty() -> None:
    outbox = _slices_of(3, 7)
    assert outbox.pull("stream", 0, 1.0) is not None
    assert outbox.pull("stream", 0, 0.0) is None  # more of the smaller turn may be on its way
    later = outbox.pull("stream", 0, 1.0)
    assert later is not None
    assert later.message.turn == 7


def test_the_same_turn_does_not_wait_for_itself() -> None:
    outbox = _slices_of(3)
    outbox.put((4, 0, 0, 0), memoryview(bytes(1 << 20)), 3, Handle("slice"), whole=True)
    assert outbox.pull("stream", 0, 1.0) is not None
    assert outbox.pull("stream", 0, 0.0) is not None


@pytest.mark.usefixtures("_patient")
def test_the_next_turn_does_not_wait_after_a_rest() -> None:
    outbox = _slices_of(6)
    done = outbox.pull("stream", 0, 1.0)
    assert done is not None
    outbox.acknowledged("stream", done.message.number, done.offset)
    outbox.put((7, 0, 0, 0), memoryview(bytes(1 << 20)), 7, Handle("slice"), whole=True)
    assert outbox.pull("stream", 0, 0.0) is not None
