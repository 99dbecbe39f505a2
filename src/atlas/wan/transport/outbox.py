"""What waits to be sent to one peer on one lane, and which chunk goes next: the WAN queue.

The rule is the simulator's (`ir.dispatch`): smallest turn first, changes only at chunk boundaries, never idle while
something may go. What may go is what the receiver has room for: a receive is posted for it, or its staging has
credit; the last of the credit is kept for a turn that overtakes later ones. A chunk is ours until it is
acknowledged; a lost stream's chunks go first. Knows no sockets: streams pull, and report what became of it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Collection

from atlas.errors import WorkerError
from atlas.ir.dispatch import before
from atlas.wan.congestion.inflight_limit import InflightLimit
from atlas.wan.transport.base import Handle, Tag, guarded
from atlas.wan.transport.message import Announced, Chunk, OutgoingMessage
from atlas.wan.transport.wire import MAX_CHUNK_BYTES, MAX_POSTED

MIN_CHUNK_BYTES = 64 * 1024
FIRST_TURN = -(1 << 62)
RESERVE = 0.25
"""The part of the staging that only a turn which overtakes may use."""


class Outbox:
    """Thread-safe. `pull` is called by streams, `put` by the user, the rest by whoever reads the peer's records."""

    def __init__(
        self,
        chunk_bytes: int = 256 * 1024,
        num_streams: int = 1,
        least_chunk_bytes: int = MIN_CHUNK_BYTES,
        first_chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        """Chunks grow from `first_chunk_bytes` at the beginning of a message to `chunk_bytes`, if that is more, and
        shrink to `least_chunk_bytes` towards its end."""
        self.chunk_bytes, self.num_streams = chunk_bytes, num_streams
        self.least_chunk_bytes, self.first_chunk_bytes = least_chunk_bytes, first_chunk_bytes
        self.flight: InflightLimit | None = None
        """How much may be under way unacknowledged: more would only queue where turns are not known."""
        self.staging_bytes = 0
        """The receiver's; nothing unposted goes before it has told us."""
        self.delivered_bytes = 0
        self.usual_s = 0.0
        """How long an acknowledgement takes, smoothed."""
        self.last_progress_ns = time.monotonic_ns()
        self.failure: WorkerError | None = None
        self._lock = threading.RLock()
        self._changed, self._rests = threading.Condition(self._lock), threading.Condition(self._lock)
        self._emptied = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._ready: list[tuple[tuple[int, int], OutgoingMessage]] = []
        self._waiting: list[tuple[tuple[int, int], OutgoingMessage]] = []
        self._live: dict[int, OutgoingMessage] = {}
        self._held: dict[object, dict[tuple[int, int], Chunk]] = {}
        self._posted = Announced()
        self._charged_bytes = self._freed_bytes = self._unacked_bytes = 0
        self._latest_turn = self._slice_turn = self._next_turn = FIRST_TURN
        self._closed = False

    # ---- the user's side ---------------------------------------------------------------------------------------
    def put(self, tag: Tag, view: memoryview, turn: int, handle: Handle, *, whole: bool = False) -> None:
        with self._changed:
            if self.failure is None and not self._closed:
                message = OutgoingMessage(next(self._numbers), tag, view, turn, handle, whole)
                handle.progress = message.progress
                if not self._live:
                    self.last_progress_ns = time.monotonic_ns()
                    self._next_turn, self._slice_turn = self._slice_turn + 1, FIRST_TURN
                    if whole and self.flight is not None:
                        self.flight.hold(len(view), message.put_at)
                self._live[message.number] = message
                heapq.heappush(self._waiting, (before(turn, message.number), message))
                self._admit()
                return
            error = self.failure or WorkerError("the transport is closed")
        handle.finish(WorkerError(f"{handle.what}: {error}"))

    @property
    def is_empty(self) -> bool:
        return not self._live

    @property
    def has_ready(self) -> bool:
        """Something could go at once, if the streams took it."""
        return bool(self._ready)

    @property
    def has_unacked(self) -> bool:
        with self._changed:
            return any(self._held.values())

    def tune(self, chunk_bytes: int, num_streams: int, least_chunk_bytes: int = MIN_CHUNK_BYTES) -> None:
        with self._changed:
            if num_streams > self.num_streams:
                self._rests.notify_all()
            self.chunk_bytes, self.num_streams = chunk_bytes, num_streams
            self.least_chunk_bytes = least_chunk_bytes

    @property
    def backlog_bytes(self) -> int:
        """What has not been handed to a stream yet."""
        with self._changed:
            return sum(len(m.view) - m.next_offset for m in self._live.values())

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything is acknowledged; False if that took too long or failed."""
        with self._changed:
            return self._emptied.wait_for(lambda: not self._live or self.failure is not None, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._wake_all()

    def fail(self, error: WorkerError) -> None:
        """Ends every wait with an error that says what was to be done and how far it had come."""
        with self._changed:
            self.failure = self.failure or error
            lost = list(self._live.values())
            self._live.clear()
            self._ready.clear()
            self._waiting.clear()
            self._wake_all()
        for message in lost:
            message.handle.finish(WorkerError(f"{message.handle.what}: {message.progress()}; {self.failure}"))

    # ---- the streams' side -------------------------------------------------------------------------------------
    def pull(self, stream: object, index: int, timeout_s: float) -> Chunk | None:
        """The next chunk for a stream; None after `timeout_s`, at the end, or while streams of this index rest."""
        with self._changed:
            if not self._may_pull(index):
                # Those that rest wait apart, so that who is woken can also work.
                (self._changed if index < self.num_streams else self._rests).wait(min(timeout_s, self._pause_s()))
            if not self._may_pull(index):
                if self._ready and index >= self.num_streams:
                    self._changed.notify()  # woken in vain: it rests since it began to wait
                return None
            chunk = self._take(stream)
            if self._may_pull(0):
                self._changed.notify()  # one wakes the next, so that nobody wakes in vain
            handle = chunk.message.handle
            begins = not handle.start_ns
            handle.start_ns = handle.start_ns or time.monotonic_ns()
        if begins and handle.on_start is not None:
            guarded(handle.on_start)
        return chunk

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether something can be pulled, at once or within the time."""
        with self._changed:
            return bool(self._ready) or (self._changed.wait(timeout_s) and bool(self._ready))

    def steal(
        self,
        stream: object,
        age_s: float,
        below_turn: int | None = None,
        halted: Collection[object] = (),
        halted_s: float = 0.0,
    ) -> Chunk | None:
        """A chunk that another stream took so long ago that this one would have delivered it; of the smallest turn.
        Only when nothing else waits, or of turns below `below_turn`. Both may arrive; the receiver takes one.
        `halted_s`: the age for those of streams that have halted, as long as nobody else holds them as well."""
        now = time.monotonic()
        with self._changed:
            if below_turn is None and self._ready:
                return None
            stuck = {key for other in halted for key in self._held.get(other, ())}
            for other, held in self._held.items() if stuck else ():
                stuck -= held.keys() if other not in halted else set()
            best: tuple[tuple[int, int], Chunk] | None = None
            for message in self._live.values():
                if below_turn is not None and message.turn >= below_turn:
                    continue
                for chunk in message.unacked.values():
                    least_s = halted_s if (message.number, chunk.offset) in stuck else age_s
                    if now - message.taken_at[chunk.offset] < least_s:
                        continue
                    if (message.number, chunk.offset) in self._held.get(stream, {}):
                        continue
                    rank = before(message.turn, message.number)
                    if best is None or rank < best[0]:
                        best = (rank, chunk)
            if best is None:
                return None
            chunk = best[1]
            chunk.message.taken_at[chunk.offset] = now
            self._held.setdefault(stream, {})[chunk.message.number, chunk.offset] = chunk
            return chunk

    @property
    def head_turn(self) -> int | None:
        """The turn of what would go next."""
        with self._changed:
            return self._ready[0][1].turn if self._ready else None

    @property
    def head_since(self) -> float:
        """When what would go next was put here."""
        with self._changed:
            return self._ready[0][1].put_at if self._ready else 0.0

    @property
    def head_bytes(self) -> int:
        """What is left to take of it."""
        with self._changed:
            message = self._ready[0][1] if self._ready else None
            return len(message.view) - message.next_offset if message is not None else 0

    @property
    def closed(self) -> bool:
        return self._closed or self.failure is not None

    def written(self, chunk: Chunk) -> None:
        """The kernel has taken it all: from now on it is the path that takes its time."""
        chunk.message.taken_at[chunk.offset] = time.monotonic()

    def count_from(self, number: int, offset: int, at: float) -> None:
        """As `written`, from another moment."""
        with self._changed:
            message = self._live.get(number)
            if message is not None and offset in message.unacked:
                message.taken_at[offset] = at

    def acknowledged(self, stream: object, number: int, offset: int) -> Chunk | None:
        """The chunk, if it was still ours to worry about."""
        finished = None
        with self._changed:
            held = self._held.get(stream)
            if held is not None:
                held.pop((number, offset), None)
            message = self._live.get(number)
            chunk = message.unacked.pop(offset, None) if message is not None else None
            if message is None or chunk is None:
                return None
            message.acked_bytes += chunk.num_bytes
            taken_at = message.taken_at.pop(offset)
            self._unacked_bytes -= chunk.num_bytes
            if self.flight is not None and self._ready:
                self._changed.notify()
            self.delivered_bytes += chunk.num_bytes
            self.last_progress_ns = time.monotonic_ns()
            now = self.last_progress_ns / 1e9
            self.usual_s += 0.05 * (now - taken_at - self.usual_s)
            if self.flight is not None:
                self.flight.came_back(now - taken_at, now, chunk.num_bytes)
            if message.all_taken and not message.unacked:
                finished = self._live.pop(number)
                self._posted.finish(message.tag)
                if not self._live:
                    self._emptied.notify_all()
        if finished is not None:
            finished.handle.finish()
        return chunk

    def lost(self, stream: object) -> int:
        """A stream is gone: what it carried and nobody acknowledged goes again, first. How many chunks that were."""
        with self._changed:
            num_again = 0
            for chunk in self._held.pop(stream, {}).values():
                message = chunk.message
                if message.number not in self._live or message.unacked.pop(chunk.offset, None) is None:
                    continue
                num_again += 1
                self._unacked_bytes -= chunk.num_bytes
                if message.all_taken:
                    heapq.heappush(self._ready, (before(message.turn, message.number), message))
                message.again.append(chunk)
            self._wake_all()
            return num_again

    # ---- the receiver's word -----------------------------------------------------------------------------------
    def posted(self, tag: Tag) -> None:
        with self._changed:
            within_bounds = self._posted.add(tag)
            self._admit()
        if not within_bounds:
            self.fail(WorkerError(f"the peer announced more receives than the {MAX_POSTED} it may have posted"))

    def freed(self, total_bytes: int, staging_bytes: int | None = None) -> None:
        with self._changed:
            self._freed_bytes = max(self._freed_bytes, total_bytes)
            if staging_bytes is not None:
                self.staging_bytes = staging_bytes
            self._admit()

    def refused(self, number: int, reason: str) -> None:
        """The receiver will never take this message: its send fails, and everything else goes on."""
        with self._changed:
            message = self._live.pop(number, None)
            if message is None:
                return
            self._ready = [entry for entry in self._ready if entry[1] is not message]
            heapq.heapify(self._ready)
            self._unacked_bytes -= sum(chunk.num_bytes for chunk in message.unacked.values())
            for held in self._held.values():
                for key in [key for key in held if key[0] == number]:
                    del held[key]
            self._posted.finish(message.tag)
            self.last_progress_ns = time.monotonic_ns()
            self._wake_all()
        message.handle.finish(WorkerError(f"{message.handle.what}: {reason}"))

    def wake(self) -> None:
        """Who may pull has changed."""
        with self._changed:
            self._wake_all()

    def _wake_all(self) -> None:
        for condition in (self._changed, self._rests, self._emptied):
            condition.notify_all()

    # ---- inside, with the lock held ----------------------------------------------------------------------------
    def _may_pull(self, index: int) -> bool:
        if not self._ready or index >= self.num_streams or self.failure is not None:
            return False
        if self.flight is not None and self._unacked_bytes >= self.flight.limit_bytes:
            self.flight.filled()
            return False
        return self._held_s() <= 0

    def _pause_s(self) -> float:
        """Until the path has taken what went before; where that is not what holds things up, for ever."""
        held_s = self._held_s() if self._ready else 0.0
        return held_s if held_s > 0 else threading.TIMEOUT_MAX

    def _held_s(self) -> float:
        """How long what would go next still waits."""
        if self.flight is None:
            return 0.0
        now, message = time.monotonic(), self._ready[0][1]
        is_due = not message.whole or message.turn <= self._slice_turn or message.turn == self._next_turn
        return max(0.0 if is_due else self.flight.turn_s(now), self.flight.pause_s(now))

    def _admit(self) -> None:
        """Moves what may go from waiting to ready; what may not does not stop what comes after it."""
        kept = []
        while self._waiting:
            entry = heapq.heappop(self._waiting)
            if self._may_go(entry[1]):
                heapq.heappush(self._ready, entry)
            else:
                kept.append(entry)
        self._waiting = kept  # sorted, so a heap
        if self._ready:
            self._changed.notify()

    def _may_go(self, message: OutgoingMessage) -> bool:
        if message.tag in self._posted:
            return True
        room_bytes = self.staging_bytes - (self._charged_bytes - self._freed_bytes)
        if message.turn >= self._latest_turn:
            room_bytes -= round(self.staging_bytes * RESERVE)
        if len(message.view) > room_bytes or not self.staging_bytes:
            return False
        message.eager = True
        self._charged_bytes += len(message.view)
        self._latest_turn = max(self._latest_turn, message.turn)
        return True

    def _take(self, stream: object) -> Chunk:
        message = self._ready[0][1]
        if message.again:
            chunk = message.again.pop()
        else:
            left = len(message.view) - message.next_offset
            # Smaller towards the end, so that all streams finish together; but no crumbs.
            size = min(self.chunk_bytes, max(self.least_chunk_bytes, left // (2 * self.num_streams)), left)
            size = min(size, max(self.first_chunk_bytes, message.next_offset // self.num_streams))
            if left < 1.5 * size or message.whole:
                size = left
            chunk = Chunk(message, message.next_offset, size)
            message.next_offset += size
        if message.whole:
            self._slice_turn = message.turn
        message.num_taken += 1
        message.unacked[chunk.offset] = chunk
        self._unacked_bytes += chunk.num_bytes
        message.taken_at[chunk.offset] = now = time.monotonic()
        if self.flight is not None:
            self.flight.left(chunk.num_bytes, now)
        self._held.setdefault(stream, {})[message.number, chunk.offset] = chunk
        if message.all_taken:
            heapq.heappop(self._ready)
        return chunk
