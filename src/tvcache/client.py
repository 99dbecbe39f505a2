"""A store behind a server. Without the server rollouts run as without a cache: nothing here raises because of it.

It logs an outage once and retries from time to time. Leases of calls that take long are renewed in the background.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from typing import Any

from tvcache import messages
from tvcache.endpoint import Certificates, HttpEndpoint
from tvcache.errors import words_of
from tvcache.stores import Ask, Lease
from tvcache.values import Value

LOG = logging.getLogger("tvcache")
TIMEOUT_S = 10.0
"""Of a request, beside the time for which the server may let it wait."""
RETRY_S = (0.1, 5.0)
"""First and longest delay between attempts to reach the server."""
UNREACHABLE = (OSError, http.client.HTTPException, ValueError)


class Client:
    """`Cache(Client("http://127.0.0.1:8765"))`."""

    def __init__(self, url: str, token: str = "", certificates: Certificates | None = None) -> None:
        self.endpoint = HttpEndpoint(url, token, certificates)
        self.acknowledged = 0
        """Values that the server has acknowledged."""
        self._lock = threading.Lock()
        self._down_until_s, self._retry_s, self._told = 0.0, RETRY_S[0], False
        self._refusals: set[str] = set()
        self._leases: dict[int, float] = {}
        """Time at which each lease was granted, by number."""
        self._lease_s = 10.0
        self._renewer: threading.Thread | None = None
        self._closing = threading.Event()

    def begin(self, ask: Ask, wait_s: float) -> Value | Lease:
        give_up_s, asked = time.monotonic() + wait_s, messages.asked(ask)
        while True:
            patience_s = max(0.0, min(messages.MAX_WAIT_S, give_up_s - time.monotonic()))
            found = self._post("/v1/begin", asked | {"wait_s": patience_s}, patience_s + TIMEOUT_S)
            if found is None:
                return Lease()
            if found.get("value") is not None:
                return messages.value_of(found["value"])
            if "lease" in found:
                return self._leased(found)
            if time.monotonic() >= give_up_s:
                return Lease()

    def finish(self, ask: Ask, lease: Lease, value: Value | None) -> Value | None:
        with self._lock:
            self._leases.pop(lease.number, None)
        if value is None and lease.number == 0:
            return None
        sent = messages.asked(ask) | {
            "lease": lease.number,
            "value": None if value is None else messages.valued(value),
        }
        found = self._post("/v1/finish", sent, TIMEOUT_S)
        if found is None or found.get("value") is None:
            return None
        if value is not None:
            self.acknowledged += 1
        return messages.value_of(found["value"])

    def drop(self, ask: Ask, tool: str, reason: str) -> None:
        self._post("/v1/drop", messages.asked(ask) | {"tool": tool, "why": reason}, TIMEOUT_S)

    def close(self) -> None:
        self._closing.set()
        if self._renewer is not None:
            self._renewer.join()
        self.endpoint.close()

    def _leased(self, found: dict[str, Any]) -> Lease:
        lease = Lease(int(found["lease"]))
        with self._lock:
            if lease.number:
                self._leases[lease.number] = time.monotonic()
            self._lease_s = float(found["lease_s"])
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._renew, name="tvcache-renew", daemon=True)
                self._renewer.start()
        return lease

    def _renew(self) -> None:
        while not self._closing.wait(self._lease_s / 4):
            with self._lock:
                old_s = time.monotonic() - self._lease_s / 4
                leases = [number for number, given_s in self._leases.items() if given_s <= old_s]
            if leases:
                self._post("/v1/renew", {"leases": leases}, TIMEOUT_S)
        self.endpoint.close()

    def _post(self, path: str, sent: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The response; None if the server is unreachable or refuses."""
        if time.monotonic() < self._down_until_s:
            return None
        try:
            status, found = self.endpoint.post(path, sent, timeout_s)
        except UNREACHABLE as error:
            self._down(f"no server at {self.endpoint.url} ({words_of(error)}): running without a cache")
            return None
        if status == 401:
            self._down(f"{self.endpoint.url} refuses the token: running without a cache. Give its token")
            return None
        if self._down_until_s:
            with self._lock:
                self._down_until_s, self._retry_s, back = 0.0, RETRY_S[0], self._told
            if back:
                LOG.warning("tvcache: %s answers again", self.endpoint.url)
                self._told = False
        if status != 200 or not isinstance(found, dict):
            self._refused(str(found.get("error")) if isinstance(found, dict) else f"status {status}")
            return None
        return found

    def _refused(self, message: str) -> None:
        with self._lock:
            first = message not in self._refusals
            self._refusals.add(message)
        if first:
            LOG.warning("tvcache: %s: %s", self.endpoint.url, message)

    def _down(self, message: str) -> None:
        with self._lock:
            self._down_until_s = time.monotonic() + self._retry_s
            self._retry_s = min(self._retry_s * 2, RETRY_S[1])
            first, self._told = not self._told, True
        if first:
            LOG.warning("tvcache: %s", message)
