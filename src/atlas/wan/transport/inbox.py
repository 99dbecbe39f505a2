"""What arrives from one peer on one lane: every byte once, straight into the caller's buffer where one is posted,
else into bounded staging.

Chunks come in any order, on any stream, perhaps twice. A stream claims a chunk before it writes; a second
claim ends the stream that made the first (its sender has given it up) and waits until it has let go, so nobody
writes into memory that was handed over. Knows no sockets: streams claim, fill and settle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from atlas.errors import WorkerError
from atlas.wan.transport.base import Handle, Key, Tag, guarded, size_error
from atlas.wan.transport.wire import MAX_POSTED, FrameHeader, RefusalReason

CLAIM_TIMEOUT_S = 10.0
SMALL, FULL, LUMP = 1 / 64, 1 / 4, 1 / 16
"""Parts of the staging. While less than FULL of it is taken, receives of SMALL messages are not announced, since
credit brings them; what becomes free is told in LUMPs. A word costs as much as a small message."""


class Abortable(Protocol):
    """What an inbox knows of the stream that fills it."""

    def abort(self) -> None: ...


class MessageRefusedError(Exception):
    """A chunk of a message that is never taken. The sender must hear of it; the stream is sound."""

    def __init__(self, why: RefusalReason) -> None:
        super().__init__(why.name)
        self.why = why


@dataclass(eq=False)
class IncomingMessage:
    """A message of which something has come."""

    header: FrameHeader
    view: memoryview
    counted: bool
    """It takes room in the staging: nobody waited for it when it began to come."""
    handle: Handle | None = None
    into: memoryview | None = None
    """The caller's buffer, if it was posted too late to receive into."""
    filled: set[int] = field(default_factory=set)
    filled_bytes: int = 0
    claims: dict[int, Abortable] = field(default_factory=dict)


