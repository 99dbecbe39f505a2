"""The service's connections to its workers: sends tasks, receives results.

A worker that connects gets its WorkerOrder. When a connection breaks, the worker is lost and the dispatcher is called
at once. Everything runs on the service's event loop. Knows frames and workers; not requests, not admission.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from atlas.addresses import is_loopback
from atlas.errors import AtlasError, WorkerError
from atlas.wan.security.credentials import Security, require_name
from bubbletea.admit.records import PrefillLane
from bubbletea.frames import ClosedError, FrameServer, Payload, WireFrame, receive_async, write
from bubbletea.handoff.remote_parts import RemotePart
from bubbletea.kv_blocks import KV, KvBlock, pack_block, unpack_block
from bubbletea.kv_server import own_address
from bubbletea.prefill.job import PrefillTask
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
    WorkerOrder,
    pack_task,
    ticket_of,
)
from bubbletea.prefill.service_link import logits_of

if TYPE_CHECKING:
    from bubbletea.serve.dispatch import Dispatcher

log = logging.getLogger("bubbletea.serve")


@dataclass(eq=False)
class ConnectedWorker:
    """A worker and its connection; a new connection is a new ConnectedWorker."""

    worker: int
    name: str
    datacenter: str
    pid: int
    transport: tuple[str, str, int]
    order: WorkerOrder
    writer: asyncio.StreamWriter
    parts: tuple[str, int, bool] | None = None
    """Where decode engines fetch what it has prefilled, and whether they need a certificate; None: nowhere."""
    ready: bool = False
    share: float = 1.0
    """Of each wait: the share that was last sent."""
    heard_ns: int = field(default_factory=time.monotonic_ns)
    """When it last sent anything."""
    is_silent: bool = False
    """It sends nothing although it has prefills to do: it gets no others until it sends again."""

    @property
    def is_usable(self) -> bool:
        return self.ready and not self.is_silent

    @property
    def part(self) -> RemotePart | None:
        """Its layers of a prefill, for a decode engine."""
        if self.parts is None:
            return None
        layers = self.order.served.cuts(self.order.layers_per_stage)[self.order.stage].layers
        host, port, is_secure = self.parts
        return RemotePart(host, port, layers.start, layers.stop, f"{self.datacenter}/{self.name}" if is_secure else "")


class WorkerConnections(FrameServer):
    """`find(who)` returns the service's number of a worker and its order, or raises WorkerError to refuse it."""

    def __init__(self, token: str, find: Callable[[dict[str, Any]], tuple[int, WorkerOrder]], model: str) -> None:
        super().__init__(token)
        self.find, self.model = find, model
        self.listener: Dispatcher
        """Gets all events; set before this listens."""
        self.members: dict[int, ConnectedWorker] = {}
        self._refused: set[str] = set()
        self.num_bytes = 0
        """To and from workers."""

    async def start(self, path: Path) -> str:
        """Listens on a Unix socket that only this user can open; returns its address."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o600)
        self.accept_from(listener)
        return f"unix:{path}"

    async def listen(self, host: str, port: int, security: Security | None) -> str:
        """Listens for workers of a run, with the run's certificates; returns the address that they dial. Without
        certificates on loopback only."""
        if security is None and not is_loopback(host):
            raise AtlasError(f"--workers-host {host}: workers of other hosts need certificates. Give --certs")
        self.context = None if security is None else security.server_context
        try:
            bound, port = await self.listen_at(host, port)
        except OSError as error:
            raise AtlasError(
                f"{host}:{port}: cannot listen there ({error.strerror}). Choose another address or --workers-port"
            ) from None
        name = own_address(bound)
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    def of_lane(self, lane: PrefillLane) -> tuple[ConnectedWorker, ...]:
        return tuple(self.members[worker] for worker in lane.workers)

    # ---- out -----------------------------------------------------------------------------------------------------
    def send(self, member: ConnectedWorker, task: PrefillTask, tokens: Sequence[int], cached: Sequence[Tensor]) -> None:
        """Sends a task, its tokens (to the first stage), and keys and values of the cached ones by layer of the worker.
        Sends nothing if the connection is lost: `left` is about to be called."""
        order = member.order
        layers = order.served.cuts(order.layers_per_stage)[order.stage].layers
        for layer, kv in zip(layers, cached, strict=False):
            block = KvBlock(ticket_of(task), self.model, layer, 0, task.start, kv)
            self._write(member, KV, *pack_block(block))
        self._write(member, TASK, *pack_task(task, tokens if task.stage == 0 else ()))

    def cancel(self, member: ConnectedWorker, job: int, attempt: int) -> None:
        self._write(member, CANCEL, {"job": job, "attempt": attempt})

    def _write(self, member: ConnectedWorker, kind: int, fields: dict[str, Any], payload: Payload = b"") -> None:
        self.num_bytes += write(member.writer, kind, fields, payload)

    def lease(self, member: ConnectedWorker, job: int, attempt: int, seconds: float) -> None:
        """It keeps its part of a hand-off for this long."""
        self._write(member, LEASE, {"job": job, "attempt": attempt, "seconds": seconds})

    def drop(self, members: Sequence[ConnectedWorker], ticket: str) -> None:
        for member in members:
            self._write(member, DROP, {"ticket": ticket})

    def share(self, share: float) -> None:
        """Sends the share of each wait that may be used, if it has changed."""
        for member in self.members.values():
            if member.ready and member.share != share and not member.writer.is_closing():
                member.share = share
                self._write(member, SHARE, {"share": share})

    # ---- in ------------------------------------------------------------------------------------------------------
    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = await self._welcome(reader, writer)
        try:
            while not writer.is_closing():  # data from a lost worker may still be buffered
                frame = await receive_async(reader)
                self.num_bytes += frame.num_bytes
                self._take(member, frame)
        finally:
            if self.members.get(member.worker) is member:
                del self.members[member.worker]
                if member.ready:
                    self.listener.left(member)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ConnectedWorker:
        found: list[tuple[int, WorkerOrder]] = []

        def answer(who: dict[str, Any]) -> dict[str, Any]:
            certificate = writer.get_extra_info("peercert")
            if certificate is not None:
                require_name(certificate, f"{who['datacenter']}/{who['name']}")
            try:
                found.append(self.find(who))
            except WorkerError as error:
                if str(error) not in self._refused:  # once: the worker comes again every few seconds
                    self._refused.add(str(error))
                    log.warning("%s", error)
                return {"refused": str(error)}
            order, has_baseline = found[0][1].to_json(), self.listener.has_baseline
            return {"order": order, "now_ns": time.monotonic_ns(), "has_baseline": has_baseline}

        who = await self._admit(reader, writer, answer)
        if not found:
            raise ClosedError("the worker was refused")
        transport = (str(who["transport"][0]), str(who["transport"][1]), int(who["transport"][2]))
        worker, order = found[0]
        host, port, is_secure = who.get("parts") or ("", 0, False)
        parts = (str(host), int(port), bool(is_secure)) if port else None
        names = str(who["name"]), str(who["datacenter"])
        member = ConnectedWorker(worker, *names, int(who["pid"]), transport, order, writer, parts)
        before, self.members[worker] = self.members.get(worker), member
        if before is not None and before.ready:
            self.listener.left(before)  # the worker was restarted: its earlier tasks are lost
        return member

    def _take(self, member: ConnectedWorker, frame: WireFrame) -> None:
        listener, fields = self.listener, frame.fields
        member.heard_ns = time.monotonic_ns()
        if member.is_silent:
            member.is_silent = False
            listener.joined(member)
        if frame.kind == READY:
            member.ready = True
            listener.joined(member)
        elif frame.kind == KV:
            block = unpack_block(frame, model=self.model)
            job, _, attempt = block.ticket.partition(".")
            listener.block(int(job), int(attempt), block)
        elif frame.kind == KEPT:
            layer, start, stop = (int(n) for n in fields["span"])
            listener.kept(int(fields["job"]), int(fields["attempt"]), layer, start, stop)
        elif frame.kind == LOGITS:
            listener.logits(int(fields["job"]), int(fields["attempt"]), logits_of(frame))
        elif frame.kind == FAILED:
            listener.failed(int(fields["job"]), int(fields["attempt"]), str(fields["why"]))
        elif frame.kind == REPORT:
            listener.reported(member, fields["ran"], fields["waits"])
            for num_tokens, took_ns in fields["loads"]:
                listener.loaded(int(num_tokens), int(took_ns))
        elif frame.kind != DONE:
            raise WorkerError(f"unexpected frame of kind {frame.kind} from worker {member.name}")
