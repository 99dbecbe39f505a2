"""Temporal bandwidth sharing: a node sends with the WAN capacity of all nodes of its cell.

A transfer is cut into slices. Each path (through a node of the cell, over the WAN to its counterpart) pulls the
next slice when it has room, so each carries what it delivers now; a relay serves its WAN queue by the same turns as
everybody, and never idles. Slices that a path has held too long are sent again over a path with nothing better
to do; the destination takes each once. Nobody coordinates: the turns follow from the queues. A `Transport` on top
of an `Endpoint`; knows no tensors and no sockets.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from atlas.errors import WorkerError
from atlas.wan.endpoint import Endpoint
from atlas.wan.greet import Address
from atlas.wan.inbox import Inbox
from atlas.wan.outbox import Chunk, Outbox
from atlas.wan.slices import MAX_PAIRS, Note, NoteKind, Slice, pack_note, pack_slice, unpack_note, unpack_slice
from atlas.wan.transport import Buffer, Handle, Key, Tag, Transport, view_of, writable_view_of
from atlas.wan.wire import FrameKind, Header

SLICE_LANE, NOTE_LANE = 64, 63
"""Lane n of a cell travels on lane SLICE_LANE + n of its endpoints."""
SLICE_BYTES = 128 * 1024
STAGED_SLICES = 3
"""How many slices wait at a relay: enough that it never idles, few enough that a slow one does not hoard."""
OVERDUE = 2.0
"""A slice is overdue when it took so many times what its successors need."""
TICK_S = 0.02
MOMENT_S = 0.003

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
        self.num_staged = 0
        self.latency_s = 0.25
        self.delivered_bytes = 0
        self.taken_at: dict[tuple[int, int], float] = {}
        self.changed = threading.Condition()

    def departed(self, num_slices: int = 1) -> None:
        """They are on the WAN: there is room for others."""
        with self.changed:
            self.num_staged = max(0, self.num_staged - num_slices)
            self.changed.notify()

    def note_latency(self, slice_id: tuple[int, int], now: float) -> None:
        begin = self.taken_at.pop(slice_id, None)
        if begin is not None:
            self.latency_s += 0.2 * (now - begin - self.latency_s)


class Sender:
    """All slices for one destination and lane, and a puller per path."""

    def __init__(self, cell: Cell, destination: str, lane: int, paths: list[Hops]) -> None:
        self.cell, self.destination, self.lane = cell, destination, lane
        self.outbox = Outbox(chunk_bytes=cell.slice_bytes, num_streams=len(paths))
        self.outbox.freed(0, cell.endpoint.settings.staging_bytes)
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
                if path.num_staged >= STAGED_SLICES:
                    path.changed.wait(0.1)
                    continue
            chunk = self._next(path)
            if chunk is not None:
                self._hand_over(path, chunk)

    def _next(self, path: Path) -> Chunk | None:
        """What is overdue and comes first; else what comes first; else what somebody else has held too long."""
        head = self.outbox.head_turn
        if head is not None and (chunk := self.outbox.steal(path, OVERDUE * path.latency_s, below_turn=head + 1)):
            return chunk
        wait_s = TICK_S if not self.outbox.is_empty else 0.1
        if chunk := self.outbox.pull(path, path.index, wait_s):
            return chunk
        return self.outbox.steal(path, 1.3 * path.latency_s)

    def _hand_over(self, path: Path, chunk: Chunk) -> None:
        message = chunk.message
        fields = (message.number, len(message.view), chunk.offset, chunk.num_bytes, message.tag, message.eager)
        one = Slice(path.hops, self.lane, message.turn, *fields)
        with path.changed:
            path.num_staged += 1
            path.taken_at[message.number, chunk.offset] = time.monotonic()
        direct = len(path.hops) == 2 or path.hops[1] not in self.cell.pairs
        self.cell.forward(one, pack_slice(one, chunk.payload), path.departed if direct else None)

    def heed(self, note: Note) -> None:
        path = next((p for p in self.paths if p.hops == note.hops), None)
        if path is None:
            return
        if note.kind == NoteKind.DEPARTED:
            path.departed(len(note.slices))
        elif note.kind == NoteKind.ACK:
            for slice_id in note.slices:
                path.note_latency(slice_id, time.monotonic())
                chunk = self.outbox.acknowledged(path, *slice_id)
                path.delivered_bytes += chunk.num_bytes if chunk else 0
        elif note.kind == NoteKind.POSTED:
            self.outbox.posted(note.tag)
        elif note.kind == NoteKind.FREED:
            self.outbox.freed(note.amount)

    def watch(self) -> None:
        silent_s = (time.monotonic_ns() - self.outbox.last_progress_ns) / 1e9
        if self.outbox.has_unacked and not self.outbox.is_empty and silent_s > self.cell.endpoint.settings.deadline_s:
            ways = ", ".join(" > ".join(path.hops) for path in self.paths)
            self.outbox.fail(WorkerError(f"no slice got through for {silent_s:.1f} s on any of {ways}"))

    def close(self) -> None:
        self.closing = True
        self.outbox.close()
        for thread in self.threads:
            thread.join()


class Cell(Transport):
    """`pairs`: the nodes of this node's cell and their counterparts beyond the WAN. Takes over lanes of `endpoint`;
    then `connect` to the cell and to the counterpart."""

    def __init__(
        self, endpoint: Endpoint, pairs: Mapping[str, str], lanes: Iterable[int] = (0,), slice_bytes: int = SLICE_BYTES
    ) -> None:
        self.endpoint, self.pairs, self.name, self.slice_bytes = endpoint, dict(pairs), endpoint.name, slice_bytes
        self._lock = threading.Lock()
        self._senders: dict[tuple[str, int], Sender] = {}
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._counter = itertools.count(1)
        self._closing = threading.Event()
        self._lanes = list(lanes)
        for lane in self._lanes:
            endpoint.consume(SLICE_LANE + lane, self._slice)
        endpoint.consume(NOTE_LANE, self._note)
        self._pending: dict[tuple[NoteKind, Hops, int], list[tuple[int, int]]] = {}
        self._pending_changed = threading.Condition()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._watch, self._write_notes)]
        for thread in self._threads:
            thread.name = f"atlas wan cell {self.name}"
            thread.start()

    def connect(self, peers: dict[str, Address], timeout_s: float = 30.0) -> None:
        """To the other nodes of the cell and to the counterpart beyond the WAN."""
        self.endpoint.connect(peers, [NOTE_LANE], timeout_s, light=True)
        self.endpoint.connect(peers, [SLICE_LANE + lane for lane in self._lanes], timeout_s)

    def send(self, key: Key, buffer: Buffer, turn: int = 0, what: str = "") -> Handle:
        handle = Handle(what or f"{key} to {key.peer}")
        self._sender(key.peer, key.lane).outbox.put(key.tag, view_of(buffer), turn, handle)
        return handle

    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        handle = Handle(what or f"{key} from {key.peer}")
        view = None if buffer is None else writable_view_of(buffer)
        self._inbox(key.peer, key.lane).post(key.tag, view, handle)
        return handle

    def close(self, timeout_s: float = 5.0) -> None:
        """Leaves the endpoint open: others may still relay through us."""
        deadline = time.monotonic() + timeout_s
        for sender in list(self._senders.values()):
            sender.outbox.drain(max(0.0, deadline - time.monotonic()))
        self._closing.set()
        with self._pending_changed:
            self._pending_changed.notify()
        for thread in self._threads:
            thread.join()
        for sender in self._senders.values():
            sender.close()
            sender.outbox.fail(WorkerError(f"{self.name} was closed"))
        for inbox in self._inboxes.values():
            inbox.fail(WorkerError(f"{self.name} was closed"))

    def paths(self, destination: str, lane: int = 0) -> list[Path]:
        """For measurements: what each path has delivered."""
        return self._sender(destination, lane).paths

    # ---- slices onward, notes back -----------------------------------------------------------------------------
    def forward(self, one: Slice, data: bytearray | memoryview, on_start: Callable[[], None] | None = None) -> None:
        """To the next hop, at the slice's turn."""
        following = one.hops[one.hops.index(self.name) + 1]
        key = Key(following, SLICE_LANE + one.lane, (next(self._counter), 0, 0, 0))
        self.endpoint.send(key, data, one.turn, on_start=on_start, whole=True)

    def _slice(self, key: Key, data: memoryview) -> None:
        one, payload = unpack_slice(data)
        if self.name not in one.hops or one.hops[0] == self.name:
            raise WorkerError(f"a slice for {one.hops} came to {self.name}")
        if one.hops[-1] == self.name:
            self._deliver(one, payload)
        elif self.name in self.pairs and one.hops[1] == self.name:
            self.forward(one, data, lambda: self._soon(NoteKind.DEPARTED, one))
        else:
            self.forward(one, data)

    def _deliver(self, one: Slice, payload: memoryview) -> None:
        inbox = self._inbox(one.hops[0], one.lane, one.hops)
        fields = (one.number, one.total_bytes, one.offset, one.num_bytes, one.tag, one.eager)
        header, completed = Header(FrameKind.CHUNK, one.lane, self.endpoint.epoch, *fields), False
        with self._lock:
            view = inbox.claim(_NEVER, header)
            if view is not None:
                view[:] = payload
                completed = inbox.settle(header, filled=True)
        self._soon(NoteKind.ACK, one)
        if completed:
            inbox.complete(header)

    def _soon(self, kind: NoteKind, one: Slice) -> None:
        """A note per slice costs more than the slice: what happens within a moment goes in one."""
        with self._pending_changed:
            self._pending.setdefault((kind, one.hops, one.lane), []).append((one.number, one.offset))
            self._pending_changed.notify()

    def _write_notes(self) -> None:
        while not self._closing.is_set():
            with self._pending_changed:
                if not self._pending and not self._closing.is_set():
                    self._pending_changed.wait(0.2)
                    continue
            time.sleep(MOMENT_S)
            with self._pending_changed:
                pending, self._pending = self._pending, {}
            for (kind, hops, lane), slices in pending.items():
                self._return(Note(kind, hops, lane, tuple(slices[:MAX_PAIRS])))

    def _return(self, note: Note) -> None:
        preceding = note.hops[note.hops.index(self.name) - 1]
        self.endpoint.send(Key(preceding, NOTE_LANE, (next(self._counter), 0, 0, 0)), pack_note(note), turn=-1)

    def _note(self, key: Key, data: memoryview) -> None:
        note = unpack_note(data)
        if self.name not in note.hops or note.hops[-1] == self.name:
            raise WorkerError(f"a note for {note.hops} came to {self.name}")
        if note.hops[0] == self.name:
            self._sender(note.hops[-1], note.lane).heed(note)
        else:
            self._return(note)

    # ---- who is who --------------------------------------------------------------------------------------------
    def _sender(self, destination: str, lane: int) -> Sender:
        with self._lock:
            if (destination, lane) not in self._senders:
                paths = hops_of(self.name, destination, self.pairs)
                self._senders[destination, lane] = Sender(self, destination, lane, paths)
            return self._senders[destination, lane]

    def _inbox(self, source: str, lane: int, hops: Hops | None = None) -> Inbox:
        with self._lock:
            if (source, lane) not in self._inboxes:
                inbox = Inbox(source, lane, self.endpoint.settings.staging_bytes, None)
                inbox.on_posted = lambda tag: self._announce(source, lane, NoteKind.POSTED, tag=tag)
                inbox.on_freed = lambda total: self._announce(source, lane, NoteKind.FREED, a=total)
                self._inboxes[source, lane] = inbox
            return self._inboxes[source, lane]

    def _announce(self, source: str, lane: int, kind: NoteKind, a: int = 0, tag: Tag = (0, 0, 0, 0)) -> None:
        """Over every path: any of them may be down, and hearing it twice does no harm."""
        pairs = {counterpart: node for node, counterpart in self.pairs.items()}
        for hops in hops_of(source, self.name, pairs):
            self._return(Note(kind, hops, lane, (), a, tag))

    def _watch(self) -> None:
        while not self._closing.wait(0.2):
            for sender in list(self._senders.values()):
                sender.watch()


class _Never:
    """A claim inside one lock is never contested."""

    def abort(self) -> None:
        raise AssertionError("a slice was claimed twice")


_NEVER = _Never()
