"""One connection: writes frames or records, reads exact numbers of bytes, encrypted or plain.

Sockets block in the kernel with kernel timeouts, so a large read or write is one system call without the interpreter
lock. One thread may write while another reads: they share no buffer. Does not know what it carries. `abort`, `tune` and
`facts` may be called by any thread; `close` only by the owner, after reader and writer have stopped, so that no thread
uses a descriptor that the system has given to another connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.wan.security.aead import TAG_BYTES, AeadCipher
from atlas.wan.transport.unix_sockets import is_unix
from atlas.wan.transport.wire import HEADER_BYTES, MAX_CHUNK_BYTES

TICK_S = 0.5
"""How often a blocked read or write checks for an abort and for timeouts."""
MAX_PACING_RATE = 47
"""SO_MAX_PACING_RATE, which Python does not name."""
UNPACED = 0xFFFFFFFF
"""SO_MAX_PACING_RATE without a limit."""
MIN_BATCH_BYTES, MAX_BATCH_BYTES = 4 * 1024, 512 * 1024
"""A payload is read in batches: the kernel wakes the reader when so much is there (SO_RCVLOWAT), not for every packet.
On loopback this saved a tenth of the CPU time per byte."""
MAX_BUFFER_BYTES = MAX_CHUNK_BYTES + HEADER_BYTES + 2 * TAG_BYTES
"""A chunk with its header, both encrypted."""
PACE_TOLERANCE = 0.05
"""A change of pace smaller than this is not worth a system call."""
BBR_MEMORY_S = 10.0
"""How long bbr keeps its estimate of the least delay (tcp_bbr.c: bbr_min_rtt_win_sec)."""
BBR_PROBE_SEGMENTS = 4
"""The window with which bbr measures the least delay (tcp_bbr.c: bbr_cwnd_min_target)."""
TCP_INFO_BYTES, MIN_RTT_AT, DELIVERED_AT = 196, 148, 192
"""Of `struct tcp_info` in <linux/tcp.h>: the part that is read, and the offsets of two of its fields."""


class TcpFacts(NamedTuple):
    """What the kernel reports of a connection (TCP_INFO)."""

    rtt_s: float
    min_rtt_s: float
    window_bytes: int
    window_segments: int
    num_retransmits: int
    retransmitted_bytes: int
    delivered_bytes: int
    """What the peer's kernel has acknowledged, in order or not."""


