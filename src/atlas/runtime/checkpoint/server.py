"""Serves the checkpoint stores of one launcher to other nodes: answers the calls of their `RemoteStore`s.

Every node that the transport has authenticated may read; a node writes and deletes only in the store with the copies of
its own datacenter. An upload that stops half-way, or whose hash differs, does not appear. Knows stores and calls, not
checkpoints.
"""

from __future__ import annotations

import errno
import json
import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atlas.errors import WorkerError
from atlas.runtime.checkpoint.calls import (
    BULK_LANE,
    CALL_LANE,
    MAX_QUEUED_BYTES,
    PIECE_BYTES,
    REPLY_LANE,
    copies_of,
    error_reply,
    pack,
    unpack,
)
from atlas.runtime.checkpoint.store import BlobWriter, Chunk, PlaceStore
from atlas.runtime.checkpoint.tensors import Tally
from atlas.wan.transport.base import Key, PeerRoute
from atlas.wan.transport.endpoint import Endpoint

IDLE_S = 60.0
"""Uploads of a node that sends nothing for this long are dropped."""
MAX_UPLOADS = 8
"""Files that one peer may be writing at the same time."""
WIDEN_S = 30.0
"""What the warm-up of a channel to a reader may take."""
_log = logging.getLogger("atlas.checkpoint")


class StoreRequest(NamedTuple):
    """A parsed call."""

    number: int
    header: dict[str, Any]
    payload: memoryview

    @property
    def verb(self) -> str:
        return str(self.header.get("verb"))


class CheckpointServer:
    """Create it before the endpoint connects; `admit` the nodes that may call; `close` it before the endpoint."""

    def __init__(self, endpoint: Endpoint, stores: Mapping[str, PlaceStore], *, idle_s: float = IDLE_S) -> None:
        self.endpoint, self.stores, self.idle_s = endpoint, dict(stores), idle_s
        self._sessions: dict[str, PeerSession] = {}
        self._routes: dict[str, PeerRoute] = {}
        self._lock = threading.Lock()
        self._closed = False
        endpoint.consume(CALL_LANE, self._arrived)

    def admit(self, peers: Mapping[str, PeerRoute]) -> None:
        """Nodes that may call, and how to reach them."""
        for peer, route in peers.items():
            self._routes[peer] = route
            self.endpoint.open(peer, REPLY_LANE, route.address, light=True)
            if route.dial_for and route.address is not None:
                self.endpoint.dial_for(peer, CALL_LANE, route.address)

    def widen(self, peer: str) -> None:
        """Open the lane for contents of large files, with as many streams as the path needs."""
        channel = self.endpoint.open(peer, BULK_LANE, self._routes[peer].address)
        try:
            self.endpoint.warm_up([channel], WIDEN_S)
        except WorkerError as error:
            raise ConnectionError(errno.ECONNREFUSED, str(error)) from error

    def close(self) -> None:
        """Drop blobs that are incomplete."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
        for session in sessions:
            session.close()

    def _arrived(self, key: Key, message: memoryview) -> None:
        """On the transport's thread: only queue it."""
        with self._lock:
            if self._closed:
                return
            if key.peer not in self._sessions:
                self._sessions[key.peer] = PeerSession(self, key.peer)
            session = self._sessions[key.peer]
        session.take(key.tag[0], message)


