"""The decode engine's side of a hand-off, on a blocking socket: fetches keys and values from one prefill worker
(`kv_server`). Imports only torch and the frames, because it runs in the decode engine's process.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atlas.errors import WorkerError
from atlas.lifetime import Closing
from bubbletea.frames import FrameSocket, WireFrame, greet, receive, send
from bubbletea.handoff.remote_parts import Ticket
from bubbletea.kv_blocks import END, FETCH, GONE, KV, PLACE, PLACES, READ, RELEASE, KvBlock, unpack_block
from bubbletea.nixl_plane import own_agent

if TYPE_CHECKING:
    from atlas.wan.security.credentials import Security

PATIENCE_S = 10.0
"""Longest time without data from the other side."""
MAX_READ_BYTES = 1 << 36
"""Of all blocks that one fetch reads by NIXL, for which memory is allocated at once: 64 GiB."""


@dataclass(frozen=True)
class EngineIdentity:
    """Who fetches, and how it proves that it may."""

    token: str
    certs: str = ""
    """Folder with certificates; empty: hand-offs are fetched from loopback only."""
    name: str = ""
    """`datacenter/node`, as in the certificate."""
    by_nixl: bool = False
    """Read keys and values by NIXL from workers that have it too."""

    def security(self) -> Security:
        # Only here: without certificates, the connector loads none of atlas.wan into vLLM's process.
        from atlas.wan.security.credentials import Credentials, Security

        return Security(Credentials.of_folder(Path(self.certs), self.name), ())


class Fetcher(Closing):
    """A connection to one worker; not thread-safe, but another thread may `close` it."""

    def __init__(self, host: str, port: int, caller: EngineIdentity, peer: str = "") -> None:
        """`peer`: the name in the certificate of the other side; empty: the connection is not encrypted."""
        self._by_nixl = caller.by_nixl
        sock = socket.create_connection((host, port), timeout=PATIENCE_S)
        self._sock: FrameSocket = sock
        try:
            if peer:
                self._sock = _secured(sock, caller, peer)
            greet(self._sock, caller.token, {"name": "decoder"})
        except BaseException:
            sock.close()
            raise
        self._sock.settimeout(PATIENCE_S)

    def fetch(
        self,
        ticket: Ticket,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int] = (),
        heads: tuple[int, int] | None = None,
    ) -> Iterator[KvBlock]:
        """Blocks that have tokens `start` to `stop` of the given layers (default: all that the worker has), layer by
        layer; raises WorkerError on any error."""
        stop = ticket.num_tokens if stop is None else stop
        asked = {"ticket": ticket.id, "start": start, "stop": stop, "layers": list(layers), "heads": heads}
        send(self._sock, FETCH, asked | ({"plane": "nixl"} if self._by_nixl else {}))
        num_blocks = 0
        while True:
            frame = receive(self._sock)
            if frame.kind == KV:
                num_blocks += 1
                yield unpack_block(frame, model=ticket.model)
            elif frame.kind == PLACES and self._by_nixl:
                yield from self._read(ticket, bytes(frame.payload))
                return
            elif frame.kind == END and frame.fields.get("blocks") == num_blocks:
                return
            elif frame.kind == GONE:
                raise WorkerError(f"hand-off {ticket.id}: {frame.fields.get('why')}")
            else:
                raise WorkerError(
                    f"hand-off {ticket.id}: unexpected frame of kind {frame.kind} after {num_blocks} blocks"
                )

    def _read(self, ticket: Ticket, about: bytes) -> Iterator[KvBlock]:
        """By NIXL, all blocks at once."""
        places = list[WireFrame]()
        while (frame := receive(self._sock, max_payload=0)).kind == PLACE:
            places.append(frame)
        if frame.kind != END or frame.fields.get("blocks") != len(places):
            found = f"{frame.kind} after {len(places)} PLACE frames"
            raise WorkerError(f"hand-off {ticket.id}: unexpected frame of kind {found}")
        try:
            spans = [(int(place.fields["address"]), int(place.fields["bytes"])) for place in places]
        except (KeyError, TypeError, ValueError):
            raise WorkerError(f"hand-off {ticket.id}: a PLACE frame without a valid address and size") from None
        if min((size for _, size in spans), default=1) <= 0 or sum(size for _, size in spans) > MAX_READ_BYTES:
            raise WorkerError(
                f"hand-off {ticket.id}: its PLACE frames announce {sum(size for _, size in spans)} bytes; each must "
                f"have at least 1, all together at most {MAX_READ_BYTES}"
            )
        payloads = own_agent().read(about, spans, time.monotonic() + PATIENCE_S)
        send(self._sock, READ, {})
        for place, payload in zip(places, payloads, strict=True):
            yield unpack_block(WireFrame(KV, place.fields, payload), model=ticket.model)

    def release(self, ticket: Ticket) -> None:
        """Allows the service to drop it."""
        send(self._sock, RELEASE, {"ticket": ticket.id})

    def interrupt(self) -> None:
        """Ends a fetch on another thread with an error."""
        with contextlib.suppress(OSError):  # it is closed already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def _secured(sock: socket.socket, caller: EngineIdentity, peer: str) -> FrameSocket:
    from bubbletea.prefill.tls import secured  # imports atlas.wan, see `EngineIdentity.security`

    if not caller.certs:
        raise WorkerError(f"{peer} needs certificates: name their folder in `certs`, and this node in `name`")
    return secured(sock, caller.security(), peer)
