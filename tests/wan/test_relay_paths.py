"""Which path of a cell gets which slice, with simulated paths."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

import pytest

from atlas.wan.cell_relay import paths
from atlas.wan.cell_relay.paths import MOST_HOLD_S, RelayPath, SliceSender
from atlas.wan.cell_relay.slices import NoteKind, RelayNote, RelaySlice
from atlas.wan.transport import outbox as outbox_module
from atlas.wan.transport.base import Handle
from atlas.wan.transport.outbox import Outbox

SLICE_BYTES = 32 * 1024
HOPS = [("a", "x"), ("a", "b", "y", "x")]


class VirtualClock:
    """Stands in for `time` in a module: it advances only when someone waits. Events happen at their time."""

    def __init__(self) -> None:
        self.now, self._events, self._order = 1000.0, list[tuple[float, int, Callable[[], None]]](), itertools.count()

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def wait(self, timeout_s: float) -> bool:
        """Until the next event, or for this long."""
        end = self.now + timeout_s
        if not self._events or self._events[0][0] > end:
            self.now = end
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True

    # as a condition
    def notify(self) -> None: ...

    def __enter__(self) -> VirtualClock:
        return self

    def __exit__(self, *_: object) -> None: ...


class SteppedOutbox(Outbox):
    clock: VirtualClock

    def wait_ready(self, timeout_s: float) -> bool:
        return super().wait_ready(0.0) or (self.clock.wait(timeout_s) and super().wait_ready(0.0))


class SteppedSender(SliceSender):
    """Without a thread: `send` runs until a transfer is delivered."""

    def _run(self) -> None: ...

    def send(self, number: int, num_slices: int) -> None:
        handle = Handle("transfer")
        handle.on_done(lambda _: setattr(self, "closing", True))
        self.outbox.put((number, 0, 0, 0), memoryview(bytes(num_slices * SLICE_BYTES)), number, handle)
        self.closing = False
        self._share_out()


class Ways:
    """Slices take `slice_s` to leave, one after the other, and arrive `latency_s` later."""

    def __init__(self, clock: VirtualClock, slice_s: float, latencies_s: list[float]) -> None:
        self.clock, self.slice_s, self.latencies_s = clock, slice_s, latencies_s
        self.free_at = [0.0 for _ in latencies_s]
        self.first_way: dict[int, int] = {}
        """By offset: the path that was given a slice first."""
        self.sender: SliceSender | None = None

    def hand_over(self, path: RelayPath, one: RelaySlice, payload: memoryview) -> None:
        self.first_way.setdefault(one.offset, path.index)
        start = max(self.free_at[path.index], self.clock.now)
        self.free_at[path.index] = start + self.slice_s
        self._later(start + self.slice_s, path, one, NoteKind.DEPARTED)
        self._later(start + self.slice_s + self.latencies_s[path.index], path, one, NoteKind.ACK)

    def _later(self, at: float, path: RelayPath, one: RelaySlice, kind: NoteKind) -> None:
        def notify() -> None:
            assert self.sender is not None
            self.sender.handle(RelayNote(kind, path.hops, 0, ((one.number, one.offset, path.index),)))

        self.clock.at(at, notify)


def test_the_last_slices_are_sent_on_the_path_where_they_arrive_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(paths, "time", clock)
    monkeypatch.setattr(outbox_module, "time", clock)
    ways, outbox = Ways(clock, 0.01, [0.05, 0.25]), SteppedOutbox(SLICE_BYTES, 2, SLICE_BYTES)
    outbox.clock = clock
    outbox.freed(0, 1 << 30)
    ways.sender = sender = SteppedSender(outbox, 0, HOPS, ways.hand_over)
    sender._changed = clock  # type: ignore[assignment]
    for number in range(2):  # the first measures the latency of each path
        ways.first_way.clear()
        sender.send(number, 40)
    chosen = list(ways.first_way.values())
    assert len(chosen) == 40
    # Both carry as much; with ten fewer on the later one both finish together. Without the rule it would be 20 each.
    assert 5 <= chosen.count(1) <= 10


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
        while len({index for index, _ in handed}) < 2 and time.monotonic() < begin + 60:
            time.sleep(0.001)
    finally:
        sender.close()
    first = dict(reversed(handed))
    assert handed[0][0] == 1, "the relay's may go at once: the relay waits itself"
    assert first[0] >= begin + MOST_HOLD_S
