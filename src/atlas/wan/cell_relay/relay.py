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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from atlas.errors import WorkerError
from atlas.wan.cell_relay.ack_batching import AckBatcher
from atlas.wan.cell_relay.paths import RelayPath, SliceSender, hops_of
from atlas.wan.cell_relay.slices import Note, NoteKind, RelaySlice, pack_note, pack_slice, unpack_note, unpack_slice
from atlas.wan.transport.base import Buffer, Handle, Key, Tag, Transport, view_of, writable_view_of
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.handshake import Address
from atlas.wan.transport.inbox import Inbox, MessageRefusedError
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.wire import FrameHeader, FrameKind

SLICE_BYTES, FIRST_SLICE_BYTES, LAST_SLICE_BYTES = 128 * 1024, 64 * 1024, 32 * 1024
"""Of a transfer: in its middle; at its beginning, when somebody with a smaller turn may begin as well; and at its end,
so that all paths finish together."""
SCARCE_SLICES = 2
"""A sender that has fewer at a relay than these is told at once that one has left."""
SLICE_LANE, NOTE_LANE = 64, 63
"""Lane n of a cell travels on lane SLICE_LANE + n of its endpoints."""


class Cell(Transport):
    """`pairs`: the nodes of this node's cell and their counterparts beyond the WAN. Takes over lanes of `endpoint`;
    then `connect` to the cell and to the counterpart. `sends`: the lanes on which this side sends; None: on all."""

    def __init__(
        self,
        endpoint: Endpoint,
        pairs: Mapping[str, str],
        lanes: Iterable[int] = (0,),
        slice_bytes: int = SLICE_BYTES,
        sends: Iterable[int] | None = None,
    ) -> None:
        self.endpoint, self.pairs, self.name, self.slice_bytes = endpoint, dict(pairs), endpoint.name, slice_bytes
        self._lock = threading.Lock()
        self._senders: dict[tuple[str, int], SliceSender] = {}
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._relayed = Counter[tuple[str, str, int]]()
        self._counter = itertools.count(1)
        self._closing = threading.Event()
        self._lanes = list(lanes)
        self._sends = self._lanes if sends is None else list(sends)
        for lane in self._lanes:
            endpoint.consume(SLICE_LANE + lane, self._slice)
        endpoint.consume(NOTE_LANE, self._note)
        self._notes = AckBatcher(f"atlas wan notes {self.name}", self._return)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name=f"atlas wan cell {self.name}")
        self._watcher.start()

    def connect(self, peers: dict[str, Address], timeout_s: float = 30.0) -> None:
        """To the other nodes of the cell and to the counterpart beyond the WAN."""
        self.endpoint.connect(peers, [NOTE_LANE], timeout_s, light=True)
        near = {name: address for name, address in peers.items() if name in self.pairs}
        far = {name: address for name, address in peers.items() if name not in self.pairs}
        self.endpoint.connect(near, [SLICE_LANE + lane for lane in self._lanes], timeout_s)
        # One that carries nothing would still take half the path while both find out what it gives.
        self.endpoint.connect(far, [SLICE_LANE + lane for lane in self._sends], timeout_s)

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
        self._notes.close()
        self._watcher.join()
        for sender in self._senders.values():
            sender.close()
            sender.outbox.fail(WorkerError(f"{self.name} was closed"))
        for inbox in self._inboxes.values():
            inbox.fail(WorkerError(f"{self.name} was closed"))

    def paths(self, destination: str, lane: int = 0) -> list[RelayPath]:
        """For measurements: what each path has delivered."""
        return self._sender(destination, lane).paths

    # ---- slices onward, notes back -----------------------------------------------------------------------------
    def _forward(self, one: RelaySlice, data: bytes | memoryview, on_start: Callable[[], None] | None = None) -> None:
        """To the next hop, at the slice's turn."""
        following = one.hops[one.hops.index(self.name) + 1]
        key = Key(following, SLICE_LANE + one.lane, (next(self._counter), 0, 0, 0))
        self.endpoint.send(key, data, one.turn, "a slice", on_start, whole=True)

    def _hand_over(self, path: RelayPath, one: RelaySlice, payload: memoryview) -> None:
        """A sender's slice sets out; a relay of the cell will say when it has left it, we know ourselves."""
        direct = one.hops[1] not in self.pairs
        sender = self._senders[one.hops[-1], one.lane]
        on_start = (lambda: sender.departed(path, [(one.number, one.offset)])) if direct else None
        self._forward(one, pack_slice(one, payload), on_start)

    def _slice(self, key: Key, data: memoryview) -> None:
        one, payload = unpack_slice(data)
        if self.name not in one.hops or one.hops[0] == self.name:
            raise WorkerError(f"a slice for {one.hops} came to {self.name}")
        if one.hops[-1] == self.name:
            self._deliver(one, payload)
        elif self.name in self.pairs and one.hops[1] == self.name:
            self._relay(one, data)
        else:
            self._forward(one, data)

    def _relay(self, one: RelaySlice, data: memoryview) -> None:
        """For a node of our cell, which hears when it has left; soon only if that has hardly another one here."""
        place = (one.hops[0], one.hops[-1], one.lane)
        with self._lock:
            self._relayed[place] += 1

        def departed() -> None:
            with self._lock:
                self._relayed[place] -= 1
                is_scarce = self._relayed[place] < SCARCE_SLICES
            self._notes.add(NoteKind.DEPARTED, one, at_once=is_scarce)

        self._forward(one, data, departed)

    def _deliver(self, one: RelaySlice, payload: memoryview) -> None:
        if one.hops[0] not in self.pairs.values() or one.lane not in self._lanes:
            raise WorkerError(f"a slice of lane {one.lane} from {one.hops[0]}, which is not in the cell beyond the WAN")
        inbox = self._inbox(one.hops[0], one.lane)
        fields = (one.number, one.total_bytes, one.offset, one.num_bytes, one.tag, one.eager)
        header, completed = FrameHeader(FrameKind.CHUNK, one.lane, self.endpoint.epoch, *fields), False
        try:
            with self._lock:
                view = inbox.claim(_NEVER, header)
                if view is not None:
                    view[:] = payload
                    completed = inbox.settle(header, filled=True)
        except MessageRefusedError as refused:
            self._return(Note(NoteKind.FAILED, one.hops, one.lane, (one.done,), refused.why))
            self._announce(one.hops[0], one.lane, NoteKind.FREED, inbox.freed_bytes)
            return
        self._notes.add(NoteKind.ACK, one, at_once=completed)
        if completed:
            inbox.complete(header)

    def _return(self, note: Note) -> None:
        preceding = note.hops[note.hops.index(self.name) - 1]
        self.endpoint.send(Key(preceding, NOTE_LANE, (next(self._counter), 0, 0, 0)), pack_note(note), -1, "a note")

    def _note(self, key: Key, data: memoryview) -> None:
        note = unpack_note(data)
        if self.name not in note.hops or note.hops[-1] == self.name:
            raise WorkerError(f"a note for {note.hops} came to {self.name}")
        if note.hops[0] == self.name:
            if note.hops[-1] not in self.pairs.values() or note.lane not in self._lanes:
                raise WorkerError(f"a note of lane {note.lane} from {note.hops[-1]}, which is not in the cell beyond")
            self._sender(note.hops[-1], note.lane).heed(note)
        else:
            self._return(note)

    # ---- who is who --------------------------------------------------------------------------------------------
    def _sender(self, destination: str, lane: int) -> SliceSender:
        with self._lock:
            if (destination, lane) not in self._senders:
                outbox = Outbox(self.slice_bytes, len(self.pairs), LAST_SLICE_BYTES, FIRST_SLICE_BYTES)
                outbox.freed(0, self.endpoint.settings.staging_bytes)
                paths = hops_of(self.name, destination, self.pairs)
                own = self.endpoint.channel(self.pairs[self.name], SLICE_LANE + lane)
                self._senders[destination, lane] = SliceSender(
                    outbox, lane, paths, self._hand_over, lambda: own.paced_s(self.slice_bytes)
                )
            return self._senders[destination, lane]

    def _inbox(self, source: str, lane: int) -> Inbox:
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
                sender.watch(self.endpoint.settings.deadline_s)


class _Never:
    """A claim inside one lock is never contested."""

    def abort(self) -> None:
        raise AssertionError("a slice was claimed twice")


_NEVER = _Never()
