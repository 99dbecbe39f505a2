"""A sender's paths through its cell: each pulls the next slice when it has room, so each carries what it delivers now.

Slices that a path has held too long are sent again over a path with nothing better to do. Knows hops and slices; how
they travel is the cell's affair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from atlas.errors import WorkerError
from atlas.wan.outbox import Chunk, Outbox
from atlas.wan.slices import Note, NoteKind, Slice

STAGED_SLICES = 3
"""How many slices wait at a relay: enough that it never idles, few enough that a slow one does not hoard. One at first,
one more for each that leaves: whose turn it is not yet keeps nobody busy."""
OVERDUE = 2.0
"""A slice is overdue when it took so many times what its successors need."""
TICK_S = 0.02

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


class Path:
    """One way to the destination. `latency_s` is from handing a slice over to its acknowledgement, smoothed."""

    def __init__(self, index: int, hops: Hops) -> None:
        self.index, self.hops = index, hops
        self.num_staged, self.num_allowed = 0, 1
        self.latency_s = 0.25
        self.delivered_bytes = 0
        self.taken_at: dict[tuple[int, int], float] = {}
        self.changed = threading.Condition()

    def departed(self) -> None:
        """A slice is on the WAN: there is room for another."""
        with self.changed:
            self.num_staged = max(0, self.num_staged - 1)
            self.num_allowed = min(STAGED_SLICES, self.num_allowed + 1)
            self.changed.notify()

    def note_latency(self, slice_id: tuple[int, int], now: float) -> None:
        begin = self.taken_at.pop(slice_id, None)
        if begin is not None:
            self.latency_s += 0.2 * (now - begin - self.latency_s)


class Sender:
    """All slices for one destination and lane, and a puller per path; `hand_over` sends them on their way."""

    def __init__(
        self, outbox: Outbox, lane: int, paths: list[Hops], hand_over: Callable[[Path, Slice, memoryview], None]
    ) -> None:
        self.outbox, self.lane, self._hand_over = outbox, lane, hand_over
        self.paths = [Path(i, hops) for i, hops in enumerate(paths)]
        self.closing = False
        self.threads = [
            threading.Thread(target=self._run, args=(path,), daemon=True, name=f"atlas wan path {path.hops}")
            for path in self.paths
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, path: Path) -> None:
        while not self.closing:
            with path.changed:
                if path.num_staged >= path.num_allowed:
                    path.changed.wait(0.1)
                    continue
            chunk = self._next(path)
            if chunk is not None:
                self._set_out(path, chunk)

    def _next(self, path: Path) -> Chunk | None:
        """What is overdue and comes first; else what comes first; else what somebody else has held too long."""
        head = self.outbox.head_turn
        if head is not None and (chunk := self.outbox.steal(path, OVERDUE * path.latency_s, below_turn=head + 1)):
            return chunk
        wait_s = TICK_S if not self.outbox.is_empty else 0.1
        if chunk := self.outbox.pull(path, path.index, wait_s):
            return chunk
        if self.outbox.is_empty:
            path.num_allowed = 1
        return self.outbox.steal(path, 1.3 * path.latency_s)

    def _set_out(self, path: Path, chunk: Chunk) -> None:
        message = chunk.message
        fields = (message.number, len(message.view), chunk.offset, chunk.num_bytes, message.tag, message.eager)
        with path.changed:
            path.num_staged += 1
            path.taken_at[message.number, chunk.offset] = time.monotonic()
        self._hand_over(path, Slice(path.hops, self.lane, message.turn, *fields, path.index), chunk.payload)

    def heed(self, note: Note) -> None:
        if note.kind == NoteKind.POSTED:
            self.outbox.posted(note.tag)
        elif note.kind == NoteKind.FREED:
            self.outbox.freed(note.amount)
        now = time.monotonic()
        for number, offset, index in note.slices:
            if index >= len(self.paths):
                raise WorkerError(f"a note about path {index} of {len(self.paths)} to {note.hops[-1]}")
            path = self.paths[index]
            if note.kind == NoteKind.DEPARTED:
                path.departed()
                continue
            path.note_latency((number, offset), now)
            chunk = self.outbox.acknowledged(path, number, offset)
            path.delivered_bytes += chunk.num_bytes if chunk else 0

    def watch(self, deadline_s: float) -> None:
        silent_s = (time.monotonic_ns() - self.outbox.last_progress_ns) / 1e9
        if self.outbox.has_unacked and not self.outbox.is_empty and silent_s > deadline_s:
            ways = ", ".join(" > ".join(path.hops) for path in self.paths)
            self.outbox.fail(WorkerError(f"no slice got through for {silent_s:.1f} s on any of {ways}"))

    def close(self) -> None:
        self.closing = True
        self.outbox.close()
        for thread in self.threads:
            thread.join()
