"""Two nodes on one host, without a thread between them: who sends writes, who waits reads. For nodes that compute on
the processor, where every thread that wakes takes a core, and the interpreter, from one that computes.

A link is a Unix socket, one way, for one peer and lane, named after the listener's TCP address as its twin is
(`nearby`). What was sent lies in the kernel until the receiver waits for something on the link: a send is done when
the kernel has it all, a receive when it is read. Nothing is acknowledged and nothing sent again: a link that breaks
has lost its peer, and everything on it fails. Turns do not count: first come, first served.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.wan.security.credentials import read_by, write_by
from atlas.wan.transport.base import Buffer, Handle, Key, Tag, Transport, size_error, view_of, writable_view_of
from atlas.wan.transport.stream import SocketStream, broken
from atlas.wan.transport.unix_sockets import Address, dial_unix, is_other_user, listen_unix
from atlas.wan.transport.wire import (
    GREETING_BYTES,
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    Greeting,
    pack_greeting,
    pack_header,
    unpack_greeting,
    unpack_header,
)

MEET_S = 10.0
RETRY_S = 0.05
"""Between two tries to accept a connection."""
SEND_BUFFER_BYTES = 4 << 20
"""What the kernel is asked to hold of a link, so that a sender need not wait for a receiver that computes."""
WELCOME, NO = b"\1", b"\0"


class DirectTransport(Transport):
    """Listens from the start beside `address`; `dial` the peers, then send and receive, each link one way."""

    def __init__(self, name: str, address: Address, *, epoch: int = 0, patience_s: float = 30.0) -> None:
        """`patience_s`: how long a peer may not take, or not finish, what it was sent."""
        self.name, self.epoch, self.patience_s = name, epoch, patience_s
        self._outward: dict[tuple[str, int], DirectSender] = {}
        self._inward: dict[tuple[str, int], DirectReceiver] = {}
        self._closing = threading.Event()
        self._door = listen_unix(address, "direct")
        if self._door is not None:
            threading.Thread(target=self._admit, args=(self._door,), daemon=True, name=f"{name} direct").start()

    def dial(self, peer: str, lane: int, address: Address) -> bool:
        """Whether there is a link now: not where the peer is elsewhere, or has no door of this kind."""
        sock = dial_unix(address, "direct")
        if sock is None:
            return False
        mine, deadline = Greeting(self.name, peer, lane, self.epoch, 0), time.monotonic() + MEET_S
        try:
            write_by(sock, pack_greeting(mine), deadline)
            agreed = read_by(sock, 1, deadline) == WELCOME
        except OSError:
            agreed = False
        if not agreed:
            sock.close()
            return False
        self._outward[peer, lane] = DirectSender(mine, sock, self.patience_s)
        return True

    @property
    def has_links(self) -> bool:
        return bool(self._outward or self._inward)

    def sends_to(self, peer: str, lane: int) -> bool:
        return (peer, lane) in self._outward

    def hears_from(self, peer: str, lane: int) -> bool:
        """To be asked when all peers have dialled."""
        return (peer, lane) in self._inward

    def send(self, key: Key, buffer: Buffer, turn: int = 0, what: str = "") -> Handle:
        handle = Handle(what or f"{key} to {key.peer}")
        self._outward[key.peer, key.lane].send(key.tag, view_of(buffer), handle)
        return handle

    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        inward = self._inward[key.peer, key.lane]
        handle = ReadOnWaitHandle(what or f"{key} from {key.peer}", inward)
        inward.post(key.tag, None if buffer is None else writable_view_of(buffer), handle)
        return handle

    @property
    def is_sending(self) -> bool:
        return any(link.is_busy for link in self._outward.values())

    def close(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        if self._door is not None:
            with contextlib.suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)
            self._door.close()
        for outward in self._outward.values():
            outward.close(max(0.0, deadline - time.monotonic()))
        for inward in self._inward.values():
            inward.close()

    def _admit(self, door: socket.socket) -> None:
        """Until the door is closed."""
        while not self._closing.is_set():
            try:
                sock, _ = door.accept()
            except OSError:  # closed; or no descriptor is left, and some will come back
                self._closing.wait(RETRY_S)
                continue
            try:
                if not self._is_let_in(sock):
                    sock.close()
            except (OSError, WorkerError):
                sock.close()

    def _is_let_in(self, sock: socket.socket) -> bool:
        deadline = time.monotonic() + MEET_S
        if is_other_user(sock):
            return False
        theirs = unpack_greeting(read_by(sock, GREETING_BYTES, deadline))
        place = (theirs.name, theirs.lane)
        if theirs.peer != self.name or theirs.epoch != self.epoch or place in self._inward:
            write_by(sock, NO, deadline)
            return False
        self._inward[place] = DirectReceiver(theirs, sock, self.patience_s)
        sock.sendall(WELCOME)
        return True


class ReadOnWaitHandle(Handle):
    """A receive. Whoever waits for it reads what comes, of others too, until it is done."""

    def __init__(self, what: str, link: DirectReceiver) -> None:
        super().__init__(what)
        self._link = link

    def wait(self, timeout_s: float | None = None) -> memoryview | None:
        if not self.done:
            self._link.read_until(self, timeout_s)
        return super().wait(timeout_s)


class DirectReceiver:
    """What comes from one peer on one lane, in the order in which it was sent."""

    def __init__(self, greeting: Greeting, sock: socket.socket, patience_s: float) -> None:
        self.peer, self.lane, self.epoch = greeting.name, greeting.lane, greeting.epoch
        self._stream = SocketStream(sock, patience_s=patience_s)
        self._posted: dict[Tag, tuple[Handle, memoryview | None]] = {}
        self._early: dict[Tag, memoryview] = {}
        """What came while others were waited for, and was not expected yet."""
        self._failure: WorkerError | None = None
        self._num_bytes = 0
        self._reading, self._lock = threading.Lock(), threading.Lock()

    def post(self, tag: Tag, view: memoryview | None, handle: Handle) -> None:
        handle.progress = self._progress
        with self._lock:
            if tag in self._posted:
                raise ValueError(f"{handle.what}: it is already being received")
            early = self._early.pop(tag, None)
            if early is None and self._failure is None:
                self._posted[tag] = (handle, view)
                return
        if early is None:
            handle.finish(WorkerError(f"{handle.what}: {self._failure}"))
        else:
            self._deliver(tag, early, handle, view)

    def read_until(self, handle: Handle, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._reading:
            while not handle.done:
                try:
                    self._read(None if deadline is None else max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    self._fail(WorkerError(f"nothing came within {timeout_s:g} s; {self._progress()}"))
                except (OSError, WorkerError) as error:
                    self._fail(WorkerError(f"the connection from {self.peer} was lost: {broken(error)}"))

    def _read(self, patience_s: float | None) -> None:
        """One message: a header, then all of it, straight into the buffer that was posted for it."""
        header = unpack_header(self._stream.read_head(HEADER_BYTES, patience_s))
        if header.kind != FrameKind.CHUNK or header.epoch != self.epoch or header.lane != self.lane:
            raise WorkerError(f"a frame of epoch {header.epoch}, lane {header.lane} on a link of another")
        wanted = self._posted.get(header.tag, (None, None))[1]
        fits = wanted is not None and len(wanted) == header.total_bytes
        view = wanted if wanted is not None and fits else memoryview(bytearray(header.total_bytes))
        self._stream.read_into(view)
        self._num_bytes += len(view)
        with self._lock:
            entry = self._posted.pop(header.tag, None)
            if entry is None:
                self._early[header.tag] = view
        if entry is not None:
            self._deliver(header.tag, view, *entry)

    def _deliver(self, tag: Tag, came: memoryview, handle: Handle, wanted: memoryview | None) -> None:
        if wanted is not None and len(wanted) != len(came):
            handle.finish(size_error(Key(self.peer, self.lane, tag), len(came), len(wanted)))
            return
        if wanted is not None and wanted is not came:
            wanted[:] = came
        handle.finish(buffer=came if wanted is None else wanted)

    def _fail(self, error: WorkerError) -> None:
        with self._lock:
            self._failure = self._failure or error
            lost, self._posted = self._posted, {}
        self._stream.abort()
        for handle, _ in lost.values():
            handle.finish(WorkerError(f"{handle.what}: {self._failure}"))

    def _progress(self) -> str:
        return f"{self._num_bytes} bytes came from {self.peer} so far"

    def close(self) -> None:
        self._fail(WorkerError("it was closed"))
        with self._reading:
            self._stream.close()


class _UnsentMessage(NamedTuple):
    """What the kernel has not taken yet of a message."""

    parts: list[memoryview]
    handle: Handle


class DirectSender:
    """What goes to one peer on one lane. Who sends it writes it; what the kernel has no room for waits for a thread,
    which is started when that first happens."""

    def __init__(self, mine: Greeting, sock: socket.socket, patience_s: float) -> None:
        self.mine = mine
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._stream = SocketStream(sock, patience_s=patience_s)
        self._waiting: deque[_UnsentMessage] = deque()
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._failure: WorkerError | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def send(self, tag: Tag, view: memoryview, handle: Handle) -> None:
        header = FrameHeader(FrameKind.CHUNK, self.mine.lane, self.mine.epoch, total_bytes=len(view), tag=tag)
        parts = [memoryview(pack_header(header)), view]
        handle.start_ns = time.monotonic_ns()
        with self._changed:
            try:
                left = parts if self._waiting or self._failure else self._sent_at_once(parts)
            except OSError as error:
                self._failure, left = WorkerError(f"the connection was lost: {broken(error)}"), parts
            if left and self._failure is None:
                self._waiting.append(_UnsentMessage(left, handle))
                self._wake_writer()
                return
        handle.finish(WorkerError(f"{handle.what}: {self._failure}") if left else None)

    def _sent_at_once(self, parts: list[memoryview]) -> list[memoryview]:
        """What is left of it."""
        try:
            sent = self._stream.sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return parts
        left = []
        for part in parts:
            if sent < len(part):
                left.append(part[sent:])
            sent = max(0, sent - len(part))
        return left

    def _wake_writer(self) -> None:
        if self._writer is None:
            name = f"atlas {self.mine.name} -> {self.mine.peer} (lane {self.mine.lane})"
            self._writer = threading.Thread(target=self._write, daemon=True, name=name)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """Until the link fails or is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._failure is not None)
                if self._failure is not None:
                    return
                rest = self._waiting[0]
            try:
                for part in rest.parts:
                    self._stream.write(b"", part)
            except (OSError, WorkerError) as error:
                self._fail(WorkerError(f"{self.mine.peer} does not take it: {broken(error)}"))
                return
            with self._changed:
                if self._waiting:
                    self._waiting.popleft()
                self._changed.notify_all()
            rest.handle.finish()

    def _fail(self, error: WorkerError) -> None:
        with self._changed:
            self._failure = self._failure or error
            lost, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for rest in lost:
            rest.handle.finish(WorkerError(f"{rest.handle.what}: {self._failure}"))

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)
        self._fail(WorkerError("it was closed"))
        self._stream.abort()
        if self._writer is not None:
            self._writer.join()
        self._stream.close()
