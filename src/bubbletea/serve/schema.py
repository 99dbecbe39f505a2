"""The fields of a request, from OpenAI's and vLLM's APIs, and the OpenAPI document. Every field of those APIs either
has an effect or is refused by name; unknown fields and wrong types are refused too. A field that is not supported
accepts the values without effect: null and its default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_NEW = 1 << 20
"""More tokens than any model generates: larger numbers are mistakes."""
NOT_HERE = "Not supported here."
OF_THE_PROMPT = {
    *("prompt_embeds", "suffix", "chat_template", "chat_template_kwargs", "documents", "tools", "functions"),
    *("continue_final_message", "reasoning_effort", "media_io_kwargs", "mm_processor_kwargs"),
}
"""Fields that change the tokens of a prompt: refused in the prefill role too."""
Text = Annotated[str, Field(max_length=8 << 20)]
Word = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(max_length=1024)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=MAX_NEW)]
Empty = Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)]


def _not_here() -> Any:
    """A field that accepts only values without effect."""
    return Field(default=None, description=NOT_HERE)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = _not_here()


class TextFormat(_Strict):
    type: Literal["text"]


class TransferParams(_Strict):
    """The fields that a vLLM router sends to a prefill engine; only the first has an effect."""

    do_remote_decode: bool | None = None
    do_remote_prefill: Literal[False] | None = _not_here()
    remote_engine_id: None = _not_here()
    remote_request_id: None = _not_here()
    remote_block_ids: Empty | None = _not_here()
    remote_host: None = _not_here()
    remote_port: None = _not_here()
    prompt_token_ids: None = _not_here()


class _Sampled(_Strict):
    """How tokens are chosen."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31, description="-1 and 0: all")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=1 << 17)] | None = None
    bad_words: Annotated[list[Word], Field(max_length=256)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=4)] | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_NEW)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = Field(default=None, description="Another name of max_tokens.")
    n: Literal[1] | None = _not_here()
    best_of: Literal[1] | None = _not_here()
    use_beam_search: Literal[False] | None = _not_here()
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = _not_here()
    watermarking: Literal[False] | None = _not_here()
    repetition_detection: None = _not_here()
    logits_processors: None = _not_here()
    response_format: TextFormat | None = _not_here()
    structured_outputs: None = _not_here()
    guided_json: None = _not_here()
    guided_regex: None = _not_here()
    guided_choice: None = _not_here()
    guided_grammar: None = _not_here()
    guided_decoding_backend: None = _not_here()
    guided_whitespace_pattern: None = _not_here()
    structural_tag: None = _not_here()

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def asked_new(self) -> int | None:
        """The requested number of tokens; None if not given."""
        return self.max_tokens or self.max_completion_tokens

    @model_validator(mode="after")
    def _numbers_agree(self) -> _Sampled:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _refusal("max_completion_tokens", "must equal max_tokens if both are given")
        if self.asked_new and (self.min_tokens or 0) > self.asked_new:
            raise _refusal("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.asked_new}")
        return self


