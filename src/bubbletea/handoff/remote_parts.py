"""Where the keys and values of a hand-off are: `kv_transfer_params`, with one part for each prefill worker, which has
some of the layers. The names are those of vLLM's own connectors where they exist. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from atlas.errors import WorkerError
from bubbletea.handoff.signature import seal


@dataclass(frozen=True)
class RemotePart:
    """Layers `first` to `stop`, exclusive, and the worker that has them."""

    host: str
    port: int
    first: int
    stop: int
    name: str = ""
    """Of the worker, as in its certificate; empty: it has none, and listens on loopback only."""

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host, "port": self.port, "layers": [self.first, self.stop], "name": self.name}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RemotePart:
        first, stop = data["layers"]
        return cls(str(data["host"]), int(data["port"]), int(first), int(stop), str(data.get("name", "")))


@dataclass(frozen=True)
class Ticket:
    """The `kv_transfer_params` of a prefill."""

    id: str
    host: str
    port: int
    """Of the service, which takes the release."""
    model: str
    num_tokens: int
    parts: tuple[RemotePart, ...]
    """In the order of their layers, all from the first on."""
    service: str = ""
    """The service's name in its certificate; empty: it has none."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Ticket | None:
        """None if the parameters are not a BubbleTea hand-off."""
        if not params.get("do_remote_prefill") or params.get("remote_engine_id") != "bubbletea":
            return None
        if not params.get("remote_parts"):
            raise WorkerError("kv_transfer_params without remote_parts: the service is older than this connector")
        try:
            parts = sorted((RemotePart.from_json(part) for part in params["remote_parts"]), key=lambda part: part.first)
            found = cls(
                str(params["remote_request_id"]),
                str(params["remote_host"]),
                int(params["remote_port"]),
                str(params["remote_model_id"]),
                int(params["remote_num_tokens"]),
                tuple(parts),
                str(params.get("remote_service", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WorkerError(f"kv_transfer_params without a valid {error}") from None
        _require_tiled(parts)
        return found

    def parts_of(self, layers: Sequence[int]) -> list[tuple[RemotePart, list[int]]]:
        """Which of these layers each part has; raises WorkerError if one of them is in no part."""
        split = [(part, [layer for layer in layers if part.first <= layer < part.stop]) for part in self.parts]
        if missing := set(layers) - {layer for _, some in split for layer in some}:
            raise WorkerError(f"remote_parts leave out layer {min(missing)}")
        return [(part, some) for part, some in split if some]


def _require_tiled(parts: Sequence[RemotePart]) -> None:
    """Layers 0, 1, ... without a gap."""
    if parts[0].first != 0 or any(part.first >= part.stop for part in parts):
        raise WorkerError(f"remote_parts start at layer {parts[0].first}, or have a part without layers")
    for one, other in pairwise(parts):
        if other.first < one.stop:
            raise WorkerError(f"remote_parts overlap: layer {other.first} is in two of them")
        if other.first > one.stop:
            raise WorkerError(f"remote_parts leave out layer {one.stop}")


def transfer_params(ticket: Ticket, token: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Signed for `prompt`: an engine refuses the hand-off for any other prompt."""
    named = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "bubbletea",
        "remote_request_id": ticket.id,
        "remote_block_ids": [],
        "remote_host": ticket.host,
        "remote_port": ticket.port,
        "remote_model_id": ticket.model,
        "remote_num_tokens": ticket.num_tokens,
        "remote_parts": [part.to_json() for part in ticket.parts],
        "remote_service": ticket.service,
    }
    return seal(named, token, prompt)
