"""The door: accepts connections, lets in those that say the right first bytes, and is not impressed by floods.

One thread watches all that have not spoken yet: their number, their time and the rate of accepting are bounded, and
the oldest silent one makes room for the newest. Only who says our preamble gets a thread, and of those only so
many at once, each with a deadline. Knows nothing of what is said afterwards.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from atlas.errors import WorkerError
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.unix_sockets import is_other_user
from atlas.wan.transport.wire import PREAMBLE, read_preamble

ACCEPTS_AT_ONCE = 16


@dataclass(eq=False)
class PendingConnection:
    """A connection that has not said its preamble yet."""

    sock: socket.socket
    deadline: float
    said: bytes = b""


class Acceptor:
    """`admit(sock, mode)` runs on a thread of its own and owns the socket, for as long as it likes."""

    def __init__(
        self, doors: list[socket.socket], settings: TransportSettings, admit: Callable[[socket.socket, int], None]
    ) -> None:
        self.settings, self.admit = settings, admit
        self.num_accepted = self.num_turned_away = 0
        self._doors = doors
        self._selector = selectors.DefaultSelector()
        for door in doors:
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ)
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, PendingConnection] = {}
        self._places = threading.BoundedSemaphore(settings.max_handshakes)
        self._closing = False
        self._allowance, self._allowance_at = float(ACCEPTS_AT_ONCE), time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="atlas wan porter")
        self._thread.start()

    def greeted(self) -> None:
        """Called by `admit` when its handshake is over: its place is free for another."""
        self._places.release()

    def close(self) -> None:
        self._closing = True
        self._wake_in.send(b"x")
        self._thread.join()
        for sock in [*self._strangers, *self._doors, self._wake_in, self._wake_out]:
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.25):
                if not isinstance(key.fileobj, socket.socket):
                    continue
                if key.fileobj in self._doors:
                    self._accept(key.fileobj)
                elif key.fileobj in self._strangers:
                    self._hear(self._strangers[key.fileobj])
            self._drop_late()

    def _accept(self, door: socket.socket) -> None:
        now = time.monotonic()
        rate = self.settings.accepts_per_s
        self._allowance = min(ACCEPTS_AT_ONCE, self._allowance + (now - self._allowance_at) * rate)
        self._allowance_at = now
        if self._allowance < 1:
            time.sleep(1 / rate)  # the kernel's backlog waits for us; what runs is not disturbed
            return
        while self._allowance >= 1:
            self._allowance -= 1
            try:
                sock, _ = door.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(0.05)  # out of descriptors, most likely: some will come back
                return
            self.num_accepted += 1
            if is_other_user(sock):
                sock.close()
                continue
            sock.setblocking(False)
            if len(self._strangers) >= self.settings.max_pending:
                self._turn_away(next(iter(self._strangers.values())))
            try:
                self._selector.register(sock, selectors.EVENT_READ)
            except OSError:  # the system watches no more descriptors for us
                sock.close()
                continue
            self._strangers[sock] = PendingConnection(sock, now + self.settings.handshake_s)

    def _hear(self, stranger: PendingConnection) -> None:
        try:
            said = stranger.sock.recv(PREAMBLE.size - len(stranger.said))
            stranger.said += said
            if not said:
                raise WorkerError("gone")
            if len(stranger.said) < PREAMBLE.size:
                return
            mode = read_preamble(stranger.said)
        except (OSError, WorkerError):
            self._turn_away(stranger)
            return
        if not self._places.acquire(blocking=False):
            self._turn_away(stranger)
            return
        thread = threading.Thread(target=self.admit, args=(stranger.sock, mode), daemon=True, name="atlas wan inbound")
        self._forget(stranger)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads: it may have some later, and the door stays open
            self._places.release()
            self.num_turned_away += 1
            stranger.sock.close()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for stranger in list(self._strangers.values()):
            if stranger.deadline > now:
                return  # they are in order of arrival
            self._turn_away(stranger)

    def _turn_away(self, stranger: PendingConnection) -> None:
        self.num_turned_away += 1
        self._forget(stranger)
        with contextlib.suppress(OSError):
            stranger.sock.close()

    def _forget(self, stranger: PendingConnection) -> None:
        del self._strangers[stranger.sock]
        self._selector.unregister(stranger.sock)
