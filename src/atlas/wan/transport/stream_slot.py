"""One of the streams of a channel: its current connection, and the number of frames without an answer. And fault
counters.

Thread-safe. Knows no frames and no messages.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from atlas.wan.transport.stream import SocketStream
from atlas.wan.transport.wire import Greeting


class Faults(NamedTuple):
    """Counters of a sender. In an undisturbed run, the first two are zero."""

    num_replaced: int = 0
    """Streams that replaced one that broke or stopped answering."""
    num_resent: int = 0
    """Chunks sent again because their stream was lost."""
    num_hedged: int = 0
    """Chunks sent a second time on another stream because their answer was late. A busy host causes some."""

    def since(self, before: Faults) -> Faults:
        return Faults(*(now - then for now, then in zip(self, before, strict=True)))

    @classmethod
    def sum(cls, some: Iterable[Faults]) -> Faults:
        return cls(*map(sum, zip(cls(), *some, strict=True)))


class StreamSlot:
    """The place of one stream in a channel. A stream that breaks is replaced by another in the same slot."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream: SocketStream | None = None
        self.dialing: socket.socket | None = None
        self.dialled: queue.SimpleQueue[tuple[SocketStream, Greeting] | None] = queue.SimpleQueue()
        """Connections that the peer has dialled for this slot; None: the channel is being closed."""
        self.num_connections = self.num_answers = 0
        self.warm_bytes = 0
        """Warm-up bytes in flight on this stream."""
        self._num_unanswered, self._quiet_since = 0, 0.0
        """Frames without an answer so far, and since when nothing was received."""
        self._lock = threading.Lock()

    def close_dialled(self) -> None:
        """The channel is closed: closes the connections that no thread has taken, and ends the wait for them."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (dialled := self.dialled.get_nowait()) is not None:
                    dialled[0].close()
        self.dialled.put(None)

    def begin(self, stream: SocketStream) -> None:
        with self._lock:
            self._num_unanswered = self.num_answers = self.warm_bytes = 0
            self._quiet_since = time.monotonic()
        self.stream = stream

    def sent(self, now: float, warm_bytes: int = 0) -> None:
        """Records a frame that the peer will answer."""
        with self._lock:
            self.warm_bytes += warm_bytes
            if not self._num_unanswered:
                self._quiet_since = now
            self._num_unanswered += 1

    def received(self, now: float, *, answers: bool, warm_bytes: int = 0) -> None:
        """Records a record of the peer, and whether it answers a frame."""
        with self._lock:
            self._quiet_since = now
            self._num_unanswered -= answers
            self.num_answers += answers
            self.warm_bytes -= warm_bytes

    def silent_s(self) -> float:
        """How long an answer is due and nothing was received."""
        with self._lock:
            return time.monotonic() - self._quiet_since if self._num_unanswered else 0.0
