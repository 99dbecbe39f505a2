"""A whole service in a thread, with worker processes that do not train, for tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from prefill_samples import LLAMA

from bubbletea.prefill.dedicated_worker import DedicatedWorker
from bubbletea.prefill.shard import Served
from bubbletea.serve.assemble import AssembledService, ServiceSettings, assemble
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.dedicated_workers import DedicatedWorkers
from bubbletea.serve.http import HttpServer
from bubbletea.serve.run import ListenSettings, run
from bubbletea.serve.worker_windows import alone

MIB = 1 << 20
PERIOD_S = 0.2
PATIENCE_S = 120.0
"""Of a client; seconds are enough on an idle machine."""
TINY = ServiceSettings(
    "tiny", Served(LLAMA, seed=1), split=2, chunk=128, arena_bytes=16 * MIB, workspace_bytes=64 * MIB,
    store_bytes=256 * MIB, prefix_bytes=32 * MIB, deadline_s=60.0,
)  # fmt: skip


@dataclass
class Serving:
    url: str
    parts: AssembledService
    server: HttpServer
    hosts: DedicatedWorkers

    def use_every_hit(self, patch: pytest.MonkeyPatch) -> None:
        """Of the prefix cache, whatever it costs: so small a model is computed faster than it is moved."""
        patch.setattr(self.parts.dispatcher.prefixes.times, "pays", lambda num_tokens, compute_ns: True)

    def wait_for_lanes(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while httpx.get(f"{self.url}/health", timeout=60).json()["lanes"] < count:
            assert time.monotonic() < deadline, f"not {count} lanes within {timeout_s} s"
            time.sleep(0.1)


PASSING = ("deadline", "no-lane", "handed_back")
"""Why a service on a busy host refuses a request for a while: waits are too short there, or a worker is late."""


def post_patiently(url: str, **request: Any) -> httpx.Response:
    """As a client does: a request that is refused for a while is sent again when the answer says so. One that has a
    deadline is sent once."""
    end, body = time.monotonic() + PATIENCE_S, request.get("json")
    while True:
        response = httpx.post(url, timeout=60, **request)
        is_refused = response.status_code in (429, 503) and "retry-after-ms" in response.headers
        if not is_refused or response.json()["error"]["code"] not in PASSING or "deadline_s" in (body or ()):
            return response
        assert time.monotonic() < end, response.text
        time.sleep(int(response.headers["retry-after-ms"]) / 1e3)


@contextmanager
def serving(
    settings: ServiceSettings = TINY,
    num_workers: int = 2,
    *,
    keys: ApiKeys | None = None,
    busy: float = 0.3,
    drain_s: float = 20.0,
    token: str = "",
) -> Iterator[Serving]:
    windows = alone(num_workers, settings.arena_bytes, PERIOD_S, busy)
    parts = assemble(settings, windows, keys or ApiKeys.open_to_all(), token)
    started, found = threading.Event(), list[Serving]()
    made = list[DedicatedWorkers]()

    def workers(address: str, token_file: str) -> DedicatedWorkers:
        made.append(
            DedicatedWorkers(
                [DedicatedWorker(address, token_file, w, "localhost", PERIOD_S, busy) for w in range(num_workers)]
            )
        )
        return made[0]

    def on_start(server: HttpServer) -> None:
        found.append(Serving(f"http://127.0.0.1:{server.port}", parts, server, made[0]))
        started.set()

    thread = threading.Thread(
        target=lambda: asyncio.run(run(parts, ListenSettings(port=0, drain_s=drain_s), workers, on_start)), daemon=True
    )
    thread.start()
    assert started.wait(60)
    try:
        found[0].wait_for_lanes(num_workers // (settings.split or 1))
        yield found[0]
    finally:
        found[0].server.drain()
        thread.join(drain_s + PATIENCE_S)
        assert not thread.is_alive()
