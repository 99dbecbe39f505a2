"""Errors in OpenAI's format: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import difflib
import math
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from bubbletea.serve.prefills import HandedBack, Refused
from bubbletea.serve.schema import NOT_HERE, OF_THE_PROMPT, PARTS

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
HAND_BACK_RETRY_S = 1.0
"""Retry-After of an admitted request that could not be finished."""
REASONS = {
    "deadline": "no bubble of training fits this prompt before its deadline",
    "share": "other tenants, which were served less, are waiting",
    "memory": "the memory for keys and values is in use",
    "no-lane": "no copy of the model has all its workers connected",
    "overcommitted": "prefill on this host slows training by more than --slowdown",
}


class ApiError(Exception):
    """An error response; `retry_s` goes into Retry-After."""

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


def of_validation(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """The first error in a body, with the name of its field."""
    found = error.errors(include_url=False, include_input=False)
    first = found[0]
    if _is_of_type(first["type"]) and len(first["loc"]) == 2:
        # A field of several types has an error for each of them: a broken rule is of the type that was given.
        rules = (one for one in found if one["loc"][:-1] == first["loc"][:-1] and not _is_of_type(one["type"]))
        first = next(rules, first)
    kind, path = first["type"], [str(part) for part in first["loc"]]
    if kind == "disagrees":
        path = [first["ctx"]["field"]]
    top = model.model_fields.get(path[0]) if path else None
    if top is not None and top.description == NOT_HERE:
        path = path[:1]  # the whole object is not supported
    known = PARTS[path[0]] if len(path) > 1 and path[0] in PARTS else model
    # After the first name, the path also has pydantic's names of union members.
    where = ".".join(part for i, part in enumerate(path) if not i or part.isdigit() or part in known.model_fields)
    field = known.model_fields.get(where.rpartition(".")[2])
    if kind == "extra_forbidden" and (field is None or field.description != NOT_HERE):
        return _unknown(path[-1], ".".join([*path[:-1][:2], path[-1]]), known)
    if field is not None and field.description == NOT_HERE:
        said = "not supported here. Leave it out"
        if known is model and path[0] not in OF_THE_PROMPT:  # what chooses tokens, or describes them
            said = "the embedded decoder does not have it. Leave it out, or decode with vLLM behind the hand-off"
    else:
        # A message may quote the request, with characters that are not allowed in a header or log.
        said = first["msg"].encode(errors="replace").decode()[:300]
    return ApiError(400, f"{where}: {said}" if where else said, param=where or None, code="invalid_value")


def _is_of_type(kind: str) -> bool:
    return kind.endswith("_type") or kind == "literal_error"


def _unknown(name: str, where: str, known: type[BaseModel]) -> ApiError:
    shown, where = (text.encode(errors="replace").decode()[:80] for text in (name, where))
    nearest = difflib.get_close_matches(name[:80], known.model_fields, n=1)
    message = f"{shown}: no such field. Leave it out" + (f", or write {nearest[0]}" if nearest else "")
    return ApiError(400, message, param=where, code="unknown_parameter")


def of_refusal(refused: Refused, length: int) -> ApiError:
    if refused.retry_s is None:
        why = refused.detail or "no copy of the model has enough bubbles and memory for it"
        message = f"the prompt has {length} tokens or more: {why}"
        return ApiError(400, message, param="prompt", code="context_length_exceeded")
    status = 503 if refused.reason in ("no-lane", "overcommitted") else 429
    why = REASONS.get(refused.reason, refused.reason) + (f" ({refused.detail})" if refused.detail else "")
    message = f"{why}; retry in {refused.retry_s:.3f} s"
    return ApiError(status, message, code=refused.reason, retry_s=refused.retry_s)


def of_hand_back(error: HandedBack) -> ApiError:
    return ApiError(
        503,
        f"the request was admitted but could not be completed: {error}",
        code="handed_back",
        retry_s=HAND_BACK_RETRY_S,
    )
