"""A path that breaks on purpose: forwards connections to a target, and cuts or stalls each after a random number of
bytes. For tests and for `bench/wan_faults.py`; the emulator models paths, this one only hurts them.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading

BLOCK_BYTES = 256 * 1024


class Chaos:
    """`mean_bytes` until a fault, on average; every `stall_share` of the faults is a silence instead of a cut."""

    def __init__(
        self,
        target: tuple[str, int],
        mean_bytes: float,
        *,
        stall_share: float = 0.2,
        seed: int = 0,
        max_faults: int = 0,
    ) -> None:
        self.target, self.mean_bytes, self.stall_share = target, mean_bytes, stall_share
        self.max_faults = max_faults or 1 << 60
        self.num_cut = self.num_stalled = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._server.settimeout(0.2)
        self.address: tuple[str, int] = self._server.getsockname()
        self._start(self._accept)

    @property
    def num_faults(self) -> int:
        return self.num_cut + self.num_stalled

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        self._server.close()

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True, name="atlas wan chaos")  # type: ignore[arg-type]
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._server.accept()
            except OSError:
                continue
            self._start(self._carry, near)

    def _carry(self, near: socket.socket) -> None:
        """Both ways, until it is time to break."""
        with near:
            try:
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                return
            with self._lock:
                self._sockets |= {near, far}
                limit = self._random.expovariate(1 / self.mean_bytes)
                stalls = self._random.random() < self.stall_share
            with far:
                near.settimeout(None)
                far.settimeout(None)
                back = threading.Thread(target=self._pass, args=(far, near, 1e18, False), daemon=True)
                back.start()
                self._pass(near, far, limit, stalls)
                back.join()
                with self._lock:
                    self._sockets -= {near, far}

    def _pass(self, source: socket.socket, sink: socket.socket, limit: float, stalls: bool) -> None:
        passed, block = 0, bytearray(BLOCK_BYTES)
        view = memoryview(block)
        with contextlib.suppress(OSError):
            while got := source.recv_into(view):
                if passed + got > limit and self._may_fault(stalls):
                    sink.sendall(view[: max(0, int(limit - passed))])
                    if stalls:
                        self._wait_until_given_up(source)
                    break
                sink.sendall(view[:got])
                passed += got
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                if limit < 1e18:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)

    def _may_fault(self, stalls: bool) -> bool:
        with self._lock:
            if self.num_faults >= self.max_faults:
                return False
            self.num_stalled += stalls
            self.num_cut += not stalls
            return True

    def _wait_until_given_up(self, source: socket.socket) -> None:
        """Swallows nothing, forwards nothing: only the peer's end of patience ends it."""
        poll_s = 0.05
        while not self._closing.wait(poll_s):
            info = source.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if info[0] != 1:  # no longer established
                return
