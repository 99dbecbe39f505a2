"""One connection: writes frames or records, reads exactly what it is asked to, sealed or plain.

Sockets block in the kernel with kernel time-outs, so a large read or write is one system call without the
interpreter's lock. One thread may write while another reads: they share no buffer. Knows no meaning of what it
carries. `abort`, `tune` and `facts` may be called by any thread; `close` only by the owner, after the reader and the
writer have left, so that nobody uses a descriptor that the system has given to another connection.
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
from atlas.wan.transport.wire import MAX_CHUNK_BYTES

TICK_S = 0.5
"""How often a blocked read or write looks up."""
NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)
WAITALL, DONTWAIT = socket.MSG_WAITALL, socket.MSG_DONTWAIT
MIN_LUMP_BYTES, MAX_LUMP_BYTES = 4 * 1024, 512 * 1024
"""A payload is read in lumps: the kernel wakes us when so much is there, not for every packet."""
BBR_MEMORY_S, HALTED_SEGMENTS = 10.0, 4
_TCP_INFO_HEAD = struct.Struct("=8B24I4Q")


class TcpFacts(NamedTuple):
    """What the kernel says of a connection. Window in bytes: what may be under way at once."""

    rtt_s: float
    min_rtt_s: float
    window_bytes: int
    window_segments: int
    num_retransmits: int
    retransmitted_bytes: int
    delivered_bytes: int
    """Of which the peer's kernel has told, in order or not."""


