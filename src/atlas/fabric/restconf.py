"""A switch behind RESTCONF (RFC 8040): one data resource holds all cross-connects, as JSON.

    PUT  ROOT/data/atlas-ocs:cross-connects      replaces them
    GET  ROOT/data/atlas-ocs:cross-connects      reads them back, each with its `oper-status`

A change has settled when every circuit is `up`. Errors of the server (`ietf-restconf:errors`) are passed on.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from atlas.fabric.circuit_plan import Circuit
from atlas.fabric.switch import SwitchError, merged, require_one_to_one

RESOURCE = "atlas-ocs:cross-connects"
MEDIA_TYPE = "application/yang-data+json"
MOST_BYTES = 16 << 20
"""Of an answer of the switch."""
TIMEOUT_S, POLL_S = 5.0, 0.01
"""Of one request; between two questions whether the circuits are up."""


class RestconfSwitch:
    """`root` is the RESTCONF root, such as http://switch/restconf."""

    def __init__(self, root: str) -> None:
        parts = urlsplit(root)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SwitchError(f"{root!r} is not an address of a switch: write http://HOST/restconf")
        self.root, self._parts = root, parts
        self._wanted: set[Circuit] = set()
        self._writing = asyncio.Lock()

    async def apply(self, circuits: Sequence[Circuit]) -> None:
        require_one_to_one(circuits)
        async with self._writing:  # a PUT replaces all: an older one must not come later
            self._wanted = merged(self._wanted, circuits)
            rows = [{"name": f"{a}--{b}", "a": a, "b": b} for a, b in sorted(self._wanted)]
            await asyncio.to_thread(self._request, "PUT", {RESOURCE: {"cross-connect": rows}})
        while not set(circuits) <= await self.circuits():
            await asyncio.sleep(POLL_S)

    async def circuits(self) -> set[Circuit]:
        found = await asyncio.to_thread(self._request, "GET", None)
        try:
            rows = found[RESOURCE]["cross-connect"]
            return {(str(row["a"]), str(row["b"])) for row in rows if row.get("oper-status") == "up"}
        except (TypeError, KeyError, AttributeError):
            raise SwitchError(f"{self.root}: the answer is not a list of cross-connects") from None

    def _request(self, method: str, body: Any) -> Any:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        headers = {"Accept": MEDIA_TYPE, "Content-Type": MEDIA_TYPE}
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, f"{self._parts.path.rstrip('/')}/data/{RESOURCE}", text, headers)
            answer = connection.getresponse()
            raw = answer.read(MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise SwitchError(f"{self.root}: cannot be reached ({error})") from None
        finally:
            connection.close()
        if answer.status not in (200, 201, 204):
            raise SwitchError(f"{self.root}: refused: {_reason(raw) or f'HTTP status {answer.status}'}")
        try:
            return json.loads(raw) if raw else None
        except ValueError:
            raise SwitchError(f"{self.root}: the answer is not JSON") from None


def _reason(raw: bytes) -> str:
    """The message of an `ietf-restconf:errors` document."""
    try:
        first = json.loads(raw)["ietf-restconf:errors"]["error"][0]
        return str(first.get("error-message") or first["error-tag"])[:200]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return ""
