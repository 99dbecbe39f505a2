"""Which path of a cell gets which slice, with simulated paths."""

from __future__ import annotations

import threading
import time

from atlas.wan.cell_relay.paths import MOST_HOLD_S, RelayPath, SliceSender
from atlas.wan.cell_relay.slices import Note, NoteKind, RelaySlice
from atlas.wan.transport.base import Handle
from atlas.wan.transport.outbox import Outbox

SLICE_BYTES = 32 * 1024
HOPS = [("a", "x"), ("a", "b", "y", "x")]


class Ways:
    """Slices take `slice_s` to leave, one after the other, and arrive `latency_s` later."""

    def __init__(self, slice_s: float, latencies_s: list[float]) -> None:
        self.slice_s, self.latencies_s = slice_s, latencies_s
        self.free_at = [0.0 for _ in latencies_s]
        self.first_way: dict[int, int] = {}
        """By offset: the path that was given a slice first."""
        self.sender: SliceSender | None = None

    def hand_over(self, path: RelayPath, one: RelaySlice, payload: memoryview) -> None:
        self.first_way.setdefault(one.offset, path.index)
        start = max(self.free_at[path.index], time.monotonic())
        self.free_at[path.index] = start + self.slice_s
        self._later(start + self.slice_s, path, one, NoteKind.DEPARTED)
        self._later(start + self.slice_s + self.latencies_s[path.index], path, one, NoteKind.ACK)

    def _later(self, at: float, path: RelayPath, one: RelaySlice, kind: NoteKind) -> None:
        def notify() -> None:
            assert self.sender is not None
            self.sender.handle(Note(kind, path.hops, 0, ((one.number, one.offset, path.index),)))

        timer = threading.Timer(max(0.0, at - time.monotonic()), notify)
        timer.daemon = True
        timer.start()


def test_the_last_slices_are_sent_on_the_path_where_they_arrive_first() -> None:
    ways = Ways(0.01, [0.05, 0.25])
    outbox = Outbox(SLICE_BYTES, 2, SLICE_BYTES)
    outbox.freed(0, 1 << 30)
    ways.sender = sender = SliceSender(outbox, 0, HOPS, ways.hand_over)
    try:
        for number in range(2):  # the first measures the latency of each path
            ways.first_way.clear()
            handle = Handle("transfer")
            outbox.put((number, 0, 0, 0), memoryview(bytes(40 * SLICE_BYTES)), number, handle)
            handle.wait(10.0)
    finally:
        sender.close()
    chosen = list(ways.first_way.values())
    assert len(chosen) == 40
    # Both carry as much; with ten fewer on the later one both finish together. Without the rule it would be 20 each.
    assert 4 < chosen.count(1) < 18


def test_the_own_path_waits_a_moment_for_a_smaller_turn_of_others() -> None:
    handed: list[tuple[int, float]] = []
    outbox = Outbox(SLICE_BYTES, 2, SLICE_BYTES)
    outbox.freed(0, 1 << 30)
    sender = SliceSender(
        outbox, 0, HOPS, lambda path, _, __: handed.append((path.index, time.monotonic())), lambda: 0.1
    )
    try:
        begin = time.monotonic()
        outbox.put((0, 0, 0, 0), memoryview(bytes(4 * SLICE_BYTES)), 0, Handle("transfer"))
        while len({index for index, _ in handed}) < 2 and time.monotonic() < begin + 5:
            time.sleep(0.001)
    finally:
        sender.close()
    first = dict(reversed(handed))
    assert handed[0][0] == 1, "the relay's may go at once: the relay waits itself"
    assert first[0] >= begin + MOST_HOLD_S