class _Answered(_Strict):
    """Fields about the form of the response."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Literal[1] | None = _not_here()
    request_id: Annotated[str, Field(pattern="^[A-Za-z0-9._:-]{1,128}$")] | None = Field(
        default=None, description="Used in the id of the response, after the usual prefix."
    )
    skip_special_tokens: Literal[True] | None = _not_here()
    spaces_between_special_tokens: Literal[True] | None = _not_here()
    prompt_logprobs: None = _not_here()
    logprob_token_ids: None = _not_here()
    return_tokens_as_token_ids: Literal[False] | None = _not_here()
    return_token_ids: Literal[False] | None = _not_here()
    return_token_offsets: Literal[False] | None = _not_here()
    return_prompt_text: Literal[False] | None = _not_here()
    return_mm_kwargs: Literal[True] | None = _not_here()
    routed_experts_prompt_start: Literal[0] | None = _not_here()
    # vllm-router adds these two, and two more to chats, to every request.
    no_stop_trim: Literal[False] | None = _not_here()
    return_hidden_states: Literal[False] | None = _not_here()

    @model_validator(mode="after")
    def _options_are_of_a_stream(self) -> _Answered:
        if self.stream_options is not None and not self.stream:
            raise _refusal("stream_options", "is allowed only together with stream: true")
        if self.stream_options and self.stream_options.continuous_usage_stats and not self.with_usage:
            raise _refusal("stream_options.continuous_usage_stats", "is allowed only together with include_usage: true")
        return self

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def with_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class _Common(_Sampled, _Answered):
    model: Annotated[str, Field(max_length=256)]
    user: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Written to the log of requests (bubbletea.requests)."
    )
    safety_identifier: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="The newer name of user."
    )
    priority: Literal["online", "offline"] | Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None,
        description="Offline requests use the bubbles that online ones leave. As a number: 0 online, above 0 offline.",
    )
    deadline_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None,
        description="Seconds until the prefill must be delivered; if that is impossible, it is refused at once.",
    )
    kv_transfer_params: TransferParams | None = Field(
        default=None, description="In the prefill role of a router: {do_remote_decode: true}, with max_tokens 1."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="The prefix cache is shared only with requests of the same salt."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = Field(
        default=None, description="Keep this many tokens of the prompt; -1: as many as fit the context."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="left (the default) drops the prompt's beginning, right its end."
    )
    add_special_tokens: bool | None = Field(
        default=None, description="Default: true for a plain prompt, false for a chat, whose template adds them."
    )

    session_id: None = _not_here()
    vllm_xargs: Empty | None = _not_here()
    ec_transfer_params: Empty | None = _not_here()
    mm_processor_kwargs: Empty | None = _not_here()
    media_io_kwargs: Empty | None = _not_here()

    @model_validator(mode="before")
    @classmethod
    def _leave_decoding_to_the_engine(cls, given: Any) -> Any:
        """A router sends the whole request to both: in the prefill role, what is about decoding has no effect here."""
        asked = given.get("kv_transfer_params") if isinstance(given, dict) else None
        if not isinstance(asked, dict) or asked.get("do_remote_decode") is not True:
            return given
        ignored = {name for name, field in cls.model_fields.items() if field.description == NOT_HERE} - OF_THE_PROMPT
        ignored |= {"min_tokens", "stream_options"} | ({"max_completion_tokens"} if given.get("max_tokens") else set())
        return {name: value for name, value in given.items() if name not in ignored}

    @model_validator(mode="after")
    def _fields_agree(self) -> _Common:
        if self.truncate_prompt_tokens == 0:
            raise _refusal("truncate_prompt_tokens", "must be -1 or at least 1")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise _refusal("truncation_side", "is allowed only together with truncate_prompt_tokens")
        if self.deadline_s is not None and self.is_offline:
            raise _refusal("deadline_s", "is only for online requests: an offline request has no deadline")
        return self

    @property
    def is_offline(self) -> bool:
        return self.priority == "offline" or (isinstance(self.priority, int) and self.priority > 0)

    @property
    def hands_off(self) -> bool:
        return bool(self.kv_transfer_params and self.kv_transfer_params.do_remote_decode)


class CompletionRequest(_Common):
    prompt: Text | Annotated[list[Token], Field(min_length=1, max_length=1 << 20)]
    prompt_embeds: None = _not_here()
    echo: Literal[False] | None = _not_here()
    logprobs: None = _not_here()
    suffix: None = _not_here()

    @property
    def num_new(self) -> int:
        return self.asked_new or 16


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256)]
    name: None = _not_here()
    refusal: None = _not_here()
    annotations: Empty | None = _not_here()
    audio: None = _not_here()
    function_call: None = _not_here()
    tool_calls: Empty | None = _not_here()
    tool_call_id: None = _not_here()
    reasoning: None = _not_here()
    reasoning_content: None = _not_here()

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Common):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    add_generation_prompt: bool | None = None
    continue_final_message: Literal[False] | None = _not_here()
    chat_template: None = _not_here()
    chat_template_kwargs: Empty | None = _not_here()
    documents: Empty | None = _not_here()
    echo: Literal[False] | None = _not_here()
    logprobs: Literal[False] | None = _not_here()
    top_logprobs: Literal[0] | None = _not_here()
    tools: Empty | None = _not_here()
    tool_choice: Literal["none"] | None = _not_here()
    parallel_tool_calls: Literal[True] | None = _not_here()
    functions: Empty | None = _not_here()
    function_call: Literal["none"] | None = _not_here()
    reasoning_effort: Literal["none"] | None = _not_here()
    thinking_token_budget: None = _not_here()
    include_reasoning: Literal[True] | None = _not_here()
    separate_reasoning: Literal[True] | None = _not_here()
    stream_reasoning: Literal[True] | None = _not_here()
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = _not_here()
    audio: None = _not_here()
    prediction: None = _not_here()
    metadata: Empty | None = _not_here()
    moderation: None = _not_here()
    prompt_cache_key: None = _not_here()
    prompt_cache_options: Empty | None = _not_here()
    prompt_cache_retention: None = _not_here()
    service_tier: Literal["auto", "default"] | None = _not_here()
    store: Literal[False] | None = _not_here()
    verbosity: Literal["medium"] | None = _not_here()
    web_search_options: None = _not_here()

    @property
    def num_new(self) -> int:
        return self.asked_new or 128


def _refusal(name: str, rule: str) -> PydanticCustomError:
    """An error of one field by a rule about several."""
    return PydanticCustomError("disagrees", "{rule}", {"rule": rule, "field": name})


PARTS: dict[str, type[BaseModel]] = {
    "stream_options": StreamOptions,
    "kv_transfer_params": TransferParams,
    "messages": ChatMessage,
}
"""By field: the model of its objects."""


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
"""An event of a stream: a JSON object as text; the last one is [DONE]."""
RETRY = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 0}}}
STATUSES = {
    "400": "Not a valid request",
    "401": "No key, or a wrong one",
    "404": "No such model or path",
    "405": "The path does not allow this method",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "No bubble fits in time: Retry-After says when one will",
    "503": "The service cannot answer now, for example while no copy of the model has all its workers connected: "
    "Retry-After says when to retry",
}


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI document of all paths."""
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
