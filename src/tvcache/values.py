"""Outputs of tools as bytes: JSON, bytes, or an error that its tool declared a value.

A value is decoded for every hit, so callers cannot change what others get. Objects keep the order of their
keys: an agent sees the same text as without a cache. No pickle.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from tvcache.errors import ArgumentsError, TvcacheError
from tvcache.keys import parse, require_json
from tvcache.tools import Tool

MAX_VALUE_BYTES = 16 << 20
"""Larger outputs are not stored."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value stored under a key."""

    body: bytes
    """JSON: an object with one of `json`, `bytes` (base64) or `error`."""
    seconds: float = 0.0
    """Seconds that the tool took."""


def encode(output: Any) -> bytes | None:
    """Encode an output; None if it would not be the same after decoding."""
    if isinstance(output, bytes):
        return _text({"bytes": base64.b64encode(output).decode()})
    try:
        require_json(output)
        return _text({"json": output})
    except (ArgumentsError, UnicodeEncodeError):
        return None


def encode_error(error: Exception) -> bytes | None:
    """An error whose arguments are JSON."""
    try:
        require_json(list(error.args))
        return _text({"error": [type(error).__qualname__, list(error.args)]})
    except (ArgumentsError, UnicodeEncodeError):
        return None


def decode(body: bytes, tool: Tool | None = None) -> Any:
    """The output; raises the error if the value is one."""
    found = json.loads(body)
    if "json" in found:
        return found["json"]
    if "bytes" in found:
        return base64.b64decode(found["bytes"])
    name, arguments = found["error"]
    for kind in tool.errors if tool else ():
        if kind.__qualname__ == name:
            raise kind(*arguments)
    raise TvcacheError(f"{name}: {', '.join(map(str, arguments))}")


def require_body(text: str) -> bytes:
    """Check a body from the network or a file; raises ArgumentsError if it is invalid."""
    found = parse(text)
    if not isinstance(found, dict) or len(found) != 1 or not set(found) <= {"json", "bytes", "error"}:
        raise ArgumentsError("a value must be an object with one of json, bytes or error")
    if "bytes" in found:
        try:
            base64.b64decode(found["bytes"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ArgumentsError("bytes of a value must be base64 text") from None
    error = found.get("error", ["", []])
    if not (isinstance(error, list) and len(error) == 2 and isinstance(error[0], str) and isinstance(error[1], list)):
        raise ArgumentsError("an error of a value must be a name and a list of arguments")
    return text.encode()


def _text(found: Any) -> bytes | None:
    made = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return made if len(made) <= MAX_VALUE_BYTES else None
