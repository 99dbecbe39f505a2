"""A transport in memory."""

from __future__ import annotations

import threading
import time

from atlas.errors import WorkerError
from atlas.wan.transport.base import Buffer, Handle, Key, Mailbox, Transport, view_of, writable_view_of


class Loopback(Transport):
    """Nodes of one process: `a, b = Loopback.network("a", "b")`. Delivers at once, in the order of sends."""

    def __init__(self, name: str, nodes: dict[str, Loopback]) -> None:
        self.name, self._nodes, self._closed = name, nodes, False
        self._lock = threading.Lock()
        self._boxes: dict[tuple[str, int], Mailbox] = {}

    @staticmethod
    def network(*names: str) -> tuple[Loopback, ...]:
        nodes: dict[str, Loopback] = {}
        nodes.update({name: Loopback(name, nodes) for name in names})
        return tuple(nodes.values())

    def send(self, key: Key, buffer: Buffer, turn: int = 0, what: str = "") -> Handle:
        handle, peer = Handle(what or f"{key} to {key.peer}"), self._nodes.get(key.peer)
        handle.start_ns = time.monotonic_ns()
        if peer is None or peer._closed:
            handle.fail(f"{self.name} has no open peer {key.peer}")
        else:
            peer._box(self.name, key.lane).deliver(key.tag, memoryview(bytearray(view_of(buffer))))
            handle.finish()
        return handle

    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        handle = Handle(what or f"{key} from {key.peer}")
        self._box(key.peer, key.lane).post(key.tag, writable_view_of(buffer), handle)
        return handle

    def close(self, timeout_s: float = 5.0) -> None:
        self._closed = True
        for box in list(self._boxes.values()):
            box.fail(WorkerError(f"{self.name} was closed"))

    def _box(self, peer: str, lane: int) -> Mailbox:
        with self._lock:
            if (peer, lane) not in self._boxes:
                self._boxes[peer, lane] = Mailbox(peer, lane)
            box = self._boxes[peer, lane]
        if self._closed:
            box.fail(WorkerError(f"{self.name} is closed"))
        return box
