"""Sends keys and values to decode engines in other processes: answers FETCH frames (`kv_blocks`) from a `KvHolder`.
Every prefill worker has one, on a thread of its own; so has the service, which only takes releases.

Blocks go from the holder's memory into the socket on separate threads: nothing is copied or hashed on the event loop,
unless the connection is encrypted. Knows frames and blocks; not requests, not prefill.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from atlas.addresses import is_loopback
from atlas.callers import LoopThread
from atlas.errors import AtlasError, WorkerError
from bubbletea.frames import FrameServer, WireFrame, receive_async, send, write
from bubbletea.kv_blocks import END, FETCH, GONE, KV, PLACE, PLACES, READ, RELEASE, KvBlock, pack_block
from bubbletea.nixl_plane import Offer, is_installed, offer

IDLE_S = 120.0
"""A connection without a fetch for this long is closed."""
SEND_S = 30.0
"""A decode engine that reads nothing for this long is disconnected."""
SWEEP_S = 1.0
"""Between two removals of expired keys and values."""
NO_TICKET = "nothing under this ticket: it was fetched, has expired or never existed"


@dataclass(frozen=True)
class WantedBlocks:
    """What a FETCH asks for."""

    ticket: str
    start: int
    stop: int
    layers: tuple[int, ...]
    """Empty: all that are there."""
    heads: tuple[int, int] | None = None
    """The first, and the one after the last; None: all."""
    by_nixl: bool = False
    """The engine can read them by NIXL."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> WantedBlocks:
        try:
            heads = fields.get("heads")
            return cls(
                str(fields["ticket"]),
                int(fields.get("start", 0)),
                int(fields["stop"]),
                tuple(int(i) for i in fields.get("layers") or ()),
                None if heads is None else (int(heads[0]), int(heads[1])),
                fields.get("plane") == "nixl",
            )
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            raise WorkerError("a FETCH without valid numbers") from None


class KvHolder(Protocol):
    """Where keys and values are. Called on the event loop of its server."""

    def blocks(self, wanted: WantedBlocks) -> Sequence[KvBlock]:
        """Whole blocks, which may have more tokens than were asked for; raises LookupError with the reason if there are
        none."""

    def release(self, ticket: str) -> None: ...

    def drop_expired(self) -> None: ...


def own_address(bound: str) -> str:
    """The address that others connect to: for a socket bound to all addresses, that of the default route."""
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return bound
    family, far = (socket.AF_INET, "192.0.2.1") if address.version == 4 else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # a datagram socket: sends nothing, only looks up the route
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


class KvServer(FrameServer):
    """`start` listens: on loopback with a token, elsewhere with certificates too."""

    def __init__(self, holder: KvHolder, token: str, context: ssl.SSLContext | None = None) -> None:
        super().__init__(token, context)
        self.holder = holder
        self.nixl_unencrypted = False
        """NIXL may be used although this connection is encrypted."""
        self.address: tuple[str, int] = ("", 0)
        self._withdrawals: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*self._withdrawals)

    async def start(self, host: str, port: int) -> None:
        if self.context is None and not is_loopback(host):
            raise AtlasError(f"hand-off on {host}: decode engines of other hosts need certificates. Give --certs")
        bound, port = await self.listen_at(host, port)
        self.address = (own_address(bound), port)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._admit(reader, writer)
        while True:
            async with asyncio.timeout(IDLE_S):
                frame = await receive_async(reader, max_payload=0)
            blocks = await self._answer(frame, writer)
            if blocks:
                await self._offer(blocks, reader, writer)

    async def _answer(self, frame: WireFrame, writer: asyncio.StreamWriter) -> Sequence[KvBlock]:
        """Blocks that remain to be offered by NIXL."""
        if frame.kind == RELEASE:
            self.holder.release(str(frame.fields.get("ticket", "")))
            return ()
        if frame.kind != FETCH:
            raise WorkerError(f"unexpected frame of kind {frame.kind} from a decode engine")
        wanted = WantedBlocks.of(frame.fields)
        try:
            blocks = self.holder.blocks(wanted)
        except LookupError as gone:
            write(writer, GONE, {"why": str(gone.args[0])})
            await writer.drain()
            return ()
        if wanted.by_nixl and is_installed() and (self.context is None or self.nixl_unencrypted):
            return blocks
        await self._send(writer, blocks)
        write(writer, END, {"blocks": len(blocks)})
        await writer.drain()
        return ()

    async def _offer(
        self, blocks: Sequence[KvBlock], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Names the memory of the blocks, and keeps it until the engine has read them or is gone."""
        packed = await asyncio.to_thread(lambda: [pack_block(block) for block in blocks])
        payloads = [memoryview(payload) for _, payload in packed]
        offering = asyncio.get_running_loop().run_in_executor(None, offer, payloads)
        try:
            offered = await asyncio.shield(offering)
            write(writer, PLACES, {}, offered.about)
            for (fields, _), (address, size) in zip(packed, offered.spans, strict=True):
                write(writer, PLACE, fields | {"address": address, "bytes": size})
            write(writer, END, {"blocks": len(packed)})
            await writer.drain()
            async with asyncio.timeout(SEND_S):
                frame = await receive_async(reader, max_payload=0)
        finally:
            self._withdraw(offering)
        if frame.kind != READ:
            raise WorkerError(f"a frame of kind {frame.kind} where READ is expected")

    def _withdraw(self, offering: asyncio.Future[Offer]) -> None:
        """Deregisters the memory on a task of its own: `close` cancels that of the caller, perhaps while a thread still
        registers the memory."""

        async def withdraw() -> None:
            await asyncio.wait([offering])
            if offering.exception() is None:
                await asyncio.to_thread(offering.result().close)

        task = asyncio.create_task(withdraw())
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _send(self, writer: asyncio.StreamWriter, blocks: Sequence[KvBlock]) -> None:
        if self.context is not None:
            for block in blocks:
                write(writer, KV, *await asyncio.to_thread(pack_block, block))
                await writer.drain()
            return
        await writer.drain()
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
            try:
                await asyncio.to_thread(_send_blocks, sock, blocks)
            except asyncio.CancelledError:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # ends the thread
                raise


def _send_blocks(sock: socket.socket, blocks: Sequence[KvBlock]) -> None:
    sock.settimeout(SEND_S)
    for block in blocks:
        send(sock, KV, *pack_block(block))


class KvServerThread:
    """A KvServer with an event loop of its own, beside whatever else the process does."""

    def __init__(self, server: KvServer, host: str) -> None:
        """Listens when it returns."""
        self.server, self._thread = server, LoopThread("bubbletea kv")
        try:
            self._thread.run(server.start(host, 0))
        except BaseException:
            self._thread.close()
            raise
        self._thread.loop.call_soon_threadsafe(self._sweep)

    @property
    def address(self) -> tuple[str, int]:
        return self.server.address

    def close(self) -> None:
        self._thread.run(self.server.close())
        self._thread.close()

    def _sweep(self) -> None:
        self.server.holder.drop_expired()
        self._thread.loop.call_later(SWEEP_S, self._sweep)
