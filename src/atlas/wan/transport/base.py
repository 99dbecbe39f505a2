"""The interface of every transport: `send`, `recv`, `close`, and a handle to wait on.

Knows bytes with keys, and turns. Does not know tensors, Programs, sockets or how the bytes are carried.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from atlas.errors import WorkerError

Tag = tuple[int, int, int, int]
ZERO_TAG: Tag = (0, 0, 0, 0)
Address = tuple[str, int]
"""Host and port."""


class PeerRoute(NamedTuple):
    """How a node and a peer connect."""

    address: Address | None
    """Where this node dials the peer. None: it cannot, and the peer dials for both directions."""
    dial_for: bool = False
    """The peer cannot dial this node: this node dials for both directions."""


Buffer = Any
"""Anything with a contiguous buffer: bytes, bytearray, memoryview, a numpy array."""


class Key(NamedTuple):
    """Identifies a message. The sender names the receiver as `peer`, the receiver the sender. Used once per epoch."""

    peer: str
    """`datacenter/worker` of the other end."""
    lane: int = 0
    """Kind of traffic (forward, backward, ...). Lanes never share a connection."""
    tag: Tag = ZERO_TAG

    def __str__(self) -> str:
        return f"lane {self.lane} {self.tag}"


class Handle:
    """A transfer. Done means that the receiver has every byte. `buffer` holds what was received."""

    def __init__(self, what: str = "") -> None:
        self.what = what
        self.buffer: memoryview | None = None
        self.error: WorkerError | None = None
        self.start_ns = 0
        """When the first byte of a send left the queue, on the monotonic clock."""
        self.end_ns = 0
        self.on_start: Callable[[], None] | None = None
        """Called when the first byte leaves the queue, on the thread that takes it."""
        self.progress: Callable[[], str] = lambda: "progress is not known"
        self.done = False
        self._lock = threading.Lock()
        self._finished: threading.Event | None = None
        """Made by the first `wait`: most handles are never waited on."""
        self._callbacks: list[Callable[[Handle], None]] = []

    def wait(self, timeout_s: float | None = None) -> memoryview | None:
        """Returns when the transfer is done. Raises its error, or a WorkerError after `timeout_s`."""
        with self._lock:
            if not self.done and self._finished is None:
                self._finished = threading.Event()
        if self._finished is not None and not self._finished.wait(timeout_s):
            raise WorkerError(f"{self.what}: not done within {timeout_s:g} s; {self.progress()}")
        if self.error is not None:
            raise self.error
        return self.buffer

    def finish(self, error: WorkerError | None = None, buffer: memoryview | None = None) -> None:
        """Ends the transfer. A second call changes nothing."""
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

    def fail(self, error: object) -> None:
        """Ends the transfer with an error that begins with what it was."""
        self.finish(WorkerError(f"{self.what}: {error}"))

    def on_done(self, callback: Callable[[Handle], None]) -> None:
        """Calls `callback` with this handle when it is done, or now if it is. Must be short: any thread may run it."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)


def guarded(callback: Callable[..., None], *arguments: object) -> None:
    """Calls it and reports what it raises: a thread of the transport serves many transfers, and the others must still
    finish."""
    try:
        callback(*arguments)
    except Exception as error:
        report(error)


def report(error: Exception) -> None:
    """Shows an exception like one that a thread did not catch."""
    threading.excepthook(
        threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    )


class Transport(ABC):
    """Carries bytes from node to node. Only `Handle.wait` and `close` block."""

    @abstractmethod
    def send(self, key: Key, buffer: Buffer, turn: int = 0, what: str = "") -> Handle:
        """Sends `buffer`, smallest turn first. Do not change it until the handle is done. `what` names the op."""

    @abstractmethod
    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        """Receives into `buffer`, which must have the message's size, or without one into new memory."""

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> None:
        """Delivers what was sent, within the timeout, and ends every wait."""


def view_of(buffer: Buffer) -> memoryview:
    """The bytes of a contiguous buffer as a flat view."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def writable_view_of(buffer: Buffer | None) -> memoryview | None:
    view = None if buffer is None else view_of(buffer)
    if view is not None and view.readonly and view.nbytes:
        raise ValueError("a buffer to receive into must be writable")
    return view


def is_wildcard(host: str) -> bool:
    """Whether it is 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def size_error(key: Key, given: int, expected: int) -> WorkerError:
    return WorkerError(f"{key} from {key.peer} has {given} bytes, but the buffer for it has {expected}")


class Mailbox:
    """Whole messages of one peer and lane, and the receives posted for them, in any order. Thread-safe."""

    def __init__(self, peer: str, lane: int) -> None:
        self.peer, self.lane = peer, lane
        self._lock = threading.Lock()
        self._posted: dict[Tag, tuple[Handle, memoryview | None]] = {}
        self._early: dict[Tag, memoryview] = {}
        """Messages that came before their receive was posted."""
        self._failure: WorkerError | None = None

    def post(self, tag: Tag, view: memoryview | None, handle: Handle) -> None:
        with self._lock:
            if tag in self._posted:
                raise ValueError(f"{handle.what}: it is already being received")
            early = self._early.pop(tag, None)
            if early is None and self._failure is None:
                self._posted[tag] = (handle, view)
                return
        if early is None:
            handle.fail(self._failure)
        else:
            self._hand_over(tag, early, handle, view)

    def buffer_for(self, tag: Tag, num_bytes: int) -> memoryview:
        """Where to put the message: the posted buffer if its size fits, else new memory."""
        wanted = self._posted.get(tag, (None, None))[1]
        return wanted if wanted is not None and len(wanted) == num_bytes else memoryview(bytearray(num_bytes))

    def deliver(self, tag: Tag, data: memoryview) -> None:
        with self._lock:
            entry = self._posted.pop(tag, None)
            if entry is None:
                self._early[tag] = data
                return
        self._hand_over(tag, data, *entry)

    def fail(self, error: WorkerError) -> None:
        """Ends every receive. Messages that have arrived can still be received."""
        with self._lock:
            self._failure = self._failure or error
            lost, self._posted = self._posted, {}
        for handle, _ in lost.values():
            handle.fail(self._failure)

    def _hand_over(self, tag: Tag, data: memoryview, handle: Handle, wanted: memoryview | None) -> None:
        if wanted is not None and len(wanted) != len(data):
            handle.finish(size_error(Key(self.peer, self.lane, tag), len(data), len(wanted)))
            return
        if wanted is not None and wanted is not data:
            wanted[:] = data
        handle.finish(buffer=data if wanted is None else wanted)
