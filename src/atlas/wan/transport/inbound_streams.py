"""The streams that peers have to one endpoint: each is served by its own thread while there are few of them, and by
threads that all further ones share (`stream_budget`).

Knows which peers have streams and since when one has none. The inboxes know the messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from atlas.errors import WorkerError
from atlas.wan.transport.base import ZERO_TAG, Tag
from atlas.wan.transport.inbound import Inbound
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.shared_threads import StreamReaders
from atlas.wan.transport.stream import broken
from atlas.wan.transport.stream_budget import INBOUND_LIMITS, ChannelKind
from atlas.wan.transport.wire import RecordKind

log = logging.getLogger("atlas.wan")
Place = tuple[str, int]
"""A peer and a lane."""


class InboundStreams:
    def __init__(
        self,
        settings: TransportSettings,
        readers: StreamReaders,
        kind_of: Callable[[str], ChannelKind],
    ) -> None:
        self.settings, self.readers, self.kind_of = settings, readers, kind_of
        self.num_shared = 0
        """Streams without a thread of their own."""
        self._lock = threading.Lock()
        self._streams: dict[Place, list[Inbound]] = {}
        self._gone_since: dict[Place, float] = {}
        self._come: set[Place] = set()
        self._closing = False

    def add_place(self, place: Place) -> None:
        with self._lock:
            self._streams[place] = []
            self._gone_since[place] = time.monotonic()

    def of(self, place: Place) -> list[Inbound]:
        return list(self._streams[place])

    def has_come(self, place: Place) -> bool:
        """Whether the peer ever had a stream on this lane."""
        return place in self._come

    def gone_s(self, place: Place, now: float) -> float:
        """How long the peer has had no stream on this lane."""
        return 0.0 if self._streams[place] else now - self._gone_since[place]

    def is_crowded(self, peer: str) -> bool:
        """Whether a further stream of the peer is to be served by shared threads."""
        kind = self.kind_of(peer)
        with self._lock:
            others = (streams for (other, _), streams in self._streams.items() if self.kind_of(other) is kind)
            return sum(map(len, others)) >= INBOUND_LIMITS[kind]

    def serve(self, inbound: Inbound) -> None:
        """Serves it to its end."""
        error: Exception | None = None
        self._begin(inbound)
        try:
            inbound.serve()
        except (OSError, WorkerError) as caught:
            error = caught
        finally:
            self._end(inbound, error)

    def serve_shared(self, inbound: Inbound, on_end: Callable[[], None] = lambda: None) -> None:
        """Returns at once: shared threads serve it."""
        error: Exception | None = None

        def read() -> bool:
            nonlocal error
            try:
                return inbound.serve_frame()
            except (OSError, WorkerError) as caught:
                error = caught
                return False

        def ended() -> None:
            with self._lock:
                self.num_shared -= 1
            self._end(inbound, error)
            on_end()

        with self._lock:
            self.num_shared += 1
        self._begin(inbound)
        inbound.begin()
        self.readers.add(inbound.stream, read, ended)

    def _begin(self, inbound: Inbound) -> None:
        with self._lock:
            place = (inbound.greeting.name, inbound.greeting.lane)
            self._streams[place].append(inbound)
            self._come.add(place)
            closing = self._closing
        if closing:
            inbound.abort()

    def _end(self, inbound: Inbound, error: Exception | None) -> None:
        place = (inbound.greeting.name, inbound.greeting.lane)
        inbound.close()
        with self._lock:
            self._streams[place].remove(inbound)
            self._gone_since[place] = time.monotonic()
            left, closing = len(self._streams[place]), self._closing
        if error is not None and not closing:
            log.info("a stream from %s ended: %s", place[0], broken(error))
        if error is None and not left and not closing:
            inbound.inbox.fail(WorkerError(f"{place[0]} has closed its side"))

    def send_record(self, place: Place, kind: RecordKind, a: int = 0, tag: Tag = ZERO_TAG) -> None:
        """On the first stream of the peer that works."""
        for inbound in self.of(place):
            if inbound.send_record(kind, a, tag=tag):
                return

    def watch(self, now: float) -> None:
        """Ends streams on which nothing came for too long. Those with a thread end by themselves too."""
        with self._lock:
            streams = [inbound for some in self._streams.values() for inbound in some]
        for inbound in streams:
            if now - inbound.last_frame > self.settings.idle_s:
                inbound.abort()

    def close(self) -> None:
        """Aborts all, and those that come later."""
        with self._lock:
            self._closing = True
            streams = [inbound for some in self._streams.values() for inbound in some]
        for inbound in streams:
            inbound.abort()