class PeerSession:
    """Serves one node on a thread, in the order of its calls."""

    def __init__(self, server: CheckpointServer, peer: str) -> None:
        self.server, self.peer = server, peer
        self._lock = threading.Lock()
        self._next, self._early = 0, dict[int, memoryview]()
        self._queued_bytes = 0
        self._calls: queue.SimpleQueue[StoreRequest | None] = queue.SimpleQueue()
        self._uploads: dict[int, _Upload] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"checkpoints of {peer}")
        self._thread.start()

    def take(self, number: int, message: memoryview) -> None:
        """Queue a call. Calls arrive in any order and are served by number."""
        with self._lock:
            if self._queued_bytes + len(message) > MAX_QUEUED_BYTES:
                _log.warning("%s has too many unanswered bytes: a call is dropped", self.peer)
                message = message[:0]
            self._queued_bytes += len(message)
            self._early[number] = message
            while self._next in self._early:
                self._calls.put(self._parsed(self._next, self._early.pop(self._next)))
                self._next += 1

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _parsed(self, number: int, message: memoryview) -> StoreRequest:
        try:
            header, payload = unpack(message)
        except ValueError as error:
            header, payload = {"verb": f"invalid call ({error})"}, message[:0]
        self._queued_bytes -= len(message) - len(payload)
        return StoreRequest(number, header, payload)

    def _run(self) -> None:
        while True:
            try:
                request = self._calls.get(timeout=self.server.idle_s)
            except queue.Empty:
                self._drop_uploads()
                continue
            if request is None:
                self._drop_uploads()
                return
            try:
                self._reply(request, {}, self._serve(request))
            except OSError as error:
                self._reply(request, error_reply(error))
            except Exception as error:  # an invalid call must not end the session
                self._reply(request, {"errno": errno.EINVAL, "error": f"{request.verb}: {error!r}"})

    def _reply(self, request: StoreRequest, header: Mapping[str, Any], payload: Chunk = b"") -> None:
        with self._lock:
            self._queued_bytes -= len(request.payload)
        lane = BULK_LANE if request.header.get("lane") == BULK_LANE else REPLY_LANE
        key = Key(self.peer, lane, (request.number, 0, 0, 0))
        try:
            self.server.endpoint.send(key, pack(header, payload), request.number)
        except ValueError:
            _log.warning("%s is not admitted, but sent a call", self.peer)

    def _serve(self, request: StoreRequest) -> bytes:
        """The payload of the reply."""
        header, verb = request.header, request.verb
        if verb in ("piece", "end", "drop"):
            self._continue_upload(request)
            return b""
        if verb == "widen":
            self.server.widen(self.peer)
            return b""
        store = self._store(str(header["store"]), writes=verb in ("begin", "delete"))
        name = str(header["name"])
        if verb == "begin":
            if len(self._uploads) >= MAX_UPLOADS:
                raise OSError(errno.EBUSY, f"{MAX_UPLOADS} files of {self.peer} are being written")
            self._uploads[int(header["upload"])] = _Upload(store.create(name))
        elif verb == "names":
            return json.dumps(store.names(name)).encode()
        elif verb == "size":
            with store.open(name) as file:
                return json.dumps({"bytes": file.seek(0, 2)}).encode()
        elif verb == "read":
            with store.open(name) as file:
                file.seek(int(header["offset"]))
                return file.read(min(int(header["bytes"]), PIECE_BYTES))
        elif verb == "delete":
            store.delete(name)
        else:
            raise ValueError("unknown verb")
        return b""

    def _store(self, name: str, *, writes: bool) -> PlaceStore:
        if name not in self.server.stores:
            raise FileNotFoundError(errno.ENOENT, f"{self.server.endpoint.name} has no store {name!r}")
        if writes and name != copies_of(self.peer.partition("/")[0]):
            raise PermissionError(errno.EACCES, f"{self.peer} may not write to store {name!r}")
        return self.server.stores[name]

    # ---- uploads -----------------------------------------------------------------------------------------------------
    def _continue_upload(self, request: StoreRequest) -> None:
        """Write a piece, or end the upload. After an error, all further pieces get the same error: the client may have
        several in flight."""
        number = int(request.header["upload"])
        if number not in self._uploads:
            raise TimeoutError(errno.ETIMEDOUT, "the upload was dropped: nothing was received for too long")
        upload = self._uploads[number]
        if request.verb != "piece":
            del self._uploads[number]
        try:
            if upload.error is not None:
                raise upload.error
            if request.verb == "piece":
                upload.tally.add(request.payload)
                upload.writer.write(request.payload)
            elif request.verb == "end":
                if (upload.tally.num_bytes, upload.tally.sha256) != (request.header["bytes"], request.header["sha256"]):
                    raise OSError(errno.EIO, "the received data have another hash than the sent data")
                upload.writer.commit()
        except OSError as error:
            upload.error = error
            raise
        finally:
            if upload.error is not None or request.verb != "piece":
                upload.writer.close()

    def _drop_uploads(self) -> None:
        for upload in self._uploads.values():
            upload.writer.close()
        self._uploads.clear()


@dataclass
class _Upload:
    """A blob that is being received."""

    writer: BlobWriter
    tally: Tally = field(default_factory=Tally)
    error: OSError | None = None
