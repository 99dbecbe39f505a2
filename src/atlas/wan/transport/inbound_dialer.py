"""Dials a peer that cannot dial this node, so that the peer can send: after the handshake the listener is the sender.

One connection first; its answer says how many the peer's channel uses. Each is served like a connection that the peer
has dialled, and dialled again when it ends, with growing pauses. Knows one peer and lane; not what arrives.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from atlas.errors import AtlasError, WorkerError
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address
from atlas.wan.transport.handshake import RetryPause, dial, is_final
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.shared_threads import JobThreads
from atlas.wan.transport.stream import SocketStream, broken
from atlas.wan.transport.unix_sockets import is_unix
from atlas.wan.transport.wire import Greeting

LONGEST_RETRY_S = 1.0
"""Pause before a connection is dialled again, at most."""
MAX_SLOTS = 256
"""Connections that a peer may ask for."""
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 5, 2, 3
"""The sender finds a dead connection by missing answers, but only this side can dial again. The kernel finds it here
within 5 + 3 x 2 seconds."""

Serve = Callable[[SocketStream, Greeting, Callable[[], None] | None], None]
"""Serves a connection to its end; does not raise. With a function, returns at once and calls it at the end."""


class InboundDialer:
    """Dials from the start, until `close`. `mine`: the greeting of its first connection."""

    def __init__(
        self,
        mine: Greeting,
        address: Address,
        security: Security,
        settings: TransportSettings,
        serve: Serve,
        give_up: Callable[[WorkerError], None],
        shared: JobThreads | None = None,
    ) -> None:
        """`give_up` is called once if the peer refuses for good. `shared`: dial on these threads, which must not
        block for long, and serve without a thread."""
        self.mine, self.address, self.security, self.settings = mine, address, security, settings
        self.last_error = "it was never reached"
        self._serve, self._give_up = serve, give_up
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._dialing: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._shared = shared
        self._num_slots = 0
        self._retries: dict[int, tuple[float, RetryPause]] = {}
        """When a slot dials again on shared threads, and its pause."""
        self._ensure(1)

    def close(self) -> None:
        """The caller aborts the streams that are being served."""
        self._closing.set()
        with self._lock:
            for sock in self._dialing.values():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)

    def watch(self, now: float) -> None:
        """Called a few times a second: dials again on shared threads."""
        with self._lock:
            due = [slot for slot, (at, _) in self._retries.items() if at <= now and not self._closing.is_set()]
            pauses = {slot: self._retries.pop(slot)[1] for slot in due}
        for slot, pause in pauses.items():
            self._submit(slot, pause)

    def _ensure(self, num_slots: int) -> None:
        """Starts the connections that are missing."""
        with self._lock:
            missing = range(self._num_slots, min(num_slots, MAX_SLOTS))
            self._num_slots = max(self._num_slots, missing.stop)
            for slot in missing if self._shared is None else ():
                name = f"atlas wan {self.mine.name} <- {self.mine.peer} (lane {self.mine.lane}) {slot}"
                self._threads.append(threading.Thread(target=self._run, args=(slot,), daemon=True, name=name))
                self._threads[-1].start()
        for slot in missing if self._shared is not None else ():
            self._submit(slot, RetryPause(LONGEST_RETRY_S))

    def _run(self, slot: int) -> None:
        pause = RetryPause(LONGEST_RETRY_S)
        while not self._closing.is_set():
            if self._serve_once(slot, None):
                pause.reset()
            self._closing.wait(pause.next_s())

    def _submit(self, slot: int, pause: RetryPause) -> None:
        def again() -> None:
            with self._lock:
                self._retries[slot] = (time.monotonic() + pause.next_s(), pause)

        def ended() -> None:
            pause.reset()
            again()

        def attempt() -> None:
            if not self._closing.is_set() and not self._serve_once(slot, ended):
                again()

        assert self._shared is not None
        self._shared.submit(attempt)

    def _serve_once(self, slot: int, on_end: Callable[[], None] | None) -> bool:
        """Dials and serves. False if it could not dial."""
        try:
            stream, theirs = self._dial(slot)
        except (OSError, AtlasError) as error:
            self.last_error = str(broken(error))
            if is_final(error) and not self._closing.is_set():
                self._closing.set()
                self._give_up(broken(error))
            return False
        self._ensure(theirs.slot)
        self._serve(stream, theirs, on_end)
        return True

    def _dial(self, slot: int) -> tuple[SocketStream, Greeting]:
        def on_socket(sock: socket.socket) -> None:
            with self._lock:
                self._dialing[slot] = sock
            _keep_alive(sock)

        try:
            mine = self.mine._replace(slot=slot)
            return dial(self.address, mine, self.security, self.settings.handshake_s, on_socket)
        finally:
            with self._lock:
                self._dialing.pop(slot, None)


def _keep_alive(sock: socket.socket) -> None:
    if is_unix(sock):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
