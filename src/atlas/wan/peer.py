"""How a worker talks to its peers without ever stopping its accelerator: a thread per channel sends, smallest turn
first; a thread per connection receives into a mailbox; the worker only waits for what an op needs, and never
for longer than its patience.

Knows frames and who is who. Does not know tensors, Programs, or which wait is whose fault: the waiter says so.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from typing import NamedTuple

from atlas.errors import WorkerError
from atlas.wan.framing import MAX_PAYLOAD_BYTES, Frame, FrameType, head, read_frame

NOTSENT_LOWAT_BYTES = 128 * 1024
"""How much the kernel may hold unsent: more, and a turn that comes later but matters more is stuck behind it."""
CONNECT_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 10.0
_LAST = 1 << 62


class Key(NamedTuple):
    """What a frame is: an input of this stage for this microbatch, from this pipeline, of this direction."""

    direction: int
    pipeline: int
    stage: int
    microbatch: int

    @classmethod
    def of(cls, frame: Frame) -> Key:
        return cls(frame.direction, frame.pipeline, frame.stage, frame.microbatch)


class Letter(NamedTuple):
    frame: Frame
    arrive_ns: int
    """On the monotonic clock."""


class Mailbox:
    """What has arrived and has not been fetched. The first failure of any connection ends every wait."""

    def __init__(self) -> None:
        self._letters: dict[Key, Letter] = {}
        self._failure: WorkerError | None = None
        self._changed = threading.Condition()

    def put(self, frame: Frame) -> None:
        key = Key.of(frame)
        with self._changed:
            if key in self._letters:
                self._fail(WorkerError(f"{key} arrived twice"))
                return
            self._letters[key] = Letter(frame, time.monotonic_ns())
            self._changed.notify_all()

    def fail(self, error: WorkerError) -> None:
        with self._changed:
            self._fail(error)

    def _fail(self, error: WorkerError) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()

    def wait(self, key: Key, who: str, patience_s: float, *, keep: bool = False) -> Letter:
        """The letter, once it is there. `who` begins the error: "1F3 on p0.s1 waits for 0SEND_F3 of p0.s0"."""
        deadline = time.monotonic() + patience_s
        with self._changed:
            while key not in self._letters:
                if self._failure is not None:
                    raise WorkerError(f"{who}: {self._failure}")
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise WorkerError(f"{who}: nothing came within {patience_s:g} s")
                self._changed.wait(left_s)
            return self._letters[key] if keep else self._letters.pop(key)

    def check(self) -> None:
        """Raises the failure of a connection, if there was one."""
        if self._failure is not None:
            raise self._failure


class Listener:
    """Accepts peers on a loopback port and files their frames. A peer that goes without BYE is a failure."""

    def __init__(self, mailbox: Mailbox, epoch: int = 0, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.mailbox, self.epoch, self.max_payload_bytes = mailbox, epoch, max_payload_bytes
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self._server.getsockname()
        self._peers: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in [self._server, *self._peers]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            self._peers.append(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        """A stranger that does not even say HELLO is turned away; it is no peer of ours and fails nothing."""
        name = ""
        try:
            peer.settimeout(HELLO_TIMEOUT_S)
            hello = read_frame(lambda n: _read_exactly(peer, n), 256)
            if hello.type != FrameType.HELLO or hello.epoch != self.epoch:
                return
            name = bytes(hello.payload).decode("utf-8", "replace")
            peer.settimeout(None)
            while True:
                frame = read_frame(lambda n: _read_exactly(peer, n), self.max_payload_bytes)
                if frame.type == FrameType.BYE:
                    return
                self.mailbox.put(frame)
        except (OSError, WorkerError) as error:
            if name:
                self.mailbox.fail(WorkerError(f"the connection from {name} broke: {error}"))
        finally:
            peer.close()


class Channel:
    """One direction of traffic to one peer. `send` returns at once; a thread sends, smallest turn first."""

    def __init__(self, name: str, peer_name: str, address: tuple[str, int], mailbox: Mailbox, epoch: int = 0) -> None:
        self.peer_name, self.mailbox = peer_name, mailbox
        self.start_ns: dict[Key, int] = {}
        """When each frame left the queue."""
        self._sequence = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, Frame]] = queue.PriorityQueue()
        try:
            self._socket = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            raise WorkerError(f"{name} cannot connect to {peer_name} at {address[0]}:{address[1]}: {error}") from None
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if lowat := getattr(socket, "TCP_NOTSENT_LOWAT", None):
            self._socket.setsockopt(socket.IPPROTO_TCP, lowat, NOTSENT_LOWAT_BYTES)
        hello = name.encode()[:200]
        self._write(Frame(FrameType.HELLO, hello, shape=(len(hello),), epoch=epoch))
        self._bye = Frame(FrameType.BYE, epoch=epoch)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def send(self, frame: Frame, turn: int = 0) -> None:
        """Equal turns go first come, first served."""
        self._queue.put((turn, next(self._sequence), frame))

    def close(self, patience_s: float) -> None:
        """Sends what is queued, then BYE. Raises if the peer does not take it in time."""
        self.send(self._bye, _LAST)
        self._thread.join(patience_s)
        stuck = self._thread.is_alive()
        self.cut()
        if stuck:
            raise WorkerError(f"{self.peer_name} did not take its last frames within {patience_s:g} s")

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        try:
            while True:
                _, _, frame = self._queue.get()
                if frame is self._bye:
                    self._write(frame)
                    self._socket.shutdown(socket.SHUT_WR)
                    return
                self.start_ns[Key.of(frame)] = time.monotonic_ns()
                self._write(frame)
        except OSError as error:
            self.mailbox.fail(WorkerError(f"the connection to {self.peer_name} broke: {error}"))

    def _write(self, frame: Frame) -> None:
        start = head(frame)
        if len(frame.payload) <= 1024:
            self._socket.sendall(start + bytes(frame.payload))
            return
        self._socket.sendall(start)
        self._socket.sendall(frame.payload)


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        got = sock.recv_into(view[at:])
        if not got:
            raise WorkerError(f"it ended {num_bytes - at} bytes before the end of a frame, without a word")
        at += got
    return data
