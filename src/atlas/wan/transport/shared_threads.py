"""A few threads for many streams: readers that wait for all of them at once, writers, and dialers.

A reader takes one stream that has something to read, reads one frame or record of it in blocking calls, and watches it
again. Nothing here can lock up: a frame that a reader has begun is being written by its sender's thread. Threads start
when they are needed and are daemons. Knows no frames.
"""

from __future__ import annotations

import contextlib
import queue
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

from atlas.wan.transport.base import guarded, report
from atlas.wan.transport.stream import SocketStream

READERS, WRITERS, DIALERS = 8, 4, 4
POLL_S = 0.5
"""How often a waiting reader checks whether it must end."""
WATCHED = select.EPOLLIN | select.EPOLLONESHOT

Job = Callable[[], None]


class JobThreads:
    """Runs jobs on at most `max_threads` threads, in the order of `submit`."""

    def __init__(self, name: str, max_threads: int) -> None:
        self.name, self.max_threads = name, max_threads
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0

    def submit(self, job: Job) -> None:
        with self._lock:
            self._num_idle -= 1
            if self._num_idle < 0 and len(self._threads) < self.max_threads:
                thread = threading.Thread(target=self._run, daemon=True, name=f"{self.name} {len(self._threads)}")
                self._threads.append(thread)
                self._num_idle += 1
                thread.start()
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """After the jobs that were submitted."""
        with self._lock:
            threads, self.max_threads = list(self._threads), 0
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            guarded(job)
            with self._lock:
                self._num_idle += 1


@dataclass(eq=False)
class WatchedStream:
    stream: SocketStream
    read: Callable[[], bool]
    """Reads one frame. False at the end of the stream."""
    ended: Job


class StreamReaders:
    """Threads that wait together for many streams. An event wakes one of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._epoll = select.epoll()
        self._watched: dict[int, WatchedStream] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, stream: SocketStream, read: Callable[[], bool], ended: Job) -> None:
        """`ended` is called once, when `read` has returned False; then the caller may close the stream."""
        watched = WatchedStream(stream, read, ended)
        with self._lock:
            self._watched[stream.sock.fileno()] = watched
            if len(self._threads) < min(READERS, len(self._watched)):
                thread = threading.Thread(target=self._run, daemon=True, name=f"{self.name} {len(self._threads)}")
                self._threads.append(thread)
                thread.start()
        stream.watch_any()
        self._epoll.register(stream.sock.fileno(), WATCHED)

    def close(self, timeout_s: float) -> None:
        """The caller has aborted the streams."""
        self._closing = True
        for thread in self._threads:
            thread.join(timeout_s)
        self._epoll.close()

    def _run(self) -> None:
        while not self._closing or self._watched:
            for descriptor, _ in self._epoll.poll(POLL_S, 1):
                watched = self._watched[descriptor]
                try:
                    goes_on = watched.read()
                except Exception as error:  # a bug: other streams go on
                    report(error)
                    goes_on = False
                if goes_on:
                    watched.stream.watch_any()
                    self._epoll.modify(descriptor, WATCHED)
                else:
                    self._end(descriptor, watched)

    def _end(self, descriptor: int, watched: WatchedStream) -> None:
        with self._lock:
            del self._watched[descriptor]
        with contextlib.suppress(OSError):
            self._epoll.unregister(descriptor)
        guarded(watched.ended)


class SharedThreads:
    """Of one endpoint."""

    def __init__(self, name: str) -> None:
        self.readers = StreamReaders(f"{name} reads")
        self.writers = JobThreads(f"{name} writes", WRITERS)
        self.dialers = JobThreads(f"{name} dials", DIALERS)

    def close(self, timeout_s: float) -> None:
        self.dialers.close(timeout_s)
        self.readers.close(timeout_s)
        self.writers.close(timeout_s)
