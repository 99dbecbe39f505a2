"""Who is there: a worker that comes back before its old connection has broken is another, and the old one has left."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from prefill_samples import LLAMA

from bubbletea.frames import greet, send
from bubbletea.prefill.link import dial
from bubbletea.prefill.messages import READY, Order
from bubbletea.prefill.shard import Served
from bubbletea.serve.crew import Crew, Member

ORDER = Order(Served(LLAMA), (4,), 0, arena_bytes=1, workspace_bytes=1, chunk=1)


class Heard:
    """Only what comes and goes; nothing else is said here."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.changed = asyncio.Event()

    def joined(self, member: Member) -> None:
        self.events.append(("joined", member.pid))
        self.changed.set()

    def left(self, member: Member) -> None:
        self.events.append(("left", member.pid))
        self.changed.set()


def test_a_second_life_of_a_worker_ends_the_first(tmp_path: Path) -> None:
    async def play() -> list[tuple[str, int]]:
        crew, heard = Crew("token", lambda worker: ORDER, "model"), Heard()
        crew.listener = heard  # type: ignore[assignment]
        address = await crew.start(tmp_path / "door")

        def call(pid: int) -> None:
            sock = dial(address)
            sockets.append(sock)
            who = {"name": "w0", "datacenter": "here", "worker": 0, "pid": pid, "transport": ["w0", "127.0.0.1", 1]}
            greet(sock, "token", who)
            send(sock, READY, {})

        sockets = list[socket.socket]()
        for pid in (1, 2):
            heard.changed.clear()
            await asyncio.to_thread(call, pid)
            while ("joined", pid) not in heard.events:
                await asyncio.wait_for(heard.changed.wait(), 10)
                heard.changed.clear()
        assert crew.members[0].pid == 2
        await crew.close()
        for sock in sockets:
            sock.close()
        return heard.events

    assert asyncio.run(play())[:3] == [("joined", 1), ("left", 1), ("joined", 2)]
