"""The sending side of one lane to one peer: streams that pull chunks from the outbox, and are replaced when they fail.

A thread per stream writes, another reads the peer's records. Parked streams (more than are needed now) stay open
and warm. A stream that breaks or falls silent gives its chunks back and dials again, with growing pauses; when no
stream lives and nothing moves until the deadline, everything queued fails, by name. Knows no tensors and no turns.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable

from atlas.errors import AtlasError, WorkerError
from atlas.wan.congestion.inflight_limit import InflightLimit
from atlas.wan.congestion.stream_rotation import SHIFTS, StreamRotation
from atlas.wan.congestion.tuning import HEADROOM, NEAR_RTT_S, Choice, LossWatch, RateMeter, choose, window_bytes
from atlas.wan.congestion.warm_up import MOST_BYTES, KernelStats, WarmUp
from atlas.wan.security.credentials import Security
from atlas.wan.transport.handshake import Address, RefusedError, dial
from atlas.wan.transport.message import Chunk
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.stream import SocketStream, TcpFacts, broken
from atlas.wan.transport.stream_slot import Faults, StreamSlot
from atlas.wan.transport.wire import (
    RECORD_BYTES,
    ControlRecord,
    FrameHeader,
    FrameKind,
    Greeting,
    RecordKind,
    pack_header,
    refusal_text,
    unpack_record,
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0
IDLE_S = 0.5
SAME = 0.85
"""What a later warm-up finds, over what an earlier one did, if both are right."""
LATE = 1.25
"""Round trips of a path with a queue, over its quickest."""
MORE = 1.5
"""How much faster a path is taken to be that was full by our own limit only."""
HALTED = 0.25
"""Of a round trip: so long may a stream that has halted keep what another could send."""
WARM_TICK_S = 0.05
WARM_ZEROS = memoryview(bytes(MOST_BYTES))


class Channel:
    """`open` starts it; `warm` returns when the path is open wide; `close` ends it."""

    def __init__(
        self,
        mine: Greeting,
        address: Address,
        security: Security,
        settings: TransportSettings,
        log: Callable[[str], None],
        *,
        light: bool = False,
    ) -> None:
        """`light`: for small notes; one stream, not warmed, never held back."""
        self.mine, self.address, self.security, self.settings, self.log = mine, address, security, settings, log
        self.name = f"{mine.name} -> {mine.peer} (lane {mine.lane})"
        self.outbox = Outbox()
        self.rtt_s = 0.0
        self.meter = RateMeter()
        self._num_replaced = self._num_resent = self._num_hedged = 0
        self.last_error = "never connected"
        self._lock = threading.Lock()
        self._peer_instance: int | None = None
        self._light = light
        self._slots = [StreamSlot(i) for i in range(1 if light else settings.max_streams)]
        self._shifts = StreamRotation[StreamSlot](time.monotonic())
        self._down_since = time.monotonic()
        self._warm_up: WarmUp | None = None
        self._closing = threading.Event()
        self._connected = threading.Event()
        self._choice: Choice | None = None
        self._losses = LossWatch()
        self._tuned_bytes = 0
        self._threads = [threading.Thread(target=self._live, args=(slot,), daemon=True) for slot in self._slots]
        for slot, thread in zip(self._slots, self._threads, strict=True):
            thread.name = f"atlas wan {self.name} {slot.index}"
            thread.start()

    # ---- the endpoint's side -----------------------------------------------------------------------------------
    def warm(self, deadline: float) -> None:
        """Waits for the first stream and, on a long path, fills it until its rate is known."""
        while not self._connected.wait(0.05):
            if self.outbox.failure is not None or time.monotonic() > deadline:
                raise WorkerError(f"{self.name} at {self.address}: {self.outbox.failure or self.last_error}")
        if self._light:
            return
        time.sleep(min(0.05, 3 * self.rtt_s))  # the first pongs say better how far it is than the greeting did
        self.retune()
        # First all streams find out what the path gives; then those that will be used learn to carry it.
        for shift in range(1 + SHIFTS):
            if self.outbox.flight is None:  # it may have turned out to be near
                return
            known_bps, rate_bps = self.meter.rate_bps or 0.0, self._fill(deadline)
            # The later ones start from what is known and lose less, so they know better; unless this host was busy.
            self.meter.learn(rate_bps if rate_bps > SAME * known_bps else known_bps, time.monotonic())
            self.retune()
            if shift and not self._shifts.apply(self.outbox.num_streams):
                return
            if shift:
                self._shifts.change(self.outbox.num_streams)
                self.outbox.wake()

    def _fill(self, deadline: float) -> float:
        """What the path delivered."""
        now, known_bps = time.monotonic(), self.meter.rate_bps or 0.0
        if self._choice is not None and self._choice.pacing_bps:
            self._set_pace(HEADROOM * known_bps / self._choice.num_streams)  # or it would find what is known
        self._warm_up = warm_up = WarmUp(
            self.rtt_s, known_bps, now, self.settings.warm_s, self._look, self.outbox.num_streams
        )
        self.outbox.wake()
        while not (warm_up.over and not warm_up.out_bytes) and self.num_live and time.monotonic() < deadline:
            time.sleep(0.005)
        self._warm_up = None
        self._losses.warmed(is_lossy=warm_up.is_lossy)
        return warm_up.rate_bps

    def watch(self) -> None:
        """Called a few times a second: choose anew, and give up what has been hopeless for too long."""
        now, outbox = time.monotonic(), self.outbox
        if outbox.delivered_bytes != self._tuned_bytes:
            self._tuned_bytes = outbox.delivered_bytes
            self.retune()
        if outbox.flight is not None and self._shifts.watch(outbox.num_streams, now):
            outbox.wake()
        if outbox.is_empty or outbox.failure is not None:
            return
        hopeless_since = max(outbox.last_progress_ns / 1e9, 0.0 if self.num_live else self._down_since)
        if (not self.num_live or outbox.has_unacked) and now - hopeless_since > self.settings.deadline_s:
            self.fail(f"no byte got through for {now - hopeless_since:.1f} s; the last error was: {self.last_error}")

    def retune(self) -> None:
        if not self.rtt_s or self._warm_up is not None:
            return
        if (flight := self.outbox.flight) is not None and self.outbox.is_empty and flight.had_room():
            self.meter.raise_by(MORE)
        if flight is not None and (fallen_bps := flight.fallen_bps()) is not None:
            self.meter.learn(fallen_bps, time.monotonic())
        rate_bps = None if self._light else self.meter.rate_bps
        if rate_bps and (flight := self.outbox.flight) is not None and flight.is_slow:
            rate_bps = max(rate_bps, flight.rate_bps)
        choice = choose(self.rtt_s, rate_bps, len(self._slots), window_bytes(), lossy=self._is_lossy())
        if self.settings.num_streams is not None:
            choice = choice.with_streams(self.settings.num_streams)
        self._choice = choice
        self.outbox.tune(choice.chunk_bytes, choice.num_streams, choice.least_chunk_bytes)
        if self._light or self.rtt_s < NEAR_RTT_S:
            self.outbox.flight = None
        elif self.outbox.flight is None:
            self.outbox.flight = InflightLimit(self.rtt_s)
        if (flight := self.outbox.flight) is not None and (rate_bps := self.meter.rate_bps):
            flight.learn(rate_bps, choice.chunk_bytes, self.rtt_s)
        self._set_pace(choice.pacing_bps)

    def _set_pace(self, pacing_bps: float | None) -> None:
        assert self._choice is not None
        for slot in self._slots:
            if (stream := slot.stream) is not None:
                stream.tune(self._choice.lowat_bytes, pacing_bps, near=self.rtt_s < NEAR_RTT_S)

    def _look(self) -> KernelStats | None:
        """What the kernel says of all streams. Where it speaks of a proxy nearby, it cannot tell whether they are late;
        then they are taken to be."""
        facts = self._facts()
        if len(facts) < self.num_live:
            return None
        is_late = any(f.rtt_s > LATE * f.min_rtt_s or f.min_rtt_s < 0.5 * self.rtt_s for f in facts)
        return KernelStats(sum(f.delivered_bytes for f in facts), sum(f.num_retransmits for f in facts), is_late)

    def _facts(self) -> list[TcpFacts]:
        return [facts for slot in self._slots if slot.stream and (facts := slot.stream.facts())]

    def _is_lossy(self) -> bool:
        if self._light or self.rtt_s < NEAR_RTT_S:
            return False
        sent_twice = sum(f.retransmitted_bytes for f in self._facts())
        return self._losses.is_lossy(time.monotonic(), self.outbox.delivered_bytes, sent_twice)

    def paced_s(self, num_bytes: int) -> float:
        """How long so much takes at a pace of ours; zero where there is none."""
        return num_bytes * 8 / self.outbox.flight.pace_bps if self.outbox.flight is not None else 0.0

    @property
    def num_live(self) -> int:
        return sum(slot.stream is not None for slot in self._slots)

    @property
    def faults(self) -> Faults:
        with self._lock:
            return Faults(self._num_replaced, self._num_resent, self._num_hedged)

    def fail(self, reason: str) -> None:
        self.outbox.fail(WorkerError(f"{self.name}: {reason}"))
        self._closing.set()
        self.cut()

    def cut(self) -> None:
        """Breaks every stream at once, as a fault would."""
        for slot in self._slots:
            if (stream := slot.stream) is not None:
                stream.abort()
            if (sock := slot.dialing) is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self, timeout_s: float) -> bool:
        """True if everything was delivered."""
        delivered = self.outbox.drain(timeout_s) and self.outbox.failure is None
        self._closing.set()
        self.outbox.close()
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.cut()
        for thread in self._threads:
            thread.join(self.settings.handshake_s + 1.0)
        if not delivered:
            self.outbox.fail(WorkerError(f"{self.name}: closed before it was delivered"))
        return delivered

    # ---- a stream's life ---------------------------------------------------------------------------------------
    def _live(self, slot: StreamSlot) -> None:
        try:
            self._dial_and_talk(slot)
        except Exception as error:  # a bug of ours: nobody else would replace this stream or end the waits
            self.fail(f"stream {slot.index} failed with {type(error).__name__}: {error}")
            raise

    def _dial_and_talk(self, slot: StreamSlot) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                stream = self._dial(slot)
            except RefusedError as error:
                self.last_error = str(error)
                if error.final:
                    self.fail(str(error))
                    return
            except (OSError, WorkerError) as error:
                self.last_error = str(broken(error))
            except AtlasError as error:
                self.fail(str(error))
                return
            else:
                if self._talk(slot, stream):
                    pause_s = FIRST_PAUSE_S
            self._closing.wait(pause_s * (0.5 + random.random()))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _dial(self, slot: StreamSlot) -> SocketStream:
        def began(sock: socket.socket) -> None:
            slot.dialing = sock

        try:
            stream, theirs = dial(self.address, self.mine, self.security, self.settings.handshake_s, began)
        finally:
            slot.dialing = None
        with self._lock:
            self._peer_instance = self._peer_instance or theirs.instance
            if theirs.instance != self._peer_instance:
                stream.close()
                raise RefusedError(f"{theirs.name} has restarted: a new life needs a new epoch", final=True)
        self.rtt_s = min(self.rtt_s or stream.rtt_s, stream.rtt_s)
        self.outbox.freed(0, theirs.staging_bytes)
        stream.patience_s = self.settings.stall_s
        slot.num_lives += 1
        if slot.num_lives > 1:
            with self._lock:
                self._num_replaced += 1
        return stream

    def _talk(self, slot: StreamSlot, stream: SocketStream) -> bool:
        """Until the stream ends. True if it was good for something."""
        slot.begin(stream)
        stream.on_tick = lambda: self._check_silence(slot)
        self._shifts.join(slot)
        self.retune()
        self._connected.set()
        reader = threading.Thread(target=self._listen, args=(slot, stream), daemon=True, name=f"{self.name} records")
        reader.start()
        try:
            self._write(slot, stream)
        except (OSError, WorkerError) as error:
            self._note(error)
        finally:
            stream.abort()
            reader.join()
            self._leave(slot, stream)
        return slot.num_answers > 0

    def _leave(self, slot: StreamSlot, stream: SocketStream) -> None:
        """What the stream carried goes again over another."""
        self._shifts.leave(slot)
        if (warm_up := self._warm_up) is not None:
            warm_up.lost(slot.warm_bytes)
        num_lost = self.outbox.lost(stream)
        with self._lock:
            self._num_resent += num_lost
        slot.stream = None
        if not self.num_live:
            self._down_since = time.monotonic()
        stream.close()

    def _write(self, slot: StreamSlot, stream: SocketStream) -> None:
        outbox, lane, epoch, heartbeat_s = self.outbox, self.mine.lane, self.mine.epoch, self.settings.heartbeat_s
        last_write = 0.0
        while not stream.aborted:
            now = time.monotonic()
            place, warm_up = self._shifts.place(slot), self._warm_up
            if warm_up is not None and not warm_up.over and place < outbox.num_streams:
                if num_bytes := warm_up.await_turn(place, WARM_TICK_S, now):
                    slot.wrote(now, num_bytes)
                    header = FrameHeader(FrameKind.WARM, lane, epoch, now_ns(), 0, 0, num_bytes)
                    stream.write(pack_header(header), WARM_ZEROS[:num_bytes])
                continue
            if outbox.flight is not None:
                stream.await_room()
            place = self._shifts.place(slot)
            wait_s = min(IDLE_S, heartbeat_s) if outbox.is_empty else self._look_s(place)
            chunk = outbox.pull(stream, place, wait_s)
            if chunk is None and not outbox.is_empty and (chunk := self._steal(stream)) is not None:
                with self._lock:
                    self._num_hedged += 1
            if chunk is not None:
                slot.wrote(time.monotonic())
                stream.write(_header(chunk, lane, epoch), chunk.payload)
                outbox.written(chunk)
                last_write = now
            elif self._closing.is_set() and (outbox.is_empty or outbox.failure is not None):
                stream.write(pack_header(FrameHeader(FrameKind.BYE, lane, epoch)))
                return
            elif now - last_write >= (silence_s := self._shifts.silence_s(slot, outbox.num_streams, heartbeat_s)):
                if not silence_s:
                    stream.wake()
                slot.wrote(now)
                stream.write(pack_header(FrameHeader(FrameKind.PING, lane, epoch, now_ns())))
                last_write = now

    def _look_s(self, place: int) -> float:
        """How often one that has nothing to do looks whether others are late."""
        return self.rtt_s * HALTED if self._may_halt and place < self.outbox.num_streams else self._late_s / 4

    def _steal(self, stream: SocketStream) -> Chunk | None:
        others = [slot.stream for slot in self._slots if slot.stream is not None] if self._may_halt else []
        halted = [other for other in others if other.has_halted]
        return self.outbox.steal(stream, self._late_s, halted=halted, halted_s=self.rtt_s * HALTED)

    @property
    def _may_halt(self) -> bool:
        """All streams are needed, so that none can rest when bbr would halt."""
        return self.outbox.flight is not None and not self._shifts.apply(self.outbox.num_streams)

    @property
    def _late_s(self) -> float:
        """When an answer is so late that another stream may try, if it has nothing else to do."""
        return 0.15 + 3 * max(self.rtt_s, self.outbox.usual_s)

    def _check_silence(self, slot: StreamSlot) -> None:
        stall_s = max(self.settings.stall_s, 8 * self.rtt_s)
        if slot.silent_s() > stall_s:
            raise TimeoutError(f"no answer from {self.mine.peer} for {stall_s:g} s")

    def _listen(self, slot: StreamSlot, stream: SocketStream) -> None:
        """The peer's records, until the stream ends."""
        try:
            while True:
                record = unpack_record(stream.read_head(RECORD_BYTES))
                if record.epoch != self.mine.epoch or record.lane != self.mine.lane:
                    raise WorkerError(f"a record of epoch {record.epoch}, lane {record.lane} is not for us")
                self._heed(slot, stream, record)
        except (OSError, WorkerError) as error:
            self._note(error)
        finally:
            stream.abort()

    def _heed(self, slot: StreamSlot, stream: SocketStream, record: ControlRecord) -> None:
        now = time.monotonic()
        is_pong = record.kind == RecordKind.PONG
        answers = is_pong or record.kind in (RecordKind.ACK, RecordKind.FAILED)
        slot.heard(now, answers=answers, warm_bytes=record.b if is_pong else 0)
        if record.kind == RecordKind.ACK:
            chunk = self.outbox.acknowledged(stream, record.a, record.b)
            if chunk is not None:
                # Only what is held back by the path says what the path delivers.
                if self.outbox.has_ready:
                    self.meter.acknowledged(chunk.num_bytes, now)
                else:
                    self.meter.pause()
        elif record.kind == RecordKind.PONG:
            self.rtt_s = min(self.rtt_s, (now_ns() - record.a) / 1e9)
            if record.b and (warm_up := self._warm_up) is not None:
                warm_up.came_back(record.b, now)
        elif record.kind == RecordKind.POSTED:
            self.outbox.posted(record.tag)
        elif record.kind == RecordKind.FREED:
            self.outbox.freed(record.a)
        elif record.kind == RecordKind.FAILED:
            self.outbox.refused(record.a, f"{self.mine.peer} refuses it: {refusal_text(record.b)}")

    def _note(self, error: BaseException) -> None:
        if not self._closing.is_set():
            self.last_error = str(broken(error))
            self.log(f"{self.name}: a stream is replaced: {self.last_error}")


def now_ns() -> int:
    return time.monotonic_ns()


def _header(chunk: Chunk, lane: int, epoch: int) -> bytes:
    message = chunk.message
    fields = (message.number, len(message.view), chunk.offset, chunk.num_bytes, message.tag, message.eager)
    return pack_header(FrameHeader(FrameKind.CHUNK, lane, epoch, *fields))
