"""Every field of OpenAI's and of vLLM's requests has an effect or is refused by its name; nothing is ignored.

OpenAI's fields come from the installed client's types; vLLM's (0.6 to 0.15: `CompletionRequest`,
`ChatCompletionRequest`) are written down here, since vLLM is not installed where the tests run.
"""

from __future__ import annotations

import logging
import typing
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from serving import Serving, post_patiently, serving

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
OPENAI = {
    "completions": completion_create_params.CompletionCreateParamsStreaming,
    "chat": chat_create_params.CompletionCreateParamsStreaming,
}
VLLM = {
    "completions": """
        model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user prompt_embeds best_of
        """,
    "chat": """
        messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
        presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
        reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user best_of echo
        add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs return_prompt_text return_mm_kwargs session_id ec_transfer_params
        """,
}
VLLM_BOTH = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
    add_special_tokens response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern structural_tag priority request_id logits_processors
    return_tokens_as_token_ids return_token_ids return_token_offsets routed_experts_prompt_start cache_salt
    kv_transfer_params vllm_xargs repetition_detection stream_interval
    """
OURS = "deadline_s max_completion_tokens safety_identifier"
ASK: dict[str, dict[str, Any]] = {
    "completions": {"model": "tiny", "prompt": "Tell me"},
    "chat": {"model": "tiny", "messages": [{"role": "user", "content": "Tell me"}]},
}
LETTERS = {"allowed_token_ids": list(range(65, 91)), "max_tokens": 12, "temperature": 0}
"""Greedy, and readable."""
RANDOM = {"allowed_token_ids": list(range(65, 91)), "max_tokens": 24, "temperature": 2.0, "seed": 1}
END = {"max_tokens": 8, "temperature": 0, "logit_bias": {"0": 100}}
"""Byte 0 ends an answer of the byte tokenizer."""
LONG = "x" * 1100

# Field: what every request of the test has, and two values of the field that must be answered differently.
EFFECTS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "temperature": ({**RANDOM}, 0, 2.0),
    "top_p": (RANDOM, None, 1e-6),
    "top_k": (RANDOM, -1, 1),
    "min_p": (RANDOM, 0.0, 1.0),
    "seed": (RANDOM, 1, 2),
    "presence_penalty": (LETTERS, 0.0, 2.0),
    "frequency_penalty": (LETTERS, 0.0, 2.0),
    "repetition_penalty": (LETTERS, 1.0, 50.0),
    "logit_bias": (LETTERS, {}, {"81": 100}),
    "allowed_token_ids": (LETTERS, None, [82, 83]),
    "bad_words": (LETTERS, [], [chr(letter) for letter in range(65, 90)]),
    "stop_token_ids": (LETTERS, [], list(range(65, 91))),
    "stop": ({**LETTERS, "allowed_token_ids": [65, 66, 67, 68]}, None, ["A", "B", "C", "D"]),
    "include_stop_str_in_output": ({**LETTERS, "stop_token_ids": list(range(65, 91))}, False, True),
    "ignore_eos": (END, False, True),
    "min_tokens": (END, 0, 3),
    "max_tokens": ({"temperature": 0}, 2, 3),
    "max_completion_tokens": ({"temperature": 0}, 2, 3),
    "stream": (LETTERS, False, True),
    "stream_options": ({**LETTERS, "stream": True}, None, {"include_usage": True}),
    "request_id": (LETTERS, None, "mine-1"),
    "user": (LETTERS, "ann", "bob"),
    "safety_identifier": (LETTERS, "ann", "bob"),
    "priority": (LETTERS, 0, 7),
    "deadline_s": ({**LETTERS, "prompt": LONG, "messages": [{"role": "user", "content": LONG}]}, 60, 1e-6),
    "kv_transfer_params": ({"max_tokens": 1, "temperature": 0}, None, {"do_remote_decode": True}),
    "truncate_prompt_tokens": (LETTERS, -1, 3),
    "truncation_side": ({**RANDOM, "truncate_prompt_tokens": 3}, "left", "right"),
    "add_special_tokens": (LETTERS, False, True),
    "add_generation_prompt": (LETTERS, True, False),
    "model": (LETTERS, "tiny", "other"),
    "prompt": (LETTERS, "A", "BB"),
    "messages": (LETTERS, [{"role": "user", "content": "A"}], [{"role": "system", "content": "BB"}]),
}
# Field: what asks for something that is not done here. `cache_salt` has a test of its own.
REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "mp3"},
    "best_of": 2,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "documents": [{"title": "a", "text": "b"}],
    "ec_transfer_params": {"a": 1},
    "echo": True,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "guided_choice": ["a"],
    "guided_decoding_backend": "outlines",
    "guided_grammar": "root ::= 'a'",
    "guided_json": {"type": "object"},
    "guided_regex": "a*",
    "guided_whitespace_pattern": " ",
    "include_reasoning": False,
    "length_penalty": 0.5,
    "logits_processors": ["a.b"],
    "logprob_token_ids": [1],
    "logprobs": {"completions": 2, "chat": True},
    "media_io_kwargs": {"a": {}},
    "metadata": {"a": "b"},
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_key": "a",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "prompt_embeds": "AAAA",
    "prompt_logprobs": 1,
    "reasoning_effort": "high",
    "repetition_detection": {"a": 1},
    "response_format": {"type": "json_object"},
    "return_mm_kwargs": False,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 5,
    "service_tier": "flex",
    "session_id": "a",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "store": True,
    "stream_interval": 4,
    "structural_tag": "{}",
    "structured_outputs": {"regex": "a*"},
    "suffix": "end",
    "thinking_token_budget": 5,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_logprobs": 3,
    "use_beam_search": True,
    "verbosity": "low",
    "vllm_xargs": {"a": 1},
    "watermarking": True,
    "web_search_options": {},
}
NEUTRAL = {
    "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "top_k": -1,
    "min_p": 0, "min_tokens": 0, "logit_bias": {}, "bad_words": [], "stop_token_ids": [], "length_penalty": 1.0,
    "use_beam_search": False, "echo": False, "response_format": {"type": "text"}, "priority": 0,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "vllm_xargs": {}, "kv_transfer_params": {"do_remote_decode": False, "remote_host": None}, "ignore_eos": False,
}  # fmt: skip
NEUTRAL_CHAT = {
    "tool_choice": "none", "tools": [], "functions": [], "parallel_tool_calls": True, "logprobs": False,
    "top_logprobs": 0, "modalities": ["text"], "service_tier": "auto", "store": False, "metadata": {},
    "include_reasoning": True, "add_generation_prompt": True, "chat_template_kwargs": {},
}  # fmt: skip

ROUTER = {
    "completions": {
        "stream": False, "echo": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
        "return_hidden_states": False,
    },
    "chat": {
        "stream": False, "logprobs": False, "no_stop_trim": False, "ignore_eos": False,
        "continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True,
        "stream_reasoning": True, "return_hidden_states": False, "include_reasoning": True,
    },
}  # fmt: skip
"""What vllm-router 0.1.16 adds to every request."""
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What it sends to a prefill engine."""


