"""Errors as OpenAI's API tells them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from bubbletea.serve.dispatch import HandedBack, Refused

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
REASONS = {
    "deadline": "no bubble of training fits this prompt before its deadline",
    "share": "other tenants wait and have had less",
    "memory": "the memory for keys and values is in use",
    "no-lane": "no workers are connected",
}


class ApiError(Exception):
    """What a client is told; `retry_s` goes into Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_s = status, param, code, retry_s

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_s is not None:
            headers = {
                "Retry-After": str(math.ceil(self.retry_s)),
                "retry-after-ms": str(math.ceil(self.retry_s * 1e3)),
            }
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def of_validation(error: ValidationError) -> ApiError:
    """The first of what is wrong with a body."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "str", "constrained")))
    # A message may quote the request, and a request may hold what no header or log should repeat.
    said = first["msg"].encode(errors="replace").decode()[:300]
    return ApiError(400, f"{where}: {said}" if where else said, param=where or None, code="invalid_value")


def of_refusal(refused: Refused, length: int) -> ApiError:
    if refused.retry_s is None:
        message = f"the prompt has {length} tokens or more: no lane has bubbles and memory for it"
        return ApiError(400, message, param="prompt", code="context_length_exceeded")
    status = 503 if refused.reason == "no-lane" else 429
    message = f"{REASONS.get(refused.reason, refused.reason)}; it would fit in {refused.retry_s:.3f} s"
    return ApiError(status, message, code=refused.reason, retry_s=refused.retry_s)


def of_hand_back(error: HandedBack) -> ApiError:
    return ApiError(503, f"handed back: {error}", code="handed_back", retry_s=error.retry_s)
