"""A call and its value as JSON: in the messages of client and server, and in the log."""

from __future__ import annotations

import math
from typing import Any

from tvcache.errors import ArgumentsError
from tvcache.keys import Task, ToolCall
from tvcache.stores import Ask
from tvcache.values import Value, require_body

MAX_WAIT_S = 20.0
"""Seconds for which the server holds a request open."""


def asked(ask: Ask) -> dict[str, Any]:
    return {
        "state": ask.state.hex(),
        "task": [ask.task.name, ask.task.image],
        "call": ask.call.as_json(),
        "mutates": ask.mutates,
    }


def ask_of(found: Any) -> Ask:
    """Inverse of `asked`; computes the key with the client's function."""
    task = field(found, "task", list)
    if len(task) != 2 or not all(isinstance(part, str) for part in task):
        raise ArgumentsError("task must be a list of two strings: name and image")
    try:
        state = bytes.fromhex(field(found, "state", str))
    except ValueError:
        state = b""
    if len(state) != 32:
        raise ArgumentsError("state must be 64 hexadecimal digits")
    return Ask.of(Task(*task), state, ToolCall.from_json(field(found, "call", dict)), field(found, "mutates", bool))


def valued(value: Value) -> dict[str, Any]:
    return {"body": value.body.decode(), "seconds": value.seconds}


def value_of(found: Any) -> Value:
    return Value(require_body(field(found, "body", str)), number(found, "seconds"))


def field(found: Any, name: str, kind: type) -> Any:
    if not isinstance(found, dict) or not isinstance(found.get(name), kind):
        raise ArgumentsError(f"{name} is missing or is not a {kind.__name__}")
    return found[name]


def number(found: Any, name: str) -> float:
    given = found.get(name) if isinstance(found, dict) else None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given) or given < 0:
        raise ArgumentsError(f"{name} is missing or is not a number of at least 0")
    return float(given)
