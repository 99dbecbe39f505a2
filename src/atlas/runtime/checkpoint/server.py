"""Keeps other datacenters' checkpoints, and gives them back: answers the calls of their `RemoteStore`s.

Stores lie on shelves by name. Anybody who got past the transport's door may read; a node writes and deletes only on
the shelf of its own datacenter. What arrives goes through `BlobStore.write`, so a copy that stops half-way, is cut by a
kill on either side or has another hash than it should was never there. Knows stores and calls, not checkpoints.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from atlas.runtime.checkpoint.calls import (
    ANSWER_LANE,
    CALL_LANE,
    MAX_QUEUED_BYTES,
    PIECE_BYTES,
    pack,
    refusal,
    shelf_of,
    unpack,
)
from atlas.runtime.checkpoint.store import BlobStore, Chunk
from atlas.wan.transport.base import Address, Key
from atlas.wan.transport.endpoint import Endpoint

IDLE_S = 60.0
"""A copy of which nothing comes for so long is given up."""
MAX_UPLOADS = 8
_log = logging.getLogger("atlas.checkpoint")


class StoreRequest(NamedTuple):
    """One call, taken apart."""

    number: int
    header: dict[str, Any]
    payload: memoryview

    @property
    def verb(self) -> str:
        return str(self.header.get("verb"))


class CheckpointServer:
    """Make it before the endpoint meets its peers; `admit` those that may call; `close` before the endpoint."""

    def __init__(self, endpoint: Endpoint, shelves: Mapping[str, BlobStore], *, idle_s: float = IDLE_S) -> None:
        self.endpoint, self.shelves, self.idle_s = endpoint, dict(shelves), idle_s
        self._desks: dict[str, PeerSession] = {}
        self._lock = threading.Lock()
        self._closed = False
        endpoint.consume(CALL_LANE, self._arrived)

    def admit(self, peers: Mapping[str, Address]) -> None:
        """Nodes that may call, and where their answers go."""
        for peer, address in peers.items():
            self.endpoint.open(peer, ANSWER_LANE, address, light=True)

    def close(self) -> None:
        """What is half received is forgotten."""
        with self._lock:
            self._closed = True
            desks = list(self._desks.values())
        for desk in desks:
            desk.close()

    def _arrived(self, key: Key, message: memoryview) -> None:
        """On the transport's thread: only takes it down."""
        with self._lock:
            if self._closed:
                return
            if key.peer not in self._desks:
                self._desks[key.peer] = PeerSession(self, key.peer)
            desk = self._desks[key.peer]
        desk.take(key.tag[0], message)


