"""Numbered JSON messages between two launchers that survive a broken connection: each message is kept until the other
side has confirmed it, and sent again over the next connection. Heartbeats detect a dead connection.

Knows sockets and message numbers. Does not know what the messages mean, or who may connect (`rendezvous`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import queue
import selectors
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from atlas.errors import WorkerError

log = logging.getLogger("atlas.launch")
MAX_FRAME_BYTES = 64 << 20
"""Larger than the text of a Program of half a million ops."""
MAX_KEPT_BYTES = 4 * MAX_FRAME_BYTES
HEARTBEAT_S = 0.5
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


def unframed(buffer: bytearray) -> Message | None:
    """Remove and return the first message of the buffer; None if it is incomplete. ValueError if it is invalid."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length:,} bytes")
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
        self._connection: _Connection | None = None
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
            time.sleep(0.02)
        return not self._kept

    def attach(self, sock: socket.socket, num_they_received: int, early: bytes = b"") -> None:
        """Use this connection, first for messages that the other side lacks. `early`: bytes already read from it."""
        with self._lock:
            self.detach()
            self._forget(num_they_received)
            connection = self._connection = _Connection(sock, self)
            for _, data in self._kept:
                connection.write(data)
            connection.start(early)
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

    def take(self, connection: _Connection, body: Message) -> None:
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

    def lost(self, connection: _Connection) -> None:
        """Of its connection: it is broken."""
        with self._lock:
            if self._connection is not connection:
                return
            self._connection = None
            self.gone_since = time.monotonic()
        self._on_change()


class _Connection:
    """A socket and what is to be written to it. The loop alone reads and writes: a TLS socket does not allow two."""

    def __init__(self, sock: socket.socket, channel: ControlChannel) -> None:
        self.sock, self._channel = sock, channel
        self._out, self._in = bytearray(), bytearray()
        self._lock = threading.Lock()
        self.is_closed = False
        self.events = selectors.EVENT_READ
        self._last_read = self._last_write = time.monotonic()

    def start(self, early: bytes) -> None:
        self._in += early
        self.sock.setblocking(False)
        _loop().add(self)

    def write(self, data: bytes) -> None:
        with self._lock:
            self._out += data
        _loop().wake(self)

    def close(self) -> None:
        self.is_closed = True
        _loop().wake(self)

    def ended(self) -> None:
        self.sock.close()
        self._channel.lost(self)

    def serve(self, now: float) -> bool:
        """Read and write what is possible; whether the connection is alive."""
        if self.is_closed:
            return False
        try:
            if self._read():
                self._last_read = now
            if now - self._last_read > SILENCE_S:
                return False
            if now - self._last_write > HEARTBEAT_S and not self._out:
                self._out += frame({"received": self._channel.num_received})
            if self._flush():
                self._last_write = now
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError):  # broken, or not our protocol
            return False
        return True

    @property
    def wanted_events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def _read(self) -> bool:
        received = False
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while True:
                data = self.sock.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError("the other side closed the connection")
                received = True
                self._in += data
                while (body := unframed(self._in)) is not None:
                    self._channel.take(self, body)
        while (body := unframed(self._in)) is not None:  # bytes that `attach` was given
            self._channel.take(self, body)
        return received

    def _flush(self) -> bool:
        wrote = False
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError), self._lock:
            while self._out:
                num_bytes = self.sock.send(self._out[:READ_BYTES])
                del self._out[:num_bytes]
                wrote = True
        return wrote


class _ChannelLoop:
    """One thread that reads and writes the connections of all channels of this process."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._new: list[_Connection] = []
        self._due: set[_Connection] = set()
        self._connections: set[_Connection] = set()
        threading.Thread(target=self._run, daemon=True, name="control channels").start()

    def add(self, connection: _Connection) -> None:
        with self._lock:
            self._new.append(connection)
        self.wake(connection)

    def wake(self, connection: _Connection) -> None:
        """Serve a connection soon: there is something to write, or it was closed."""
        with self._lock:
            self._due.add(connection)
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._wake.send(b"!")

    def _run(self) -> None:
        ticked = time.monotonic()
        while True:
            ready = {key.data for key, _ in self._selector.select(HEARTBEAT_S / 2)}
            if None in ready:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(1 << 16)
            now = time.monotonic()
            with self._lock:
                new, due, self._new, self._due = self._new, self._due, [], set()
            for connection in new:
                self._register(connection)
            due |= ready - {None}
            if now - ticked > HEARTBEAT_S / 2:  # heartbeats, and connections that are silent
                due, ticked = set(self._connections), now
            for connection in due & self._connections:
                self._serve(connection, now)

    def _register(self, connection: _Connection) -> None:
        try:
            self._selector.register(connection.sock, connection.events, connection)
            self._connections.add(connection)
        except (ValueError, OSError):  # closed meanwhile
            connection.ended()

    def _serve(self, connection: _Connection, now: float) -> None:
        try:
            is_alive = connection.serve(now)
        except Exception:  # a bug: it ends this connection and no other
            log.exception("a control channel failed")
            is_alive = False
        if not is_alive:
            self._connections.discard(connection)
            self._selector.unregister(connection.sock)
            connection.ended()
        elif connection.events != connection.wanted_events:
            connection.events = connection.wanted_events
            self._selector.modify(connection.sock, connection.events, connection)


@cache
def _loop() -> _ChannelLoop:
    return _ChannelLoop()
