"""The sending side of one lane to one peer: streams that pull chunks from the outbox and are replaced when they fail.

Each stream has a thread that writes and one that reads the peer's records. Streams that are not needed now stay open
and warm. A stream that breaks or gets no answers returns its chunks and connects again, with growing pauses. Without an
address the peer dials (`inbound_dialer`), and streams wait for its connections. If no stream is connected, or nothing
is delivered, until the deadline, everything queued fails. Knows no tensors and no turns.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError, WorkerError
from atlas.wan.congestion.warm_up import MAX_PIECE_BYTES
from atlas.wan.security.credentials import Security, datacenter_of
from atlas.wan.transport.base import Address
from atlas.wan.transport.channel_tuner import ChannelTuner
from atlas.wan.transport.handshake import RefusedError, RetryPause, dial, is_final
from atlas.wan.transport.message import Chunk
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.stream import SocketStream, broken
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
from atlas.weather.packets import PacketLog

log = logging.getLogger("atlas.wan")
LONGEST_RETRY_S = 2.0
"""Pause before a stream connects again, at most."""
IDLE_S = 0.5
"""How often an idle stream checks whether to ping, to warm up or to end."""
STALL_TRIPS = 8
"""On a long path, a stream is stalled after this many round trips at the earliest."""
CONNECT_POLL_S, WARM_POLL_S = 0.05, 0.05
"""How often to check whether a stream is connected, and whether a warm-up may send."""
ALL_DIALLED_S = 2.0
"""How long a warm-up waits for all connections that the peer dials."""
CLOSE_S = 1.0
"""How long streams may at least take to end by themselves when a channel is closed."""
WARM_ZEROS = memoryview(bytes(MAX_PIECE_BYTES))


class Channel:
    """Connects from the start. `warm` returns when the path is warmed up; `close` ends it."""

    is_lazy = False
    """Whether it connects only when something is sent."""

    def __init__(
        self,
        mine: Greeting,
        address: Address | None,
        security: Security,
        settings: TransportSettings,
        *,
        light: bool = False,
        num_streams: int | None = None,
    ) -> None:
        """`light`: for small messages; one stream, not warmed up, without an in-flight limit. `num_streams`: in place
        of the settings' `max_streams`."""
        self.mine, self.address, self.security, self.settings = mine, address, security, settings
        self.name = f"{mine.name} -> {mine.peer} (lane {mine.lane})"
        self.outbox = Outbox()
        if settings.record_folder and not light and datacenter_of(mine.name) != datacenter_of(mine.peer):
            path = f"{mine.name}~{mine.peer}~{mine.lane}".replace("/", ".")
            self.outbox.packets = PacketLog(Path(settings.record_folder), path)
        self.faults = Faults()
        self.last_error = "never connected"
        self._lock = threading.Lock()
        self._peer_instance: int | None = None
        self._light = light
        self._slots = [StreamSlot(i) for i in range(1 if light else num_streams or settings.max_streams)]
        self.tuner = ChannelTuner(self._slots, self.outbox, settings, light=light)
        self._down_since = time.monotonic()
        self._closing = threading.Event()
        self._connected = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start()

    def _start(self) -> None:
        for slot in self._slots:
            name = f"atlas wan {self.name} {slot.index}"
            self._threads.append(threading.Thread(target=self._run, args=(slot,), daemon=True, name=name))
            self._threads[-1].start()

    # ---- called by the endpoint --------------------------------------------------------------------------------
    def warm(self, deadline: float) -> None:
        """Waits for the first stream and, on a long path, sends until its rate is known."""
        while not self._connected.wait(CONNECT_POLL_S):
            if self.outbox.failure is not None or time.monotonic() > deadline:
                raise WorkerError(f"{self.name} {self._where}: {self.outbox.failure or self.last_error}")
        if self._light:
            return
        if self.address is None:  # the peer dials the others after the first, and they take part in the warm-up
            deadline_all = min(deadline, time.monotonic() + ALL_DIALLED_S)
            while self.num_live < self.num_slots and time.monotonic() < deadline_all:
                time.sleep(CONNECT_POLL_S)
        self.tuner.warm(deadline)

    @property
    def _where(self) -> str:
        return "over connections that the peer dials" if self.address is None else f"at {self.address}"

    def may_adopt(self, slot: int) -> bool:
        """Whether it waits for connections of the peer, and has a place of this number."""
        return self.address is None and slot < len(self._slots) and not self._closing.is_set()

    def adopt(self, stream: SocketStream, theirs: Greeting) -> bool:
        """Uses a connection that the peer has dialled, in place of an earlier one of the same number."""
        if not self.may_adopt(theirs.slot):
            return False
        slot = self._slots[theirs.slot]
        if (before := slot.stream) is not None:
            before.abort()
        slot.dialled.put((stream, theirs))
        if self._closing.is_set():  # the slot's thread may have ended since `may_adopt`
            slot.close_dialled()
        return True

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def watch(self) -> None:
        """Called a few times a second: tunes the streams, and fails what has made no progress until the deadline."""
        now, outbox = time.monotonic(), self.outbox
        self.tuner.watch(now)
        if outbox.packets is not None:
            outbox.packets.write_older()
        if outbox.is_empty or outbox.failure is not None:
            return
        stuck_s = now - max(outbox.last_progress_ns / 1e9, 0.0 if self.num_live else self._down_since)
        if (not self.num_live or outbox.has_unacked) and stuck_s > self.settings.deadline_s:
            self.fail(f"nothing was delivered for {stuck_s:.1f} s; the last error was: {self.last_error}")

    @property
    def num_live(self) -> int:
        return sum(slot.stream is not None for slot in self._slots)

    def _count(self, more: Faults) -> None:
        with self._lock:
            self.faults = Faults.sum((self.faults, more))

    def fail(self, reason: str) -> None:
        self.outbox.fail(WorkerError(f"{self.name}: {reason}"))
        self._closing.set()
        self.cut()

    def cut(self) -> None:
        """Breaks every stream."""
        for slot in self._slots:
            if (stream := slot.stream) is not None:
                stream.abort()
            if (sock := slot.dialing) is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            slot.dialled.put(None)

    def close(self, timeout_s: float) -> bool:
        """Returns whether everything was delivered. Streams that are connected have the rest of the time to tell the
        peer that this side is closed: a stream that breaks instead keeps the peer waiting until its deadline."""
        deadline = time.monotonic() + timeout_s
        delivered = self.outbox.drain(timeout_s) and self.outbox.failure is None
        if self.outbox.packets is not None:
            self.outbox.packets.close()
        self._closing.set()
        self.outbox.close()
        for slot in self._slots:
            slot.dialled.put(None)
        self._join(max(CLOSE_S, deadline - time.monotonic()) if self.num_live else CLOSE_S)
        self.cut()
        self._join(self.settings.handshake_s + CLOSE_S)
        if not delivered:
            self.outbox.fail(WorkerError(f"{self.name}: closed before it was delivered"))
        return delivered

    def _join(self, timeout_s: float) -> None:
        """Waits until the streams have ended."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- threads of a stream -----------------------------------------------------------------------------------
    def _run(self, slot: StreamSlot) -> None:
        try:
            self._connect_and_serve(slot)
        except Exception as error:  # a bug: without this, the stream is not replaced and waits do not end
            self.fail(f"stream {slot.index} failed with {type(error).__name__}: {error}")
            raise
        finally:
            slot.close_dialled()

    def _connect_and_serve(self, slot: StreamSlot) -> None:
        pause = RetryPause(LONGEST_RETRY_S)
        while not self._closing.is_set():
            try:
                stream = self._dial(slot) if self.address is not None else self._await_dial(slot)
            except (OSError, AtlasError) as error:
                self._connect_failed(error)
            else:
                if stream is None or self._serve(slot, stream):
                    pause.reset()
            if self.address is not None:
                self._closing.wait(pause.next_s())

    def _connect_failed(self, error: Exception) -> None:
        self.last_error = str(broken(error))
        if is_final(error):
            self.fail(self.last_error)

    def _await_dial(self, slot: StreamSlot) -> SocketStream | None:
        """Waits for a connection of the peer; None if the channel is being closed."""
        arrived = slot.dialled.get()
        while arrived is not None and not slot.dialled.empty():  # the peer has dialled again: the older one is lost
            arrived[0].close()
            arrived = slot.dialled.get()
        return None if arrived is None else self._joined(slot, *arrived)

    def _dial(self, slot: StreamSlot) -> SocketStream:
        assert self.address is not None

        def on_socket(sock: socket.socket) -> None:
            slot.dialing = sock

        try:
            stream, theirs = dial(self.address, self.mine, self.security, self.settings.handshake_s, on_socket)
        finally:
            slot.dialing = None
        return self._joined(slot, stream, theirs)

    def _joined(self, slot: StreamSlot, stream: SocketStream, theirs: Greeting) -> SocketStream:
        with self._lock:
            self._peer_instance = self._peer_instance or theirs.instance
            if theirs.instance != self._peer_instance:
                stream.close()
                raise RefusedError(f"{theirs.name} has restarted: a restart needs a new epoch", final=True)
        self.tuner.note_rtt(stream.rtt_s)
        self.outbox.freed(0, theirs.staging_bytes)
        stream.patience_s = self.settings.stall_s
        slot.num_connections += 1
        if slot.num_connections > 1:
            self._count(Faults(num_replaced=1))
        return stream

    def _serve(self, slot: StreamSlot, stream: SocketStream) -> bool:
        """Runs until the stream ends. Returns whether it got any answer."""
        self._join_slot(slot, stream)
        reader = threading.Thread(target=self._read, args=(slot, stream), daemon=True, name=f"{self.name} records")
        reader.start()
        try:
            self._write(slot, stream)
        except (OSError, WorkerError) as error:
            self._log(error)
        finally:
            stream.abort()
            reader.join()
            self._leave(slot, stream)
        return slot.num_answers > 0

    def _join_slot(self, slot: StreamSlot, stream: SocketStream) -> None:
        """The stream is connected."""
        slot.begin(stream)
        stream.on_tick = lambda: self._check_silence(slot)
        self.tuner.rotation.join(slot)
        self.tuner.retune()
        self._connected.set()

    def _leave(self, slot: StreamSlot, stream: SocketStream) -> None:
        """The stream has ended: what it carried is sent again on another."""
        self.tuner.rotation.leave(slot)
        if (warm_up := self.tuner.warm_up) is not None:
            warm_up.lost(slot.warm_bytes)
        self._count(Faults(num_resent=self.outbox.lost(stream)))
        slot.stream = None
        if not self.num_live:
            self._down_since = time.monotonic()
        stream.close()

    def _write(self, slot: StreamSlot, stream: SocketStream) -> None:
        outbox, heartbeat_s = self.outbox, self.settings.heartbeat_s
        last_write = 0.0
        while not stream.aborted:
            now = time.monotonic()
            place, warm_up = self.tuner.rotation.place(slot), self.tuner.warm_up
            if warm_up is not None and not warm_up.over and place < outbox.num_streams:
                if num_bytes := warm_up.await_turn(place, WARM_POLL_S, now):
                    slot.sent(now, num_bytes)
                    header = self._header(FrameKind.WARM, time.monotonic_ns(), 0, 0, num_bytes)
                    stream.write(pack_header(header), WARM_ZEROS[:num_bytes])
                continue
            if outbox.inflight is not None:
                stream.await_writable()
            place = self.tuner.rotation.place(slot)
            wait_s = min(IDLE_S, heartbeat_s) if outbox.is_empty else self.tuner.check_s(place)
            chunk = outbox.pull(stream, place, wait_s)
            if chunk is None and not outbox.is_empty and (chunk := self.tuner.steal(stream)) is not None:
                self._count(Faults(num_hedged=1))
            if chunk is not None:
                self._write_chunk(slot, stream, chunk)
                last_write = now
            elif self._closing.is_set() and (outbox.is_empty or outbox.failure is not None):
                self._write_end(stream)
                return
            elif now - last_write >= (
                silence_s := self.tuner.rotation.silence_s(slot, outbox.num_streams, heartbeat_s)
            ):
                if not silence_s:
                    stream.wake()
                self._write_ping(slot, stream)
                last_write = now

    def _header(self, kind: FrameKind, *fields: Any) -> FrameHeader:
        return FrameHeader(kind, self.mine.lane, self.mine.epoch, *fields)

    def _write_chunk(self, slot: StreamSlot, stream: SocketStream, chunk: Chunk) -> None:
        slot.sent(time.monotonic())
        stream.write(pack_header(self._header(FrameKind.CHUNK, *chunk.fields)), chunk.payload)
        self.outbox.count_from(chunk.message.number, chunk.offset, time.monotonic())

    def _write_ping(self, slot: StreamSlot, stream: SocketStream) -> None:
        slot.sent(time.monotonic())
        stream.write(pack_header(self._header(FrameKind.PING, time.monotonic_ns())))

    def _write_end(self, stream: SocketStream) -> None:
        stream.write(pack_header(self._header(FrameKind.BYE)))

    def _check_silence(self, slot: StreamSlot) -> None:
        stall_s = max(self.settings.stall_s, STALL_TRIPS * self.tuner.rtt_s)
        if slot.silent_s() > stall_s:
            raise TimeoutError(f"no answer from {self.mine.peer} for {stall_s:g} s")

    def _read(self, slot: StreamSlot, stream: SocketStream) -> None:
        """Reads the peer's records until the stream ends."""
        try:
            while self._read_record(slot, stream):
                pass
        finally:
            stream.abort()

    def _read_record(self, slot: StreamSlot, stream: SocketStream) -> bool:
        """False if the stream has ended."""
        try:
            record = unpack_record(stream.read_head(RECORD_BYTES))
            if record.epoch != self.mine.epoch or record.lane != self.mine.lane:
                own = f"epoch {self.mine.epoch}, lane {self.mine.lane}"
                raise WorkerError(f"a record of epoch {record.epoch}, lane {record.lane} on a stream of {own}")
            self._handle(slot, stream, record)
        except (OSError, WorkerError) as error:
            self._log(error)
            stream.abort()
            return False
        return True

    def _handle(self, slot: StreamSlot, stream: SocketStream, record: ControlRecord) -> None:
        now = time.monotonic()
        is_pong = record.kind == RecordKind.PONG
        answers = is_pong or record.kind in (RecordKind.ACK, RecordKind.FAILED)
        slot.received(now, answers=answers, warm_bytes=record.b if is_pong else 0)
        if record.kind == RecordKind.ACK:
            chunk = self.outbox.acknowledged(stream, record.a, record.b)
            if chunk is not None:
                # The rate of acknowledgements is the path's rate only while something waits for the path.
                if self.outbox.has_ready:
                    self.tuner.acknowledged(chunk.num_bytes, now)
                else:
                    self.tuner.meter.pause()
        elif record.kind == RecordKind.PONG:
            self.tuner.note_rtt((time.monotonic_ns() - record.a) / 1e9)
            if record.b and (warm_up := self.tuner.warm_up) is not None:
                warm_up.came_back(record.b, now)
        elif record.kind == RecordKind.POSTED:
            self.outbox.posted(record.tag)
        elif record.kind == RecordKind.FREED:
            self.outbox.freed(record.a)
        elif record.kind == RecordKind.FAILED:
            self.outbox.refused(record.a, f"{self.mine.peer} refuses it: {refusal_text(record.b)}")

    def _log(self, error: BaseException) -> None:
        if not self._closing.is_set():
            self.last_error = str(broken(error))
            log.info("%s: replacing a stream: %s", self.name, self.last_error)
