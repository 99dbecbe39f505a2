"""A sender's paths through its cell. Paths with room take slices in turn, so each carries what it delivers now.

Slices that a path has had on the WAN for too long are sent again on a path that has nothing else to send. Knows hops
and slices; the cell sends them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from atlas.errors import WorkerError
from atlas.wan.cell_relay.slices import NoteKind, RelayNote, RelaySlice
from atlas.wan.transport.message import Chunk
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.wire import refusal_text

FIRST_STAGED, STAGED_SLICES, STAGED_S = 1, 3, 0.03
"""Slices of one sender at a relay: at first, at most, and the time that they may take there. Enough that the relay does
not idle, few enough that a slow relay does not collect slices that others could send. At first only one, and one more
for each that departs: slices of all senders arrive at the same time, and the fewer there are, the sooner the relay
knows which turn is first."""
OVERDUE = 2.0
"""A slice is overdue after this many times the latency of the path that would send it again."""
IDLE_OVERDUE = 1.3
"""The same if nothing else is to be sent."""
LEAST_TURN_S, TURN = 0.25, 3.0
"""How long a slice may wait for its turn at a relay before it counts as departed: so many times the latency from there,
at least this long."""
TICK_S, IDLE_S = 0.02, 0.1
"""How often overdue slices are looked for, and how often an idle sender wakes up."""
HOLD, LEAST_HOLD_S, MOST_HOLD_S = 0.1, 0.002, 0.006
"""On a slow own path, a slice waits so many times what it takes there: slices of a smaller turn that others sent at the
same moment take that long to arrive. The relay's own wait (`inflight_limit`) ends too early for those that left
late."""
SPAN_S = 0.05
"""Time over which the rate of departing slices is measured."""
FIRST_LATENCY_S, LATENCY_GAIN = 0.25, 0.2
"""The latency of a path before it is measured, and the weight of a new sample."""
NUM_GAPS, MIN_GAP_S = 3, 0.001
"""Departures by whose median gap a path's staging is chosen. One longer gap, for other turns, does not count."""

Hops = tuple[str, ...]


def hops_of(source: str, destination: str, pairs: Mapping[str, str]) -> list[Hops]:
    """The paths from source to destination, one through each node of the source's cell. `pairs` maps these nodes to
    their counterparts on the other side of the WAN. The source's own path is first."""
    nodes = sorted(pairs, key=lambda node: node != source)
    paths = []
    for node in nodes:
        hops = [source, node, pairs[node], destination]
        paths.append(tuple(name for i, name in enumerate(hops) if i == 0 or name != hops[i - 1]))
    return paths


