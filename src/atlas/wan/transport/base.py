"""What every transport offers: `send`, `recv`, `close`, and a handle to wait on. And `Loopback`, one in memory.

Knows bytes under keys, and turns. Does not know tensors, Programs, sockets or how the bytes travel.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from atlas.errors import WorkerError

TAG_INTS = 4

Tag = tuple[int, int, int, int]
Buffer = Any
"""Anything with a contiguous buffer: bytes, bytearray, memoryview, a numpy array."""


class Key(NamedTuple):
    """What a message is. The sender names the receiver as `peer`, the receiver the sender. Used once in an epoch."""

    peer: str
    """`datacenter/worker` of the other end."""
    lane: int = 0
    """Kinds of traffic that never share a connection: forward, backward, ..."""
    tag: Tag = (0, 0, 0, 0)

    def __str__(self) -> str:
        return f"lane {self.lane} {self.tag}"


class Handle:
    """A transfer under way. Done means: the receiver has every byte. `buffer` is where a receive lies."""

    def __init__(self, what: str = "") -> None:
        self.what = what
        self.buffer: memoryview | None = None
        self.error: WorkerError | None = None
        self.start_ns = 0
        """When the first byte left the queue (a send), on the monotonic clock."""
        self.end_ns = 0
        self.on_start: Callable[[], None] | None = None
        """Called when the first byte leaves the queue, on the thread that takes it."""
        self.progress: Callable[[], str] = lambda: "no progress is known"
        self.done = False
        self._lock = threading.Lock()
        self._finished: threading.Event | None = None
        """Made by who waits first: most handles are never waited on."""
        self._callbacks: list[Callable[[Handle], None]] = []

    def wait(self, timeout_s: float | None = None) -> memoryview | None:
        """Returns once it is done; raises what went wrong, or a WorkerError after `timeout_s`."""
        with self._lock:
            if not self.done and self._finished is None:
                self._finished = threading.Event()
        if self._finished is not None and not self._finished.wait(timeout_s):
            raise WorkerError(f"{self.what}: nothing came within {timeout_s:g} s; {self.progress()}")
        if self.error is not None:
            raise self.error
        return self.buffer

    def finish(self, error: WorkerError | None = None, buffer: memoryview | None = None) -> None:
        """Ends it once; a second end changes nothing."""
        with self._lock:
            if self.done:
                return
            self.error, self.end_ns = error, time.monotonic_ns()
            self.buffer = buffer if buffer is not None else self.buffer
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
            if self._finished is not None:
                self._finished.set()
        for callback in callbacks:
            guarded(callback, self)

    def on_done(self, callback: Callable[[Handle], None]) -> None:
        """Called with this handle when it ends, or now if it has; on whichever thread ends it, so keep it short."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)


def guarded(callback: Callable[..., None], *arguments: object) -> None:
    """Calls it. What it raises is shown as a thread's uncaught exception is, and ends nothing else: a thread of the
    transport serves many transfers, and the others must still finish."""
    try:
        callback(*arguments)
    except Exception as error:
        threading.excepthook(
            threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
        )


class Transport(ABC):
    """Bytes from node to node. Nothing blocks but `Handle.wait` and `close`."""

    @abstractmethod
    def send(self, key: Key, buffer: Buffer, turn: int = 0, what: str = "") -> Handle:
        """Sends `buffer`, smallest turn first; it must not change until the handle is done. `what` names the op."""

    @abstractmethod
    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        """Receives into `buffer`, whose size must fit; without one, into memory of its own (`handle.buffer`)."""

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> None:
        """Delivers what was sent, within the time-out, and ends every wait."""


def view_of(buffer: Buffer) -> memoryview:
    """The bytes of a contiguous buffer, flat."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def writable_view_of(buffer: Buffer) -> memoryview:
    view = view_of(buffer)
    if view.readonly and view.nbytes:
        raise ValueError("a buffer to receive into must be writable")
    return view


def size_error(key: Key, given: int, expected: int) -> WorkerError:
    return WorkerError(f"{key} from {key.peer} has {given} bytes, but the buffer for it has {expected}")


class Loopback(Transport):
    """Nodes of one process, for tests: `a, b = Loopback.network("a", "b")`. Delivers at once, in order of sends."""

    def __init__(self, name: str, nodes: dict[str, Loopback]) -> None:
        self.name, self._nodes, self._closed = name, nodes, False
        self._lock = threading.Lock()
        self._arrived: dict[Key, bytes] = {}
        self._posted: dict[Key, tuple[Handle, memoryview | None]] = {}
        self.sent: list[tuple[Key, int]] = []
        """Keys and turns in the order of sends, for a test to look at."""

    @staticmethod
    def network(*names: str) -> tuple[Loopback, ...]:
        nodes: dict[str, Loopback] = {}
        nodes.update({name: Loopback(name, nodes) for name in names})
        return tuple(nodes.values())

    def send(self, key: Key, buffer: Buffer, turn: int = 0, what: str = "") -> Handle:
        handle, peer = Handle(what or f"{key} to {key.peer}"), self._nodes.get(key.peer)
        handle.start_ns = time.monotonic_ns()
        self.sent.append((key, turn))
        if peer is None or peer._closed:
            handle.finish(WorkerError(f"{handle.what}: {self.name} has no open peer {key.peer}"))
            return handle
        peer._arrive(Key(self.name, key.lane, key.tag), bytes(view_of(buffer)))
        handle.finish()
        return handle

    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        handle = Handle(what or f"{key} from {key.peer}")
        view = None if buffer is None else writable_view_of(buffer)
        with self._lock:
            if key in self._posted:
                raise ValueError(f"{key} is already being received")
            if self._closed:
                handle.finish(WorkerError(f"{handle.what}: {self.name} is closed"))
            elif key in self._arrived:
                self._deliver(key, handle, view, self._arrived.pop(key))
            else:
                self._posted[key] = (handle, view)
        return handle

    def close(self, timeout_s: float = 5.0) -> None:
        with self._lock:
            self._closed = True
            for handle, _ in self._posted.values():
                handle.finish(WorkerError(f"{handle.what}: {self.name} was closed"))
            self._posted.clear()

    def _arrive(self, key: Key, data: bytes) -> None:
        with self._lock:
            if key in self._posted:
                self._deliver(key, *self._posted.pop(key), data)
            else:
                self._arrived[key] = data

    @staticmethod
    def _deliver(key: Key, handle: Handle, view: memoryview | None, data: bytes) -> None:
        if view is None:
            handle.finish(buffer=memoryview(bytearray(data)))
        elif len(view) != len(data):
            handle.finish(size_error(key, len(data), len(view)))
        else:
            view[:] = data
            handle.finish(buffer=view)
