"""A channel of one stream without threads of its own, for a node with many peers (`stream_budget`).

Threads that all such channels share dial, write and read (`shared_threads`). `_step` runs on one thread at a time: it
takes a new connection, writes what is due, and leaves a connection that has ended. Between nodes of one datacenter it
connects when something is first sent, so peers that a Program does not use get no connection. Like a light channel, it
is not warmed up and has no in-flight limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from atlas.errors import AtlasError, WorkerError
from atlas.wan.security.credentials import Security, datacenter_of
from atlas.wan.transport.base import Address
from atlas.wan.transport.channel import LONGEST_RETRY_S, Channel
from atlas.wan.transport.handshake import RetryPause
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.shared_threads import SharedThreads
from atlas.wan.transport.stream import SocketStream
from atlas.wan.transport.wire import Greeting

STEP_CHUNKS = 8
"""Chunks that a channel sends before others have their turn."""
LONGEST_CHUNK_BYTES = 512 * 1024
"""A stream keeps a buffer of its longest chunk, and there are many of them."""
NEAR_HEARTBEATS = 10
"""Heartbeats between two pings inside a datacenter, where no middlebox drops idle connections."""


class SharedChannel(Channel):
    """Of one stream. `threads`: those of the endpoint."""

    def __init__(
        self,
        mine: Greeting,
        address: Address | None,
        security: Security,
        settings: TransportSettings,
        *,
        threads: SharedThreads,
    ) -> None:
        self._shared = threads
        self._state = threading.Lock()
        self._is_queued = self._is_again = self._is_dialing = self._is_read = False
        self._finished = threading.Event()
        self._pause, self._retry_at = RetryPause(LONGEST_RETRY_S), 0.0
        self._last_write = 0.0
        self.is_lazy = address is not None and datacenter_of(mine.name) == datacenter_of(mine.peer)
        self._heartbeat_s = settings.heartbeat_s * (NEAR_HEARTBEATS if self.is_lazy else 1)
        super().__init__(mine, address, security, settings, light=True)

    def _start(self) -> None:
        self._slot = self._slots[0]
        self.tuner.max_chunk_bytes = LONGEST_CHUNK_BYTES
        self.outbox.on_ready = self._schedule
        if not self.is_lazy:
            self._schedule()

    # ---- called by the endpoint --------------------------------------------------------------------------------
    def warm(self, deadline: float) -> None:
        if not self.is_lazy:
            super().warm(deadline)

    def adopt(self, stream: SocketStream, theirs: Greeting) -> bool:
        adopted = super().adopt(stream, theirs)
        self._schedule()
        return adopted

    def watch(self) -> None:
        super().watch()
        now, stream = time.monotonic(), self._slot.stream
        if stream is not None:
            try:
                self._check_silence(self._slot)
            except TimeoutError as error:
                self._log(error)
                stream.abort()
        is_due = now >= self._retry_at if stream is None else now - self._last_write >= self._heartbeat_s
        if is_due and not (self.is_lazy and stream is None and self.outbox.is_empty):
            self._schedule()

    def cut(self) -> None:
        super().cut()
        self._schedule()

    def _join(self, timeout_s: float) -> None:
        self._schedule()
        self._finished.wait(max(0.0, timeout_s))

    # ---- on the shared threads ---------------------------------------------------------------------------------
    def _schedule(self) -> None:
        """Runs `_step` soon; once more if it runs now."""
        with self._state:
            self._is_again = True
            if self._is_queued:
                return
            self._is_queued = True
        self._shared.writers.submit(self._run_step)

    def _run_step(self) -> None:
        with self._state:
            self._is_again = False
        try:
            self._step()
        except Exception as error:  # a bug: without this, waits do not end
            self.fail(f"its stream failed with {type(error).__name__}: {error}")
            raise
        finally:
            with self._state:
                is_again = self._is_queued = self._is_again
            if is_again:
                self._shared.writers.submit(self._run_step)

    def _step(self) -> None:
        stream = self._slot.stream
        if stream is not None and self._is_read:
            self._end(stream)
            stream = None
        if stream is None:
            stream = self._next_stream()
        if stream is None:
            return
        try:
            self._write_due(stream)
        except (OSError, WorkerError) as error:
            self._log(error)
            stream.abort()

    def _next_stream(self) -> SocketStream | None:
        """A connection that the peer has dialled. Otherwise dials, if it is time to."""
        dialled = self._last_dialled()
        if self._closing.is_set():
            if dialled is not None:
                dialled[0].close()
            if not self._is_dialing:
                self._finished.set()
            return None
        if self.address is None:
            return None if dialled is None else self._attempt(lambda: self._joined(self._slot, *dialled))
        if time.monotonic() >= self._retry_at and not self._is_dialing:
            self._is_dialing = True
            self._shared.dialers.submit(self._connect)
        return None

    def _last_dialled(self) -> tuple[SocketStream, Greeting] | None:
        """Of the connections that the peer has dialled; earlier ones are lost."""
        latest = None
        while not self._slot.dialled.empty():
            if (dialled := self._slot.dialled.get()) is not None:
                if latest is not None:
                    latest[0].close()
                latest = dialled
        return latest

    def _connect(self) -> None:
        try:
            if not self._closing.is_set():
                self._attempt(lambda: self._dial(self._slot))
        finally:
            self._is_dialing = False
            self._schedule()

    def _attempt(self, connect: Callable[[], SocketStream]) -> SocketStream | None:
        """None if it failed: the next attempt is then later, or everything queued has failed."""
        try:
            stream = connect()
        except (OSError, AtlasError) as error:
            self._connect_failed(error)
            self._retry_at = time.monotonic() + self._pause.next_s()
            return None
        self._begin(stream)
        return stream

    def _begin(self, stream: SocketStream) -> None:
        self._is_read, self._last_write = False, 0.0
        self._join_slot(self._slot, stream)
        self._shared.readers.add(stream, lambda: self._read_record(self._slot, stream), self._read_to_end)

    def _read_to_end(self) -> None:
        self._is_read = True
        self._schedule()

    def _end(self, stream: SocketStream) -> None:
        self._leave(self._slot, stream)
        if self._slot.num_answers:
            self._pause.reset()
        self._retry_at = time.monotonic() + self._pause.next_s()

    def _write_due(self, stream: SocketStream) -> None:
        """Sends some of what is ready, or a ping, or the end."""
        if stream.aborted:
            return
        for _ in range(STEP_CHUNKS):
            if (chunk := self.outbox.pull(stream, 0, 0.0)) is None:
                break
            self._write_chunk(self._slot, stream, chunk)
            self._last_write = time.monotonic()
        else:
            self._schedule()
            return
        if self._closing.is_set() and (self.outbox.is_empty or self.outbox.failure is not None):
            self._write_end(stream)
            stream.abort()
        elif time.monotonic() - self._last_write >= self._heartbeat_s:
            self._write_ping(self._slot, stream)
            self._last_write = time.monotonic()
