"""A store in another datacenter, reached over the WAN transport: the four methods of a `BlobStore`, served by the
`CheckpointServer` there.

A write is sent in pieces, a few of them at a time; it is done when the server has compared its hash, flushed it to the
disk and replied. Failures are OSErrors; those of the server's disk keep their error number.
"""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, BinaryIO, cast

from atlas.errors import WorkerError
from atlas.runtime.checkpoint.calls import (
    BULK_LANE,
    CALL_LANE,
    PIECE_BYTES,
    REPLY_LANE,
    WINDOW_BYTES,
    pack,
    unpack,
)
from atlas.runtime.checkpoint.store import BlobFile, Chunk
from atlas.runtime.checkpoint.tensors import Tally
from atlas.wan.transport.base import Handle, Key, PeerRoute
from atlas.wan.transport.endpoint import Endpoint

PATIENCE_S = 60.0
"""For a reply: a large file takes its time to reach a disk."""
LOOK_S = 0.005
READ_AHEAD_BYTES = 16 << 20
"""Of one file; launchers read several at once, before training starts."""


class CheckpointClient:
    """The calls of this node to one checkpoint server, for any number of stores and threads."""

    def __init__(self, endpoint: Endpoint, peer: str, route: PeerRoute, *, patience_s: float = PATIENCE_S) -> None:
        self.endpoint, self.peer, self.route, self.patience_s = endpoint, peer, route, patience_s
        self.upload_numbers = itertools.count()
        self._calls = itertools.count()
        self._lock, self._widening = threading.Lock(), threading.Lock()
        self._is_wide = False
        endpoint.open(peer, CALL_LANE, route.address, light=True)
        if route.dial_for and route.address is not None:
            endpoint.dial_for(peer, REPLY_LANE, route.address)

    def widen(self) -> None:
        """Have contents of files come over many streams from now on: one stream does not fill a long path."""
        with self._widening:
            if self._is_wide:
                return
            if self.route.dial_for and self.route.address is not None:
                self.endpoint.dial_for(self.peer, BULK_LANE, self.route.address)
            self.call("widen").wait()
            self._is_wide = True

    def call(self, verb: str, payload: Chunk = b"", **arguments: Any) -> StoreCall:
        """Send a call; `wait` for its reply."""
        lane = BULK_LANE if verb == "read" and self._is_wide else REPLY_LANE
        arguments["lane"] = lane
        message = pack({"verb": verb, **arguments}, payload)
        what = f"{verb} of {arguments.get('name', 'checkpoints')} at {self.peer}"
        with self._lock:
            tag = (next(self._calls), 0, 0, 0)
            reply = self.endpoint.recv(Key(self.peer, lane, tag), what=what)
            sent = self.endpoint.send(Key(self.peer, CALL_LANE, tag), message, tag[0], what)
        return StoreCall(sent, reply, len(message), self.patience_s)


class StoreCall:
    """A call that was sent."""

    def __init__(self, sent: Handle, reply: Handle, num_bytes: int, patience_s: float) -> None:
        self.num_bytes, self._sent, self._reply, self._patience_s = num_bytes, sent, reply, patience_s

    def wait(self) -> memoryview:
        """The payload of the reply; raises OSError if the call failed, or if there is no reply."""
        try:
            self._sent.wait(self._patience_s)
            message = self._reply.wait(self._patience_s)
        except WorkerError as error:
            raise ConnectionError(str(error)) from error
        assert message is not None, "a reply always has a header"
        try:
            header, payload = unpack(message)
        except ValueError as error:
            raise ConnectionError(f"{self._reply.what}: invalid reply: {error}") from error
        if "errno" in header:
            raise OSError(int(header["errno"]), f"{header.get('error')} ({self._reply.what})")
        return payload


