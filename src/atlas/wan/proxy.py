"""A plain emulated WAN path on loopback: what goes in comes out after a one-way latency, at a capped rate.

One `DelayProxy` is one node pair; all connections through it share its rate, each way apart. It reports its own
lateness, because a run in which the emulator was late says nothing. Knows bytes and time, not frames. It does
not emulate TCP's window: that, trunks and loss come with the real emulator.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

MAX_CHUNK_BYTES, CHUNK_S = 64 * 1024, 0.002
"""A chunk is delivered whole, so it must be short on the link, or a message's end waits for the next one's start."""
LOOKAHEAD_NS = 5_000_000
"""How far ahead of the link the proxy reads: far enough to hide a thread's wake-up, too short to hide a queue."""


class Lateness(NamedTuple):
    """How long after its due time a chunk left, over all chunks."""

    worst_ns: int = 0
    total_ns: int = 0
    num_chunks: int = 0

    def plus(self, late_ns: int) -> Lateness:
        return Lateness(max(self.worst_ns, late_ns), self.total_ns + late_ns, self.num_chunks + 1)


class _Lane:
    """One way over the path: when the link is free again, and how late we were. Shared by all connections."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self.chunk_bytes = max(256, min(MAX_CHUNK_BYTES, round((bytes_per_s or 1e12) * CHUNK_S)))
        self.free_ns = 0
        self.lateness = Lateness()
        self.lock = threading.Lock()

    def serve(self, num_bytes: int) -> int:
        """Takes the link for `num_bytes`; when it is through."""
        work_ns = round(num_bytes * 1e9 / self.bytes_per_s) if self.bytes_per_s else 0
        with self.lock:
            self.free_ns = max(self.free_ns, time.monotonic_ns()) + work_ns
            return self.free_ns

    def note(self, late_ns: int) -> None:
        with self.lock:
            self.lateness = self.lateness.plus(max(0, late_ns))


class DelayProxy:
    """Listens on `address`; connects every caller to `target`. `latency_s` is one way; `rate_bps` caps each way."""

    def __init__(self, target: tuple[str, int], *, latency_s: float = 0.0, rate_bps: float | None = None) -> None:
        self.target, self.latency_ns = target, round(latency_s * 1e9)
        rate = rate_bps / 8 if rate_bps else None
        self._there, self._back = _Lane(rate), _Lane(rate)
        self._sockets: list[socket.socket] = []
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        # A large receive buffer would take in the sender's whole queue, and with it the choice of what goes next.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._start(self._accept)

    @property
    def lateness(self) -> Lateness:
        a, b = self._there.lateness, self._back.lateness
        return Lateness(max(a.worst_ns, b.worst_ns), a.total_ns + b.total_ns, a.num_chunks + b.num_chunks)

    def close(self) -> None:
        """Cuts every connection at once, as a broken path would."""
        self._closed.set()
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(sock)
            if self._closed.is_set():
                self.close()
            for source, sink, lane in ((near, far, self._there), (far, near, self._back)):
                due: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
                self._start(self._take_in, source, lane, due)
                self._start(self._give_out, sink, lane, due)

    def _take_in(self, source: socket.socket, lane: _Lane, due: queue.SimpleQueue[tuple[int, bytes]]) -> None:
        chunk = b"?"
        while chunk:
            try:
                chunk = source.recv(lane.chunk_bytes)
            except OSError:
                chunk = b""
            free_ns = lane.serve(len(chunk))
            due.put((free_ns + self.latency_ns, chunk))
            _sleep_until(free_ns - LOOKAHEAD_NS)

    def _give_out(self, sink: socket.socket, lane: _Lane, due: queue.SimpleQueue[tuple[int, bytes]]) -> None:
        while True:
            due_ns, chunk = due.get()
            _sleep_until(due_ns)
            try:
                if not chunk:
                    sink.shutdown(socket.SHUT_WR)
                    return
                lane.note(time.monotonic_ns() - due_ns)
                sink.sendall(chunk)
            except OSError:
                return


def _sleep_until(due_ns: int) -> None:
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)
