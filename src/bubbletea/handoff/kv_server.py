"""Serves keys and values to decode engines in other processes: answers FETCH frames (`kv_blocks`).

`params` are the `kv_transfer_params` that reach the engine through the router. The names are those of vLLM's own
connectors where they exist.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

from atlas.errors import AtlasError, WorkerError
from bubbletea.frames import FrameServer, WireFrame, receive_async, write
from bubbletea.handoff.kv_store import KvStore, Parcel
from bubbletea.handoff.signature import seal
from bubbletea.kv_blocks import END, FETCH, GONE, KV, RELEASE, KvBlock, pack_block

IDLE_S = 120.0
"""A connection without a fetch for this long is closed."""
BLOCK_BYTES = 8 << 20
"""Approximate size of one frame."""


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
    """`start` listens; `params(parcel)` is what a decode engine needs to fetch it."""

    def __init__(
        self, store: KvStore, token: str, on_fetched: Callable[[str, int], None] = lambda ticket, n: None
    ) -> None:
        super().__init__(token)
        self.store, self.on_fetched = store, on_fetched
        self.address: tuple[str, int] = ("", 0)

    async def start(self, host: str, port: int, *, anywhere: bool = False) -> None:
        """On loopback unless `anywhere`: the connection is authenticated by a token, but not encrypted."""
        if not anywhere and not ipaddress.ip_address(host).is_loopback:
            raise AtlasError(
                f"hand-off on {host}: the connection is not encrypted. Use 127.0.0.1, or allow it explicitly"
            )
        self._server = server = await asyncio.start_server(self._serve, host, port)
        bound, port = server.sockets[0].getsockname()[:2]
        self.address = (own_address(bound), port)

    def params(self, parcel: Parcel, prompt: Sequence[int] = ()) -> dict[str, Any]:
        """Signed for `prompt`: an engine refuses the parcel for any other prompt."""
        host, port = self.address
        named = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "bubbletea",
            "remote_request_id": parcel.ticket,
            "remote_block_ids": [],
            "remote_host": host,
            "remote_port": port,
            "remote_model_id": parcel.model,
            "remote_num_tokens": parcel.length,
        }
        return seal(named, self.token, prompt)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._admit(reader, writer)
        while True:
            async with asyncio.timeout(IDLE_S):
                frame = await receive_async(reader)
            await self._answer(frame, writer)

    async def _answer(self, frame: WireFrame, writer: asyncio.StreamWriter) -> None:
        ticket = str(frame.fields.get("ticket", ""))
        if frame.kind == RELEASE:
            self.store.release(ticket)
            return
        parcel = self.store.find(ticket)
        if frame.kind != FETCH or parcel is None or not parcel.is_complete:
            write(writer, GONE, {"why": "nothing under this ticket: it was fetched, has expired or never existed"})
            await writer.drain()
            return
        num_blocks = 0
        for block in self._blocks(parcel, frame.fields):
            fields, payload = pack_block(block)
            write(writer, KV, fields, payload)
            await writer.drain()
            num_blocks += 1
        write(writer, END, {"blocks": num_blocks})
        await writer.drain()
        self.on_fetched(ticket, num_blocks)

    def _blocks(self, parcel: Parcel, fields: dict[str, Any]) -> list[KvBlock]:
        try:
            start, stop = int(fields.get("start", 0)), int(fields.get("stop", parcel.length))
            layers = [int(i) for i in fields.get("layers") or range(len(parcel.slabs))]
        except (TypeError, ValueError, OverflowError):
            raise WorkerError("a FETCH without valid numbers") from None
        start, stop = max(0, start), min(stop, parcel.length)
        step = max(1, BLOCK_BYTES // self.store.served.kv_bytes_per_layer_token)
        return [
            KvBlock(
                parcel.ticket,
                parcel.model,
                i,
                at,
                min(at + step, stop),
                parcel.slabs[i][:, :, at : min(at + step, stop)],
            )
            for i in layers
            if 0 <= i < len(parcel.slabs)
            for at in range(start, stop, step)
        ]
