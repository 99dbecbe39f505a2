"""Keys and values by NIXL: the same blocks as by TCP, the same errors. With a stand-in for the package in this process,
and with the package itself between two processes where it is installed."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from atlas.errors import WorkerError
from bubbletea import kv_server, nixl_plane
from bubbletea.handoff.fetch import EngineIdentity, Fetcher
from bubbletea.handoff.remote_parts import RemotePart, Ticket
from bubbletea.kv_blocks import KvBlock
from bubbletea.kv_server import KvServer, KvServerThread
from bubbletea.prefill.kept_parts import KeptParts
from bubbletea.vllm.settings import ConnectorSettings

TOKEN, LAYERS, TOKENS = "token", range(3), 40


class StandInAgent:
    """Reads from the memory of this process."""

    is_damaged = False
    state = "DONE"
    registered: ClassVar[list[Any]] = []

    def __init__(self, name: str, config: object) -> None:
        self.name = name

    def register_memory(self, spans: list[tuple[int, int, int, str]], kind: str) -> list[Any]:
        assert kind == "DRAM"
        self.registered.append(spans)
        return spans

    def deregister_memory(self, spans: Any) -> None:
        self.registered.remove(spans)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, about: bytes) -> str:
        return about.decode()

    def remove_remote_agent(self, name: str) -> None: ...

    def get_xfer_descs(self, spans: list[tuple[int, int, int]], kind: str) -> Any:
        return spans

    def initialize_xfer(self, operation: str, ours: Any, theirs: Any, name: str) -> Any:
        assert operation == "READ"
        return ours, theirs

    def transfer(self, handle: Any) -> str:
        for (to, size, _), (source, _, _) in zip(*handle, strict=True):
            ctypes.memmove(to, source, size)
            if self.is_damaged:
                ctypes.memset(to, 1, 1)
        return self.state

    def check_xfer_state(self, handle: Any) -> str:
        return self.state

    def release_xfer_handle(self, handle: Any) -> None: ...


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandInAgent]]:
    api = types.SimpleNamespace(nixl_agent=StandInAgent, nixl_agent_config=lambda backends: backends)
    monkeypatch.setattr(nixl_plane.importlib, "import_module", lambda name: api)
    monkeypatch.setattr(kv_server, "is_installed", lambda: True)
    nixl_plane.own_agent.cache_clear()
    yield StandInAgent
    nixl_plane.own_agent.cache_clear()


def kept_parts() -> KeptParts:
    draw, kept = torch.Generator().manual_seed(1), KeptParts()
    kept.budget_bytes = 1 << 30
    kept.open("t", (1, 0), TOKENS, LAYERS, 0)
    for layer in LAYERS:
        for start in range(0, TOKENS, 16):
            stop = min(TOKENS, start + 16)
            kept.put((1, 0), KvBlock("t", "m", layer, start, stop, torch.randn(2, 4, stop - start, 8, generator=draw)))
    return kept


@contextmanager
def listening() -> Iterator[tuple[KvServer, tuple[str, int]]]:
    server = KvServer(kept_parts(), TOKEN)
    thread = KvServerThread(server, "127.0.0.1")
    try:
        yield server, thread.address
    finally:
        thread.close()


def fetched(address: tuple[str, int], heads: tuple[int, int] | None = None, *, by_nixl: bool = True) -> list[KvBlock]:
    ticket = Ticket("t", *address, "m", TOKENS, (RemotePart(*address, 0, len(LAYERS)),))
    with Fetcher(*address, EngineIdentity(TOKEN, by_nixl=by_nixl)) as fetcher:
        return list(fetcher.fetch(ticket, heads=heads))


def assert_same(some: list[KvBlock], others: list[KvBlock]) -> None:
    assert len(some) == len(others) == 9
    for one, other in zip(some, others, strict=True):
        assert (one.layer, one.start, one.stop, one.checksums) == (
            other.layer,
            other.start,
            other.stop,
            other.checksums,
        )
        assert torch.equal(one.kv, other.kv)


@pytest.mark.parametrize("heads", [None, (1, 3)])
def test_blocks_are_those_of_tcp(stand_in: type[StandInAgent], heads: tuple[int, int] | None) -> None:
    with listening() as (_, address):
        assert_same(fetched(address, heads), fetched(address, heads, by_nixl=False))
    assert not stand_in.registered, "no memory stays registered"


def test_a_damaged_block_is_an_error(stand_in: type[StandInAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "is_damaged", True)
    with listening() as (_, address), pytest.raises(WorkerError, match="damaged"):
        fetched(address)


def test_a_read_that_fails_is_an_error(stand_in: type[StandInAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "state", "ERR")
    with listening() as (_, address), pytest.raises(WorkerError, match="NIXL failed"):
        fetched(address)
    assert not stand_in.registered


def test_no_memory_stays_registered_if_the_server_closes_meanwhile(
    stand_in: type[StandInAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    registers, go_on, has_registered = (threading.Event() for _ in range(3))
    register = stand_in.register_memory

    def slow_register(agent: StandInAgent, *given: Any) -> list[Any]:
        registers.set()
        assert go_on.wait(60)
        try:
            return register(agent, *given)
        finally:
            has_registered.set()

    def fetch(address: tuple[str, int]) -> None:
        with contextlib.suppress(WorkerError, OSError):
            fetched(address)

    monkeypatch.setattr(stand_in, "register_memory", slow_register)
    server = KvServerThread(KvServer(kept_parts(), TOKEN), "127.0.0.1")
    caller = threading.Thread(target=fetch, args=(server.address,))
    caller.start()
    assert registers.wait(60)
    [task] = server.server._callers
    closing = threading.Thread(target=server.close)
    closing.start()
    while not task.cancelling():
        time.sleep(0.001)
    go_on.set()
    assert has_registered.wait(60)
    closing.join()
    caller.join()
    assert not stand_in.registered


def test_a_closed_server_has_deregistered_all_memory(
    stand_in: type[StandInAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    deregister = stand_in.deregister_memory

    def slow_deregister(agent: StandInAgent, spans: Any) -> None:
        time.sleep(0.1)
        deregister(agent, spans)

    monkeypatch.setattr(stand_in, "deregister_memory", slow_deregister)
    monkeypatch.setattr(stand_in, "state", "ERR")
    with listening() as (_, address), pytest.raises(WorkerError, match="NIXL failed"):
        fetched(address)
    assert not stand_in.registered


def test_a_worker_without_nixl_sends_by_tcp(stand_in: type[StandInAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_server, "is_installed", lambda: False)
    with listening() as (_, address):
        assert len(fetched(address)) == 9
    assert nixl_plane.own_agent.cache_info().currsize == 0


def test_an_expired_lease_is_named(stand_in: type[StandInAgent]) -> None:
    with listening() as (server, address):
        server.holder.release("t")
        with pytest.raises(WorkerError, match="has expired"):
            fetched(address)


def test_the_connector_refuses_a_plane_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bubbletea.vllm.settings.is_installed", lambda: False)
    with pytest.raises(ValueError, match="needs the package nixl"):
        ConnectorSettings.of({"token_file": "x", "data_plane": "nixl"})
    with pytest.raises(ValueError, match="not one of tcp, nixl"):
        ConnectorSettings.of({"token_file": "x", "data_plane": "rdma"})


SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_nixl import listening
with listening() as (server, address):
    print(*address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not nixl_plane.is_installed(), reason="the package nixl is not installed")
def test_nixl_itself_reads_from_another_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        assert worker.stdin is not None
        host, port = worker.stdout.readline().split()
        for _ in range(2):
            assert_same(fetched((host, int(port))), fetched((host, int(port)), by_nixl=False))
        worker.stdin.close()
