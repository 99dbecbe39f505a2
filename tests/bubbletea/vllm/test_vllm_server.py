"""A stock vLLM server on the CPU decodes what our runtime prefilled: the same tokens, really from what was handed over;
and whatever is wrong with a hand-off, the right tokens all the same.

Slow: two servers are started, a minute or two each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import TINY as TINY_SERVICE
from serving import serving
from vllm_lab import (
    BLOCK,
    PYTHON_VARIABLE,
    ROUTER_VARIABLE,
    TOKEN,
    Fault,
    Prefiller,
    VllmServer,
    closed_port,
    led_to,
    make_model,
    make_prompts,
    stock_router,
    transfer_config,
    vllm_server,
    within,
)

from bubbletea.prefill.shard import Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no Python with vllm in it (docs/vllm.md)"
    ),
]
LENGTHS = [129, 130, 200, 255, 256, 257, 300, 383, 384, 385, 400, 511, 512, 513, 600, 700, 777, 896, 950, 1000]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(LENGTHS)


@pytest.fixture(scope="module")
def plain(folder: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM says without a connector."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with vllm_server(os.environ[PYTHON_VARIABLE], folder, log) as server:
        return [server.complete(prompt, NUM_TOKENS, f"plain {i}") for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def prefiller(folder: Path) -> Iterator[Prefiller]:
    with Prefiller(folder) as prefiller:
        yield prefiller


@pytest.fixture(scope="module")
def server(folder: Path, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """With the connector; after `plain`, whose server has ended: there is room for one at a time."""
    work = tmp_path_factory.mktemp("connected")
    (work / "token").write_text(TOKEN)
    options = ["--kv-transfer-config", transfer_config(work / "token", timeout_s=8.0)]
    with vllm_server(os.environ[PYTHON_VARIABLE], folder, work / "log", *options) as server:
        yield server


def test_twenty_of_twenty_prompts_are_decoded_alike(
    server: VllmServer, prefiller: Prefiller, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    before = server.metrics()
    handed = [
        server.complete(prompt, NUM_TOKENS, f"handed {i}", prefiller.prefill(prompt, f"handed-{i}"))
        for i, prompt in enumerate(prompts)
    ]
    assert handed == plain
    assert handed == [prefiller.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert min(len(set(tokens)) for tokens in handed) > NUM_TOKENS // 3, "tokens too dull to tell right from wrong"
    injected = sum(length // BLOCK * BLOCK for length in LENGTHS)
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["bubbletea:handoff_tokens_total"] == injected
    assert grown["bubbletea:handoff_loads_total"] == len(prompts)
    assert grown["bubbletea:handoff_failures_total"] == 0
    assert grown["vllm:external_prefix_cache_hits_total"] == injected
    assert sum(server.num_answered for server in prefiller.kv_servers) == len(prompts)
    assert within(5.0, lambda: not any(map(len, prefiller.kept))), "every hand-off is released"


def test_corrupted_keys_and_values_change_the_output(
    server: VllmServer, prefiller: Prefiller, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    for i in (0, 6, 19):
        params = prefiller.prefill(prompts[i], f"spoilt-{i}")
        prefiller.spoil(f"spoilt-{i}")
        assert server.complete(prompts[i], NUM_TOKENS, f"spoilt {i}", params) != plain[i]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("truncated", "closed the connection"),
        ("digest", "damaged"),
        ("shape", "this cache takes"),
        ("silent", "timed out"),
    ],
)
def test_failed_loads_are_recomputed(
    server: VllmServer, prefiller: Prefiller, prompts: list[list[int]], plain: list[list[int]], fault: Fault, said: str
) -> None:
    failures = server.metrics().get("bubbletea:handoff_failures_total", 0.0)
    params = prefiller.prefill(prompts[6], fault)
    prefiller.set_fault(fault)
    try:
        assert server.complete(prompts[6], NUM_TOKENS, fault, params) == plain[6]
    finally:
        prefiller.set_fault("")
    assert server.metrics()["bubbletea:handoff_failures_total"] == failures + 1
    assert said in server.log.rpartition("are recomputed: ")[2]


def test_a_missing_service_does_not_fail_the_request(
    server: VllmServer, prefiller: Prefiller, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    params = led_to(prefiller.prefill(prompts[7], "unreachable"), closed_port(), prompts[7])
    assert server.complete(prompts[7], NUM_TOKENS, "unreachable", params) == plain[7]
    assert "Connection refused" in server.log.rpartition("are recomputed: ")[2]


def test_a_hand_off_of_another_prompt_is_not_fetched(
    server: VllmServer, prefiller: Prefiller, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    loads = server.metrics()["bubbletea:handoff_loads_total"]
    of_another = prefiller.prefill(prompts[8], "of another")
    assert server.complete(prompts[9], NUM_TOKENS, "of another", of_another) == plain[9]
    forged = prefiller.prefill(prompts[9], "forged") | {"remote_num_tokens": 384}
    assert server.complete(prompts[9], NUM_TOKENS, "forged", forged) == plain[9]
    foreign = led_to(prefiller.prefill(prompts[9], "foreign") | {"remote_model_id": "0" * 24}, 1, prompts[9])
    assert server.complete(prompts[9], NUM_TOKENS, "foreign", foreign) == plain[9]
    assert server.metrics()["bubbletea:handoff_loads_total"] == loads
    for said in ("are not the prompt's", "signature of kv_transfer_params is wrong", "serve the same on both"):
        assert said in server.log


def test_a_prefix_that_vllm_holds_already_is_not_fetched_again(
    server: VllmServer, prefiller: Prefiller, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """The first four blocks are vLLM's own by the second request; only the rest travels."""
    long = prompts[19]
    server.complete(long[: 4 * BLOCK + 1], 1, "shared")
    before = server.metrics()["bubbletea:handoff_tokens_total"]
    assert server.complete(long, NUM_TOKENS, "shared", prefiller.prefill(long, "shared")) == plain[19]
    assert server.metrics()["bubbletea:handoff_tokens_total"] - before == (1000 // BLOCK - 4) * BLOCK


@pytest.mark.skipif(ROUTER_VARIABLE not in os.environ, reason=f"{ROUTER_VARIABLE} names no vllm-router (docs/vllm.md)")
def test_a_stock_router_before_the_service_and_vllm(
    server: VllmServer, folder: Path, prompts: list[list[int]], plain: list[list[int]], tmp_path: Path
) -> None:
    """As an operator starts it: the prompts of the table, tokens equal to those of vLLM alone."""
    settings = replace(TINY_SERVICE, served=Served.of_folder(folder), arena_bytes=64 << 20, workspace_bytes=256 << 20)
    loads = server.metrics()["bubbletea:handoff_loads_total"]
    with (
        serving(settings, token=TOKEN) as service,
        stock_router(service.url, f"http://127.0.0.1:{server.port}", tmp_path / "router.log") as routed,
    ):
        handed = [routed.complete(prompt, NUM_TOKENS, f"stock {i}") for i, prompt in enumerate(prompts)]
        assert handed == plain
        assert within(5.0, lambda: len(service.parts.dispatcher.store) == 0), "every hand-off is released"
    assert server.metrics()["bubbletea:handoff_loads_total"] == loads + len(prompts)


def test_a_router_passes_a_prompt_from_the_service_to_vllm(
    server: VllmServer, folder: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """The whole way: two workers prefill in chunks in their waits, the parameters go through the router unread."""
    settings = replace(TINY_SERVICE, served=Served.of_folder(folder), arena_bytes=64 << 20, workspace_bytes=256 << 20)
    loads = server.metrics()["bubbletea:handoff_loads_total"]
    with serving(settings, token=TOKEN) as service:
        for i in (1, 6, 19):
            wanted = {"model": "tiny", "prompt": prompts[i], "max_tokens": 1, "temperature": 0}
            wanted["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
            answer = httpx.post(f"{service.url}/v1/completions", json=wanted, timeout=60.0).raise_for_status().json()
            assert server.complete(prompts[i], NUM_TOKENS, f"routed {i}", answer["kv_transfer_params"]) == plain[i]
        assert within(5.0, lambda: len(service.parts.dispatcher.store) == 0), "every hand-off is released"
    assert server.metrics()["bubbletea:handoff_loads_total"] == loads + 3
