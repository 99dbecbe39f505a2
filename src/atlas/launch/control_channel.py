"""Messages between two launchers, JSON in frames of bounded size, that outlive a broken connection: each is numbered,
kept until the other side has it, and sent again over the next connection. Heartbeats tell silence from absence.

Knows sockets and numbers. What the messages mean, and who may speak (`rendezvous`), it is not told.
"""

from __future__ import annotations

import contextlib
import json
import queue
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from atlas.errors import WorkerError

MAX_FRAME_BYTES = 64 << 20
"""A Program of half a million ops as text is a fraction of it."""
MAX_KEPT_BYTES = 4 * MAX_FRAME_BYTES
HEARTBEAT_S = 0.5
SILENCE_S = 5.0
"""A connection on which nothing comes for so long is broken."""
READ_BYTES = 1 << 18

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")


def frame(message: Message) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WorkerError(f"a message of {len(body):,} bytes, more than the {MAX_FRAME_BYTES:,} of a frame")
    return _LENGTH.pack(len(body)) + body


def unframed(buffer: bytearray) -> Message | None:
    """Takes the first message off the buffer; None where it is not all there. A ValueError where it is none."""
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
        raise ValueError("a frame of too many brackets") from None
    if not isinstance(message, dict):
        raise ValueError("a frame that holds no object")
    del buffer[: _LENGTH.size + length]
    return message


class ControlChannel:
    """One side of a talk. `send` at any time; what comes is in `inbox`. Give it a connection with `attach`."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.gone_since = time.monotonic()
        """Since when there has been no connection; meaningless while there is one."""
        self._on_change = on_change
        self._lock = threading.RLock()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._num_sent, self._num_received = 0, 0
        self._connection: _Connection | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def num_received(self) -> int:
        return self._num_received

    def send(self, message: Message) -> None:
        """Returns at once; raises where the message is too large, or too much waits for the other side already.

        A message that was refused was not sent; later ones still arrive.
        """
        with self._lock:
            data = frame({"number": self._num_sent + 1, "message": message, "received": self._num_received})
            if self._kept_bytes + len(data) > MAX_KEPT_BYTES:
                waiting = self._kept_bytes + len(data)
                raise WorkerError(f"{waiting:,} bytes wait for a launcher that does not read them")
            self._num_sent += 1
            self._kept.append((self._num_sent, data))
            self._kept_bytes += len(data)
            if self._connection is not None:
                self._connection.write(data)

    def wait_sent(self, timeout_s: float) -> bool:
        """Until the other side has everything, or has gone; whether nothing waits for it."""
        deadline = time.monotonic() + timeout_s
        while self._kept and self.is_connected and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._kept

    def attach(self, sock: socket.socket, num_they_received: int, early: bytes = b"") -> None:
        """Goes on over this connection, beginning with what the other side has not had. `early`: read ahead of us."""
        with self._lock:
            self.detach()
            self._forget(num_they_received)
            connection = self._connection = _Connection(sock, self._take, self._lost, self._beat)
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

    def _take(self, body: Message) -> None:
        with self._lock:
            self._forget(int(body["received"]))
            if body.get("number", 0) != self._num_received + 1:  # a heartbeat, or one that came again
                return
            self._num_received += 1
        self.inbox.put(dict(body["message"]))

    def _forget(self, num_received: int) -> None:
        while self._kept and self._kept[0][0] <= num_received:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _beat(self) -> bytes:
        return frame({"received": self._num_received})

    def _lost(self, connection: _Connection) -> None:
        with self._lock:
            if self._connection is not connection:
                return
            self._connection = None
            self.gone_since = time.monotonic()
        self._on_change()


class _Connection:
    """A socket and the one thread that reads and writes it: a TLS socket bears no two at once."""

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[Message], None],
        lost: Callable[[_Connection], None],
        beat: Callable[[], bytes],
    ) -> None:
        self._sock, self._take, self._lost, self._beat = sock, take, lost, beat
        self._out, self._in = bytearray(), bytearray()
        self._lock = threading.Lock()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True, name="launcher's line")

    def start(self, early: bytes) -> None:
        self._in += early
        self._thread.start()

    def write(self, data: bytes) -> None:
        with self._lock:
            self._out += data
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def _run(self) -> None:
        self._sock.setblocking(False)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._sock, selectors.EVENT_READ)
                selector.register(self._woken, selectors.EVENT_READ)
                self._serve(selector)
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError):  # broken, or it speaks another language
            pass
        finally:
            for sock in (self._sock, self._wake, self._woken):
                sock.close()
            self._lost(self)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        heard = said = time.monotonic()
        while not self._closed:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
            selector.modify(self._sock, events)
            for key, _ in selector.select(HEARTBEAT_S):
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
            now = time.monotonic()
            if self._read():
                heard = now
            if now - heard > SILENCE_S:
                return
            if now - said > HEARTBEAT_S and not self._out:
                self.write(self._beat())
            if self._flush():
                said = now

    def _read(self) -> bool:
        came = False
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while True:
                data = self._sock.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError("the other side ended the connection")
                came = True
                self._in += data
                while (body := unframed(self._in)) is not None:
                    self._take(body)
        while (body := unframed(self._in)) is not None:  # what was read ahead
            self._take(body)
        return came

    def _flush(self) -> bool:
        wrote = False
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError), self._lock:
            while self._out:
                num_bytes = self._sock.send(self._out[:READ_BYTES])
                del self._out[:num_bytes]
                wrote = True
        return wrote