class Inbox:
    """Thread-safe. `on_posted` and `on_freed` tell the peer. A `consumer` takes whatever comes, unasked."""

    def __init__(self, peer: str, lane: int, staging_bytes: int, consumer: Callable[[Key, memoryview], None] | None):
        self.peer, self.lane, self.staging_bytes, self.consumer = peer, lane, staging_bytes, consumer
        self.freed_bytes = 0
        self.failure: WorkerError | None = None
        self.last_progress_ns = time.monotonic_ns()
        self.received_bytes = self.num_duplicates = self.num_consumer_errors = 0
        self.on_posted: Callable[[Tag], None] = lambda tag: None
        self.on_freed: Callable[[int], None] = lambda total: None
        self.on_consumer_error: Callable[[str], None] = lambda line: None
        self._changed = threading.Condition()
        self._posted: dict[Tag, tuple[Handle, memoryview | None]] = {}
        self._arriving: dict[int, IncomingMessage] = {}
        self._by_tag: dict[Tag, IncomingMessage] = {}
        self._arrived: dict[Tag, IncomingMessage] = {}
        self._done_below, self._done = 1, set[int]()
        self._refused: dict[int, RefusalReason] = {}
        self._staged_bytes = self._told_bytes = 0
        self._unannounced: list[Tag] = []
        """Receives that credit was to bring, which has become scarce."""

    # ---- the user's side ---------------------------------------------------------------------------------------
    def post(self, tag: Tag, view: memoryview | None, handle: Handle) -> None:
        handle.progress = self.progress
        with self._changed:
            if tag in self._posted or (tag in self._by_tag and self._by_tag[tag].handle is not None):
                raise ValueError(f"{handle.what}: it is already being received")
            arrival = self._arrived.pop(tag, None)
            if arrival is None and self.failure is not None:
                handle.finish(WorkerError(f"{handle.what}: {self.progress()}; {self.failure}"))
                return
            if arrival is None and tag in self._by_tag:
                self._by_tag[tag].handle, self._by_tag[tag].into = handle, view
                return
            if arrival is None and len(self._posted) >= MAX_POSTED:
                raise ValueError(
                    f"{handle.what}: {MAX_POSTED} receives from {self.peer} are posted on lane {self.lane}, and no "
                    "more are allowed: wait for some of them first"
                )
            if arrival is None:
                self._posted[tag] = (handle, view)
                is_small = view is not None and len(view) <= SMALL * self.staging_bytes
                announce = not is_small or self._staged_bytes > FULL * self.staging_bytes
        if arrival is None:
            if announce:
                self.on_posted(tag)
            return
        arrival.handle, arrival.into = handle, view
        self._hand_over(arrival)

    @property
    def posted_tags(self) -> list[Tag]:
        with self._changed:
            return list(self._posted)

    @property
    def waits(self) -> bool:
        return bool(self._posted) or any(a.handle is not None for a in list(self._arriving.values()))

    def fail(self, error: WorkerError) -> None:
        """Ends every wait. What has arrived whole can still be fetched."""
        with self._changed:
            self.failure = self.failure or error
            handles = [handle for handle, _ in self._posted.values()]
            handles += [a.handle for a in self._arriving.values() if a.handle is not None]
            self._posted.clear()
            self._changed.notify_all()
        for handle in handles:
            handle.finish(WorkerError(f"{handle.what}: {self.progress()}; {self.failure}"))

    def progress(self) -> str:
        ago_s = (time.monotonic_ns() - self.last_progress_ns) / 1e9
        return f"{self.received_bytes} bytes came from {self.peer} so far, the last of them {ago_s:.1f} s ago"

    # ---- the streams' side -------------------------------------------------------------------------------------
    def claim(self, source: Abortable, header: FrameHeader) -> memoryview | None:
        """Where to put the chunk; None where it has come before. Raises MessageRefusedError where it is never taken."""
        with self._changed:
            while True:
                arrival = self._find(header)
                if arrival is None or header.offset in arrival.filled:
                    self.num_duplicates += 1
                    return None
                if header.total_bytes != arrival.header.total_bytes or header.tag != arrival.header.tag:
                    raise WorkerError(f"two chunks of message {header.number} from {self.peer} contradict each other")
                other = arrival.claims.get(header.offset)
                if other is None:
                    arrival.claims[header.offset] = source
                    return arrival.view[header.offset : header.offset + header.num_bytes]
                other.abort()
                if not self._changed.wait(CLAIM_TIMEOUT_S):
                    raise WorkerError(f"a former stream of {self.peer} does not let go of a chunk")

    def settle(self, header: FrameHeader, *, filled: bool) -> bool:
        """The end of a claim. True if that completed the message: then call `complete`."""
        with self._changed:
            arrival = self._arriving.get(header.number)
            self._changed.notify_all()
            tags, self._unannounced = self._unannounced, []
        for tag in tags:
            self.on_posted(tag)
        with self._changed:
            if arrival is None or arrival.claims.pop(header.offset, None) is None or not filled:
                return False
            arrival.filled.add(header.offset)
            arrival.filled_bytes += header.num_bytes
            self.received_bytes += header.num_bytes
            self.last_progress_ns = time.monotonic_ns()
            return not arrival.filled_bytes < header.total_bytes

    def complete(self, header: FrameHeader) -> None:
        with self._changed:
            arrival = self._arriving.pop(header.number)
            self._by_tag.pop(header.tag, None)
            self._note_done(header.number)
            if self.consumer is None and arrival.handle is None:
                self._arrived[header.tag] = arrival
                return
        if self.consumer is not None:
            self._consume(arrival)
        else:
            self._hand_over(arrival)

    # ---- inside ------------------------------------------------------------------------------------------------
    def _consume(self, arrival: IncomingMessage) -> None:
        """Its room is free again whatever the consumer does. What it raises is the message's fault or the consumer's,
        not the stream's: it is counted and told to `on_consumer_error`, a bug is shown, and the stream goes on."""
        assert self.consumer is not None
        tag = arrival.header.tag
        try:
            self.consumer(Key(self.peer, self.lane, tag), arrival.view)
        except WorkerError as error:
            self._note_consumer_error(tag, error)
        except Exception as error:
            self._note_consumer_error(tag, error)
            guarded(_raise, error)
        finally:
            self._free(arrival)

    def _note_consumer_error(self, tag: Tag, error: Exception) -> None:
        with self._changed:
            self.num_consumer_errors += 1
        self.on_consumer_error(f"lane {self.lane} {tag} from {self.peer} could not be used: {error}")

    def _note_done(self, number: int) -> None:
        """With the lock held."""
        self._done.add(number)
        while self._done_below in self._done:
            self._done.remove(self._done_below)
            self._done_below += 1

    def _refuse(self, header: FrameHeader, why: RefusalReason) -> MessageRefusedError:
        """Remembered, because any chunk of it may come again on another stream. With the lock held."""
        self._refused[header.number] = why
        self._note_done(header.number)
        if header.eager:
            self.freed_bytes += header.total_bytes
        return MessageRefusedError(why)

    def _find(self, header: FrameHeader) -> IncomingMessage | None:
        """The message a chunk belongs to, begun if it is new; None if it is complete. With the lock held."""
        number, tag = header.number, header.tag
        if number in self._refused:
            raise MessageRefusedError(self._refused[number])
        if number < self._done_below or number in self._done:
            return None
        if number in self._arriving:
            return self._arriving[number]
        if tag in self._by_tag or tag in self._arrived:
            raise self._refuse(header, RefusalReason.KEY_USED)
        handle, buffer = self._posted.pop(tag, (None, None))
        if buffer is not None and handle is not None and len(buffer) != header.total_bytes:
            handle.finish(size_error(Key(self.peer, self.lane, tag), header.total_bytes, len(buffer)))
            raise self._refuse(header, RefusalReason.SIZE)
        if handle is None:
            # Twice, because a receive that was announced and has failed since needs room that no credit stands for.
            if self._staged_bytes + header.total_bytes > 2 * self.staging_bytes:
                raise WorkerError(f"{self.peer} sends more than the {self.staging_bytes} bytes it was allowed to")
            if self._staged_bytes <= FULL * self.staging_bytes < self._staged_bytes + header.total_bytes:
                self._unannounced = list(self._posted)
            self._staged_bytes += header.total_bytes
        view = buffer if buffer is not None else np.empty(header.total_bytes, np.uint8).data
        arrival = IncomingMessage(header, view, handle is None, handle)
        self._arriving[number] = self._by_tag[tag] = arrival
        return arrival

    def _hand_over(self, arrival: IncomingMessage) -> None:
        handle, into = arrival.handle, arrival.into
        assert handle is not None
        if into is not None and len(into) != len(arrival.view):
            key = Key(self.peer, self.lane, arrival.header.tag)
            handle.finish(size_error(key, len(arrival.view), len(into)))
        elif into is not None:
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(arrival.view, np.uint8))  # lets other threads run
            handle.finish(buffer=into)
        else:
            handle.finish(buffer=arrival.view)
        self._free(arrival)

    def _free(self, arrival: IncomingMessage) -> None:
        with self._changed:
            if arrival.counted:
                self._staged_bytes -= arrival.header.total_bytes
            if not arrival.header.eager:
                return
            self.freed_bytes += arrival.header.total_bytes
            total = self.freed_bytes
            if total - self._told_bytes < LUMP * self.staging_bytes:
                return
            self._told_bytes = total
        self.on_freed(total)


def _raise(error: Exception) -> None:
    raise error
