"""The decode engine's side of a hand-off, on a blocking socket: fetches keys and values from `kv_server`. Imports only
torch and the frames, because it runs in the decode engine's process.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atlas.errors import WorkerError
from bubbletea.frames import greet, receive, send
from bubbletea.kv_blocks import END, FETCH, GONE, KV, RELEASE, KvBlock, unpack_block

PATIENCE_S = 10.0
"""Longest time without data from the service."""


@dataclass(frozen=True)
class Ticket:
    """The `kv_transfer_params` of a prefill."""

    id: str
    host: str
    port: int
    model: str
    num_tokens: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Ticket | None:
        """None if the parameters are not a BubbleTea hand-off."""
        if not params.get("do_remote_prefill") or params.get("remote_engine_id") != "bubbletea":
            return None
        try:
            return cls(
                str(params["remote_request_id"]),
                str(params["remote_host"]),
                int(params["remote_port"]),
                str(params["remote_model_id"]),
                int(params["remote_num_tokens"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerError(f"kv_transfer_params without a valid {error}") from None


class Fetcher:
    """A connection to one service; not thread-safe."""

    def __init__(self, host: str, port: int, token: str, who: str = "decoder") -> None:
        self._sock = socket.create_connection((host, port), timeout=PATIENCE_S)
        try:
            greet(self._sock, token, {"name": who})
        except BaseException:
            self._sock.close()
            raise
        self._sock.settimeout(PATIENCE_S)

    def fetch(
        self, ticket: Ticket, start: int = 0, stop: int | None = None, layers: Sequence[int] = ()
    ) -> Iterator[KvBlock]:
        """Tokens `start` to `stop` of the given layers (default: all), layer by layer; raises WorkerError on any
        error."""
        stop = ticket.num_tokens if stop is None else stop
        send(self._sock, FETCH, {"ticket": ticket.id, "start": start, "stop": stop, "layers": list(layers)})
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

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
