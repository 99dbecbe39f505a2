"""Numbered JSON messages between two launchers that survive a broken connection: each message is kept until the other
side has confirmed it, and sent again over the next connection. Heartbeats detect a dead connection.

Knows sockets and message numbers. Does not know what the messages mean, or who may connect (`rendezvous`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import queue
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from atlas.callers import LoopThread
from atlas.errors import WorkerError

log = logging.getLogger("atlas.launch")
MAX_FRAME_BYTES = 64 << 20
"""Larger than the text of a Program of half a million ops."""
MAX_KEPT_BYTES = 4 * MAX_FRAME_BYTES
"""Of sent messages that the other side has not confirmed."""
LOOK_S = 0.02
"""Between two looks whether everything is confirmed."""
HEARTBEAT_S = 0.5
"""Between two frames of a channel with nothing to say."""
SILENCE_S = 5.0
"""A connection that is silent for this long is broken. Ten heartbeats."""
READ_BYTES = 1 << 18

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")


def frame(message: Message) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WorkerError(f"a message of {len(body):,} bytes is larger than the limit of {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


def pack_text(text: str) -> str:
    """A long text, compressed, as a value of a message."""
    return base64.b85encode(zlib.compress(text.encode(), 1)).decode()


def unpack_text(packed: str) -> str:
    return zlib.decompress(base64.b85decode(packed)).decode()


def unframed(buffer: bytearray, max_bytes: int) -> Message | None:
    """Remove and return the first message of the buffer; None if it is incomplete. ValueError if it is invalid."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > max_bytes:
        raise ValueError(f"a frame of {length:,} bytes is larger than the limit of {max_bytes:,}")
    if len(buffer) < _LENGTH.size + length:
        return None
    try:
        message = json.loads(bytes(buffer[_LENGTH.size : _LENGTH.size + length]))
    except RecursionError:
        raise ValueError("a frame that is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a frame that is not a JSON object")
    del buffer[: _LENGTH.size + length]
    return message


class ControlChannel:
    """One side of a channel. `send` at any time; received messages are in `inbox`, or go to a handler (`deliver_to`).
    `attach` gives it a connection."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.gone_since = time.monotonic()
        """When the last connection was lost; meaningless while connected."""
        self._on_change = on_change
        self._lock = threading.RLock()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._num_sent = self.num_received = 0
        self._connection: ControlConnection | None = None
        self._handler: Callable[[Message], None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def send(self, message: Message) -> None:
        """Queue a message. Raises if it is too large, or if too many bytes are unconfirmed already; later messages
        are not affected."""
        with self._lock:
            data = frame({"number": self._num_sent + 1, "message": message, "received": self.num_received})
            if self._kept_bytes + len(data) > MAX_KEPT_BYTES:
                waiting = self._kept_bytes + len(data)
                raise WorkerError(f"{waiting:,} bytes are queued for a launcher that does not read them")
            self._num_sent += 1
            self._kept.append((self._num_sent, data))
            self._kept_bytes += len(data)
            if self._connection is not None:
                self._connection.write(data)

    def wait_sent(self, timeout_s: float) -> bool:
        """Wait until the other side has confirmed everything, or is disconnected; whether all is confirmed."""
        deadline = time.monotonic() + timeout_s
        while self._kept and self.is_connected and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return not self._kept

    def attach(self, connection: ControlConnection, num_they_received: int) -> None:
        """Use this connection, first for messages that the other side lacks."""
        with self._lock:
            self.detach()
            self._forget(num_they_received)
            self._connection = connection
            for _, data in self._kept:
                connection.write(data)
            connection.serve(self)
        self._on_change()

    def detach(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            self.gone_since = time.monotonic()
        if connection is not None:
            connection.close()

    def restart(self, messages: Sequence[Message]) -> None:
        """Begin again, with these messages: the other side is a new process and knows nothing of the earlier ones."""
        with self._lock:
            self.detach()
            self._kept.clear()
            self._kept_bytes = self._num_sent = self.num_received = 0
            for message in messages:
                self.send(message)

    def take(self, connection: ControlConnection, body: Message) -> None:
        """Of its connection: a frame was received."""
        with self._lock:
            if self._connection is not connection:
                return
            self._forget(int(body["received"]))
            if body.get("number", 0) != self.num_received + 1:  # a heartbeat or a duplicate
                return
            self.num_received += 1
            self.put(dict(body["message"]))

    def put(self, message: Message) -> None:
        """Handle a message as if it was received."""
        with self._lock:
            (self._handler or self.inbox.put)(message)

    def deliver_to(self, handler: Callable[[Message], None] | None) -> None:
        """From now on call `handler` with every message, on the loop's thread: it must not wait. First with those that
        are in `inbox`. None: messages go to `inbox`."""
        with self._lock:
            while handler is not None and not self.inbox.empty():
                handler(self.inbox.get())
            self._handler = handler

    def _forget(self, num_received: int) -> None:
        while self._kept and self._kept[0][0] <= num_received:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def lost(self, connection: ControlConnection) -> None:
        """Of its connection: it is broken."""
        with self._lock:
            if self._connection is not connection:
                return
            self._connection = None
            self.gone_since = time.monotonic()
        self._on_change()


class ControlConnection:
    """A connection on the event loop of all channels. `write` and `close` from any thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._in = reader, writer, bytearray()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._last_read = time.monotonic()
        self.ended = asyncio.Event()
        """Set when it no longer serves its channel."""

    def write(self, data: bytes) -> None:
        self._loop.call_soon_threadsafe(self._writer.write, data)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._writer.transport.abort())

    def serve(self, channel: ControlChannel) -> None:
        """Passes messages to the channel until the connection breaks or is closed."""
        self._loop.call_soon_threadsafe(self._start, channel)

    async def receive(self, max_bytes: int) -> Message:
        """The next message. Raises OSError where the connection is closed, ValueError for anything else than a
        message."""
        while (message := unframed(self._in, max_bytes)) is None:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise ConnectionResetError("the other side closed the connection")
            self._in += data
            self._last_read = time.monotonic()
        return message

    def _start(self, channel: ControlChannel) -> None:
        self._task = asyncio.create_task(self._serve(channel))

    async def _serve(self, channel: ControlChannel) -> None:
        beats = asyncio.create_task(self._beat(channel))
        try:
            while True:
                channel.take(self, await self.receive(MAX_FRAME_BYTES))
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError):
            pass  # broken, or not our protocol
        except Exception:  # a bug: it ends this connection and no other
            log.exception("a control channel failed")
        finally:
            beats.cancel()
            self._writer.transport.abort()
            self.ended.set()
            channel.lost(self)

    async def _beat(self, channel: ControlChannel) -> None:
        """Until the other side is silent for too long."""
        while time.monotonic() - self._last_read < SILENCE_S:
            await asyncio.sleep(HEARTBEAT_S)
            if not self._writer.transport.get_write_buffer_size():
                self._writer.write(frame({"received": channel.num_received}))
        self._writer.transport.abort()


@cache
def control_loop() -> LoopThread:
    """The event loop of all channels of this process."""
    return LoopThread("control channels")
