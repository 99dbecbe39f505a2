"""The receiving side of one stream: reads frames, fills the inbox, answers with records.

The payload goes from the kernel into the buffer that the inbox names, without a stop. Any malformed frame ends the
stream and nothing else. Knows one stream; what the bytes are for is the inbox's affair.
"""

from __future__ import annotations

import threading

from atlas.errors import WorkerError
from atlas.wan.transport.base import Tag
from atlas.wan.transport.inbox import Inbox, MessageRefusedError
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
    """`serve` until it ends; True if the peer meant the end."""

    def __init__(self, stream: SocketStream, greeting: Greeting, inbox: Inbox, settings: TransportSettings) -> None:
        self.stream, self.greeting, self.inbox, self.settings = stream, greeting, inbox, settings
        self._writing = threading.Lock()

    def abort(self) -> None:
        self.stream.abort()

    def close(self) -> None:
        """By the thread that serves, at its end. Whoever tells something at this moment leaves first."""
        self.stream.abort()
        with self._writing:
            self.stream.close()

    def tell(self, kind: RecordKind, a: int = 0, b: int = 0, tag: Tag = (0, 0, 0, 0)) -> bool:
        """Sends a record; False if the stream is gone."""
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

    def serve(self) -> bool:
        """Raises OSError or WorkerError where the stream breaks or makes no sense."""
        for tag in self.inbox.posted_tags:
            self.tell(RecordKind.POSTED, tag=tag)
        self.tell(RecordKind.FREED, self.inbox.freed_bytes)
        stream, epoch, lane = self.stream, self.greeting.epoch, self.greeting.lane
        while True:
            raw = stream.read_head(HEADER_BYTES, self.settings.idle_s)
            header = unpack_header(raw, self.settings.max_message_bytes)
            if header.epoch != epoch or header.lane != lane:
                raise WorkerError(f"a frame of epoch {header.epoch}, lane {header.lane} on a stream of another")
            if header.kind == FrameKind.CHUNK:
                self._chunk(header)
            elif header.kind == FrameKind.BYE:
                return True
            else:
                if header.num_bytes:
                    stream.discard(header.num_bytes)
                self.tell(RecordKind.PONG, header.number, header.num_bytes)
                if header.kind == FrameKind.PING:
                    self.tell(RecordKind.FREED, self.inbox.freed_bytes)

    def _chunk(self, header: FrameHeader) -> None:
        try:
            view = self.inbox.claim(self, header)
        except MessageRefusedError as refused:
            self.stream.discard(header.num_bytes)
            self.tell(RecordKind.FAILED, header.number, refused.why)
            self.tell(RecordKind.FREED, self.inbox.freed_bytes)
            return
        if view is None:
            self.stream.discard(header.num_bytes)
            self.tell(RecordKind.ACK, header.number, header.offset)
            return
        filled = completed = False
        try:
            self.stream.read_into(view)
            filled = True
        finally:
            completed = self.inbox.settle(header, filled=filled)
        self.tell(RecordKind.ACK, header.number, header.offset)
        if completed:
            self.inbox.complete(header)
