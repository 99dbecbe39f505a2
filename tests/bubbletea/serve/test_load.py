"""Many clients at once: each request has exactly one answer, over a killed worker and a drain; memory stays flat."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from prefill_samples import greedy_alone, whole
from serving import PATIENCE_S, TINY, serving

from bubbletea.bench import BenchLoad, bench
from bubbletea.serve.dedicated_workers import DedicatedWorkers

RETRIES = 1000
"""No limit: how often a host refuses depends on what else it does."""


async def ask_many(
    url: str, num_requests: int, num_clients: int, found: Callable[[], Counter[str]], *, retries: int = RETRIES
) -> None:
    """With OpenAI's own client; what became of each is counted, an answer that is not the model's apart. `found` is
    called before each. A busy host refuses some at first (429): the client tries again when it was told to."""
    decoder = whole(TINY.served)
    prompts = [[(i * 7 + n) % 256 for i in range(1 + (n * 37) % 200)] for n in range(40)]
    expected = [greedy_alone(decoder, prompt, 4) for prompt in prompts]
    numbers = iter(range(num_requests))

    async def client(api: openai.AsyncOpenAI) -> None:
        for number in numbers:
            prompt = prompts[number % len(prompts)]
            counted = found()
            ask: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            try:
                answer = await api.completions.create(**ask, extra_body={"ignore_eos": True})
            except openai.APIStatusError as error:
                counted[str(error.status_code)] += 1
                continue
            except openai.APIConnectionError:
                counted["connection"] += 1
                continue
            text = bytes(expected[number % len(prompts)]).decode(errors="replace")
            counted["right" if answer.choices[0].text == text else "wrong"] += 1

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=retries, timeout=120) as api:
        await asyncio.gather(*(client(api) for _ in range(num_clients)))


def worker_pids(workers: DedicatedWorkers) -> list[int]:
    return [one.process.pid for one in workers._started]


def memory_mib(pids: list[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * resource.getpagesize() / 2**20


def check(num_requests: int, num_clients: int) -> None:
    found, killed = Counter[str](), list[int]()
    with serving(num_workers=4) as service:

        def kill_a_worker() -> None:
            while found.total() < num_requests // 3:
                time.sleep(0.02)
            killed.append(worker_pids(service.hosts)[0])
            os.kill(killed[0], signal.SIGKILL)

        killer = threading.Thread(target=kill_a_worker, daemon=True)
        killer.start()
        asyncio.run(ask_many(service.url, num_requests, num_clients, lambda: found))
        killer.join(60)
        assert killed
        assert found == {"right": num_requests}
        service.wait_for_lanes(2)  # the dead one was started again
        assert killed[0] not in worker_pids(service.hosts)


def test_every_request_is_answered_once_though_a_worker_is_killed() -> None:
    check(num_requests=200, num_clients=16)


@pytest.mark.slow
def test_two_thousand_requests_of_64_clients_with_a_worker_killed() -> None:
    check(num_requests=2000, num_clients=64)


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    with serving(num_workers=2) as service:
        used = []
        for seed in range(4):
            load = BenchLoad(service.url, "tiny", num_requests=400, num_clients=32, max_tokens=4, retries=20, seed=seed)
            report = asyncio.run(bench(load))
            assert report.statuses == {"200": 400}
            used.append(memory_mib([os.getpid(), *worker_pids(service.hosts)]))
        assert used[-1] - used[1] < 40, used


def test_a_drain_finishes_admitted_requests_and_refuses_new_ones() -> None:
    before, after = Counter[str](), Counter[str]()
    with serving(num_workers=2, drain_s=120) as service:
        dispatcher, server = service.parts.dispatcher, service.server

        def found() -> Counter[str]:
            return after if server.service.draining else before

        loader = threading.Thread(target=lambda: asyncio.run(ask_many(service.url, 300, 12, found, retries=0)))
        loader.start()
        while (num_admitted := len(dispatcher._runs)) < 4:
            assert loader.is_alive(), before
            time.sleep(0.001)
        server.drain()
        loader.join(PATIENCE_S)
        assert not loader.is_alive()
    assert set(after) <= {"503", "connection"}, after
    assert set(before) <= {"right", "429", "503", "connection"}, before  # 429: a busy host
    assert before["right"] >= num_admitted
    assert before.total() + after.total() == 300
