"""A worker's connection to the service: receives tasks, sends results and reports. Keys and values for a decode engine
stay here (`kept_parts`); those for the service's own decoder are sent. It has its own threads, so
that the training thread never waits for a socket. When it breaks, all it has is dropped; `plugin` makes a new one.

Knows messages and the engine's interface; not bubbles.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas.errors import WorkerError
from bubbletea.frames import FrameSocket, Payload, WireFrame, receive, send
from bubbletea.kv_blocks import DTYPES, KV, KvBlock, bytes_of, pack_block, unpack_block
from bubbletea.prefill.engine import PrefillEngine
from bubbletea.prefill.job import PrefillPiece, PrefillTask
from bubbletea.prefill.kept_parts import KeptParts
from bubbletea.prefill.messages import (
    CANCEL,
    DONE,
    DROP,
    FAILED,
    KEPT,
    LEASE,
    LOGITS,
    READY,
    REPORT,
    SHARE,
    TASK,
    Json,
    ticket_of,
    unpack_task,
)
from bubbletea.prefill.shard import Served
from bubbletea.prefill.staging import Staged

log = logging.getLogger("bubbletea.link")
REPORT_S = 0.05
"""Between two reports to the service about pieces and waits."""
MAX_REPORTS = 256
"""Most pieces, and most waits, in one frame."""
MAX_PENDING_BYTES = 256 << 20
"""Most bytes of keys and values that are not sent yet: if the service is slower than prefill, prefill waits."""


class _Outgoing(NamedTuple):
    """A frame that is built just before it is sent: its keys and values may still be copied from the device."""

    make: Callable[[], tuple[int, Json, Payload]]
    task: PrefillTask | None = None
    """The task that fails if the frame cannot be built."""
    kv_bytes: int = 0


class ServiceLink:
    """After the handshake (`joining`): `order` is the service's WorkerOrder; then call `serve(engine)`. Also the
    engine's outlet."""

    def __init__(self, sock: FrameSocket, answer: Json, offset_ns: int = 0) -> None:
        """`answer`: of the service, in the handshake."""
        self.parts = KeptParts()
        """Replaced by those of the worker, which outlive a connection."""
        self._sock, self.offset_ns = sock, offset_ns
        """Offset of the service's clock from this host's, within half a round trip."""
        self.order: Json = answer["order"]
        self.has_baseline = bool(answer.get("has_baseline"))
        """The service has measured training's iterations without prefill."""
        self.lost = threading.Event()
        """The connection is broken or closed."""
        self._out: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ran: list[tuple[Any, ...]] = []
        self._waits: list[tuple[int, ...]] = []
        self._loads: list[tuple[int, int]] = []
        self._engine: PrefillEngine
        """Set by `serve`, before any of its threads starts."""
        self._on_share: Callable[[float], None] = lambda share: None
        self._cached: dict[str, dict[int, Tensor]] = {}
        self._queued_bytes = self._sent_bytes = 0
        """Of keys and values; the first is written by the engine's thread, the second by the sending thread."""

    def serve(self, engine: PrefillEngine, on_share: Callable[[float], None] = lambda share: None) -> None:
        """Reports this worker as ready and starts the threads. `on_share` gets the share of each wait that may be
        used."""
        self._engine, self._on_share = engine, on_share
        self._out.put(_Outgoing(lambda: (READY, {}, b"")))
        for target in (self._read, self._write, self._tick):
            threading.Thread(target=target, daemon=True, name=f"bubbletea {target.__name__[1:]}").start()

    def close(self) -> None:
        self.lost.set()
        self._out.put(None)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # ---- the engine's outlet -----------------------------------------------------------------------------------
    @property
    def is_full(self) -> bool:
        """Too many results are waiting to be sent: no piece should start now."""
        return self._queued_bytes - self._sent_bytes > MAX_PENDING_BYTES

    def kv(self, task: PrefillTask, piece: PrefillPiece, kv: Staged) -> None:
        """[2, K, L, E] of one layer and one chunk."""

        def frame() -> tuple[int, Json, Payload]:
            ticket = task.ticket or ticket_of(task)
            block = KvBlock(ticket, self._served.id, piece.layer, piece.first, piece.last, kv())
            if not task.ticket:
                return (KV, *pack_block(block))
            self.parts.put((task.job, task.attempt), block)
            return KEPT, {**_name(task), "span": [piece.layer, piece.first, piece.last]}, b""

        num_bytes = (piece.last - piece.first) * self._served.kv_bytes_per_layer_token
        self._queued_bytes += num_bytes
        self._out.put(_Outgoing(frame, task, num_bytes))

    def logits(self, task: PrefillTask, logits: Staged) -> None:
        """In the type that the head has computed them in: half the bytes for bfloat16, and no digit less."""

        def frame() -> tuple[int, Json, Payload]:
            dtype = self._served.dtype
            return LOGITS, {**_name(task), "dtype": dtype}, bytes_of(logits().to(DTYPES[dtype]))

        self._out.put(_Outgoing(frame, task))

    def ran(self, task: PrefillTask, piece: PrefillPiece, predicted_ns: int, took_ns: int) -> None:
        row = (task.job, task.attempt, piece.layer, piece.first, piece.last, predicted_ns, took_ns)
        with self._lock:
            self._ran.append(row)

    def done(self, task: PrefillTask) -> None:
        self._out.put(_Outgoing(lambda: (DONE, _name(task), b"")))

    def failed(self, task: PrefillTask, why: str) -> None:
        self._out.put(_Outgoing(lambda: (FAILED, {**_name(task), "why": why[:500]}, b"")))

    def waited(self, step: int, index: int, began_ns: int, ended_ns: int, filled_ns: int) -> None:
        with self._lock:
            self._waits.append((step, index, began_ns + self.offset_ns, ended_ns + self.offset_ns, filled_ns))

    # ---- threads -----------------------------------------------------------------------------------------------
    @property
    def _served(self) -> Served:
        return self._engine.shard.served

    def _read(self) -> None:
        while not self.lost.is_set():
            try:
                self._take(receive(self._sock))
            except Exception as error:  # an invalid message ends the connection, not the process
                if not isinstance(error, OSError | WorkerError):
                    log.exception("a frame from the service could not be processed")
                self.close()

    def _take(self, frame: WireFrame) -> None:
        if frame.kind == KV:
            block = unpack_block(frame, model=self._served.id)
            self._cached.setdefault(block.ticket, {})[block.layer] = block.kv
        elif frame.kind == TASK:
            task, tokens = unpack_task(frame.fields, frame.payload)
            self._offer(task, tokens, self._cached.pop(ticket_of(task), {}))
        elif frame.kind == CANCEL:
            job = int(frame.fields["job"]), int(frame.fields["attempt"])
            self._engine.cancel(*job)
            self.parts.cancel(job)
        elif frame.kind == SHARE:
            self._on_share(float(frame.fields["share"]))
        elif frame.kind == LEASE:
            self.parts.lease((int(frame.fields["job"]), int(frame.fields["attempt"])), float(frame.fields["seconds"]))
        elif frame.kind == DROP:
            self.parts.release(str(frame.fields["ticket"]))

    def _offer(self, task: PrefillTask, tokens: list[int], cached: dict[int, Tensor]) -> None:
        served, layers = self._served, self._engine.shard.cut.layers
        if task.start and any(i not in cached or cached[i].shape[2] != task.start for i in layers):
            self.failed(task, "its cached tokens did not arrive with it")
            return
        if task.start:
            with self._lock:
                self._loads.append((task.start, time.monotonic_ns() + self.offset_ns - task.sent_ns))
        if task.ticket:
            job, num_bytes = (task.job, task.attempt), task.length * len(layers) * served.kv_bytes_per_layer_token
            if not self.parts.open(task.ticket, job, task.length, layers, num_bytes):
                used = f"{self.parts.used_bytes} of {self.parts.budget_bytes} bytes for hand-offs are in use"
                self.failed(task, f"{used}, and it needs {num_bytes}")
                return
            for layer in layers if task.start else ():
                self.parts.put(job, KvBlock(task.ticket, self._served.id, layer, 0, task.start, cached[layer]))
        self._engine.offer(task, tokens, [cached[i] for i in layers] if task.start else ())

    def _write(self) -> None:
        while (out := self._out.get()) is not None:
            try:
                frame = out.make()
                with contextlib.suppress(OSError):  # the reading thread notices it too
                    send(self._sock, *frame)
            except Exception as error:  # only this frame fails
                log.exception("a frame for the service could not be made")
                if out.task is not None:
                    self._engine.cancel(out.task.job, out.task.attempt)
                    self.failed(out.task, f"its results could not be copied from the device: {error!r}")
            if out.kv_bytes:
                self._sent_bytes += out.kv_bytes
                self._engine.changed.set()

    def _tick(self) -> None:
        while not self.lost.wait(REPORT_S):
            self.report()

    def report(self) -> None:
        with self._lock:
            ran, self._ran = self._ran[:MAX_REPORTS], self._ran[MAX_REPORTS:]
            waits, self._waits = self._waits[:MAX_REPORTS], self._waits[MAX_REPORTS:]
            loads, self._loads = self._loads[:MAX_REPORTS], self._loads[MAX_REPORTS:]
        if ran or waits or loads:
            self._out.put(_Outgoing(lambda: (REPORT, {"ran": ran, "waits": waits, "loads": loads}, b"")))


def _name(task: PrefillTask) -> Json:
    return {"job": task.job, "attempt": task.attempt}


def logits_of(frame: WireFrame) -> Tensor:
    return torch.frombuffer(bytearray(frame.payload), dtype=DTYPES[frame.fields["dtype"]]).float()
