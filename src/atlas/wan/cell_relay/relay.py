"""Temporal bandwidth sharing: a node sends with the WAN capacity of all nodes of its cell.

A transfer is cut into slices. Each path (through a node of the cell, over the WAN to its counterpart) takes the next
slice when it has room, so each carries what it delivers now. All relays serve their WAN queues by turns and never idle.
Slices that a path has had for too long are sent again on a path that has nothing else to send; the destination takes
each once. There is no coordinator: the turns follow from the queues. A `Transport` on top of an `Endpoint`; knows no
tensors and no sockets.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from atlas.errors import WorkerError
from atlas.lifetime import Repeating
from atlas.wan.cell_relay.ack_batching import AckBatcher
from atlas.wan.cell_relay.paths import RelayPath, SliceSender, hops_of
from atlas.wan.cell_relay.slices import (
    NoteKind,
    RelayNote,
    RelaySlice,
    pack_note,
    pack_slice,
    unpack_note,
    unpack_slice,
)
from atlas.wan.transport.base import ZERO_TAG, Address, Buffer, Handle, Key, Tag, Transport, view_of, writable_view_of
from atlas.wan.transport.endpoint import WATCH_S, Endpoint
from atlas.wan.transport.inbox import Inbox, MessageRefusedError
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.settings import CONNECT_S
from atlas.wan.transport.stream_budget import ChannelKind
from atlas.wan.transport.wire import FrameHeader, FrameKind

SLICE_BYTES, FIRST_SLICE_BYTES, LAST_SLICE_BYTES = 128 * 1024, 64 * 1024, 32 * 1024
"""In the middle of a transfer; at its start, when a smaller turn may begin at the same time; and at its end, so that
all paths finish together. A slice costs a relay about a millisecond of CPU at any size; 64 KB throughout were too
many."""
SCARCE_SLICES = 2
"""A sender with fewer slices at a relay than this is notified at once when one departs."""
FIRST_LANE = 63
"""Of a cell's lanes at its endpoints, unless the caller says otherwise: first notes, then slices of lane 0, 1, ..."""
NOTE_TURN = -1
"""Notes precede all slices."""


