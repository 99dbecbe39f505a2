"""A store in another datacenter, reached over the WAN transport: the same four verbs, answered by the `Keeper` there.

A write is cut into pieces, a few of them under way at a time; it is there when the keeper has compared its hash,
flushed it to the disk and said so. Failures are OSErrors, those of the other side's disk under their own number.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, BinaryIO, Protocol, cast

from atlas.errors import WorkerError
from atlas.runtime.checkpoint.calls import ANSWER_LANE, CALL_LANE, PIECE_BYTES, WINDOW_BYTES, pack, unpack
from atlas.runtime.checkpoint.store import Chunk
from atlas.wan.transport.base import Address, Handle, Key
from atlas.wan.transport.endpoint import Endpoint

PATIENCE_S = 60.0
"""For an answer: a large file takes its time to reach a disk."""
LOOK_S = 0.005


class CheckpointClient:
    """The calls of this node to one keeper, for any number of shelves and threads."""

    def __init__(self, endpoint: Endpoint, peer: str, address: Address, *, patience_s: float = PATIENCE_S) -> None:
        self.endpoint, self.peer, self.patience_s = endpoint, peer, patience_s
        self.numbers = itertools.count()
        """Of uploads."""
        self._calls = itertools.count()
        self._lock = threading.Lock()
        endpoint.open(peer, CALL_LANE, address, light=True)

    def call(self, verb: str, payload: Chunk = b"", **arguments: Any) -> StoreCall:
        """Under way; `wait` for its answer."""
        message = pack({"verb": verb, **arguments}, payload)
        what = f"{verb} of {arguments.get('name', 'checkpoints')} at {self.peer}"
        with self._lock:
            tag = (next(self._calls), 0, 0, 0)
            answer = self.endpoint.recv(Key(self.peer, ANSWER_LANE, tag), what=what)
            sent = self.endpoint.send(Key(self.peer, CALL_LANE, tag), message, tag[0], what)
        return StoreCall(sent, answer, len(message), self.patience_s)


class StoreCall:
    """One question under way."""

    def __init__(self, sent: Handle, answer: Handle, num_bytes: int, patience_s: float) -> None:
        self.num_bytes, self._sent, self._answer, self._patience_s = num_bytes, sent, answer, patience_s

    def wait(self) -> memoryview:
        """What the keeper answered; an OSError where it could not, or where there is no answer."""
        try:
            self._sent.wait(self._patience_s)
            message = self._answer.wait(self._patience_s)
        except WorkerError as error:
            raise ConnectionError(str(error)) from error
        assert message is not None, "an answer always has a header"
        try:
            header, payload = unpack(message)
        except ValueError as error:
            raise ConnectionError(f"{self._answer.what}: the answer makes no sense: {error}") from error
        if "errno" in header:
            raise OSError(int(header["errno"]), f"{header.get('error')} ({self._answer.what})")
        return payload


class RemoteStore:
    """A shelf of a keeper: `own`, what that datacenter saved itself, or `of-DC`, what it keeps for another."""

    def __init__(self, line: CheckpointClient, shelf: str) -> None:
        self.line, self.shelf = line, shelf

    def __str__(self) -> str:
        return f"{self.line.peer}:{self.shelf}"

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        upload, digest, num_bytes = next(self.line.numbers), hashlib.sha256(), 0
        window = CallWindow()
        window.add(self._call("begin", name, upload=upload))
        try:
            for piece in _pieces(chunks):
                digest.update(piece)
                num_bytes += len(piece)
                window.add(self.line.call("piece", piece, upload=upload, name=name))
        except BaseException:
            self.line.call("drop", upload=upload, name=name)
            raise
        window.add(self.line.call("end", upload=upload, name=name, bytes=num_bytes, sha256=digest.hexdigest()))
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
        return self.line.call(verb, shelf=self.shelf, name=name, **arguments)


class RemoteFile(io.RawIOBase):
    """A blob elsewhere, read piece by piece; all of it at once with several pieces under way."""

    def __init__(self, store: RemoteStore, name: str, num_bytes: int) -> None:
        self.store, self.blob, self.num_bytes, self._at = store, name, num_bytes, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self.num_bytes - self._at)
        if wanted <= 0:
            return 0
        data = self.store.read(self.blob, self._at, wanted).wait()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        window = CallWindow()
        for offset in range(self._at, self.num_bytes, PIECE_BYTES):
            wanted = min(PIECE_BYTES, self.num_bytes - offset)
            window.add(self.store.read(self.blob, offset, wanted), wanted)
        self._at = self.num_bytes
        return b"".join(window.drain())


class CallWindow:
    """Calls under way, answered in order, at most WINDOW_BYTES of them."""

    def __init__(self) -> None:
        self._open: deque[tuple[StoreCall, int]] = deque()
        self._open_bytes = 0
        self._answers: list[bytes] = []

    def add(self, call: StoreCall, num_bytes: int | None = None) -> None:
        """Waits for earlier ones where it is full; raises what went wrong with them."""
        size = num_bytes if num_bytes is not None else call.num_bytes
        self._open.append((call, size))
        self._open_bytes += size
        while self._open_bytes > WINDOW_BYTES:
            self._settle()

    def drain(self) -> list[bytes]:
        while self._open:
            self._settle()
        return self._answers

    def _settle(self) -> None:
        call, size = self._open.popleft()
        self._open_bytes -= size
        self._answers.append(bytes(call.wait()))


class HasTraffic(Protocol):
    """An endpoint, or several."""

    def is_sending(self, besides: Collection[int] = ()) -> bool: ...


def behind(endpoint: HasTraffic, longest_s: float = 1.0) -> Callable[[], None]:
    """For a Replicator's `yield_way`: waits while this node has anything else to send, though never longer than
    `longest_s` for a MiB, or a link that is always busy would never see a copy across."""

    def wait() -> None:
        until = time.monotonic() + longest_s
        while endpoint.is_sending(besides=(CALL_LANE, ANSWER_LANE)) and time.monotonic() < until:
            time.sleep(LOOK_S)

    return wait


def _pieces(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for at in range(0, len(view), PIECE_BYTES):
            yield view[at : at + PIECE_BYTES]
