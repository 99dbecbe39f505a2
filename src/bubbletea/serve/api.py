"""HTTP: OpenAI's paths over a `Service`. Reads bodies within bounds of size and time, writes JSON or event streams.

Errors have OpenAI's format, 429 and 503 with Retry-After; a request ends when its client disconnects. Knows HTTP; not
tokens, not bubbles.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from atlas import __version__
from bubbletea.handoff.sampling import Sampling
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.errors import ApiError, of_validation
from bubbletea.serve.schema import ChatRequest, CompletionRequest, openapi
from bubbletea.serve.service import Delta, Service, TextRequest, chat_prompt

log = logging.getLogger("bubbletea.requests")
"""One line per request, at level INFO."""
MAX_BODY_BYTES = 4 << 20
"""Of a request."""
BODY_S = 10.0
"""Time limit of a body."""
AS_GIVEN = (
    *("temperature", "top_p", "min_p", "seed", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of a request that `Sampling` has too, with the same meaning."""
FAILURE = ApiError(500, "the service failed to answer; see its log", code="internal_error")
ModelT = TypeVar("ModelT", bound=BaseModel)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """`app` is the ASGI application."""

    def __init__(self, service: Service, keys: ApiKeys) -> None:
        self.service, self.keys = service, keys
        self._openapi = openapi(__version__)
        routes = [
            Route("/v1/completions", self._answering_errors(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._answering_errors(self.chat), methods=["POST"]),
            Route("/v1/models", self._answering_errors(self.models), methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/openapi.json", self.document, methods=["GET"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        self.app.router.redirect_slashes = False  # a redirect would use the Host header of the client

    # ---- paths -------------------------------------------------------------------------------------------------
    async def completions(self, request: Request) -> Response:
        tenant = self._tenant(request)
        body = await self._body(request, CompletionRequest)
        return await self._respond(request, self._asked(body, tenant, body.prompt), body, Completion)

    async def chat(self, request: Request) -> Response:
        tenant = self._tenant(request)
        body = await self._body(request, ChatRequest)
        self._require_model(body.model)
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        prompt = chat_prompt(self.service.text, messages, add_generation=body.add_generation_prompt is not False)
        return await self._respond(request, self._asked(body, tenant, prompt), body, Chat)

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        config = self.service.served.config
        one = {
            "id": self.service.name,
            "object": "model",
            "created": 0,
            "owned_by": "bubbletea",
            "max_model_len": config.max_length,
        }
        return JSONResponse({"object": "list", "data": [one]})

    async def health(self, request: Request) -> Response:
        lanes = self.service.dispatcher.planner.num_lanes
        state = "draining" if self.service.draining else "ok" if lanes else "no workers"
        headers = {} if state == "ok" else {"Retry-After": "1"}
        found: dict[str, Any] = {"status": state, "lanes": lanes}
        limit = self.service.dispatcher.limit
        if limit is not None:
            found["overcommitted"] = limit.overcommitted
        return JSONResponse(found, 200 if state == "ok" else 503, headers)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def document(self, request: Request) -> Response:
        return JSONResponse(self._openapi)

    # ---- reading -----------------------------------------------------------------------------------------------
    def _tenant(self, request: Request) -> str:
        tenant = self.keys.tenant(request.headers.get("authorization"))
        if tenant is None:
            raise ApiError(401, "missing or unknown API key: send it as Authorization: Bearer KEY", code="invalid_key")
        return tenant

    async def _body(self, request: Request, model: type[ModelT]) -> ModelT:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be application/json")
        raw = await self._read(request)
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            raise of_validation(error, model) from None

    async def _read(self, request: Request) -> bytes:
        too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        return bytes(body)

    def _require_model(self, model: str) -> None:
        if model != self.service.name:
            message = f"no model {model[:80]!r} here: this service has {self.service.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _asked(self, body: CompletionRequest | ChatRequest, tenant: str, prompt: str | Sequence[int]) -> TextRequest:
        self._require_model(body.model)
        if body.hands_off and (body.asked_new != 1 or body.stream):
            message = "a hand-off (do_remote_decode: true) needs max_tokens: 1 and no stream"
            raise ApiError(400, message, param="max_tokens")
        is_chat = isinstance(body, ChatRequest)
        return TextRequest(
            tenant=tenant,
            prompt=prompt,
            sampling=self._sampling(body),
            stops=body.stops,
            shows_stop=bool(body.include_stop_str_in_output),
            kind="offline" if body.is_offline else "online",
            deadline_s=body.deadline_s,
            hands_off=body.hands_off,
            special=not is_chat if body.add_special_tokens is None else body.add_special_tokens,
            truncate=body.truncate_prompt_tokens,
            keeps_start=body.truncation_side == "right",
            cache_salt=body.cache_salt or "",
        )

    def _sampling(self, body: CompletionRequest | ChatRequest) -> Sampling:
        text, vocabulary = self.service.text, self.service.served.config.vocabulary
        named = {
            "stop_token_ids": body.stop_token_ids or (),
            "logit_bias": [int(token) for token in body.logit_bias or ()],
            "allowed_token_ids": body.allowed_token_ids or (),
        }
        for name, tokens in named.items():
            if max(tokens, default=0) >= vocabulary:
                raise ApiError(
                    400, f"{name}: token {max(tokens)} is not in the model's vocabulary of {vocabulary}", param=name
                )
        ends = frozenset[int]() if body.ignore_eos else text.ends
        given = {name: value for name in AS_GIVEN if (value := getattr(body, name)) is not None}
        return Sampling(
            max_tokens=body.num_new,
            stop_tokens=ends | set(named["stop_token_ids"]),
            top_k=max(0, body.top_k or 0),
            bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            allowed=None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids),
            bad=text.spellings(body.bad_words or ()),
            **given,
        )

    # ---- writing -----------------------------------------------------------------------------------------------
    async def _respond(
        self, request: Request, asked: TextRequest, body: CompletionRequest | ChatRequest, kind: type[Completion]
    ) -> Response:
        form = kind(self.service.name, body.request_id)
        user, new = body.user or body.safety_identifier, asked.sampling.max_tokens
        log.info("%s: tenant %r, user %r, %s, up to %d new tokens", form.id, asked.tenant, user, asked.kind, new)
        deltas = self.service.answer(asked)
        if not body.stream:
            return JSONResponse(await _unless_gone(request, _collected(deltas, form)))
        first = await _unless_gone(request, anext(deltas))
        events = _events(first, deltas, form, body)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def _answering_errors(self, handler: Handler) -> Handler:
        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                return error.response()
            except ClientDisconnect:
                return Response(status_code=400)  # the client has disconnected
            except Exception:
                log.exception("a request failed")
                return FAILURE.response()

        return answered


class Completion:
    """The responses of /v1/completions."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, request_id: str | None = None) -> None:
        self.id = f"{self.prefix}-{request_id or secrets.token_hex(12)}"
        self._common = {"id": self.id, "created": int(time.time()), "model": model}

    def answer(self, text: str, last: Delta) -> dict[str, Any]:
        found = {
            **self._common,
            "object": self.whole,
            "choices": [self.choice(text, last.finish)],
            "usage": usage(last),
        }
        return found if last.handed_off is None else {**found, "kv_transfer_params": last.handed_off}

    def event(self, delta: Delta, *, first: bool, counts: bool) -> dict[str, Any]:
        choice = self.piece(delta.text, delta.finish, first=first)
        found = {**self._common, "object": self.part, "choices": [choice]}
        return {**found, "usage": usage(delta)} if counts else found

    def summary(self, last: Delta) -> dict[str, Any]:
        return {**self._common, "object": self.part, "choices": [], "usage": usage(last)}

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}

    def piece(self, text: str, finish: str | None, *, first: bool) -> dict[str, Any]:
        return self.choice(text, finish)


class Chat(Completion):
    """The responses of /v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}

    def piece(self, text: str, finish: str | None, *, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def usage(last: Delta) -> dict[str, Any]:
    return {
        "prompt_tokens": last.num_prompt,
        "completion_tokens": last.num_new,
        "total_tokens": last.num_prompt + last.num_new,
        "prompt_tokens_details": {"cached_tokens": last.num_cached},
    }


async def _collected(deltas: AsyncIterator[Delta], form: Completion) -> dict[str, Any]:
    texts, last = list[str](), None
    async for delta in deltas:
        texts.append(delta.text)
        last = delta
    assert last is not None, "an answer has at least one token"
    return form.answer("".join(texts), last)


async def _events(
    first: Delta, deltas: AsyncIterator[Delta], form: Completion, body: CompletionRequest | ChatRequest
) -> AsyncIterator[str]:
    last, counts = first, body.with_running_usage
    yield _event(form.event(first, first=True, counts=counts))
    try:
        async for delta in deltas:
            last = delta
            yield _event(form.event(delta, first=False, counts=counts))
    except Exception:  # the status is sent already: the stream has an error event and no [DONE]
        log.exception("an answer was interrupted")
        yield _event(FAILURE.body)
        return
    if body.with_usage:
        yield _event(form.summary(last))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed here"}
    response = ApiError(error.status_code, said.get(error.status_code, error.detail)).response()
    response.headers.update(error.headers or {})
    return response