class RelayPath:
    """One path to the destination. `latency_s` is from a slice's departure to its acknowledgement, smoothed."""

    def __init__(self, index: int, hops: Hops) -> None:
        self.index, self.hops = index, hops
        self.num_staged, self._most_staged = 0, FIRST_STAGED
        self.latency_s, self._is_known = FIRST_LATENCY_S, False
        self.delivered_bytes = self.num_handed = 0
        self._gaps_s = deque[float](maxlen=NUM_GAPS)
        self._departed_at = 0.0
        self.left_at: dict[tuple[int, int], float] = {}
        """By unacknowledged slice: when it departed, or the latest time at which it will have."""

    @property
    def num_allowed(self) -> int:
        """Slices that may be at its relay."""
        if len(self._gaps_s) < NUM_GAPS:
            return self._most_staged
        median_s = max(sorted(self._gaps_s)[NUM_GAPS // 2], MIN_GAP_S)
        return max(1, min(self._most_staged, round(STAGED_S / median_s)))

    def rest(self) -> None:
        """There is nothing to send: the next transfer begins as the first one did."""
        self._most_staged = FIRST_STAGED

    def departed(self, slice_ids: list[tuple[int, int]], now: float) -> None:
        num = len(slice_ids)
        self._gaps_s.extend([(now - self._departed_at) / num] * num)
        self._departed_at = now
        self._most_staged = min(STAGED_SLICES, self._most_staged + num)
        self.num_staged = max(0, self.num_staged - num)
        for slice_id in slice_ids:
            if slice_id in self.left_at:
                self.left_at[slice_id] = now

    def acknowledged(self, slice_id: tuple[int, int], now: float) -> None:
        begin = self.left_at.pop(slice_id, None)
        if begin is not None:
            gain = LATENCY_GAIN if self._is_known else 1.0
            self.latency_s += gain * (max(0.0, now - begin) - self.latency_s)
            self._is_known = True


class SliceSender:
    """All slices for one destination and lane; `hand_over` sends them. The first path is the node's own. `slice_s`:
    what a slice takes on it, zero if it is too fast to wait for other turns."""

    def __init__(
        self,
        outbox: Outbox,
        lane: int,
        paths: list[Hops],
        hand_over: Callable[[RelayPath, RelaySlice, memoryview], None],
        slice_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.outbox, self.lane, self._hand_over, self._slice_s = outbox, lane, hand_over, slice_s
        self.paths = [RelayPath(i, hops) for i, hops in enumerate(paths)]
        self.closing = False
        self._handed = deque[tuple[float, int]]()
        """Recent slices: when they were handed over, and their bytes."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"atlas wan slices of {paths[0]}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._share_out()
        except Exception as error:  # a bug, or a path that was never connected: without this thread nothing is sent
            self.outbox.fail(WorkerError(f"slices to {self.paths[0].hops[-1]} stopped: {error}"))
            raise

    def _share_out(self) -> None:
        has_stolen = False
        while not self.closing:
            is_idle = self.outbox.is_empty
            for path in self.paths if is_idle else ():
                path.rest()
            is_ready = self.outbox.wait_ready(0.0 if has_stolen else IDLE_S if is_idle else TICK_S)
            with self._changed:
                free = sorted((path for path in self.paths if path.num_staged < path.num_allowed), key=self._order)
                if not free:
                    self._changed.wait(IDLE_S)
                    continue
                if is_ready and (late_s := self._late_s()):
                    free = [path for path in free if path.latency_s < late_s]
                    if not free:
                        self._changed.wait(TICK_S)
                        continue
            if is_ready and free[0] is self.paths[0]:
                self._hold()
            found = ((path, chunk) for path in free if (chunk := self._next(path, is_ready=is_ready)) is not None)
            if (first := next(found, None)) is not None:
                self._send(*first)
            has_stolen = first is not None and not is_ready

    def _hold(self) -> None:
        """Before a slice for the node's own path, if it is slow."""
        if (slice_s := self._slice_s()) and (head := self.outbox.head) is not None:
            hold_s = max(LEAST_HOLD_S, min(MOST_HOLD_S, HOLD * slice_s))
            time.sleep(max(0.0, head.put_at + hold_s - time.monotonic()))

    def _late_s(self) -> float:
        """The latency from which on a path would deliver the rest of a transfer later than the others; zero: none
        would. Latencies differ by what is queued on the paths."""
        begin = time.monotonic() - SPAN_S
        while self._handed and self._handed[0][0] < begin:
            self._handed.popleft()
        bytes_per_s = sum(num_bytes for _, num_bytes in self._handed) / SPAN_S
        head = self.outbox.head
        if not bytes_per_s or head is None:
            return 0.0
        return min(path.latency_s for path in self.paths) + head.left_bytes / bytes_per_s

    def _order(self, path: RelayPath) -> tuple[int, bool]:
        """The path with the fewest slices so far first, and the node's own path after the others."""
        return path.num_handed, path is self.paths[0]

    def _next(self, path: RelayPath, *, is_ready: bool) -> Chunk | None:
        """An overdue slice of a turn that is not later than the head's, else the next slice; if nothing is ready, one
        that another path has had for too long."""
        if not is_ready:
            return self.outbox.steal(path, IDLE_OVERDUE * path.latency_s)
        head = self.outbox.head
        if head and (chunk := self.outbox.steal(path, OVERDUE * path.latency_s, below_turn=head.turn + 1)):
            return chunk
        return self.outbox.pull(path, path.index, 0.0)

    def _send(self, path: RelayPath, chunk: Chunk) -> None:
        number, now = chunk.message.number, time.monotonic()
        at = now + max(LEAST_TURN_S, TURN * path.latency_s)
        with self._changed:
            path.num_staged += 1
            # A path that could take nothing for long does not get all that it missed.
            path.num_handed = max(path.num_handed + 1, max(other.num_handed for other in self.paths) - 1)
            path.left_at[number, chunk.offset] = at
            self._handed.append((now, chunk.num_bytes))
        self.outbox.count_from(number, chunk.offset, at)
        one = RelaySlice(path.hops, self.lane, chunk.message.turn, *chunk.fields, path.index)
        self._hand_over(path, one, chunk.payload)

    def departed(self, path: RelayPath, slice_ids: list[tuple[int, int]]) -> None:
        """The slices are on the WAN: the path may take others, and their latency is counted from now on."""
        now = time.monotonic()
        with self._changed:
            path.departed(slice_ids, now)
            self._changed.notify()
        for number, offset in slice_ids:
            self.outbox.count_from(number, offset, now)

    def handle(self, note: RelayNote) -> None:
        if note.kind == NoteKind.POSTED:
            self.outbox.posted(note.tag)
        elif note.kind == NoteKind.FREED:
            self.outbox.freed(note.amount)
        elif note.kind == NoteKind.FAILED:
            for number, _, _ in note.slices:
                self.outbox.refused(number, f"{note.hops[-1]} refuses it: {refusal_text(note.amount)}")
            return
        now, departed = time.monotonic(), dict[int, list[tuple[int, int]]]()
        for number, offset, index in note.slices:
            if index >= len(self.paths):
                raise WorkerError(f"a note about path {index} to {note.hops[-1]}: paths are 0 to {len(self.paths) - 1}")
            if note.kind == NoteKind.DEPARTED:
                departed.setdefault(index, []).append((number, offset))
                continue
            path = self.paths[index]
            with self._changed:
                path.acknowledged((number, offset), now)
            chunk = self.outbox.acknowledged(path, number, offset)
            path.delivered_bytes += chunk.num_bytes if chunk else 0
        for index, slice_ids in departed.items():
            self.departed(self.paths[index], slice_ids)

    def watch(self, deadline_s: float) -> None:
        """Fails everything if nothing was delivered until the deadline."""
        silent_s = (time.monotonic_ns() - self.outbox.last_progress_ns) / 1e9
        if self.outbox.has_unacked and not self.outbox.is_empty and silent_s > deadline_s:
            paths = ", ".join(" > ".join(path.hops) for path in self.paths)
            self.outbox.fail(WorkerError(f"no slice was delivered for {silent_s:.1f} s on any of {paths}"))

    def close(self) -> None:
        self.closing = True
        self.outbox.close()
        self._thread.join()