class RemoteStore:
    """A store of a checkpoint server: `own`, its own checkpoints, or `of-DC`, its copies of another datacenter's."""

    def __init__(self, client: CheckpointClient, store: str) -> None:
        self.client, self.store = client, store

    def __str__(self) -> str:
        return f"{self.client.peer}:{self.store}"

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        upload, tally, window = next(self.client.upload_numbers), Tally(), CallWindow()
        window.add(self._call("begin", name, upload=upload))
        try:
            for piece in tally.through(_pieces(chunks)):
                window.add(self.client.call("piece", piece, upload=upload, name=name))
        except BaseException:
            self.client.call("drop", upload=upload, name=name)
            raise
        window.add(self.client.call("end", upload=upload, name=name, bytes=tally.num_bytes, sha256=tally.sha256))
        window.drain()

    def open(self, name: str) -> BinaryIO:
        found = json.loads(bytes(self._call("size", name).wait()))
        return cast(BinaryIO, io.BufferedReader(RemoteFile(self, name, int(found["bytes"])), PIECE_BYTES))

    def names(self, prefix: str = "") -> list[str]:
        found: list[str] = json.loads(bytes(self._call("names", prefix).wait()))
        return found

    def delete(self, name: str) -> None:
        self._call("delete", name).wait()

    def read(self, name: str, offset: int, num_bytes: int) -> StoreCall:
        return self._call("read", name, offset=offset, bytes=num_bytes)

    def _call(self, verb: str, name: str, **arguments: Any) -> StoreCall:
        return self.client.call(verb, store=self.store, name=name, **arguments)


class RemoteFile(BlobFile):
    """A blob of a remote store. Up to READ_AHEAD_BYTES are asked for before they are read: a long path stays full."""

    def __init__(self, store: RemoteStore, name: str, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.store, self.blob = store, name
        self._asked = 0
        self._ahead: deque[StoreCall] = deque()
        self._piece = memoryview(b"")
        """What is left of the piece that arrived last."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._asked = super().seek(offset, whence)
        self._ahead.clear()
        self._piece = memoryview(b"")
        return self._at

    def readinto(self, buffer: Any) -> int:
        if not self._piece:
            self._ask_ahead()
            self._piece = self._ahead.popleft().wait() if self._ahead else self._piece
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        self._at += count
        return count

    def _ask_ahead(self) -> None:
        if self.num_bytes > READ_AHEAD_BYTES:
            self.store.client.widen()
        while self._asked < min(self.num_bytes, self._at + READ_AHEAD_BYTES):
            wanted = min(PIECE_BYTES, self.num_bytes - self._asked)
            self._ahead.append(self.store.read(self.blob, self._asked, wanted))
            self._asked += wanted

    def readall(self) -> bytes:
        pieces = []
        buffer = bytearray(PIECE_BYTES)
        while count := self.readinto(buffer):
            pieces.append(bytes(buffer[:count]))
        return b"".join(pieces)


class CallWindow:
    """Unanswered calls of at most WINDOW_BYTES, in order."""

    def __init__(self) -> None:
        self._open: deque[StoreCall] = deque()
        self._open_bytes = 0

    def add(self, call: StoreCall) -> None:
        """Wait for earlier calls if the window is full; raises their errors."""
        self._open.append(call)
        self._open_bytes += call.num_bytes
        while self._open_bytes > WINDOW_BYTES:
            self._settle()

    def drain(self) -> None:
        while self._open:
            self._settle()

    def _settle(self) -> None:
        call = self._open.popleft()
        self._open_bytes -= call.num_bytes
        call.wait()


def behind(is_sending: Callable[[Collection[int]], bool], longest_s: float = 1.0) -> Callable[[], None]:
    """For a Replicator's `yield_way`: wait while this node has anything else to send (`is_sending` besides some lanes),
    but at most `longest_s` per MiB: copies must progress on a link that is always busy."""

    def wait() -> None:
        until = time.monotonic() + longest_s
        while is_sending((CALL_LANE, REPLY_LANE, BULK_LANE)) and time.monotonic() < until:
            time.sleep(LOOK_S)

    return wait


def _pieces(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for at in range(0, len(view), PIECE_BYTES):
            yield view[at : at + PIECE_BYTES]
