"""What arrives from one peer on one lane: every byte once, directly into the posted buffer, or else into bounded
staging.

Chunks arrive in any order, on any stream, perhaps twice. A stream claims a chunk before it writes. If another stream is
receiving the chunk, the second copy is read into memory of its own, and the copy that is complete first counts. If that
is the second, the first stream is aborted a moment later, and the second waits until the first has settled, so no
stream writes into memory that was handed over. Knows no sockets: streams claim, fill and settle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from atlas.errors import WorkerError
from atlas.wan.transport.base import Handle, Key, Tag, report, size_error
from atlas.wan.transport.wire import MAX_POSTED, FrameHeader, RefusalReason

log = logging.getLogger("atlas.wan")
LATE_COPY_S = 0.25
"""How long a complete second copy waits for the first before it aborts the first's stream. On a busy host, the thread
of a healthy stream may wait this long for a core."""
CLAIM_TIMEOUT_S = 10.0
"""The longest that an aborted stream may take to settle."""
SMALL, FULL, REPORT = 1 / 64, 1 / 4, 1 / 16
"""Shares of the staging. While less than FULL is used, receives of SMALL messages are not announced, because the
messages are sent on credit. Freed bytes are reported when they make up REPORT. A record costs as much as a small
message."""


class Abortable(Protocol):
    """The stream that fills a chunk, as far as an inbox knows it."""

    def abort(self) -> None: ...


class MessageRefusedError(Exception):
    """A chunk of a message that is not accepted. The sender gets a record; the stream goes on."""

    def __init__(self, why: RefusalReason) -> None:
        super().__init__(why.name)
        self.why = why


class ChunkBusyError(Exception):
    """Another stream is receiving this chunk: read the copy, then claim again with `has_copy`."""


@dataclass(eq=False)
class IncomingMessage:
    """A message of which at least one chunk has arrived."""

    header: FrameHeader
    view: memoryview
    counted: bool
    """It counts against the staging: no receive was posted when it began to arrive."""
    handle: Handle | None = None
    into: memoryview | None = None
    """The caller's buffer, if it was posted after the message began to arrive."""
    filled: set[int] = field(default_factory=set)
    filled_bytes: int = 0
    claims: dict[int, Abortable] = field(default_factory=dict)


