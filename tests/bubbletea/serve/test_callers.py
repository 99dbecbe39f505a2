"""Callers that never prove the token keep no other caller waiting."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from bubbletea import frames
from bubbletea.frames import greet
from bubbletea.kv_server import KvHolder, KvServer, KvServerThread
from bubbletea.prefill.kept_parts import KeptParts

HOLDER: KvHolder = KeptParts()


def test_a_burst_of_callers_waits_to_be_accepted() -> None:
    """More than a queue of asyncio's own size would take; the others would try again a second later."""

    async def connected_at_once() -> int:
        server = KvServer(HOLDER, "token")
        await server.start("127.0.0.1", 0)
        with ExitStack() as stack:
            callers = [stack.enter_context(socket.socket()) for _ in range(500)]
            for caller in callers:  # the event loop does not run meanwhile, so none is accepted
                caller.setblocking(False)
                caller.connect_ex(server.address)
            count = sum(is_connected(caller) for caller in callers)
            await server.close()
        return count

    assert asyncio.run(connected_at_once()) == 500


def is_connected(sock: socket.socket) -> bool:
    with suppress(OSError):
        return bool(sock.getpeername())
    return False


def test_a_caller_with_the_token_gets_in_among_idle_ones_and_garbage() -> None:
    server = KvServerThread(KvServer(HOLDER, "token"), "127.0.0.1")
    try:
        with flooded(server.address):
            for _ in range(20):
                with socket.create_connection(server.address, timeout=60) as sock:
                    greet(sock, "token", {"name": "decoder"})
    finally:
        server.close()


def test_a_server_that_is_closed_closes_callers_that_it_is_accepting() -> None:
    """A socket that is lost instead gives a ResourceWarning, which is an error here."""
    for _ in range(10):
        server = KvServerThread(KvServer(HOLDER, "token"), "127.0.0.1")
        with ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(socket.create_connection(server.address, timeout=60))
            server.close()


def test_garbage_does_not_fill_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(frames, "WARN_S", 3600.0)
    server = KvServerThread(KvServer(HOLDER, "token"), "127.0.0.1")
    try:
        for _ in range(20):
            with socket.create_connection(server.address, timeout=60) as sock, suppress(ConnectionResetError):
                sock.sendall(b"x" * 64)
                while sock.recv(4096):  # until the server has closed it, which is after it has logged
                    pass
    finally:
        server.close()
    assert len(caplog.records) == 1
    assert "not a BubbleTea frame" in caplog.text


@contextmanager
def flooded(address: tuple[str, int]) -> Iterator[None]:
    """Inside the block others connect all the time, at most 50 at once. Half of them send garbage."""
    over, begun = threading.Event(), threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            with suppress(OSError):
                held.append(socket.create_connection(address, timeout=60))
                if len(held) % 2:
                    held[-1].send(os.urandom(64))
            if len(held) >= 50:
                begun.set()
                held.pop(0).close()
        for sock in held:
            sock.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        over.set()
        thread.join()
