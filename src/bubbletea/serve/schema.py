"""What a request may say, as OpenAI's API has it, and the OpenAPI document of it. Wrong types are refused, unknown
names ignored as vLLM does; what is known but not computed here is refused, never silently left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_NEW = 1 << 20
Text = Annotated[str, Field(max_length=8 << 20)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Loose(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Loose):
    include_usage: bool | None = None


class _Common(_Loose):
    model: Annotated[str, Field(max_length=256)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=1, description="One answer per request.")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=256)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=4)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    priority: Literal["online", "offline"] | None = Field(
        default=None, description="Offline requests wait for bubbles that online ones leave."
    )
    deadline_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None, description="The prefill must be delivered within this, or is refused at once."
    )
    kv_transfer_params: dict[str, Any] | None = Field(
        default=None, description="In the prefill role of a router: {do_remote_decode: true}, with max_tokens 1."
    )

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def hands_off(self) -> bool:
        return bool((self.kv_transfer_params or {}).get("do_remote_decode"))

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Common):
    prompt: Text | Annotated[list[Token], Field(min_length=1, max_length=1 << 20)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW)] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None

    @property
    def num_new(self) -> int:
        return self.max_tokens or 16


class TextPart(_Loose):
    type: Literal["text"]
    text: Text


class Message(_Loose):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_NEW)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: None = None

    @property
    def num_new(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 128

    @model_validator(mode="after")
    def _not_both(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same thing and differ")
        return self


# ---- the document ------------------------------------------------------------------------------------------------
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}}
"""Of a stream: a JSON object as text, and at the end [DONE]."""
RETRY = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 0}}}
STATUSES = {
    "400": "Not a proper request",
    "401": "No key, or a wrong one",
    "404": "No such model or path",
    "405": "Another method",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "No bubble fits in time: Retry-After says when one will",
    "503": "No worker is there, or the service drains: Retry-After says when to ask again",
}


def openapi(version: str) -> dict[str, Any]:
    """Of everything the service answers to."""
    models = {model.__name__: model for model in (CompletionRequest, ChatRequest)}
    schemas: dict[str, Any] = {"Error": ERROR}
    for name, model in models.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}

    def answers(ok: dict[str, Any], *statuses: str) -> dict[str, Any]:
        found: dict[str, Any] = {"200": {"description": "An answer", "content": ok}}
        for status in statuses:
            found[status] = {"description": STATUSES[status], "content": error}
            if status in ("429", "503"):
                found[status]["headers"] = RETRY
        return found

    def post(name: str, what: str) -> dict[str, Any]:
        schema = {"$ref": f"#/components/schemas/{name}"}
        ok = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": EVENT}}
        return {
            "post": {
                "operationId": what,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": answers(ok, "400", "401", "404", "408", "413", "415", "429", "503"),
            }
        }

    def get(what: str, kind: str, *statuses: str) -> dict[str, Any]:
        schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
        return {"get": {"operationId": what, "responses": answers({kind: {"schema": schema}}, *statuses)}}

    return {
        "openapi": "3.1.0",
        "info": {"title": "BubbleTea", "version": version},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/v1/completions": post("CompletionRequest", "complete"),
            "/v1/chat/completions": post("ChatRequest", "chat"),
            "/v1/models": get("models", "application/json", "401"),
            "/health": get("health", "application/json", "503"),
            "/metrics": get("metrics", "text/plain"),
        },
    }
