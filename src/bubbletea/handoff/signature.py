"""Authenticates `kv_transfer_params`, which pass through a router and a client: a digest of the prompt, and a signature
(HMAC) over all relevant fields with the token that service and decode engine share.

Without it a client could direct a decode engine to any address, or combine another prompt's keys and values with its
own prompt and so put wrong ones into the engine's prefix cache. Standard library only.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from atlas.errors import WorkerError

SEALED = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_model_id",
    "remote_num_tokens",
    "remote_prompt_digest",
    "remote_parts",
    "remote_service",
)


def seal(params: Mapping[str, Any], token: str, prompt: Sequence[int]) -> dict[str, Any]:
    """The parameters with the prompt's digest and a signature."""
    named = {**params, "remote_prompt_digest": prompt_digest(prompt)}
    return {**named, "remote_seal": _sealed(named, token)}


def require_genuine(params: Mapping[str, Any], token: str) -> None:
    given = str(params.get("remote_seal", "")).encode(errors="replace")
    if not hmac.compare_digest(given, _sealed(params, token).encode()):
        raise WorkerError("the signature of kv_transfer_params is wrong: give both sides the same token")


def require_prompt(params: Mapping[str, Any], prompt: Sequence[int]) -> None:
    """The prefilled prompt must be the prompt to be decoded, or its beginning."""
    num_tokens = int(params["remote_num_tokens"])
    if params.get("remote_prompt_digest") != prompt_digest(prompt[:num_tokens]):
        raise WorkerError(
            f"the {num_tokens} tokens that were prefilled are not the prompt's: use one tokenizer and one chat template"
        )


def prompt_digest(prompt: Sequence[int]) -> str:
    numbers = array.array("q", prompt)
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()


def _sealed(params: Mapping[str, Any], token: str) -> str:
    text = json.dumps([params.get(name) for name in SEALED], separators=(",", ":"), sort_keys=True)
    return hmac.new(token.encode(), f"bubbletea hand-off {text}".encode(), hashlib.sha256).hexdigest()
