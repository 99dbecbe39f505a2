"""HTTP that no client sends: it is refused, and neither a traceback nor a line per request is logged."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx2 as httpx
import pytest
from serving import Serving, serving

from bubbletea.serve.auth import ApiKeys

CHUNKED = b"Host: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
BAD_CHUNK = b"ZZ\r\n"
HOSTILE = {
    "not HTTP": [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"],
    "two lengths": [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"],
    "headers too large": [b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"],
    "a websocket": [b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"],
    "a bad chunk without a key": [b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + BAD_CHUNK],
    "a bad chunk to no path": [b"POST /nowhere HTTP/1.1\r\n" + CHUNKED + BAD_CHUNK],
    "a bad chunk after the response": [b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED, BAD_CHUNK],
    "a second request that is not HTTP": [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + b"\0\r\n\r\n"],
}
"""Bytes that are sent one after the other; the next ones after a response to the first."""


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with serving(keys=ApiKeys({"a": b"\0" * 32}, {"a": 1.0})) as found:
        yield found


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_requests_leave_nothing_in_the_log(
    service: Serving, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", service.server.port), timeout=60) as sock:
            answer = b""
            for part in HOSTILE[name]:
                with suppress(ConnectionError, BrokenPipeError):
                    sock.sendall(part)
                    answer += sock.recv(65536)
            with suppress(ConnectionError):
                sock.shutdown(socket.SHUT_WR)
                while more := sock.recv(65536):
                    answer += more
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))
    assert httpx.get(f"{service.url}/health", timeout=60).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))] == []
