"""Two nodes on one host, without threads between them: the sender writes, and the thread that waits reads. For nodes
that compute on the CPU, where every thread that wakes up takes a core and the interpreter lock from one that computes.

A link is a Unix socket, one way, for one peer and lane, named after the listener's TCP address (`unix_sockets`). Sent
bytes stay in the kernel until the receiver waits for something on the link. A send is done when the kernel has all of
it, a receive when it is read. Nothing is acknowledged or sent again: if a link breaks, everything on it fails. Turns
are ignored: messages are sent in the order of the calls.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.wan.security.credentials import PlainExchange
from atlas.wan.transport.base import (
    Address,
    Buffer,
    Handle,
    Key,
    Mailbox,
    Tag,
    Transport,
    view_of,
    writable_view_of,
)
from atlas.wan.transport.stream import SocketStream, broken
from atlas.wan.transport.unix_sockets import dial_unix, is_other_user, listen_unix
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

HANDSHAKE_S = 10.0
"""What the handshake of a link may take."""
ACCEPT_RETRY_S = 0.05
"""After a failed accept, for example because no file descriptor is left."""
SEND_BUFFER_BYTES = 4 << 20
"""What the kernel is asked to buffer per link, so that a sender need not wait while the receiver computes."""
ACCEPTED, REFUSED = b"\1", b"\0"


class DirectTransport(Transport):
    """Listens from the start beside `address`. `dial` the peers, then send and receive; each link is one way."""

    def __init__(self, name: str, address: Address, *, epoch: int = 0, patience_s: float = 30.0) -> None:
        """`patience_s`: how long a peer may stop reading, or stop in the middle of a message, before its link fails."""
        self.name, self.epoch, self.patience_s = name, epoch, patience_s
        self._senders: dict[tuple[str, int], DirectSender] = {}
        self._receivers: dict[tuple[str, int], DirectReceiver] = {}
        self._closing = threading.Event()
        self._listener = listen_unix(address, "direct")
        self._acceptor: threading.Thread | None = None
        if self._listener is not None:
            self._acceptor = threading.Thread(
                target=self._accept, args=(self._listener,), daemon=True, name=f"{name} direct"
            )
            self._acceptor.start()

    def dial(self, peer: str, lane: int, address: Address) -> bool:
        """Opens a link. False if the peer is on another host or does not accept direct links."""
        sock = dial_unix(address, "direct")
        if sock is None:
            return False
        mine, exchange = Greeting(self.name, peer, lane, self.epoch, 0), _exchange(sock)
        try:
            exchange.write(pack_greeting(mine))
            is_accepted = exchange.read(1) == ACCEPTED
        except OSError:
            is_accepted = False
        if not is_accepted:
            sock.close()
            return False
        self._senders[peer, lane] = DirectSender(mine, sock, self.patience_s)
        return True

    def sends_to(self, peer: str, lane: int) -> bool:
        return (peer, lane) in self._senders

    def receives_from(self, peer: str, lane: int) -> bool:
        """Only known when all peers have dialled."""
        return (peer, lane) in self._receivers

    def send(self, key: Key, buffer: Buffer, turn: int = 0, what: str = "") -> Handle:
        handle = Handle(what or f"{key} to {key.peer}")
        self._senders[key.peer, key.lane].send(key.tag, view_of(buffer), handle)
        return handle

    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        receiver = self._receivers[key.peer, key.lane]
        handle = ReadOnWaitHandle(what or f"{key} from {key.peer}", receiver)
        receiver.mailbox.post(key.tag, writable_view_of(buffer), handle)
        return handle

    @property
    def is_sending(self) -> bool:
        return any(link.is_busy for link in self._senders.values())

    def close(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        if self._listener is not None and self._acceptor is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._acceptor.join(HANDSHAKE_S)  # while it accepts, the name stays taken
            self._listener.close()
        for sender in self._senders.values():
            sender.close(max(0.0, deadline - time.monotonic()))
        for receiver in self._receivers.values():
            receiver.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                self._closing.wait(ACCEPT_RETRY_S)
                continue
            try:
                if not self._is_accepted(sock):
                    sock.close()
            except (OSError, WorkerError):
                sock.close()

    def _is_accepted(self, sock: socket.socket) -> bool:
        exchange = _exchange(sock)
        if is_other_user(sock):
            return False
        theirs = unpack_greeting(exchange.read(GREETING_BYTES))
        place = (theirs.name, theirs.lane)
        if theirs.peer != self.name or theirs.epoch != self.epoch or place in self._receivers:
            exchange.write(REFUSED)
            return False
        self._receivers[place] = DirectReceiver(theirs, sock, self.patience_s)
        sock.sendall(ACCEPTED)
        return True


def _exchange(sock: socket.socket) -> PlainExchange:
    return PlainExchange(sock, time.monotonic() + HANDSHAKE_S)


class ReadOnWaitHandle(Handle):
    """A receive. The thread that waits for it reads the link, also messages for others, until it is done."""

    def __init__(self, what: str, link: DirectReceiver) -> None:
        super().__init__(what)
        self._link, self.progress = link, link.progress

    def wait(self, timeout_s: float | None = None) -> memoryview | None:
        if not self.done:
            self._link.read_until(self, timeout_s)
        return super().wait(timeout_s)


class DirectReceiver:
    """Receives from one peer on one lane, in the order of the sends."""

    def __init__(self, greeting: Greeting, sock: socket.socket, patience_s: float) -> None:
        self.peer, self.lane, self.epoch = greeting.name, greeting.lane, greeting.epoch
        self.mailbox = Mailbox(greeting.name, greeting.lane)
        self._stream = SocketStream(sock, patience_s=patience_s)
        self._num_bytes = 0
        self._reading = threading.Lock()

    def read_until(self, handle: Handle, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._reading:
            while not handle.done:
                try:
                    self._read(None if deadline is None else max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    self._fail(f"nothing came within {timeout_s:g} s; {self.progress()}")
                except (OSError, WorkerError) as error:
                    self._fail(f"the connection from {self.peer} was lost: {broken(error)}")

    def _read(self, patience_s: float | None) -> None:
        """Reads one message: a header, then the payload, directly into the posted buffer."""
        header = unpack_header(self._stream.read_head(HEADER_BYTES, patience_s))
        if header.kind != FrameKind.CHUNK or header.epoch != self.epoch or header.lane != self.lane:
            frame = f"kind {header.kind}, epoch {header.epoch}, lane {header.lane}"
            link = f"kind {FrameKind.CHUNK}, epoch {self.epoch}, lane {self.lane}"
            raise WorkerError(f"a frame of {frame} where {link} is expected")
        view = self.mailbox.buffer_for(header.tag, header.total_bytes)
        self._stream.read_into(view)
        self._num_bytes += len(view)
        self.mailbox.deliver(header.tag, view)

    def _fail(self, reason: str) -> None:
        self.mailbox.fail(WorkerError(reason))
        self._stream.abort()

    def progress(self) -> str:
        return f"{self._num_bytes} bytes came from {self.peer} so far"

    def close(self) -> None:
        self._fail("it was closed")
        with self._reading:
            self._stream.close()


class _UnsentMessage(NamedTuple):
    """What the kernel has not accepted yet of a message."""

    parts: list[memoryview]
    handle: Handle


class DirectSender:
    """Sends to one peer on one lane. The caller writes; if the kernel's buffer is full, a thread writes the rest. The
    thread is started when that first happens."""

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
                left = parts if self._waiting or self._failure else self._stream.send_now(parts)
            except OSError as error:
                self._failure, left = WorkerError(f"the connection was lost: {broken(error)}"), parts
            if left and self._failure is None:
                self._waiting.append(_UnsentMessage(left, handle))
                self._wake_writer()
                return
        if left:
            handle.fail(self._failure)
        else:
            handle.finish()

    def _wake_writer(self) -> None:
        if self._writer is None:
            name = f"atlas {self.mine.name} -> {self.mine.peer} (lane {self.mine.lane})"
            self._writer = threading.Thread(target=self._write, daemon=True, name=name)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """Runs until the link fails or is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._failure is not None)
                if self._failure is not None:
                    return
                unsent = self._waiting[0]
            try:
                for part in unsent.parts:
                    self._stream.write(b"", part)
            except (OSError, WorkerError) as error:
                self._fail(WorkerError(f"{self.mine.peer} does not receive: {broken(error)}"))
                return
            with self._changed:
                if self._waiting:
                    self._waiting.popleft()
                self._changed.notify_all()
            unsent.handle.finish()

    def _fail(self, error: WorkerError) -> None:
        with self._changed:
            self._failure = self._failure or error
            lost, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for unsent in lost:
            unsent.handle.fail(self._failure)

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)
        self._fail(WorkerError("it was closed"))
        self._stream.abort()
        if self._writer is not None:
            self._writer.join()
        self._stream.close()
