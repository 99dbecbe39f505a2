"""The HTTP server: uvicorn with h11, with time limits for slow clients, and a shutdown that finishes admitted requests.

uvicorn has a time limit for idle connections but not for headers; `HeaderTimeout` adds it. Its log has no line for
what a client does wrong: clients without a key could fill it. Knows connections; not requests.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from weakref import WeakKeyDictionary

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bubbletea.serve.service import Service

HEADERS_S = 10.0
"""Time limit from the connection, or the first byte of a request, to the end of the headers."""
KEEP_ALIVE_S = 15
"""An idle connection is closed after this."""
MAX_HEADER_BYTES = 64 << 10
"""Of one request; larger ones are refused."""
MAX_WAITING = 1024
"""Connections without complete headers; the oldest makes room for a new one."""


class HeaderTimeout(H11Protocol):
    """Closes a connection whose headers do not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What the client sent is not HTTP. uvicorn responds to that also after and during another response, and lets
        the application respond again; h11 raises an error for both."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application's response is dropped
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_S, self._expire)
        waiting = _WAITING.setdefault(self.server_state, {})
        waiting[self] = None
        if len(waiting) > MAX_WAITING:
            next(iter(waiting))._expire()

    def _settle(self) -> None:
        _WAITING.get(self.server_state, {}).pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._settle()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()


_WAITING: WeakKeyDictionary[Any, dict[HeaderTimeout, None]] = WeakKeyDictionary()
"""By server: connections that have not sent their headers, the oldest first."""


class HttpServer(uvicorn.Server):
    """The first signal drains: new requests are refused, admitted ones finish within `drain_s`. The second stops it."""

    def __init__(self, app: Any, service: Service, drain_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=HeaderTimeout,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        super().__init__(config)
        self.service, self.drain_s = service, drain_s
        self.port = 0
        """The port it listens on."""
        self._until_s = float("inf")

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.service.draining:
            self.should_exit = True
        self.drain()

    def drain(self) -> None:
        if not self.service.draining:
            self.service.draining = True
            self._until_s = time.monotonic() + self.drain_s

    async def on_tick(self, counter: int) -> bool:
        done = self.service.draining and (self.service.num_active == 0 or time.monotonic() > self._until_s)
        return await super().on_tick(counter) or done
