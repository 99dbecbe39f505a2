"""What makes `kv_transfer_params` trustworthy on their way through a router and a client's hands: a digest of the
prompt and a seal over everything that matters, by the token that service and decode engine share.

Without it a client could send a decode engine to any address, or pair somebody else's keys and values with a prompt of
his own and so fill the engine's prefix cache with wrong ones. Standard library only.
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
)


def seal(params: Mapping[str, Any], token: str, prompt: Sequence[int]) -> dict[str, Any]:
    """The parameters with the prompt's digest and a seal."""
    named = {**params, "remote_prompt_digest": prompt_digest(prompt)}
    return {**named, "remote_seal": _sealed(named, token)}


def require_genuine(params: Mapping[str, Any], token: str) -> None:
    given = str(params.get("remote_seal", "")).encode(errors="replace")
    if not hmac.compare_digest(given, _sealed(params, token).encode()):
        raise WorkerError("kv_transfer_params are not as the service sealed them: give both sides the same token")


def require_prompt(params: Mapping[str, Any], prompt: Sequence[int]) -> None:
    """The prompt that was prefilled is the one to be decoded, or its beginning."""
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
    text = json.dumps([params.get(name) for name in SEALED], separators=(",", ":"))
    return hmac.new(token.encode(), f"bubbletea hand-off {text}".encode(), hashlib.sha256).hexdigest()