class SocketStream:
    """A connected socket after its handshake. Blocks at most `patience_s` without any progress."""

    def __init__(
        self, sock: socket.socket, cipher: AeadCipher | None = None, patience_s: float = 10.0, rtt_s: float = 0.0
    ) -> None:
        self.sock, self.cipher, self.patience_s, self.rtt_s = sock, cipher, patience_s, rtt_s
        self.aborted = False
        self.on_tick: Callable[[], None] = lambda: None
        """Called every `TICK_S` of waiting. May raise to end the wait."""
        self._encrypted_out, self._encrypted_in = bytearray(0), bytearray(0)
        """One for the writer and one for the reader, which run at the same time."""
        self._owning = threading.Lock()
        """Held while the descriptor is used by other threads than reader and writer, and while it is closed."""
        self._closed = False
        self._batch_bytes, self._in_batches = 1, not is_unix(sock)
        self._read_poll, self._write_poll = select.poll(), select.poll()
        self._read_poll.register(sock, select.POLLIN)
        self._write_poll.register(sock, select.POLLOUT)
        self._tuned = (0, 0.0)
        self._near: bool | None = None
        self._born = time.monotonic()
        sock.settimeout(None)
        tick = struct.pack("@ll", int(TICK_S), int(TICK_S % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # ---- writing -----------------------------------------------------------------------------------------------
    def write(self, head: bytes, payload: memoryview | None = None) -> None:
        if self.cipher is None:
            self._send([memoryview(head)] if not payload else [memoryview(head), payload])
            return
        head_bytes, payload_bytes = len(head) + TAG_BYTES, len(payload) + TAG_BYTES if payload else 0
        self._encrypted_out, out = _at_least(self._encrypted_out, head_bytes + payload_bytes)
        self.cipher.encrypt(head, out[:head_bytes])
        if payload:
            self.cipher.encrypt(payload, out[head_bytes:])
        self._send([out])

    def await_writable(self) -> None:
        """Waits until the kernel has sent most of what it was given, so that the next chunk is chosen late."""
        last_ns = time.monotonic_ns()
        while not self._write_poll.poll(TICK_S * 1e3):
            self._check(last_ns, "accept", self.patience_s)

    def send_now(self, parts: list[memoryview]) -> list[memoryview]:
        """Sends, plain, what the kernel's buffer takes, and returns the rest."""
        try:
            return _rest(parts, self.sock.sendmsg(parts, (), socket.MSG_DONTWAIT))
        except BlockingIOError:
            return parts

    def _send(self, parts: list[memoryview]) -> None:
        last_ns = time.monotonic_ns()
        while parts:
            try:
                parts = _rest(parts, self.sock.sendmsg(parts))
            except BlockingIOError:
                self._check(last_ns, "accept", self.patience_s)
                continue
            last_ns = time.monotonic_ns()

    # ---- reading -----------------------------------------------------------------------------------------------
    def read_head(self, num_bytes: int, patience_s: float | None = None) -> bytes | bytearray:
        """Reads a header or a record. Waits for it `patience_s`; None: without limit."""
        if self.cipher is None:
            head = bytearray(num_bytes)
            self._fill(memoryview(head), patience_s)
            return head
        raw, head = bytearray(num_bytes + TAG_BYTES), bytearray(num_bytes)
        self._fill(memoryview(raw), patience_s)
        self.cipher.decrypt(memoryview(raw), memoryview(head))
        return head

    def read_into(self, view: memoryview) -> None:
        """Reads a payload."""
        if not view:
            return
        if self.cipher is None:
            self._fill(view, self.patience_s)
            return
        self._encrypted_in, raw = _at_least(self._encrypted_in, len(view) + TAG_BYTES)
        self._fill(raw, self.patience_s)
        self.cipher.decrypt(raw, view)

    def discard(self, num_bytes: int) -> None:
        """Reads a payload that is not needed. If it is encrypted, it is still verified."""
        self.read_into(memoryview(bytearray(num_bytes)))

    def _fill(self, view: memoryview, patience_s: float | None) -> None:
        last_ns, at, end = time.monotonic_ns(), 0, len(view)
        while at < end:
            flags = socket.MSG_DONTWAIT if self._await_batch(end - at) else socket.MSG_WAITALL
            try:
                got = self.sock.recv_into(view[at:], end - at, flags)
            except BlockingIOError:
                self._check(last_ns, "send", patience_s)
                continue
            if not got:
                raise ConnectionResetError(f"the peer closed it {'in the middle of a frame' if at else ''}".rstrip())
            at += got
            last_ns = time.monotonic_ns()

    def _await_batch(self, num_bytes: int) -> bool:
        """Waits until a batch is there, or for a tick. False if there are too few bytes to batch."""
        batch_bytes = min(num_bytes, MAX_BATCH_BYTES) if self._in_batches and num_bytes >= MIN_BATCH_BYTES else 1
        self._set_batch(batch_bytes)
        if batch_bytes > 1:
            self._read_poll.poll(TICK_S * 1e3)
        return batch_bytes > 1

    def watch_any(self) -> None:
        """Makes a poll of the socket return at the next byte. Called by the reader, between two frames."""
        self._set_batch(1)

    def _set_batch(self, batch_bytes: int) -> None:
        if batch_bytes != self._batch_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, batch_bytes)
            self._batch_bytes = batch_bytes

    def _check(self, last_ns: int, verb: str, patience_s: float | None) -> None:
        if self.aborted:
            raise ConnectionAbortedError("closed by this side")
        self.on_tick()
        if patience_s is not None and time.monotonic_ns() - last_ns > patience_s * 1e9:
            raise TimeoutError(f"the peer did not {verb} anything for {patience_s:g} s")

    # ---- end and tuning ----------------------------------------------------------------------------------------
    def abort(self) -> None:
        """Wakes the reader and the writer, which get an error and stop."""
        self.aborted = True
        with self._owning, contextlib.suppress(OSError):
            if not self._closed:
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        with self._owning:
            self._closed = True
            self.sock.close()

    def tune(self, lowat_bytes: int, pacing_bps: float | None, *, near: bool) -> None:
        """Sets how much the kernel may hold unsent, and how fast it may send. Ignored if the kernel refuses."""
        with self._owning:
            if self._closed:
                return
            if near != self._near:
                self._near = near
                set_congestion_control(self.sock, near=near)
            before_lowat, before_bps = self._tuned
            pacing_bps = pacing_bps or 0.0
            if lowat_bytes == before_lowat and abs(pacing_bps - before_bps) <= PACE_TOLERANCE * before_bps:
                return
            self._tuned = (lowat_bytes, pacing_bps)
            pace = UNPACED if not pacing_bps else min(UNPACED - 1, max(1, int(pacing_bps / 8)))
            packed = struct.pack("=Q", pace) if pace > 1 << 31 else pace
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, lowat_bytes)
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, packed)

    def wake(self) -> None:
        """Called before a stream that rested works again. bbr pauses when its least delay is BBR_MEMORY_S old. A rest
        and a ping renew the estimate, but not before it is that old. Selecting bbr again does, and keeps the window."""
        if time.monotonic() - self._born < BBR_MEMORY_S:
            self.restart()

    def restart(self) -> None:
        """Starts bbr again, with the window that it has."""
        with self._owning:
            if not self._closed:
                set_congestion_control(self.sock, near=True)
                set_congestion_control(self.sock, near=False)

    def facts(self) -> TcpFacts | None:
        """None if the kernel does not report them, or if the stream is closed."""
        with self._owning:
            return None if self._closed else tcp_facts(self.sock)

    @property
    def has_paused(self) -> bool:
        """Whether it sends almost nothing: bbr measures the least delay, or the path was lost."""
        facts = self.facts()
        return facts is not None and facts.window_segments <= BBR_PROBE_SEGMENTS


