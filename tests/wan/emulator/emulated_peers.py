"""Servers and clients for emulated paths."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator


class Peer:
    """Echoes a connection that begins with `e`; of one that begins with `s`, records when bytes arrive."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.server = socket.create_server((host, port))
        self.address: tuple[str, int] = self.server.getsockname()
        self.arrivals: list[tuple[float, int]] = []
        self.ended = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.server.accept()
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            echoes = sock.recv(1) == b"e"
            while data := sock.recv(1 << 18):
                if echoes:
                    sock.sendall(data)
                with self._lock:
                    self.arrivals.append((time.monotonic(), len(data)))
        self.ended.release()

    def rate_bps(self, after_s: float) -> float:
        """Slope of what came, the first `after_s` left out."""
        with self._lock:
            arrivals = list(self.arrivals)
        first = next(i for i, (at, _) in enumerate(arrivals) if at > arrivals[0][0] + after_s)
        num_bytes = sum(count for _, count in arrivals[first + 1 :])
        return num_bytes * 8 / (arrivals[-1][0] - arrivals[first][0])

    def close(self) -> None:
        for sock in [self.server, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def peer() -> Iterator[Peer]:
    found = Peer()
    try:
        yield found
    finally:
        found.close()


def call(address: tuple[str, int], kind: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=60)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(kind)
    except OSError:  # reset after it was accepted
        sock.close()
        raise
    return sock


def round_trips_s(address: tuple[str, int], count: int = 10) -> list[float]:
    """The first, which pays for the handshake, left out."""
    taken = []
    with call(address, b"e") as sock:
        for _ in range(count + 1):
            began = time.monotonic()
            sock.sendall(b"ping")
            assert sock.recv(100) == b"ping"
            taken.append(time.monotonic() - began)
    return taken[1:]


def require_round_trip(address: tuple[str, int], below_s: float, limit_s: float = 60.0) -> None:
    """One that is this short; a busy host needs some attempts."""
    deadline = time.monotonic() + limit_s
    while (shortest_s := min(round_trips_s(address))) >= below_s:
        assert time.monotonic() < deadline, f"{shortest_s} s"


def pour(address: tuple[str, int], seconds: float) -> int:
    """Sends as much as goes for so long; how much went."""
    block, sent, end = bytes(64 * 1024), 0, time.monotonic() + seconds
    with call(address, b"s") as sock:
        while time.monotonic() < end:
            sent += sock.send(block)
    return sent
