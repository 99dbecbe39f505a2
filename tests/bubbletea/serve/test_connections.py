"""Who is there: a worker that comes back before its old connection has broken is another, and the old one has left. And
nothing is written to a connection that is lost."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from prefill_samples import LLAMA

from bubbletea.frames import greet, send, write
from bubbletea.prefill.job import PrefillTask
from bubbletea.prefill.joining import dial
from bubbletea.prefill.messages import READY, WorkerOrder
from bubbletea.prefill.shard import Served
from bubbletea.serve.connections import ConnectedWorker, WorkerConnections

ORDER = WorkerOrder(Served(LLAMA), (4,), 0, arena_bytes=1, workspace_bytes=1, chunk=1)


class Heard:
    """Only what comes and goes; nothing else is said here."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.changed = asyncio.Event()

    has_baseline = False

    def joined(self, member: ConnectedWorker) -> None:
        self.events.append(("joined", member.pid))
        self.changed.set()

    def left(self, member: ConnectedWorker) -> None:
        self.events.append(("left", member.pid))
        self.changed.set()


def call(address: str, pid: int) -> socket.socket:
    """As a worker that is ready."""
    sock = dial(address)
    who = {"name": "w0", "datacenter": "here", "worker": 0, "pid": pid, "transport": ["w0", "127.0.0.1", 1]}
    greet(sock, "token", who)
    send(sock, READY, {})
    return sock


async def until(heard: Heard, event: tuple[str, int]) -> None:
    while event not in heard.events:
        await asyncio.wait_for(heard.changed.wait(), 60)
        heard.changed.clear()


def test_a_restarted_worker_replaces_its_old_connection(tmp_path: Path) -> None:
    async def play() -> list[tuple[str, int]]:
        connections, heard = WorkerConnections("token", lambda who: (0, ORDER), "model"), Heard()
        connections.listener = heard  # type: ignore[assignment]
        address = await connections.start(tmp_path / "workers.sock")
        sockets = []
        for pid in (1, 2):
            sockets.append(await asyncio.to_thread(call, address, pid))
            await until(heard, ("joined", pid))
        assert connections.members[0].pid == 2
        await connections.close()
        for sock in sockets:
            sock.close()
        return heard.events

    assert asyncio.run(play())[:3] == [("joined", 1), ("left", 1), ("joined", 2)]


def test_nothing_is_written_to_a_lost_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line of the log for every such write, after the fifth."""

    async def play() -> None:
        connections, heard = WorkerConnections("token", lambda who: (0, ORDER), "model"), Heard()
        connections.listener = heard  # type: ignore[assignment]
        address = await connections.start(tmp_path / "workers.sock")
        sock = await asyncio.to_thread(call, address, 1)
        await until(heard, ("joined", 1))
        member = connections.members[0]
        sock.close()
        for job in range(20):  # before the event loop could notice
            connections.send(member, PrefillTask(job, 0, 4, 0, (4,), 0, 0, (member.transport,)), [1, 2, 3, 4], ())
            connections.cancel(member, job, 0)
        await until(heard, ("left", 1))
        await connections.close()

    asyncio.run(play())
    assert not caplog.records


def test_writing_to_a_lost_worker_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A task is many frames, all written before the event loop can report that the connection is lost."""

    async def write_many() -> None:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        theirs.close()
        for _ in range(10):
            write(writer, READY, {}, b"x" * 100)
        writer.close()

    asyncio.run(write_many())
    assert caplog.messages == []