class PeerSession:
    """Serves one node, on a thread of its own, in the order of its calls."""

    def __init__(self, keeper: CheckpointServer, peer: str) -> None:
        self.keeper, self.peer = keeper, peer
        self._lock = threading.Lock()
        self._next, self._early = 0, dict[int, memoryview]()
        self._queued_bytes = 0
        self._line: queue.SimpleQueue[StoreRequest | None] = queue.SimpleQueue()
        self._uploads: dict[int, IncomingBlob] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"checkpoints of {peer}")
        self._thread.start()

    def take(self, number: int, message: memoryview) -> None:
        """Calls arrive in any order; they are served by number."""
        with self._lock:
            if self._queued_bytes + len(message) > MAX_QUEUED_BYTES:
                _log.warning("%s sends more than it may without an answer: a call of it is dropped", self.peer)
                message = message[:0]
            self._queued_bytes += len(message)
            self._early[number] = message
            while self._next in self._early:
                self._line.put(self._parsed(self._next, self._early.pop(self._next)))
                self._next += 1

    def close(self) -> None:
        self._line.put(None)
        self._thread.join()
        for upload in self._uploads.values():
            upload.close()

    def answer(self, request: StoreRequest, header: Mapping[str, Any], payload: Chunk = b"") -> None:
        with self._lock:
            self._queued_bytes -= len(request.payload)
        key = Key(self.peer, ANSWER_LANE, (request.number, 0, 0, 0))
        try:
            self.keeper.endpoint.send(key, pack(header, payload), request.number)
        except ValueError:
            _log.warning("%s calls, but is not among the peers that may", self.peer)

    def _parsed(self, number: int, message: memoryview) -> StoreRequest:
        try:
            header, payload = unpack(message)
        except ValueError as error:
            header, payload = {"verb": f"call that makes no sense ({error})"}, message[:0]
        self._queued_bytes -= len(message) - len(payload)
        return StoreRequest(number, header, payload)

    def _run(self) -> None:
        while (request := self._line.get()) is not None:
            try:
                self._serve(request)
            except OSError as error:
                self.answer(request, refusal(error))
            except Exception as error:  # a request that makes no sense must not end the service of this node
                self.answer(request, {"errno": errno.EINVAL, "error": f"{request.verb}: {error!r}"})

    def _serve(self, request: StoreRequest) -> None:
        header, verb = request.header, request.verb
        if verb in ("piece", "end", "drop"):
            self._pass_on(request)
            return
        store = self._shelf(str(header["shelf"]), writes=verb in ("begin", "delete"))
        name = str(header["name"])
        if verb == "begin":
            self._begin(request, store, name)
        elif verb == "names":
            self.answer(request, {}, json.dumps(store.names(name)).encode())
        elif verb == "size":
            with store.open(name) as file:
                self.answer(request, {}, json.dumps({"bytes": file.seek(0, 2)}).encode())
        elif verb == "read":
            with store.open(name) as file:
                file.seek(int(header["offset"]))
                self.answer(request, {}, file.read(min(int(header["bytes"]), PIECE_BYTES)))
        elif verb == "delete":
            store.delete(name)
            self.answer(request, {})
        else:
            raise ValueError("there is no such verb")

    def _shelf(self, shelf: str, *, writes: bool) -> BlobStore:
        if shelf not in self.keeper.shelves:
            raise FileNotFoundError(errno.ENOENT, f"{self.keeper.endpoint.name} has no shelf {shelf!r}")
        if writes and shelf != shelf_of(self.peer.partition("/")[0]):
            raise PermissionError(errno.EACCES, f"shelf {shelf!r} is not for {self.peer} to write on")
        return self.keeper.shelves[shelf]

    def _begin(self, request: StoreRequest, store: BlobStore, name: str) -> None:
        self._uploads = {number: upload for number, upload in self._uploads.items() if upload.alive}
        if len(self._uploads) >= MAX_UPLOADS:
            raise OSError(errno.EBUSY, f"{MAX_UPLOADS} files of {self.peer} are being written")
        self._uploads[int(request.header["upload"])] = IncomingBlob(store, name, self.answer, self.keeper.idle_s)
        self.answer(request, {})

    def _pass_on(self, request: StoreRequest) -> None:
        upload = self._uploads.get(int(request.header["upload"]))
        if upload is None or not upload.alive:
            raise TimeoutError(errno.ETIMEDOUT, "the copy was given up: nothing came for too long")
        upload.pieces.put(request)


class IncomingBlob:
    """One file on its way to a disk, on a thread of its own. Each piece is answered when it is written."""

    def __init__(self, store: BlobStore, name: str, answer: Callable[..., None], idle_s: float) -> None:
        self.store, self.name, self.idle_s, self._answer = store, name, idle_s, answer
        self.pieces: queue.SimpleQueue[StoreRequest | None] = queue.SimpleQueue()
        self._open: StoreRequest | None = None
        """Taken and not yet answered."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"copy of {name}")
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._closed = True
        self.pieces.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self.store.write(self.name, self._taken())
        except OSError as error:
            self._refuse_rest(error)
        except Exception as error:  # on a thread: whoever sends the file must hear of it
            _log.exception("copy of %s to %s", self.name, self.store)
            self._refuse_rest(OSError(errno.EIO, f"a bug at the keeper: {error!r}"))
        else:
            assert self._open is not None, "a write ends with an end"
            self._answer(self._open, {})

    def _taken(self) -> Iterator[Chunk]:
        digest, num_bytes = hashlib.sha256(), 0
        while True:
            self._open = request = self._next()
            if request is None or request.verb == "drop":
                raise OSError(errno.ECANCELED, "the copy was broken off")
            if request.verb == "end":
                break
            digest.update(request.payload)
            num_bytes += len(request.payload)
            yield request.payload
            self._answer(request, {})
            self._open = None
        if (num_bytes, digest.hexdigest()) != (request.header.get("bytes"), request.header.get("sha256")):
            raise OSError(errno.EIO, "what arrived has another hash than what was sent")

    def _next(self) -> StoreRequest | None:
        try:
            return self.pieces.get(timeout=self.idle_s)
        except queue.Empty:
            raise TimeoutError(errno.ETIMEDOUT, f"nothing of the copy came for {self.idle_s:g} s") from None

    def _refuse_rest(self, error: OSError) -> None:
        """Whoever sends learns of it with the first piece that is answered, and may have more under way."""
        try:
            request = self._open or (None if self._closed else self._next())
            while request is not None:
                self._answer(request, refusal(error))
                if request.verb in ("end", "drop"):
                    return
                request = self._next()
        except TimeoutError:
            _log.warning("copy of %s to %s: %s", self.name, self.store, error)
