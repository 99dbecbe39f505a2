"""A sender's paths through its cell: those with room take slices in turn, so each carries what it delivers now.

Slices that a path has had on the WAN too long are sent again over a path with nothing better to do. Knows hops and
slices; how they travel is the cell's affair.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from atlas.errors import WorkerError
from atlas.wan.cell_relay.slices import Note, NoteKind, RelaySlice
from atlas.wan.transport.message import Chunk
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.wire import refusal_text

FIRST_STAGED, STAGED_SLICES, STAGED_S = 1, 3, 0.03
"""How many slices wait at a relay, and for how long in all: enough that it never idles, little enough that a slow one
does not hoard. At first just one, and one more for each that departs: those of all senders arrive together, and the
fewer there are, the sooner does a relay know whose turn it is."""
OVERDUE = 2.0
"""A slice is overdue when it took so many times what others need, from when it left for the WAN."""
LEAST_TURN_S, TURN = 0.25, 3.0
"""How long one may wait for its turn at a relay before that counts as having left; or so many times what slices need
from there."""
TICK_S, IDLE_S = 0.02, 0.1
HOLD, LEAST_HOLD_S, MOST_HOLD_S = 0.1, 0.002, 0.006
"""Over what a slice takes on a slow path: so long we wait before we carry one of our own. What others sent at the same
moment, with a smaller turn, takes that long to reach us; the relays' own wait (`flight.py`) comes too late for those
which were slow to set out."""
SPAN_S = 0.05
"""Over which it is counted how fast slices leave."""

Hops = tuple[str, ...]


def hops_of(source: str, destination: str, pairs: Mapping[str, str]) -> list[Hops]:
    """The paths from source to destination, one through each node of the source's cell: `pairs` maps every one of
    them to its counterpart beyond the WAN. The source's own comes first."""
    nodes = sorted(pairs, key=lambda node: node != source)
    paths = []
    for node in nodes:
        hops = [source, node, pairs[node], destination]
        paths.append(tuple(name for i, name in enumerate(hops) if i == 0 or name != hops[i - 1]))
    return paths


class RelayPath:
    """One way to the destination. `latency_s` is from a slice's departure to its acknowledgement, smoothed."""

    def __init__(self, index: int, hops: Hops) -> None:
        self.index, self.hops = index, hops
        self.num_staged, self._most_staged = 0, FIRST_STAGED
        self.latency_s, self._is_known = 0.25, False
        self.delivered_bytes = self.num_handed = 0
        self._gaps_s = deque[float](maxlen=3)
        self._departed_at = 0.0
        self.left_at: dict[tuple[int, int], float] = {}
        """Of what it was handed and has not acknowledged: when it departed, or will have at the latest."""

    @property
    def has_room(self) -> bool:
        return self.num_staged < self.num_allowed

    @property
    def num_allowed(self) -> int:
        """By how far apart its last slices departed; one longer gap, when others had their turn, does not count."""
        if len(self._gaps_s) < 3:
            return self._most_staged
        return max(1, min(self._most_staged, round(STAGED_S / max(sorted(self._gaps_s)[1], 0.001))))

    def rest(self) -> None:
        """There is nothing to send: the next transfer begins as the first one did."""
        self._most_staged = FIRST_STAGED

    def departed(self, slice_ids: list[tuple[int, int]], now: float) -> None:
        """These have, since the last ones did."""
        num = len(slice_ids)
        self._gaps_s.extend([(now - self._departed_at) / num] * num)
        self._departed_at = now
        self._most_staged = min(STAGED_SLICES, self._most_staged + num)
        self.num_staged = max(0, self.num_staged - num)
        for slice_id in slice_ids:
            if slice_id in self.left_at:
                self.left_at[slice_id] = now

    def note_latency(self, slice_id: tuple[int, int], now: float) -> None:
        begin = self.left_at.pop(slice_id, None)
        if begin is not None:
            gain = 0.2 if self._is_known else 1.0
            self.latency_s += gain * (max(0.0, now - begin) - self.latency_s)
            self._is_known = True