class SocketStream:
    """A connected socket, greeted. Blocks at most `patience_s` without any progress."""

    def __init__(self, sock: socket.socket, seal: AeadCipher | None = None, patience_s: float = 10.0) -> None:
        self.sock, self.seal, self.patience_s = sock, seal, patience_s
        self.overhead_bytes = TAG_BYTES if seal else 0
        self.aborted = False
        self.rtt_s = 0.0
        self.on_tick: Callable[[], None] = lambda: None
        """Called every `TICK_S` of waiting; may raise to end the wait."""
        self._sealed_out, self._sealed_in = bytearray(0), bytearray(0)
        """One for the writer and one for the reader: they work at the same time."""
        self._owning = threading.Lock()
        """Held by whoever uses the descriptor from outside, and while it is closed."""
        self._closed = False
        self._lump_bytes, self._in_lumps = 1, not is_unix(sock)
        self._poll, self._room_poll = select.poll(), select.poll()
        self._poll.register(sock, select.POLLIN)
        self._room_poll.register(sock, select.POLLOUT)
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
        if self.seal is None:
            self._send([memoryview(head)] if not payload else [memoryview(head), payload])
            return
        num_bytes = len(payload) if payload else 0
        self._sealed_out, out = _room(
            self._sealed_out, len(head) + TAG_BYTES + (num_bytes + TAG_BYTES if num_bytes else 0)
        )
        self.seal.encrypt(head, out[: len(head) + TAG_BYTES])
        if payload:
            self.seal.encrypt(payload, out[len(head) + TAG_BYTES :])
        self._send([out])

    def await_room(self) -> None:
        """Until the kernel has sent most of what it was given: what comes next is chosen no sooner than that."""
        last_ns = time.monotonic_ns()
        while not self._room_poll.poll(TICK_S * 1e3):
            self._check(last_ns, "take", self.patience_s)

    def _send(self, parts: list[memoryview]) -> None:
        last_ns = time.monotonic_ns()
        while parts:
            try:
                sent = self.sock.sendmsg(parts)
            except BlockingIOError:
                self._check(last_ns, "take", self.patience_s)
                continue
            last_ns = time.monotonic_ns()
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    # ---- reading -----------------------------------------------------------------------------------------------
    def read_head(self, num_bytes: int, patience_s: float | None = None) -> bytes | bytearray:
        """A header or a record; waits for it `patience_s`, by default for ever: silence is the caller's affair."""
        raw = bytearray(num_bytes + self.overhead_bytes)
        self._fill(memoryview(raw), patience_s)
        if self.seal is None:
            return raw
        head = bytearray(num_bytes)
        self.seal.decrypt(memoryview(raw), memoryview(head))
        return head

    def read_into(self, view: memoryview) -> None:
        """A payload."""
        if not view:
            return
        if self.seal is None:
            self._fill(view, self.patience_s)
            return
        self._sealed_in, raw = _room(self._sealed_in, len(view) + TAG_BYTES)
        self._fill(raw, self.patience_s)
        self.seal.decrypt(raw, view)

    def discard(self, num_bytes: int) -> None:
        """Reads a payload that nobody needs. Sealed, it must still be genuine."""
        self.read_into(memoryview(bytearray(num_bytes)))

    def _fill(self, view: memoryview, patience_s: float | None) -> None:
        last_ns, at, end = time.monotonic_ns(), 0, len(view)
        while at < end:
            flags = DONTWAIT if self._await_lump(end - at) else WAITALL
            try:
                got = self.sock.recv_into(view[at:], end - at, flags)
            except BlockingIOError:
                self._check(last_ns, "send", patience_s)
                continue
            if not got:
                raise ConnectionResetError(f"the peer ended it {'in the middle of a frame' if at else ''}".rstrip())
            at += got
            last_ns = time.monotonic_ns()

    def _await_lump(self, num_bytes: int) -> bool:
        """Waits until a good part of them is there, or a tick has passed; False if they are too few for that."""
        lump_bytes = min(num_bytes, MAX_LUMP_BYTES) if self._in_lumps and num_bytes >= MIN_LUMP_BYTES else 1
        if lump_bytes != self._lump_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lump_bytes)
            self._lump_bytes = lump_bytes
        if lump_bytes > 1:
            self._poll.poll(TICK_S * 1e3)
        return lump_bytes > 1

    def _check(self, last_ns: int, verb: str, patience_s: float | None) -> None:
        if self.aborted:
            raise ConnectionAbortedError("given up by this side")
        self.on_tick()
        if patience_s is not None and time.monotonic_ns() - last_ns > patience_s * 1e9:
            raise TimeoutError(f"the peer did not {verb} anything for {patience_s:g} s")

    # ---- life and tuning ---------------------------------------------------------------------------------------
    def abort(self) -> None:
        """Wakes whoever reads or writes; they see an error and leave."""
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
        """How much the kernel may hold unsent, and how fast it may send. Where the kernel refuses, it is as it was."""
        with self._owning:
            if not self._closed:
                self._tune(lowat_bytes, pacing_bps, near=near)

    def _tune(self, lowat_bytes: int, pacing_bps: float | None, *, near: bool) -> None:
        if near != self._near:
            self._near = near
            congestion_control(self.sock, near=near)
        before_lowat, before_bps = self._tuned
        if lowat_bytes == before_lowat and abs((pacing_bps or 0.0) - before_bps) <= 0.05 * before_bps:
            return
        self._tuned = (lowat_bytes, pacing_bps or 0.0)
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, lowat_bytes)
        pace = 0xFFFFFFFF if not pacing_bps else min(0xFFFFFFFE, max(1, int(pacing_bps / 8)))
        with contextlib.suppress(OSError):
            self.sock.setsockopt(
                socket.SOL_SOCKET, MAX_PACING_RATE, struct.pack("=Q", pace) if pace > 1 << 31 else pace
            )

    def wake(self) -> None:
        """Before it begins to work over distance. bbr halts when its least delay is BBR_MEMORY_S old; a rest and a ping
        renew that, but not before it is so old. Choosing bbr again does, and keeps the window."""
        if time.monotonic() - self._born < BBR_MEMORY_S:
            congestion_control(self.sock, near=True)
            congestion_control(self.sock, near=False)

    def facts(self) -> TcpFacts | None:
        """None where the kernel does not tell (no Linux, closed)."""
        try:
            with self._owning:
                if self._closed:
                    return None
                raw = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except (OSError, AttributeError):
            return None
        if len(raw) < 196:
            return None
        words = struct.unpack_from("=24I", raw, 8)
        mss, rtt_us, cwnd, num_retransmits = words[2], words[15], words[18], words[23]
        min_rtt_us, num_delivered = (struct.unpack_from("=I", raw, at)[0] for at in (148, 192))
        window, twice = mss * cwnd, mss * num_retransmits
        return TcpFacts(rtt_us / 1e6, min_rtt_us / 1e6, window, cwnd, num_retransmits, twice, mss * num_delivered)

    @property
    def has_halted(self) -> bool:
        """Nearly nothing goes out: bbr looks for the least delay, or the path was lost."""
        facts = self.facts()
        return facts is not None and facts.window_segments <= HALTED_SEGMENTS


def _room(buffer: bytearray, num_bytes: int) -> tuple[bytearray, memoryview]:
    """The buffer, or a longer one in its place, and so many bytes of it."""
    if len(buffer) < num_bytes:
        assert num_bytes <= MAX_CHUNK_BYTES + 1024
        buffer = bytearray(num_bytes)
    return buffer, memoryview(buffer)[:num_bytes]


def congestion_control(sock: socket.socket, *, near: bool) -> str:
    """Over distance bbr, where the kernel allows it; not within a datacenter, where its pacing costs half the speed.

    Says which one it is. Even bbr is paced from above: several of them overflow a queue that one would not.
    """
    option = getattr(socket, "TCP_CONGESTION", 13)
    for name in (b"cubic", b"reno") if near else (b"bbr",):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, option, name)
            return name.decode()
        except OSError:
            continue
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode()
    except OSError:
        return "unknown"


def broken(error: BaseException) -> WorkerError:
    """Any failure of a stream, in our words."""
    return error if isinstance(error, WorkerError) else WorkerError(str(error) or type(error).__name__)
