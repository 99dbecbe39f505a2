"""One place for a stream of a channel: who is in it, and what the peer still owes it. And what went wrong, counted.

Thread-safe. Knows no frames and no messages.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from atlas.wan.transport.stream import SocketStream


class Faults(NamedTuple):
    """What a sender counts. All zero where nothing disturbs it."""

    num_replaced: int = 0
    """Streams that took the place of one that broke or fell silent."""
    num_resent: int = 0
    """Chunks sent again because their stream was lost."""
    num_hedged: int = 0
    """Chunks sent a second time over another stream because their answer was late: a busy host is enough for that."""

    def since(self, before: Faults) -> Faults:
        return Faults(*(now - then for now, then in zip(self, before, strict=True)))

    @classmethod
    def sum(cls, some: Iterable[Faults]) -> Faults:
        return cls(*map(sum, zip(cls(), *some, strict=True)))


class StreamSlot:
    """A place for a stream."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream: SocketStream | None = None
        self.dialing: socket.socket | None = None
        self.num_lives = self.num_answers = 0
        self.warm_bytes = 0
        """Of a warm-up, under way on this stream."""
        self._num_out, self._quiet_since = 0, 0.0
        """Frames that the peer has not answered yet, and since when we wait for an answer and hear nothing."""
        self._lock = threading.Lock()

    def begin(self, stream: SocketStream) -> None:
        with self._lock:
            self._num_out = self.num_answers = self.warm_bytes = 0
            self._quiet_since = time.monotonic()
        self.stream = stream

    def wrote(self, now: float, warm_bytes: int = 0) -> None:
        """A frame that the peer will answer."""
        with self._lock:
            self.warm_bytes += warm_bytes
            if not self._num_out:
                self._quiet_since = now
            self._num_out += 1

    def heard(self, now: float, *, answers: bool, warm_bytes: int = 0) -> None:
        """A record, which may answer a frame."""
        with self._lock:
            self._quiet_since = now
            self._num_out -= answers
            self.num_answers += answers
            self.warm_bytes -= warm_bytes

    def silent_s(self) -> float:
        """How long the peer has owed an answer and said nothing."""
        with self._lock:
            return time.monotonic() - self._quiet_since if self._num_out else 0.0