class Inbox:
    """Thread-safe. `on_posted` and `on_freed` notify the peer. A `consumer` gets every message without a receive."""

    def __init__(self, peer: str, lane: int, staging_bytes: int, consumer: Callable[[Key, memoryview], None] | None):
        self.peer, self.lane, self.staging_bytes, self.consumer = peer, lane, staging_bytes, consumer
        self.freed_bytes = 0
        self.failure: WorkerError | None = None
        self.last_progress_ns = time.monotonic_ns()
        self.received_bytes = 0
        self.on_posted: Callable[[Tag], None] = lambda tag: None
        self.on_freed: Callable[[int], None] = lambda total: None
        self._changed = threading.Condition()
        self._posted: dict[Tag, tuple[Handle, memoryview | None]] = {}
        self._arriving: dict[int, IncomingMessage] = {}
        self._by_tag: dict[Tag, IncomingMessage] = {}
        self._arrived: dict[Tag, IncomingMessage] = {}
        self._done_below, self._done = 1, set[int]()
        self._refused: dict[int, RefusalReason] = {}
        self._staged_bytes = self._reported_bytes = 0
        self._unannounced: list[Tag] = []
        """Receives to announce now, because credit has become scarce."""

    # ---- the user's side ---------------------------------------------------------------------------------------
    def post(self, tag: Tag, view: memoryview | None, handle: Handle) -> None:
        handle.progress = self.progress
        with self._changed:
            arriving = self._by_tag.get(tag)
            if tag in self._posted or (arriving is not None and arriving.handle is not None):
                raise ValueError(f"{handle.what}: it is already being received")
            arrived = self._arrived.pop(tag, None)
            if arrived is None:
                if self.failure is not None:
                    handle.fail(f"{self.progress()}; {self.failure}")
                    return
                if arriving is not None:
                    arriving.handle, arriving.into = handle, view
                    return
                if len(self._posted) >= MAX_POSTED:
                    raise ValueError(
                        f"{handle.what}: {MAX_POSTED} receives from {self.peer} are posted on lane {self.lane}, and no "
                        "more are allowed: wait for some of them first"
                    )
                self._posted[tag] = (handle, view)
                is_small = view is not None and len(view) <= SMALL * self.staging_bytes
                announce = not is_small or self._staged_bytes > FULL * self.staging_bytes
        if arrived is not None:
            arrived.handle, arrived.into = handle, view
            self._hand_over(arrived)
        elif announce:
            self.on_posted(tag)

    @property
    def posted_tags(self) -> list[Tag]:
        with self._changed:
            return list(self._posted)

    @property
    def waits(self) -> bool:
        return bool(self._posted) or any(a.handle is not None for a in list(self._arriving.values()))

    def fail(self, error: WorkerError) -> None:
        """Ends every receive. Messages that have arrived can still be received."""
        with self._changed:
            self.failure = self.failure or error
            handles = [handle for handle, _ in self._posted.values()]
            handles += [a.handle for a in self._arriving.values() if a.handle is not None]
            self._posted.clear()
            self._changed.notify_all()
        for handle in handles:
            handle.fail(f"{self.progress()}; {self.failure}")

    def progress(self) -> str:
        ago_s = (time.monotonic_ns() - self.last_progress_ns) / 1e9
        return f"{self.received_bytes} bytes came from {self.peer} so far, the last of them {ago_s:.1f} s ago"

    # ---- the streams' side -------------------------------------------------------------------------------------
    def claim(self, source: Abortable, header: FrameHeader, *, has_copy: bool = False) -> memoryview | None:
        """Where to put the chunk; None if it arrived before. Raises MessageRefusedError if its message is not accepted,
        and ChunkBusyError if another stream is receiving it. `has_copy`: the whole chunk has been read, so the other
        stream gets a moment and is then aborted."""
        with self._changed:
            while True:
                arrival = self._find(header)
                if arrival is None or header.offset in arrival.filled:
                    return None
                if header.total_bytes != arrival.header.total_bytes or header.tag != arrival.header.tag:
                    raise WorkerError(f"two chunks of message {header.number} from {self.peer} contradict each other")
                other = arrival.claims.get(header.offset)
                if other is None:
                    arrival.claims[header.offset] = source
                    return arrival.view[header.offset : header.offset + header.num_bytes]
                if not has_copy:
                    raise ChunkBusyError
                if not self._await_settled(arrival, header.offset, LATE_COPY_S):
                    other.abort()
                    if not self._await_settled(arrival, header.offset, CLAIM_TIMEOUT_S):
                        raise WorkerError(f"an earlier stream of {self.peer} did not stop writing a chunk in time")

    def _await_settled(self, arrival: IncomingMessage, offset: int, timeout_s: float) -> bool:
        return self._changed.wait_for(lambda: offset not in arrival.claims, timeout_s)

    def settle(self, header: FrameHeader, *, filled: bool) -> bool:
        """Ends a claim. True if the message is complete: then call `complete`."""
        with self._changed:
            arrival = self._arriving.get(header.number)
            tags, self._unannounced = self._unannounced, []
        for tag in tags:
            self.on_posted(tag)
        with self._changed:
            if arrival is None or arrival.claims.pop(header.offset, None) is None:
                return False
            self._changed.notify_all()
            if not filled:
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
        """Frees the staging whatever the consumer does. An error of the consumer does not end the stream: it is logged.
        If it is not a WorkerError, its traceback is shown too."""
        assert self.consumer is not None
        tag = arrival.header.tag
        try:
            self.consumer(Key(self.peer, self.lane, tag), arrival.view)
        except Exception as error:
            log.info("lane %d %s from %s could not be used: %s", self.lane, tag, self.peer, error)
            if not isinstance(error, WorkerError):
                report(error)
        finally:
            self._free(arrival)

    def _note_done(self, number: int) -> None:
        """With the lock held."""
        self._done.add(number)
        while self._done_below in self._done:
            self._done.remove(self._done_below)
            self._done_below += 1

    def _refuse(self, header: FrameHeader, why: RefusalReason) -> MessageRefusedError:
        """Remembers it, because chunks of it may arrive on other streams. With the lock held."""
        self._refused[header.number] = why
        self._note_done(header.number)
        if header.eager:
            self.freed_bytes += header.total_bytes
        return MessageRefusedError(why)

    def _find(self, header: FrameHeader) -> IncomingMessage | None:
        """The message that a chunk belongs to, made if it is new; None if it is complete. With the lock held."""
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
            # Twice, because a message whose announced receive has failed since then was sent without credit.
            if self._staged_bytes + header.total_bytes > 2 * self.staging_bytes:
                raise WorkerError(f"{self.peer} sends more than the {self.staging_bytes} bytes that are allowed")
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
            # numpy copies without the interpreter lock
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(arrival.view, np.uint8))
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
            if total - self._reported_bytes < REPORT * self.staging_bytes:
                return
            self._reported_bytes = total
        self.on_freed(total)
