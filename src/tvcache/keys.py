"""The key of a tool call: task, then every mutating call so far, then this call. Lookup, store and replay use `key`.

A state is the SHA-256 of the task and the mutating calls, chained: one more call costs one hash, for any length of
the history. It does not know tools, values or environments.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvcache.errors import ArgumentsError

MAX_CALL_BYTES, MAX_DEPTH = 1 << 20, 64
"""Of the arguments of a call, in canonical form. Calls beyond are not cached."""


@dataclass(frozen=True)
class Task:
    """The task of a tree. Equal names with different images are different tasks."""

    name: str
    image: str = ""
    """Digest of the environment that rollouts of this task start from."""


@dataclass(frozen=True)
class ToolCall:
    """One call, as part of a key."""

    name: str
    arguments: Any
    version: str = ""
    """Version of the tool: change it when the tool's behaviour changes."""
    image: str = ""
    """Digest of the environment's image."""
    kind: str = "call"
    """`reward` for a reward, so that no tool's name can collide with one."""

    @cached_property
    def canonical(self) -> bytes:
        return canonical(self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {
            "arguments": self.arguments,
            "image": self.image,
            "kind": self.kind,
            "name": self.name,
            "version": self.version,
        }

    @classmethod
    def from_json(cls, found: Any) -> ToolCall:
        """Inverse of `as_json`; raises ArgumentsError for anything else."""
        texts = ("image", "kind", "name", "version")
        if not isinstance(found, dict) or set(found) != {"arguments", *texts}:
            raise ArgumentsError("a call is an object with arguments, image, kind, name and version, and nothing else")
        if not all(isinstance(found[name], str) for name in texts):
            raise ArgumentsError("image, kind, name and version of a call must be strings")
        return cls(found["name"], found["arguments"], found["version"], found["image"], found["kind"])


def root(task: Task) -> bytes:
    """The state before the first call."""
    return hashlib.sha256(b"tvcache 1\n" + canonical({"image": task.image, "task": task.name})).digest()


def key(state: bytes, call: ToolCall) -> bytes:
    """The key of a call in a state. For a mutating call it is also the state after it."""
    return hashlib.sha256(state + call.canonical).digest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, without spaces. Characters stay as they are: look-alikes are different keys."""
    require_json(value)
    try:
        found = _ENCODER.encode(value).encode()
    except UnicodeEncodeError as error:
        raise ArgumentsError(f"a string has half of a surrogate pair ({error.reason}): give valid Unicode") from None
    if len(found) > MAX_CALL_BYTES:
        raise ArgumentsError(
            f"{len(found):,} bytes of arguments: at most {MAX_CALL_BYTES:,} are cached. Pass a reference"
        )
    return found


def require_json(value: Any, depth: int = 0) -> None:
    """Raise ArgumentsError unless `value` is JSON as it is: nothing that encoding would change silently."""
    if value is None or isinstance(value, (str, bool, int)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ArgumentsError(f"{value!r} is not JSON: numbers must be finite. Pass a string or null instead")
        return
    if depth >= MAX_DEPTH:
        raise ArgumentsError(f"nested more than {MAX_DEPTH} deep: flatten the arguments")
    if isinstance(value, list):
        for item in value:
            require_json(item, depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ArgumentsError(f"the key {name!r} of an object is not a string: keys of JSON objects are strings")
            require_json(item, depth + 1)
    else:
        raise ArgumentsError(
            f"{type(value).__name__} is not JSON: use objects, lists, strings, numbers, booleans or null"
        )


def parse(text: str | bytes) -> Any:
    """Parse JSON strictly: no NaN, no duplicate keys, bounded nesting."""
    try:
        found = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ArgumentsError(f"nested more than {MAX_DEPTH} deep: flatten the arguments") from None
    except UnicodeDecodeError:
        raise ArgumentsError("not UTF-8: JSON is UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ArgumentsError(f"not JSON: {error.msg} at character {error.pos}") from None
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentsError(f"the key {twice!r} appears twice in one object. Keep one of the two")
    return found


def _no_constant(name: str) -> Any:
    raise ArgumentsError(f"{name} is not JSON: numbers must be finite")


_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
