"""Clients that misbehave. What is not HTTP is refused, and neither a traceback nor a line per request is logged; a
client that does not read its response holds no memory for keys and values."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx2 as httpx
import pytest
from serving import PATIENCE_S, Serving, serving

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
    with serving(keys=ApiKeys({"a": hashlib.sha256(b"key").digest()}, {"a": 1.0})) as found:
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
                with suppress(OSError):  # the service may have closed the connection
                    sock.sendall(part)
                with suppress(OSError):
                    answer += sock.recv(65536)
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
                while more := sock.recv(65536):
                    answer += more
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))
    assert httpx.get(f"{service.url}/health", timeout=60).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))] == []


def test_a_response_that_is_not_read_holds_no_memory_once_it_is_decoded(service: Serving) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}  # events large enough to fill the sockets
    ask = {"model": "tiny", "prompt": "Tell me", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    body = json.dumps(ask | {"stream_options": usage}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    store, until_s = service.parts.dispatcher.store, time.monotonic() + PATIENCE_S
    service.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of accepted ones too
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", service.server.port))
        sock.sendall(head.encode() + body)
        assert sock.recv(12) == b"HTTP/1.1 200"
        while store.used_bytes:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert service.parts.service.num_active == 1, "the response has not been sent yet"
    while service.parts.service.num_active:
        assert time.monotonic() < until_s
        time.sleep(0.01)