def fields(endpoint: str) -> set[str]:
    theirs = set(typing.get_type_hints(OPENAI[endpoint]))
    return theirs | set(VLLM[endpoint].split()) | set(VLLM_BOTH.split()) | set(OURS.split())


CASES = [(endpoint, name) for endpoint in PATHS for name in sorted(fields(endpoint))]


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with serving(busy=0.0) as found:
        yield found


def post(service: Serving, endpoint: str, body: dict[str, Any]) -> httpx.Response:
    wanted = {name: value for name, value in body.items() if name not in {"prompt", "messages"} - ASK[endpoint].keys()}
    return post_patiently(service.url + PATHS[endpoint], json=ASK[endpoint] | wanted)


def seen(response: httpx.Response, log: pytest.LogCaptureFixture) -> Any:
    """What a client can tell two answers apart by, the log of requests included, but not by time or chance."""
    told = [record.getMessage().partition(":")[2] for record in log.records if record.name == "bubbletea.requests"]
    log.clear()
    if response.headers["content-type"].startswith("text/event-stream"):
        return "stream", "usage" in response.text, told
    found = response.json()
    if "error" in found:
        return response.status_code, found["error"]["param"], told
    choice = found["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    usage = {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return text, choice["finish_reason"], usage, found["id"].endswith("mine-1"), "kv_transfer_params" in found, told


def with_special_tokens(service: Serving, patch: pytest.MonkeyPatch) -> None:
    """Bytes have none of their own."""
    plain = service.parts.service.text._encode
    patch.setattr(service.parts.service.text, "_encode", lambda text, special: [1] * special + plain(text, special))


@pytest.mark.parametrize(("endpoint", "name"), CASES)
def test_every_field_has_an_effect_or_is_refused_by_its_name(
    service: Serving, endpoint: str, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "bubbletea.requests")
    if name in REFUSED:
        value = REFUSED[name]
        response = post(service, endpoint, {name: value[endpoint] if name == "logprobs" else value})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == name
        assert name in response.json()["error"]["message"]
        return
    if name == "cache_salt":
        return  # below
    if name == "add_special_tokens":
        with_special_tokens(service, monkeypatch)
    base, one, other = EFFECTS[name]
    first, second = (seen(post(service, endpoint, {**base, name: value}), caplog) for value in (one, other))
    assert first != second


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_salt_keeps_prefixes_apart(service: Serving, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service.use_every_hit(monkeypatch)
    long = {"prompt": LONG, "messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    cached = [
        post(service, endpoint, {**long, "cache_salt": f"{endpoint} {salt}"}).json()["usage"]
        for salt in ("a", "a", "b")
    ]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached] == [0, 1024, 0]


@pytest.mark.parametrize("endpoint", PATHS)
def test_values_without_effect_are_accepted(service: Serving, endpoint: str) -> None:
    nulls = dict.fromkeys(fields(endpoint) - {"model", "prompt", "messages"})
    assert post(service, endpoint, {**nulls, "max_tokens": 1}).status_code == 200
    neutral = NEUTRAL | (NEUTRAL_CHAT if endpoint == "chat" else {})
    response = post(service, endpoint, {**neutral, "max_tokens": 1})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("endpoint", PATHS)
def test_requests_of_a_stock_router_are_answered(service: Serving, endpoint: str) -> None:
    response = post(service, endpoint, {**ROUTER[endpoint], "max_tokens": 1})
    assert response.status_code == 200, response.text
    response = post(service, endpoint, {**ROUTER[endpoint], "max_tokens": 1, "kv_transfer_params": PREFILL})
    assert response.json()["kv_transfer_params"]["do_remote_prefill"], response.text
    for name in ("no_stop_trim", "return_hidden_states"):
        assert post(service, endpoint, {name: True}).json()["error"]["param"] == name


@pytest.mark.parametrize("endpoint", PATHS)
def test_in_the_prefill_role_decoding_is_left_to_the_engine(service: Serving, endpoint: str) -> None:
    """A router sends the whole request to the prefill engine too."""
    of_decoding = {
        "n": 2, "logprobs": 3 if endpoint == "completions" else True, "min_tokens": 5, "max_completion_tokens": 100,
        "stream_options": {"include_usage": True}, "return_token_ids": True, "structured_outputs": {"choice": ["a"]},
        "response_format": {"type": "json_object"}, "kv_transfer_params": PREFILL, "max_tokens": 1,
    }  # fmt: skip
    response = post(service, endpoint, ROUTER[endpoint] | of_decoding)
    assert response.status_code == 200, response.text
    assert response.json()["kv_transfer_params"]["do_remote_prefill"]
    if endpoint == "chat":
        tools = [{"type": "function", "function": {"name": "f"}}]
        refused = post(service, endpoint, {"tools": tools, "max_tokens": 1, "kv_transfer_params": PREFILL})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "hint"),
    [
        ("completions", {"max_token": 4}, "max_token", "max_tokens"),
        ("completions", {"tempreature": 1}, "tempreature", "temperature"),
        ("completions", {"messages": []}, "messages", "messages: no such field. Leave it out"),
        ("completions", {"prompt": [1], "thinking": 1}, "thinking", "thinking: no such field. Leave it out"),
        ("chat", {"top-p": 0.5}, "top-p", "top_p"),
        ("chat", {"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", "usage"),
        ("chat", {"messages": [{"role": "user", "contnt": "a"}]}, "messages.0.content", ""),
        ("chat", {"messages": [{"role": "user", "content": "a", "nme": "a"}]}, "messages.0.nme", "name"),
        ("chat", {"messages": [{"role": "user", "content": "a", "name": "a"}]}, "messages.0.name", ""),
        ("chat", {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role", ""),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (
            "completions",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "include_usage",
        ),
        ("completions", {"logprobs": 3}, "logprobs", "decode with vLLM"),
        ("completions", {"suffix": "a"}, "suffix", "suffix: not supported here. Leave it out"),
        ("completions", {"stream": "yes"}, "stream", ""),
        ("completions", {"stop": ["a"] * 5}, "stop", "at most 4 items"),
        ("completions", {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "max_tokens"),
        ("completions", {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "max_tokens"),
        ("completions", {"logit_bias": {"256": 1}}, "logit_bias", "256"),
        ("completions", {"logit_bias": {"a": 1}}, "logit_bias", ""),
        ("completions", {"allowed_token_ids": [999]}, "allowed_token_ids", "999"),
        ("completions", {"stop_token_ids": [999]}, "stop_token_ids", "999"),
        ("completions", {"priority": -1}, "priority", "greater than or equal to 0"),
        ("completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
        ("completions", {"truncation_side": "left"}, "truncation_side", "truncate_prompt_tokens"),
        ("completions", {"deadline_s": 5, "priority": "offline"}, "deadline_s", "online"),
        (
            "completions",
            {"kv_transfer_params": {"do_remote_prefill": True}},
            "kv_transfer_params.do_remote_prefill",
            "",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_names_the_field_and_the_nearest_name(
    service: Serving, endpoint: str, body: dict[str, Any], param: str, hint: str
) -> None:
    whole = ASK[endpoint] | body
    error = httpx.post(service.url + PATHS[endpoint], json=whole, timeout=60)
    assert error.status_code == 400, error.text
    assert error.json()["error"]["param"] == param
    message = error.json()["error"]["message"]
    assert hint in message if not hint.endswith("Leave it out") else hint == message


def test_if_all_tokens_are_banned_one_is_still_chosen(service: Serving) -> None:
    both = {"allowed_token_ids": [65], "bad_words": ["A"], "max_tokens": 3, "temperature": 1.0}
    assert post(service, "completions", both).json()["choices"][0]["text"] == "AAA"