def tcp_facts(sock: socket.socket) -> TcpFacts | None:
    """None if the kernel does not report them."""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return None
    if len(raw) < TCP_INFO_BYTES:
        return None
    words = struct.unpack_from("=24I", raw, 8)
    mss, rtt_us, cwnd, num_retransmits = words[2], words[15], words[18], words[23]
    min_rtt_us, num_delivered = (struct.unpack_from("=I", raw, at)[0] for at in (MIN_RTT_AT, DELIVERED_AT))
    window, twice = mss * cwnd, mss * num_retransmits
    return TcpFacts(rtt_us / 1e6, min_rtt_us / 1e6, window, cwnd, num_retransmits, twice, mss * num_delivered)


def _at_least(buffer: bytearray, num_bytes: int) -> tuple[bytearray, memoryview]:
    """The buffer, or a longer one in its place, and a view of its first bytes."""
    if len(buffer) < num_bytes:
        assert num_bytes <= MAX_BUFFER_BYTES
        buffer = bytearray(num_bytes)
    return buffer, memoryview(buffer)[:num_bytes]


def _rest(parts: list[memoryview], num_sent: int) -> list[memoryview]:
    """What is left of `parts` after this many bytes."""
    for i, part in enumerate(parts):
        if num_sent < len(part):
            return [part[num_sent:], *parts[i + 1 :]]
        num_sent -= len(part)
    return []


def set_congestion_control(sock: socket.socket, *, near: bool) -> None:
    """Bbr between datacenters, if the kernel allows it. Not inside one, where its pacing halves the throughput."""
    for name in (b"cubic", b"reno") if near else (b"bbr",):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def broken(error: BaseException) -> WorkerError:
    """Any failure of a stream as a WorkerError."""
    return error if isinstance(error, WorkerError) else WorkerError(str(error) or type(error).__name__)
