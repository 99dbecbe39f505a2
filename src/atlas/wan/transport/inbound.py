"""The receiving side of one stream: reads frames, fills the inbox, answers with records.

The payload is read directly into the buffer that the inbox names. A malformed frame ends the stream and nothing else.
Knows one stream; the inbox knows the messages.
"""

from __future__ import annotations

import threading
import time

from atlas.errors import WorkerError
from atlas.wan.transport.base import ZERO_TAG, Tag
from atlas.wan.transport.inbox import ChunkBusyError, Inbox, MessageRefusedError
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.stream import SocketStream
from atlas.wan.transport.wire import (
    HEADER_BYTES,
    ControlRecord,
    FrameHeader,
    FrameKind,
    Greeting,
    RecordKind,
    pack_record,
    unpack_header,
)


class Inbound:
    """`serve` runs until the stream ends. Without a thread of its own: `begin`, then `serve_frame` for each frame."""

    def __init__(self, stream: SocketStream, greeting: Greeting, inbox: Inbox, settings: TransportSettings) -> None:
        self.stream, self.greeting, self.inbox, self.settings = stream, greeting, inbox, settings
        self.last_frame = time.monotonic()
        self._writing = threading.Lock()

    def abort(self) -> None:
        self.stream.abort()

    def close(self) -> None:
        """Called by the thread that served. Waits for a thread that is in `send_record`."""
        self.stream.abort()
        with self._writing:
            self.stream.close()

    def send_record(self, kind: RecordKind, a: int = 0, b: int = 0, tag: Tag = ZERO_TAG) -> bool:
        """False if the stream is gone."""
        record = pack_record(ControlRecord(kind, self.greeting.lane, self.greeting.epoch, a, b, tag))
        try:
            with self._writing:
                if self.stream.aborted:
                    return False
                self.stream.write(record)
            return True
        except (OSError, WorkerError):
            self.stream.abort()
            return False

    def serve(self) -> None:
        """Returns when the peer has closed the stream with a BYE. Raises OSError or WorkerError if it breaks."""
        self.begin()
        while self.serve_frame():
            pass

    def begin(self) -> None:
        """Announces the posted receives and the freed staging to the peer."""
        for tag in self.inbox.posted_tags:
            self.send_record(RecordKind.POSTED, tag=tag)
        self.send_record(RecordKind.FREED, self.inbox.freed_bytes)

    def serve_frame(self) -> bool:
        """Reads one frame. False if the peer has closed the stream with it. Raises OSError or WorkerError."""
        stream, greeting = self.stream, self.greeting
        header = unpack_header(stream.read_head(HEADER_BYTES, self.settings.idle_s), self.settings.max_message_bytes)
        self.last_frame = time.monotonic()
        if header.epoch != greeting.epoch or header.lane != greeting.lane:
            frame, own = f"epoch {header.epoch}, lane {header.lane}", f"epoch {greeting.epoch}, lane {greeting.lane}"
            raise WorkerError(f"a frame of {frame} on a stream of {own}")
        if header.kind == FrameKind.CHUNK:
            self._receive(header)
        elif header.kind == FrameKind.BYE:
            return False
        else:
            if header.num_bytes:
                stream.discard(header.num_bytes)
            self.send_record(RecordKind.PONG, header.number, header.num_bytes)
            if header.kind == FrameKind.PING:
                self.send_record(RecordKind.FREED, self.inbox.freed_bytes)
        return True

    def _receive(self, header: FrameHeader) -> None:
        copy: bytearray | None = None
        try:
            try:
                view = self.inbox.claim(self, header)
            except ChunkBusyError:  # the sender sent it on a second stream, because the answer of the first is late
                copy = bytearray(header.num_bytes)
                self.stream.read_into(memoryview(copy))
                view = self.inbox.claim(self, header, has_copy=True)
        except MessageRefusedError as refused:
            self._discard(header, copy)
            self.send_record(RecordKind.FAILED, header.number, refused.why)
            self.send_record(RecordKind.FREED, self.inbox.freed_bytes)
            return
        if view is None:
            self._discard(header, copy)
            self.send_record(RecordKind.ACK, header.number, header.offset)
            return
        filled = completed = False
        try:
            if copy is None:
                self.stream.read_into(view)
            else:
                view[:] = copy
            filled = True
        finally:
            completed = self.inbox.settle(header, filled=filled)
        self.send_record(RecordKind.ACK, header.number, header.offset)
        if completed:
            self.inbox.complete(header)

    def _discard(self, header: FrameHeader, copy: bytearray | None) -> None:
        if copy is None:
            self.stream.discard(header.num_bytes)
