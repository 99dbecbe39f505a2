"""Accepts connections, checks their first bytes, and limits what floods of connections can cost.

One thread watches all connections that have not sent a preamble: their number, their time and the rate of accepting are
bounded, and the oldest is closed to make room for a new one. Only a connection with a valid preamble gets a thread, at
most `max_handshakes` of them at once, each with a deadline. Then too the oldest makes room, unless it has just begun:
peers that all connect at once must not end each other's handshakes. Does not know what follows the preamble.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from atlas.callers import NO_DESCRIPTOR_S
from atlas.errors import WorkerError
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.unix_sockets import is_other_user
from atlas.wan.transport.wire import PREAMBLE, read_preamble

BURST_ACCEPTS = 16
"""Connections accepted at once after an idle time."""
SELECT_S = 0.25
"""How often connections that sent no preamble are checked for their deadline."""
GRACE_S = 1.0
"""What a handshake may take, if it is one of many: several round trips between any two places."""


@dataclass(eq=False)
class PendingConnection:
    """A connection that has not sent its whole preamble."""

    sock: socket.socket
    deadline: float
    preamble: bytes = b""


class Acceptor:
    """Calls `admit(sock, mode)` on a new thread for each connection with a valid preamble. `admit` owns the socket."""

    def __init__(
        self,
        listeners: list[socket.socket],
        settings: TransportSettings,
        admit: Callable[[socket.socket, int], None],
    ) -> None:
        self.settings, self.admit = settings, admit
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for listener in listeners:
            listener.setblocking(False)
        for sock in [*listeners, self._wake_out]:
            self._selector.register(sock, selectors.EVENT_READ)
        self._pending: dict[socket.socket, PendingConnection] = {}
        self._lock = threading.Lock()
        self._handshakes: dict[socket.socket, float] = {}
        """The sockets of handshakes that have not ended, and when these began. The oldest first."""
        self._threads: list[threading.Thread] = []
        """Those that run `admit`, and perhaps some that have ended."""
        self._closing = False
        self._allowance, self._allowance_at = float(BURST_ACCEPTS), time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="atlas wan acceptor")
        self._thread.start()

    def handshake_done(self, sock: socket.socket) -> None:
        """Called by `admit` when its handshake has ended, before it closes the socket."""
        with self._lock:
            self._handshakes.pop(sock, None)

    def close(self) -> None:
        self._closing = True
        self._wake_in.send(b"x")
        self._thread.join()
        with self._lock:
            for sock in self._handshakes:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # ends its thread
        for sock in [*self._pending, *self._listeners, self._wake_in, self._wake_out]:
            sock.close()
        self._selector.close()

    def join(self, timeout_s: float) -> None:
        """Waits, after `close`, until every `admit` has returned, also those that have just begun."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(SELECT_S):
                if not isinstance(key.fileobj, socket.socket):
                    continue
                if key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                elif key.fileobj in self._pending:
                    self._read(self._pending[key.fileobj])
            self._drop_late()

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        rate = self.settings.accepts_per_s
        self._allowance = min(BURST_ACCEPTS, self._allowance + (now - self._allowance_at) * rate)
        self._allowance_at = now
        if self._allowance < 1:
            time.sleep(1 / rate)  # connections wait in the kernel's backlog, and running transfers are not disturbed
            return
        while self._allowance >= 1:
            self._allowance -= 1
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(NO_DESCRIPTOR_S)
                return
            if is_other_user(sock):
                sock.close()
                continue
            sock.setblocking(False)
            if len(self._pending) >= self.settings.max_pending:
                self._drop(next(iter(self._pending.values())))
            try:
                self._selector.register(sock, selectors.EVENT_READ)
            except OSError:  # the kernel's limit of watched descriptors
                sock.close()
                continue
            self._pending[sock] = PendingConnection(sock, now + self.settings.handshake_s)

    def _read(self, pending: PendingConnection) -> None:
        try:
            data = pending.sock.recv(PREAMBLE.size - len(pending.preamble))
            pending.preamble += data
            if not data:
                raise WorkerError("closed before its preamble")
            if len(pending.preamble) < PREAMBLE.size:
                return
            mode = read_preamble(pending.preamble)
        except (OSError, WorkerError):
            self._drop(pending)
            return
        self._forget(pending)
        self._begin_handshake(pending.sock, mode)

    def _begin_handshake(self, sock: socket.socket, mode: int) -> None:
        now = time.monotonic()
        with self._lock:
            if len(self._handshakes) >= self.settings.max_handshakes:
                oldest, since = next(iter(self._handshakes.items()))
                if now - since < GRACE_S:
                    sock.close()
                    return
                del self._handshakes[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread
            self._handshakes[sock] = now
        thread = threading.Thread(target=self.admit, args=(sock, mode), daemon=True, name="atlas wan inbound")
        try:
            thread.start()
        except RuntimeError:  # the system's limit of threads: there may be some later
            self.handshake_done(sock)
            sock.close()
            return
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _drop_late(self) -> None:
        now = time.monotonic()
        for pending in list(self._pending.values()):
            if pending.deadline > now:
                return  # they are in order of arrival
            self._drop(pending)

    def _drop(self, pending: PendingConnection) -> None:
        self._forget(pending)
        with contextlib.suppress(OSError):
            pending.sock.close()

    def _forget(self, pending: PendingConnection) -> None:
        del self._pending[pending.sock]
        self._selector.unregister(pending.sock)
