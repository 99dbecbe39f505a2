"""The service as its clients see it: OpenAI's API, its errors, streams, keys, hand-off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import httpx2 as httpx
import openai
import pytest
from prefill_samples import greedy_alone, whole
from serving import PATIENCE_S, TINY, Serving, post_patiently, serving

from atlas.errors import WorkerError
from bubbletea.admit.aims import Aims
from bubbletea.handoff.fetch import EngineIdentity, Fetcher
from bubbletea.handoff.remote_parts import RemotePart, Ticket
from bubbletea.kv_blocks import KvBlock
from bubbletea.serve import http as http_module
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.metrics import ServiceMetrics

KEYS = {"red": "red-key", "blue": "blue-key"}
ASK = {"model": "tiny", "prompt": "Tell me", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
IN_TIME_S = 2.0
"""A request that comes back at most this much later than it was told to is admitted (`admission.GRACE_NS`)."""


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    digests = {name: hashlib.sha256(key.encode()).digest() for name, key in KEYS.items()}
    with serving(keys=ApiKeys(digests, dict.fromkeys(KEYS, 1.0))) as found:
        yield found


def post(
    service: Serving, body: Any, path: str = "/v1/completions", key: str = "red-key", **more: Any
) -> httpx.Response:
    options = {"json": body} if not isinstance(body, bytes) else {"content": body}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **more}
    return post_patiently(service.url + path, headers=headers, **options)


def within(holds: Callable[[], bool]) -> bool:
    """Whether it becomes true."""
    until = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def client(service: Serving, key: str = "red-key") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=60)


def is_openai_error(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return isinstance(error["message"], str) and isinstance(error["type"], str) and {"param", "code"} <= error.keys()


# ---- answers -----------------------------------------------------------------------------------------------------
def test_greedy_answers_equal_those_of_the_whole_model(service: Serving) -> None:
    decoder = whole(TINY.served)
    for length in (1, 7, 300, 700):
        prompt = [(7 * i + length) % 256 for i in range(length)]
        expected = service.parts.service.text.decode(greedy_alone(decoder, prompt, 6))
        answer = post(service, ASK | {"prompt": prompt, "max_tokens": 6}).json()
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["choices"][0]["finish_reason"] == "length"


def test_the_openai_client_gets_the_same_streamed_and_whole(service: Serving) -> None:
    talk: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Grüße"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    chat = client(service).chat.completions
    answer = chat.create(**talk).choices[0].message.content
    chunks = list(chat.create(**talk, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason in ("length", "stop")


def test_a_stream_counts_tokens_in_every_chunk_if_asked(service: Serving) -> None:
    talk: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "stream": True}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client(service).chat.completions.create(**talk, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-2:] == [counts[-1]] * 2


def test_a_seed_repeats_and_a_temperature_varies(service: Serving) -> None:
    ask = ASK | {"temperature": 1.0, "max_tokens": 24}
    said = [post(service, ask | {"seed": seed}).json()["choices"][0]["text"] for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_a_stop_string_ends_the_answer_before_it(service: Serving) -> None:
    whole_text = post(service, ASK | {"max_tokens": 12}).json()["choices"][0]["text"]
    stop = whole_text[4:6]
    answer = post(service, ASK | {"max_tokens": 12, "stop": stop}).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == whole_text[: whole_text.index(stop)]


def test_a_prefix_is_found_again_by_its_tenant_only(service: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    service.use_every_hit(monkeypatch)
    ask = ASK | {"prompt": [9] * 1200}
    found = [
        post(service, ask, key=key).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for key in ("red-key", "red-key", "blue-key")
    ]
    assert found == [0, 1024, 0]


def test_models_health_and_metrics(service: Serving) -> None:
    assert client(service).models.list().data[0].id == "tiny"
    assert httpx.get(f"{service.url}/health", timeout=60).json()["status"] == "ok"
    text = httpx.get(f"{service.url}/metrics", timeout=60).text
    for name in (
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:request_prefill_time_seconds_sum",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits_total",
        "bubbletea:fill_ratio",
        "bubbletea:training_slowdown_ratio",
        "bubbletea:bubbles_total",
    ):
        assert name in text


def test_counters_exist_before_their_first_event(service: Serving) -> None:
    text = ServiceMetrics("m").text().decode()
    for reason in ("deadline", "share", "memory", "no-lane"):
        assert f'bubbletea:admission_rejections_total{{model_name="m",reason="{reason}"}} 0.0' in text
    for finish in ("stop", "length"):
        assert f'vllm:request_success_total{{finished_reason="{finish}",model_name="m"}} 0.0' in text
    for name in ("vllm:generation_tokens_total", "bubbletea:requests_handed_back_total", "bubbletea:fill_ratio"):
        assert f'{name}{{model_name="m"}} 0.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 0.0' in text
    served = httpx.get(f"{service.url}/metrics", timeout=60).text
    for worker in ("w0", "w1"):
        assert f'bubbletea:slices_late_total{{model_name="tiny",worker="{worker}"}}' in served


def test_no_response_repeats_the_host_header(service: Serving) -> None:
    for path in ("/v1/models/", "/v1/completions/", "/health/", "/nowhere"):
        headers = {"Host": "elsewhere.example", "Authorization": "Bearer red-key"}
        response = httpx.get(service.url + path, headers=headers, follow_redirects=False, timeout=60)
        assert response.status_code == 404
        assert is_openai_error(response)
        assert "elsewhere.example" not in response.text + str(response.headers)


def release(service: Serving, ticket: Ticket | None) -> None:
    assert ticket is not None
    with Fetcher(ticket.host, ticket.port, EngineIdentity(service.parts.token)) as fetcher:
        fetcher.release(ticket)
    assert within(lambda: service.parts.dispatcher.store.find(ticket.id) is None)


# ---- hand-off ----------------------------------------------------------------------------------------------------
def test_a_prefill_only_response_has_the_address_of_keys_and_values(service: Serving) -> None:
    ask = ASK | {"prompt": list(range(200)), "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = post(service, ask).json()
    assert answer["usage"]["completion_tokens"] == 1
    ticket = Ticket.of(answer["kv_transfer_params"])
    assert ticket is not None
    assert [(part.first, part.stop) for part in ticket.parts] == [(0, 2), (2, 4)], "two workers with two layers each"
    caller, blocks = EngineIdentity(service.parts.token), list[KvBlock]()
    for part in ticket.parts:
        with Fetcher(part.host, part.port, caller) as fetcher:
            blocks += fetcher.fetch(ticket)
    assert {(b.layer, token) for b in blocks for token in range(b.start, b.stop)} == set(product(range(4), range(200)))
    release(service, ticket)

    def is_gone(part: RemotePart) -> bool:
        with Fetcher(part.host, part.port, caller) as fetcher:
            try:
                return not list(fetcher.fetch(ticket))
            except WorkerError as error:
                return "nothing under this ticket" in str(error)

    assert within(lambda: all(map(is_gone, ticket.parts))), "the release passes through the service"


def test_keys_and_values_of_a_hand_off_do_not_pass_through_the_service(service: Serving) -> None:
    ask = ASK | {"prompt": [7] * 1000, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    connections, served = service.parts.connections, service.parts.settings.served
    before = connections.num_bytes
    answer = post(service, ask).json()
    used = connections.num_bytes - before
    release(service, Ticket.of(answer["kv_transfer_params"]))
    assert used < 1000 * 1024, "the bar: 1 KiB a token"
    assert used < 0.1 * 1000 * served.config.num_layers * served.kv_bytes_per_layer_token


def test_a_hand_off_that_its_workers_cannot_offer_is_refused(service: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    member = next(iter(service.parts.connections.members.values()))
    monkeypatch.setattr(member, "parts", None)
    ask = ASK | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    refused = post(service, ask)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_handoff")
    assert "--certs" in refused.json()["error"]["message"]


def test_a_prefill_that_is_handed_off_has_one_token(service: Serving) -> None:
    ask = ASK | {"prompt": list(range(200)), "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    refused = post(service, ask | {"max_tokens": 2})
    assert refused.status_code == 400
    assert "max_tokens: 1" in refused.json()["error"]["message"]


def test_a_prefix_that_is_slow_to_move_is_computed_again(service: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ASK | {"prompt": [3] * 1100, "max_tokens": 1}
    times = service.parts.dispatcher.prefixes.times

    def cached() -> int:
        return int(post(service, ask).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    monkeypatch.setattr(times, "_ns_per_token", 0.0)
    assert [cached(), cached()] == [0, 1024]
    assert within(lambda: times._ns_per_token > 0), "the workers have reported how long it took"
    monkeypatch.setattr(times, "_ns_per_token", 1e12)
    assert cached() == 0


# ---- bad input ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (ASK | {"model": "other"}, 404),
        (ASK | {"prompt": "x" * 9000}, 400),
        (ASK | {"prompt": [1] * 9000}, 400),
        (ASK | {"prompt": [999]}, 400),
        (ASK | {"prompt": []}, 400),
        (ASK | {"prompt": 5}, 400),
        (ASK | {"prompt": ["a", 1]}, 400),
        (ASK | {"max_tokens": "4"}, 400),
        (ASK | {"max_tokens": 0}, 400),
        (ASK | {"max_tokens": 8192}, 400),
        (ASK | {"temperature": -1}, 400),
        (ASK | {"n": 2}, 400),
        (ASK | {"logprobs": 3}, 400),
        (ASK | {"stop": ["a"] * 5}, 400),
        (ASK | {"stream": "yes"}, 400),
        ({}, 400),
        ([], 400),
        (b"", 400),
        (b"{", 400),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400),
        (b"[" * 100_000, 400),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_have_openais_format(service: Serving, body: Any, status: int) -> None:
    response = post(service, body)
    assert response.status_code == status, response.text
    assert is_openai_error(response)


def test_an_oversized_body_is_not_read(service: Serving) -> None:
    response = post(service, json.dumps(ASK | {"prompt": "x" * (10 << 20)}).encode())
    assert response.status_code == 413
    assert is_openai_error(response)


def test_other_content_paths_and_methods(service: Serving) -> None:
    assert post(service, b"prompt=1", **{"Content-Type": "text/plain"}).status_code == 415
    for response in (
        httpx.get(f"{service.url}/v1/completions", timeout=60),
        httpx.get(f"{service.url}/nowhere", timeout=60),
    ):
        assert response.status_code in (404, 405)
        assert is_openai_error(response)


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer nope", "Basic red-key", "red-key", "Bearer red-key2"])
def test_requests_without_a_valid_key_are_refused(service: Serving, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    response = httpx.post(f"{service.url}/v1/completions", json=ASK, headers=headers, timeout=60)
    assert response.status_code == 401
    assert is_openai_error(response)
    assert httpx.get(f"{service.url}/v1/models", headers=headers, timeout=60).status_code == 401


def test_slow_headers_close_the_connection(service: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "HEADERS_S", 0.3)
    with socket.create_connection(("127.0.0.1", service.server.port), timeout=60) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        assert sock.recv(100) == b"", "long before this side would"


def test_a_slow_body_gets_408(service: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bubbletea.serve.api.BODY_S", 0.3)
    with socket.create_connection(("127.0.0.1", service.server.port), timeout=60) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer red-key\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert b" 408 " in sock.recv(1000)


def test_an_internal_error_has_openais_format(service: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("no token today")

    monkeypatch.setattr("bubbletea.handoff.decode.choose", broken)
    response = post(service, ASK)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "no token today" not in response.text
    assert post(service, ASK | {"stream": True}).status_code == 500
    tokens = iter((65, 66))
    monkeypatch.setattr("bubbletea.handoff.decode.choose", lambda *_: next(tokens))
    lines = post(service, ASK | {"stream": True}).text.split("\n\n")
    assert '"server_error"' in lines[-2]
    assert "[DONE]" not in lines[-2]


# ---- refusals ----------------------------------------------------------------------------------------------------
def test_a_refusal_says_when_it_would_fit(service: Serving) -> None:
    refused = post(service, ASK | {"prompt": "x" * 8000, "deadline_s": 0.0001})
    assert refused.status_code == 429
    assert is_openai_error(refused)
    retry_s = int(refused.headers["retry-after-ms"]) / 1e3
    assert 0 < retry_s < 30
    assert int(refused.headers["Retry-After"]) >= retry_s


def test_a_refused_request_that_comes_back_in_time_is_admitted(service: Serving) -> None:
    hurried = ASK | {"prompt": "x" * 7000, "deadline_s": 0.0001}
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        refused = post(service, hurried)
        assert refused.status_code == 429
        told_s, retry_s = time.monotonic(), int(refused.headers["retry-after-ms"]) / 1e3
        time.sleep(retry_s)
        again, took_s = post(service, hurried), time.monotonic() - told_s
        if again.status_code == 200:
            return
        assert again.status_code == 429
        assert took_s > retry_s + IN_TIME_S, "it was in time, also if this host was busy"
    pytest.fail("this host was too busy to come back in time")


def test_postponed_requests_are_answered_late(service: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.parts.dispatcher.planner.postponed, "_aims", Aims(late=0.9, late_tokens=2000))
    hurried = ASK | {"prompt": "x" * 8000, "deadline_s": 0.0001}
    assert post(service, hurried).status_code == 200
    assert post(service, hurried | {"prompt": "x" * 1900}).status_code == 429


def test_a_memory_refusal_has_the_time_when_memory_is_free(service: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    store = service.parts.dispatcher.store
    monkeypatch.setattr(store, "budget_bytes", store.used_bytes + store.bytes_of(100))
    kept = post(service, ASK | {"prompt": "x" * 80, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    ticket = Ticket.of(kept.json()["kv_transfer_params"])
    assert ticket is not None
    refused = post(service, ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "memory")
    assert 50 < int(refused.headers["retry-after-ms"]) / 1e3 < 60, "kept for a minute, where nobody fetches it"
    release(service, ticket)
    assert post(service, ASK).status_code == 200
    too_long = post(service, ASK | {"prompt": "x" * 200})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_tenant_cannot_use_the_memory_reserved_for_another(service: Serving) -> None:
    """Short prompts with long answers reserve memory long before they use it."""
    store = service.parts.dispatcher.store
    long = ASK | {"max_tokens": 8000, "stream": True}
    stack, refused = contextlib.ExitStack(), None
    with stack, httpx.Client(base_url=service.url, timeout=60) as client:

        def ask(key: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return stack.enter_context(client.stream("POST", "/v1/completions", json=long, headers=headers))

        for _ in range(2 + store.budget_bytes // store.bytes_of(8000)):
            response = ask("red-key")
            if response.status_code != 200:
                refused = response
                break
        assert refused is not None, "one tenant has got all of the memory"
        error = json.loads(refused.read())["error"]
        assert (refused.status_code, error["code"]) == (429, "memory")
        assert "by this tenant" in error["message"]
        assert float(refused.headers["retry-after-ms"]) > 0
        assert ask("blue-key").status_code == 200, "the other gets in at once"
    wait_until_idle(service)


def wait_until_idle(service: Serving) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while service.parts.service.num_active or service.parts.dispatcher.store.used_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_request_ends_when_its_client_disconnects(service: Serving) -> None:
    ask = ASK | {"max_tokens": 7000, "stream": True}
    headers = {"Authorization": "Bearer red-key"}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=ask, headers=headers, timeout=60) as response:
        lines = response.iter_lines()  # forgotten, it would hang up
        next(lines)
        assert gauge(service, "vllm:num_requests_running", 1.0), "it is being decoded"
    wait_until_idle(service)
    assert gauge(service, "vllm:num_requests_running", 0.0)


def gauge(service: Serving, name: str, value: float) -> bool:
    """Whether it becomes that."""

    def is_it() -> bool:
        text = httpx.get(f"{service.url}/metrics", timeout=60).text
        return any(line.startswith(name) and float(line.split()[-1]) == value for line in text.splitlines())

    return within(is_it)


def test_offline_requests_are_answered_too(service: Serving) -> None:
    answer = post(service, ASK | {"priority": "offline"})
    assert answer.status_code == 200