class SliceSender:
    """All slices for one destination and lane; `hand_over` sends them on their way. The first path is our own;
    `slice_s` says what a slice takes on it, zero where it is too fast to wait for others' turns."""

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
        """When slices were handed over lately, and how long they were."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"atlas wan slices of {paths[0]}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._share_out()
        except Exception as error:  # a bug, or a path that was never connected: without this thread nothing leaves
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
                free = sorted((path for path in self.paths if path.has_room), key=self._order)
                if not free:
                    self._changed.wait(IDLE_S)
                    continue
                if is_ready and (late_s := self._late_s()):
                    free = [path for path in free if path.latency_s < late_s]
                    if not free:
                        self._changed.wait(TICK_S)
                        continue
            if is_ready and free[0] is self.paths[0] and (slice_s := self._slice_s()):
                hold_s = max(LEAST_HOLD_S, min(MOST_HOLD_S, HOLD * slice_s))
                time.sleep(max(0.0, self.outbox.head_since + hold_s - time.monotonic()))
            found = ((path, chunk) for path in free if (chunk := self._next(path, is_ready=is_ready)) is not None)
            if (first := next(found, None)) is not None:
                self._set_out(*first)
            has_stolen = first is not None and not is_ready

    def _late_s(self) -> float:
        """The latency of paths on which the rest of a transfer would arrive later than on the others; zero: of none.
        They differ by what queues on them."""
        begin = time.monotonic() - SPAN_S
        while self._handed and self._handed[0][0] < begin:
            self._handed.popleft()
        bytes_per_s = sum(num_bytes for _, num_bytes in self._handed) / SPAN_S
        left_bytes = self.outbox.head_bytes
        return min(path.latency_s for path in self.paths) + left_bytes / bytes_per_s if bytes_per_s else 0.0

    def _order(self, path: RelayPath) -> tuple[int, bool]:
        """Who was given least comes first, our own path after the others."""
        return path.num_handed, path is self.paths[0]

    def _next(self, path: RelayPath, *, is_ready: bool) -> Chunk | None:
        """What is overdue and comes first; else what comes first; else what somebody else has held too long."""
        if not is_ready:
            return self.outbox.steal(path, 1.3 * path.latency_s)
        head = self.outbox.head_turn
        if head is not None and (chunk := self.outbox.steal(path, OVERDUE * path.latency_s, below_turn=head + 1)):
            return chunk
        return self.outbox.pull(path, path.index, 0.0)

    def _set_out(self, path: RelayPath, chunk: Chunk) -> None:
        message = chunk.message
        fields = (message.number, len(message.view), chunk.offset, chunk.num_bytes, message.tag, message.eager)
        at = time.monotonic() + max(LEAST_TURN_S, TURN * path.latency_s)
        with self._changed:
            path.num_staged += 1
            # One that had no room for long does not get all that it missed.
            path.num_handed = max(path.num_handed + 1, max(other.num_handed for other in self.paths) - 1)
            path.left_at[message.number, chunk.offset] = at
            self._handed.append((time.monotonic(), chunk.num_bytes))
        self.outbox.count_from(message.number, chunk.offset, at)
        self._hand_over(path, RelaySlice(path.hops, self.lane, message.turn, *fields, path.index), chunk.payload)

    def departed(self, path: RelayPath, slice_ids: list[tuple[int, int]]) -> None:
        """They are on the WAN: there is room for others, and from now on it is the path that takes its time."""
        now = time.monotonic()
        with self._changed:
            path.departed(slice_ids, now)
            self._changed.notify()
        for number, offset in slice_ids:
            self.outbox.count_from(number, offset, now)

    def heed(self, note: Note) -> None:
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
                raise WorkerError(f"a note about path {index} of {len(self.paths)} to {note.hops[-1]}")
            if note.kind == NoteKind.DEPARTED:
                departed.setdefault(index, []).append((number, offset))
                continue
            path = self.paths[index]
            with self._changed:
                path.note_latency((number, offset), now)
            chunk = self.outbox.acknowledged(path, number, offset)
            path.delivered_bytes += chunk.num_bytes if chunk else 0
        for index, slice_ids in departed.items():
            self.departed(self.paths[index], slice_ids)

    def watch(self, deadline_s: float) -> None:
        silent_s = (time.monotonic_ns() - self.outbox.last_progress_ns) / 1e9
        if self.outbox.has_unacked and not self.outbox.is_empty and silent_s > deadline_s:
            ways = ", ".join(" > ".join(path.hops) for path in self.paths)
            self.outbox.fail(WorkerError(f"no slice got through for {silent_s:.1f} s on any of {ways}"))

    def close(self) -> None:
        self.closing = True
        self.outbox.close()
        self._thread.join()
