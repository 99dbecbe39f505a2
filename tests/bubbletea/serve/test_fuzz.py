"""A schema fuzzer over the OpenAPI document: whatever it sends, no 5xx, no hang, answers as documented."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import Serving, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with serving() as found:
        yield found


@pytest.mark.parametrize("path", PATHS)
def test_no_request_that_a_fuzzer_finds_is_a_server_error(service: Serving, path: str) -> None:
    fuzz(service, path, 25)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_no_request_of_many_is_a_server_error(service: Serving, path: str) -> None:
    fuzz(service, path, 500)


def fuzz(service: Serving, path: str, num_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    operation = schema[path]["POST" if "completions" in path else "GET"]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    seen: set[int] = set()

    @hypothesis.settings(
        max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(case=hypothesis.strategies.one_of(*(operation.as_strategy(generation_mode=m) for m in modes)))
    def check(case: schemathesis.Case) -> None:
        body = case.body
        if isinstance(body, dict):
            # The name of the model is known to its users; with a made-up one every request would end at 404.
            body = {**body, **({"model": "tiny"} if isinstance(body.get("model"), str) else {})}
            for name in ("max_tokens", "max_completion_tokens"):  # the tests need no long answers
                if isinstance(body.get(name), int) and body[name] > 8:
                    body[name] = 8
            case.body = body
        response = case.call(timeout=120)
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    check()
    assert httpx.get(f"{service.url}/health").json()["status"] == "ok"
    assert 200 in seen, f"only {seen}: the fuzzer never got through"