class Cell(Transport):
    """`pairs`: the nodes of this node's cell and their counterparts on the other side of the WAN. Uses lanes of
    `endpoint` from `first_lane` on, so several cells can share it. Then `connect` to the cell and to the counterpart.
    `sends`: the lanes on which this side sends; None: all of them."""

    def __init__(
        self,
        endpoint: Endpoint,
        pairs: Mapping[str, str],
        lanes: Iterable[int] = (0,),
        slice_bytes: int = SLICE_BYTES,
        sends: Iterable[int] | None = None,
        first_lane: int = FIRST_LANE,
    ) -> None:
        self.endpoint, self.pairs, self.name, self.slice_bytes = endpoint, dict(pairs), endpoint.name, slice_bytes
        self._lock = threading.Lock()
        self._senders: dict[tuple[str, int], SliceSender] = {}
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._relayed = Counter[tuple[str, str, int]]()
        self._counter = itertools.count(1)
        self._lanes = list(lanes)
        self._sends = self._lanes if sends is None else list(sends)
        self._note_lane, self._slice_lane = first_lane, first_lane + 1
        for lane in self._lanes:
            endpoint.consume(self._slice_lane + lane, self._on_slice)
        endpoint.consume(self._note_lane, self._on_note)
        self._batcher = AckBatcher(f"atlas wan notes {self.name}", self._return)
        self._watcher = Repeating(f"atlas wan cell {self.name}", WATCH_S, self._watch)

    def dial_for(self, peers: Mapping[str, Address]) -> None:
        """Dials the connections on which these peers send: they cannot dial this node. Call it before `connect`."""
        for name, address in peers.items():
            theirs = [lane for lane in self._lanes if name in self.pairs or lane not in self._sends] or self._lanes
            for lane in (self._note_lane, *(self._slice_lane + lane for lane in theirs)):
                self.endpoint.dial_for(name, lane, address)

    def kinds(self, peers: Iterable[str]) -> list[ChannelKind]:
        """Of the channels that `connect` opens."""
        lanes = {name: self._lanes if name in self.pairs else self._sends for name in peers}
        kinds = [kind for name in lanes for kind in [self.endpoint.kind_of(name)] * len(lanes[name])]
        return [*kinds, *[ChannelKind.LIGHT] * len(lanes)]

    def connect(self, peers: Mapping[str, Address | None], timeout_s: float = CONNECT_S) -> None:
        """Connects to the other nodes of the cell and to the counterpart on the other side of the WAN. None in place of
        an address: the peer calls `dial_for`."""
        self.endpoint.connect(peers, [self._note_lane], timeout_s, light=True)
        near = {name: address for name, address in peers.items() if name in self.pairs}
        far = {name: address for name, address in peers.items() if name not in self.pairs}
        self.endpoint.connect(near, [self._slice_lane + lane for lane in self._lanes], timeout_s)
        # Not the lanes on which this side sends nothing: their warm-up would take half of the path.
        self.endpoint.connect(far, [self._slice_lane + lane for lane in self._sends], timeout_s)

    def send(self, key: Key, buffer: Buffer, turn: int = 0, what: str = "") -> Handle:
        handle = Handle(what or f"{key} to {key.peer}")
        self._sender(key.peer, key.lane).outbox.put(key.tag, view_of(buffer), turn, handle)
        return handle

    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        handle = Handle(what or f"{key} from {key.peer}")
        self._inbox(key.peer, key.lane).post(key.tag, writable_view_of(buffer), handle)
        return handle

    def close(self, timeout_s: float = 5.0) -> None:
        """Leaves the endpoint open: other nodes may still relay through this one."""
        deadline = time.monotonic() + timeout_s
        for sender in list(self._senders.values()):
            sender.outbox.drain(max(0.0, deadline - time.monotonic()))
        self._batcher.close()
        self._watcher.close()
        for sender in self._senders.values():
            sender.close()
            sender.outbox.fail(WorkerError(f"{self.name} was closed"))
        for inbox in self._inboxes.values():
            inbox.fail(WorkerError(f"{self.name} was closed"))

    def paths(self, destination: str, lane: int = 0) -> list[RelayPath]:
        """For measurements."""
        return self._sender(destination, lane).paths

    # ---- slices forward, notes back ----------------------------------------------------------------------------
    def _forward(self, one: RelaySlice, data: bytes | memoryview, on_start: Callable[[], None] | None = None) -> None:
        """Sends a slice to the next hop, in its turn."""
        following = one.hops[one.hops.index(self.name) + 1]
        key = Key(following, self._slice_lane + one.lane, (next(self._counter), 0, 0, 0))
        self.endpoint.send(key, data, one.turn, "a slice", on_start, whole=True)

    def _hand_over(self, path: RelayPath, one: RelaySlice, payload: memoryview) -> None:
        """Sends a slice of this node. A relay of the cell sends a note when it departs; on the own path `on_start`
        does."""
        direct = one.hops[1] not in self.pairs
        sender = self._senders[one.hops[-1], one.lane]
        on_start = (lambda: sender.departed(path, [(one.number, one.offset)])) if direct else None
        self._forward(one, pack_slice(one, payload), on_start)

    def _on_slice(self, key: Key, data: memoryview) -> None:
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
        """Forwards a slice of another node of the cell, and notifies that node when it departs."""
        place = (one.hops[0], one.hops[-1], one.lane)
        with self._lock:
            self._relayed[place] += 1

        def departed() -> None:
            with self._lock:
                self._relayed[place] -= 1
                is_scarce = self._relayed[place] < SCARCE_SLICES
            self._batcher.add(NoteKind.DEPARTED, one, at_once=is_scarce)

        self._forward(one, data, departed)

    def _deliver(self, one: RelaySlice, payload: memoryview) -> None:
        if one.hops[0] not in self.pairs.values() or one.lane not in self._lanes:
            raise WorkerError(f"a slice of lane {one.lane} from {one.hops[0]}, which is not in the other cell")
        inbox = self._inbox(one.hops[0], one.lane)
        fields = (one.number, one.total_bytes, one.offset, one.num_bytes, one.tag, one.eager)
        header, completed = FrameHeader(FrameKind.CHUNK, one.lane, self.endpoint.epoch, *fields), False
        try:
            with self._lock:
                view = inbox.claim(_LOCK_HOLDER, header)
                if view is not None:
                    view[:] = payload
                    completed = inbox.settle(header, filled=True)
        except MessageRefusedError as refused:
            self._return(RelayNote(NoteKind.FAILED, one.hops, one.lane, (one.done,), refused.why))
            self._announce(one.hops[0], one.lane, NoteKind.FREED, inbox.freed_bytes)
            return
        self._batcher.add(NoteKind.ACK, one, at_once=completed)
        if completed:
            inbox.complete(header)

    def _return(self, note: RelayNote) -> None:
        preceding = note.hops[note.hops.index(self.name) - 1]
        self.endpoint.send(
            Key(preceding, self._note_lane, (next(self._counter), 0, 0, 0)), pack_note(note), NOTE_TURN, "a note"
        )

    def _on_note(self, key: Key, data: memoryview) -> None:
        note = unpack_note(data)
        if self.name not in note.hops or note.hops[-1] == self.name:
            raise WorkerError(f"a note for {note.hops} came to {self.name}")
        if note.hops[0] == self.name:
            if note.hops[-1] not in self.pairs.values() or note.lane not in self._lanes:
                raise WorkerError(f"a note of lane {note.lane} from {note.hops[-1]}, which is not in the other cell")
            self._sender(note.hops[-1], note.lane).handle(note)
        else:
            self._return(note)

    # ---- senders and inboxes -----------------------------------------------------------------------------------
    def _sender(self, destination: str, lane: int) -> SliceSender:
        with self._lock:
            if (destination, lane) not in self._senders:
                outbox = Outbox(self.slice_bytes, len(self.pairs), LAST_SLICE_BYTES, FIRST_SLICE_BYTES)
                outbox.freed(0, self.endpoint.settings.staging_bytes)
                paths = hops_of(self.name, destination, self.pairs)
                own = self.endpoint.channel(self.pairs[self.name], self._slice_lane + lane)
                self._senders[destination, lane] = SliceSender(
                    outbox, lane, paths, self._hand_over, lambda: own.tuner.paced_s(self.slice_bytes)
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

    def _announce(self, source: str, lane: int, kind: NoteKind, a: int = 0, tag: Tag = ZERO_TAG) -> None:
        """Sends a note on every path, because any may be down. Duplicates do no harm."""
        pairs = {counterpart: node for node, counterpart in self.pairs.items()}
        for hops in hops_of(source, self.name, pairs):
            self._return(RelayNote(kind, hops, lane, (), a, tag))

    def _watch(self) -> None:
        for sender in list(self._senders.values()):
            sender.watch(self.endpoint.settings.deadline_s)


class _LockHolder:
    """Claims chunks of an inbox under the cell's lock, so that no second claim can abort it."""

    def abort(self) -> None:
        raise AssertionError("a slice was claimed twice")


_LOCK_HOLDER = _LockHolder()
