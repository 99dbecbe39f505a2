"""The WAN queue: what is to be sent to one peer on one lane, and which chunk is next.

The rule is the simulator's (`ir.program.before`): smallest turn first, switching only at chunk boundaries, never idle
while something may be sent. A message may be sent if its receive is posted, or if the receiver's staging has credit for
it; the last of the credit is reserved for turns that overtake later ones. A chunk is kept until it is acknowledged;
chunks of a lost stream are sent first. Knows no sockets: streams pull chunks and report what happened to them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.ir.program import before
from atlas.wan.congestion.inflight_limit import InflightLimit
from atlas.wan.congestion.tuning import LEAST_CHUNK_BYTES
from atlas.wan.transport.base import Handle, Tag, guarded
from atlas.wan.transport.message import AnnouncedTags, Chunk, OutgoingMessage
from atlas.wan.transport.wire import MAX_CHUNK_BYTES, MAX_POSTED
from atlas.weather.packets import PacketLog

BEFORE_ALL_TURNS = -(1 << 62)
RESERVE = 0.25
"""Share of the staging that only a turn smaller than one already sent may use."""
LAST_CHUNK = 1.5
"""A rest of a message smaller than this many chunks is sent as one."""
ACK_GAIN = 0.05
"""Weight of a new sample in the smoothed acknowledgement time."""
UNIX_NS = time.time_ns() - time.monotonic_ns()
"""Unix time at zero of the monotonic clock."""


class QueueHead(NamedTuple):
    """The message that is sent next."""

    turn: int
    put_at: float
    left_bytes: int
    """What no stream has pulled yet."""


class Outbox:
    """Thread-safe. Users call `put`, streams call `pull`, the readers of the peer's records call the rest."""

    def __init__(
        self,
        chunk_bytes: int = 256 * 1024,
        num_streams: int = 1,
        least_chunk_bytes: int = LEAST_CHUNK_BYTES,
        first_chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        """Chunks grow from `first_chunk_bytes` at the start of a message to `chunk_bytes`, and shrink to
        `least_chunk_bytes` towards its end."""
        self.chunk_bytes, self.num_streams = chunk_bytes, num_streams
        self.least_chunk_bytes, self.first_chunk_bytes = least_chunk_bytes, first_chunk_bytes
        self.inflight: InflightLimit | None = None
        """Bounds what is in flight. More would only queue in the network, where turns are not known."""
        self.packets: PacketLog | None = None
        """Where every chunk is recorded, if at all."""
        self.staging_bytes = 0
        """The receiver's, from its greeting. Until then only posted messages are sent."""
        self.delivered_bytes = 0
        self.usual_s = 0.0
        """How long an acknowledgement takes, smoothed. Seconds."""
        self.last_progress_ns = time.monotonic_ns()
        self.failure: WorkerError | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """Called, with the lock held, when a stream that does not wait in `pull` may find something there."""
        self._lock = threading.RLock()
        self._changed, self._rests = threading.Condition(self._lock), threading.Condition(self._lock)
        self._emptied = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._ready: list[tuple[tuple[int, int], OutgoingMessage]] = []
        self._waiting: list[tuple[tuple[int, int], OutgoingMessage]] = []
        self._live: dict[int, OutgoingMessage] = {}
        self._held: dict[object, dict[tuple[int, int], Chunk]] = {}
        self._posted = AnnouncedTags()
        self._charged_bytes = self._freed_bytes = self._unacked_bytes = 0
        self._latest_turn = self._slice_turn = self._next_turn = BEFORE_ALL_TURNS
        self._closed = False

    # ---- the user's side ---------------------------------------------------------------------------------------
    def put(self, tag: Tag, view: memoryview, turn: int, handle: Handle, *, whole: bool = False) -> None:
        with self._changed:
            if self.failure is None and not self._closed:
                message = OutgoingMessage(next(self._numbers), tag, view, turn, handle, whole)
                handle.progress = message.progress
                if not self._live:
                    self.last_progress_ns = time.monotonic_ns()
                    self._next_turn, self._slice_turn = self._slice_turn + 1, BEFORE_ALL_TURNS
                    if whole and self.inflight is not None:
                        self.inflight.hold(len(view), message.put_at)
                self._live[message.number] = message
                heapq.heappush(self._waiting, (before(turn, message.number), message))
                self._admit()
                return
            error = self.failure or WorkerError("the transport is closed")
        handle.fail(error)

    @property
    def is_empty(self) -> bool:
        return not self._live

    @property
    def has_ready(self) -> bool:
        """Whether something may be sent now."""
        return bool(self._ready)

    @property
    def has_unacked(self) -> bool:
        with self._changed:
            return any(self._held.values())

    def tune(self, chunk_bytes: int, num_streams: int, least_chunk_bytes: int) -> None:
        with self._changed:
            if num_streams > self.num_streams:
                self._rests.notify_all()
            self.chunk_bytes, self.num_streams = chunk_bytes, num_streams
            self.least_chunk_bytes = least_chunk_bytes

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything is acknowledged. False if that takes longer, or fails."""
        with self._changed:
            return self._emptied.wait_for(lambda: not self._live or self.failure is not None, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._wake_all()

    def fail(self, error: WorkerError) -> None:
        """Ends every send with an error that names it and its progress."""
        with self._changed:
            self.failure = self.failure or error
            lost = list(self._live.values())
            self._live.clear()
            self._ready.clear()
            self._waiting.clear()
            self._wake_all()
        for message in lost:
            message.handle.fail(f"{message.progress()}; {self.failure}")

    # ---- the streams' side -------------------------------------------------------------------------------------
    def pull(self, stream: object, index: int, timeout_s: float) -> Chunk | None:
        """The next chunk for a stream. None after `timeout_s`, at the end, or while streams with this index rest."""
        with self._changed:
            if not self._may_pull(index):
                # Resting streams wait on a condition of their own, so that a notify wakes a stream that works.
                (self._changed if index < self.num_streams else self._rests).wait(min(timeout_s, self._pause_s()))
            if not self._may_pull(index):
                if self._ready and index >= self.num_streams:
                    self._changed.notify()  # this stream began to rest while it waited: wake another
                return None
            chunk = self._take(stream)
            if self._may_pull(0):
                self._changed.notify()  # each stream wakes the next, so that none wakes for nothing
            handle = chunk.message.handle
            begins = not handle.start_ns
            handle.start_ns = handle.start_ns or time.monotonic_ns()
        if begins and handle.on_start is not None:
            guarded(handle.on_start)
        return chunk

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until something can be pulled. False after `timeout_s`."""
        with self._changed:
            return bool(self._ready) or (self._changed.wait(timeout_s) and bool(self._ready))

    def steal(
        self,
        stream: object,
        age_s: float,
        below_turn: int | None = None,
        paused: Collection[object] = (),
        paused_s: float = 0.0,
    ) -> Chunk | None:
        """A chunk of the smallest turn that another stream has had for `age_s` or longer, to send it a second time.
        Only if nothing else is ready, or below `below_turn`. The receiver takes the copy that arrives first. `paused_s`
        is the age for chunks that only `paused` streams have."""
        now = time.monotonic()
        with self._changed:
            if below_turn is None and self._ready:
                return None
            stuck = {key for other in paused for key in self._held.get(other, ())}
            for other, held in self._held.items() if stuck else ():
                stuck -= held.keys() if other not in paused else set()
            best: tuple[tuple[int, int], Chunk] | None = None
            for message in self._live.values():
                if below_turn is not None and message.turn >= below_turn:
                    continue
                for chunk in message.unacked.values():
                    least_s = paused_s if (message.number, chunk.offset) in stuck else age_s
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
    def head(self) -> QueueHead | None:
        with self._changed:
            if not self._ready:
                return None
            message = self._ready[0][1]
            return QueueHead(message.turn, message.put_at, len(message.view) - message.next_offset)

    def count_from(self, number: int, offset: int, at: float) -> None:
        """Sets when a chunk left this host: its acknowledgement is timed from there."""
        with self._changed:
            message = self._live.get(number)
            if message is not None and offset in message.unacked:
                message.taken_at[offset] = at

    def acknowledged(self, stream: object, number: int, offset: int) -> Chunk | None:
        """Returns the chunk, or None if it was acknowledged before."""
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
            if self.inflight is not None and self._ready:
                self._changed.notify()
            self.delivered_bytes += chunk.num_bytes
            self.last_progress_ns = time.monotonic_ns()
            now = self.last_progress_ns / 1e9
            if self.packets is not None:
                sent_ns = int(taken_at * 1e9)
                self.packets.add(sent_ns + UNIX_NS, chunk.num_bytes, max(1, self.last_progress_ns - sent_ns))
            self.usual_s += ACK_GAIN * (now - taken_at - self.usual_s)
            if self.inflight is not None:
                self.inflight.came_back(now - taken_at, now, chunk.num_bytes)
            if message.all_taken and not message.unacked:
                finished = self._live.pop(number)
                self._posted.finish(message.tag)
                if not self._live:
                    self._emptied.notify_all()
        if finished is not None:
            finished.handle.finish()
        return chunk

    def lost(self, stream: object) -> int:
        """A stream is gone: its unacknowledged chunks are sent again, first. Returns how many."""
        with self._changed:
            num_again = 0
            for chunk in self._held.pop(stream, {}).values():
                message = chunk.message
                if message.number not in self._live or message.unacked.pop(chunk.offset, None) is None:
                    continue
                num_again += 1
                if self.packets is not None:
                    self.packets.add(int(message.taken_at[chunk.offset] * 1e9) + UNIX_NS, chunk.num_bytes)
                self._unacked_bytes -= chunk.num_bytes
                if message.all_taken:
                    heapq.heappush(self._ready, (before(message.turn, message.number), message))
                message.again.append(chunk)
            self._wake_all()
            return num_again

    # ---- records of the receiver -------------------------------------------------------------------------------
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
        """The receiver does not accept this message: its send fails, and everything else goes on."""
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
        message.handle.fail(reason)

    def wake(self) -> None:
        """Wakes all streams, because another set of them may pull now."""
        with self._changed:
            self._wake_all()

    def _wake_all(self) -> None:
        for condition in (self._changed, self._rests, self._emptied):
            condition.notify_all()
        self.on_ready()

    # ---- inside, with the lock held ----------------------------------------------------------------------------
    def _may_pull(self, index: int) -> bool:
        if not self._ready or index >= self.num_streams or self.failure is not None:
            return False
        if self.inflight is not None and self._unacked_bytes >= self.inflight.limit_bytes:
            self.inflight.filled()
            return False
        return self._held_s() <= 0

    def _pause_s(self) -> float:
        """How long the head is still held back by pacing. Without limit if something else holds it back."""
        held_s = self._held_s() if self._ready else 0.0
        return held_s if held_s > 0 else threading.TIMEOUT_MAX

    def _held_s(self) -> float:
        """How long the in-flight limit still holds the head back."""
        if self.inflight is None:
            return 0.0
        now, message = time.monotonic(), self._ready[0][1]
        is_due = not message.whole or message.turn <= self._slice_turn or message.turn == self._next_turn
        return max(0.0 if is_due else self.inflight.turn_s(now), self.inflight.pause_s(now))

    def _admit(self) -> None:
        """Moves messages that may be sent from waiting to ready. One that may not does not block those after it."""
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
            self.on_ready()

    def _may_go(self, message: OutgoingMessage) -> bool:
        if message.tag in self._posted:
            return True
        credit_bytes = self.staging_bytes - (self._charged_bytes - self._freed_bytes)
        if message.turn >= self._latest_turn:
            credit_bytes -= round(self.staging_bytes * RESERVE)
        if len(message.view) > credit_bytes or not self.staging_bytes:
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
            # Smaller towards the end, so that all streams finish together.
            size = min(self.chunk_bytes, max(self.least_chunk_bytes, left // (2 * self.num_streams)), left)
            size = min(size, max(self.first_chunk_bytes, message.next_offset // self.num_streams))
            if left < LAST_CHUNK * size or message.whole:
                size = left
            chunk = Chunk(message, message.next_offset, size)
            message.next_offset += size
        if message.whole:
            self._slice_turn = message.turn
        message.num_taken += 1
        message.unacked[chunk.offset] = chunk
        self._unacked_bytes += chunk.num_bytes
        message.taken_at[chunk.offset] = now = time.monotonic()
        if self.inflight is not None:
            self.inflight.left(chunk.num_bytes, now)
        self._held.setdefault(stream, {})[message.number, chunk.offset] = chunk
        if message.all_taken:
            heapq.heappop(self._ready)
        return chunk
