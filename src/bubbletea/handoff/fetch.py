"""The decode engine's side of a hand-off, on a blocking socket: fetches keys and values from one prefill worker
(`kv_server`). Imports only torch and the frames, because it runs in the decode engine's process.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atlas.errors import WorkerError
from bubbletea.frames import FrameSocket, greet, receive, send
from bubbletea.handoff.remote_parts import Ticket
from bubbletea.kv_blocks import END, FETCH, GONE, KV, RELEASE, KvBlock, unpack_block

if TYPE_CHECKING:
    from atlas.wan.security.credentials import Security

PATIENCE_S = 10.0
"""Longest time without data from the other side."""


@dataclass(frozen=True)
class Caller:
    """Who fetches, and how it proves that it may."""

    token: str
    certs: str = ""
    """Folder with certificates; empty: hand-offs are fetched from loopback only."""
    name: str = ""
    """`datacenter/node`, as in the certificate."""

    def security(self) -> Security:
        from atlas.wan.security.credentials import Credentials, Security

        return Security(Credentials.of_folder(Path(self.certs), self.name), ())


class Fetcher:
    """A connection to one worker; not thread-safe, but another thread may `close` it."""

    def __init__(self, host: str, port: int, caller: Caller, peer: str = "") -> None:
        """`peer`: the name in the certificate of the other side; empty: the connection is not encrypted."""
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
        send(self._sock, FETCH, asked)
        num_blocks = 0
        while True:
            frame = receive(self._sock)
            if frame.kind == KV:
                num_blocks += 1
                yield unpack_block(frame, model=ticket.model)
            elif frame.kind == END and frame.fields.get("blocks") == num_blocks:
                return
            elif frame.kind == GONE:
                raise WorkerError(f"hand-off {ticket.id}: {frame.fields.get('why')}")
            else:
                raise WorkerError(f"hand-off {ticket.id}: a frame of kind {frame.kind} after {num_blocks} blocks")

    def release(self, ticket: Ticket) -> None:
        """Allows the service to drop it."""
        send(self._sock, RELEASE, {"ticket": ticket.id})

    def interrupt(self) -> None:
        """Ends a fetch on another thread with an error."""
        with contextlib.suppress(OSError):  # it is closed already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _secured(sock: socket.socket, caller: Caller, peer: str) -> FrameSocket:
    from bubbletea.prefill.tls import secured

    if not caller.certs:
        raise WorkerError(f"{peer} needs certificates: name their folder in `certs`, and this node in `name`")
    return secured(sock, caller.security(), peer)
