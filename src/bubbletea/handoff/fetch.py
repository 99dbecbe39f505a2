"""The other end of the door: a decode engine's side, on a blocking socket. Needs torch and nothing else of ours but the
frames, so that it can be imported into a decode engine's process.
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
"""Longer than this the service may not be silent."""


@dataclass(frozen=True)
class Ticket:
    """What `kv_transfer_params` says about a prefill."""

    id: str
    host: str
    port: int
    model: str
    num_tokens: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Ticket | None:
        """None where the parameters are not a hand-off of ours."""
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
            raise WorkerError(f"kv_transfer_params without a proper {error}") from None


class Fetcher:
    """A connection to one service; not to be shared between threads."""

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
        """Tokens `start` to `stop` of some layers (none named: all), layer by layer; raises if anything is amiss."""
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
        """Nobody will fetch it any more."""
        send(self._sock, RELEASE, {"ticket": ticket.id})

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
