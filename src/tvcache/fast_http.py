"""uvicorn's protocol with a shorter way for the few requests that every tool call makes.

h11 takes most of a small request's time. A POST that is complete, plain and for one of our paths needs no h11;
everything else (other methods, chunked bodies, pipelining, odd headers, errors, requests that have to wait) goes to h11
byte for byte, as if this were not here. Knows HTTP's framing; what a request means is the server's part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BYTES = 256 << 10
"""Larger requests take the usual path."""
BEGIN = b"POST /v1/"
TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
NOT_HERE = {b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer"}
Headers = Mapping[bytes, bytes]
Answer = Callable[[str, Headers, bytes], bytes | None]
"""(path, headers, body) to the JSON of a 200, or None to use h11."""


def protocol(answer: Answer, paths: Collection[str]) -> type[H11Protocol]:
    """A class for `uvicorn.Config(http=...)`."""
    lines = {f"POST {path} HTTP/1.1".encode(): path for path in paths}

    class FastProtocol(H11Protocol):
        _held = b""
        """The bytes of an incomplete request."""

        def data_received(self, data: bytes) -> None:
            if self._held or self._idle():
                data, self._held = self._held + data, b""
                made = self._answered(data)
                if made is None:
                    super().data_received(data)
                elif made:
                    self._unset_keepalive_if_required()
                    self.transport.write(made)
                    self.timeout_keep_alive_task = self.loop.call_later(
                        self.timeout_keep_alive, self.timeout_keep_alive_handler
                    )
            else:
                super().data_received(data)

        def _idle(self) -> bool:
            """Between two requests: h11 has received nothing of the next one."""
            states = (self.conn.our_state, self.conn.their_state)
            return states == (h11.IDLE, h11.IDLE) and not self.conn.trailing_data[0]

        def _answered(self, data: bytes) -> bytes | None:
            """The response; empty if the request is incomplete; None to use h11."""
            if not data.startswith(BEGIN) or len(data) > MAX_BYTES:
                return None
            head, complete, body = data.partition(b"\r\n\r\n")
            if not complete:
                self._held = data
                return b""
            found = parsed(head, lines)
            if found is None or len(body) > found[2]:
                return None
            path, headers, length = found
            if len(body) < length:
                self._held = data
                return b""
            made = answer(path, headers, body)
            if made is None:
                return None
            return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(made) + made

    return FastProtocol


def parsed(head: bytes, lines: Mapping[bytes, str]) -> tuple[str, dict[bytes, bytes], int] | None:
    """(path, headers, length of the body) of a plain request; None for any other."""
    first, *rest = head.split(b"\r\n")
    path, headers = lines.get(first), dict[bytes, bytes]()
    if path is None:
        return None
    for line in rest:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or name in headers or not TOKEN.fullmatch(name) or not VALUE.fullmatch(value):
            return None
        headers[name] = value.strip(b" \t")
    length = headers.get(b"content-length", b"")
    plain = b"host" in headers and headers.get(b"connection", b"keep-alive").lower() == b"keep-alive"
    if not plain or not length.isdigit() or len(length) > 6 or not NOT_HERE.isdisjoint(headers):
        return None
    return path, headers, int(length)
