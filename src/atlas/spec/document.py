"""Reads an untrusted user's file: UTF-8, size, depth, duplicate keys, alias bombs, odd numbers.

Returns plain dicts, lists and scalars, and for every key the `file:line` it came from. YAML is read as users expect:
`1e3` is a number, a date stays text. It does not know jobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from atlas.errors import SpecError

Keys = tuple[str | int, ...]
"""A place in a document: ("cluster", "datacenters", 0, "nodes")."""

MAX_BYTES = 512 * 1024
MAX_DEPTH = 24
MAX_NODES = 50_000
"""After aliases are written out: a bomb stops here."""

_INT = re.compile(r"[-+]?[0-9][0-9_]{0,39}")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)([eE][-+]?[0-9]+)?")
_SPECIAL = {".nan": "nan", ".inf": "inf", "+.inf": "inf", "-.inf": "-inf"}


@dataclass
class Document:
    """Plain data, and where each part of it was written."""

    data: Any
    origins: dict[Keys, str] = field(default_factory=dict)

    def origin(self, keys: Keys, default: str) -> str:
        """The `file:line` of a key, or of the nearest thing around it."""
        for end in range(len(keys), -1, -1):
            if keys[:end] in self.origins:
                return self.origins[keys[:end]]
        return default


def dotted(keys: Keys) -> str:
    """`cluster.links[0].latency_ms`; odd characters are escaped."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return (text if text.isprintable() else ascii(text)[1:-1])[:200] or "(whole file)"


def shown(value: object) -> object:
    """A value short enough for a message."""
    if isinstance(value, dict | list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    return value[:60] + "..." if isinstance(value, str) and len(value) > 60 else value


def nearest(word: str, known: Iterable[str]) -> str:
    """ "Did you mean X?", or the list of what there is."""
    names = list(known)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(names))}"


def read_text(path: Path, *, key: str, max_bytes: int = MAX_BYTES) -> str:
    """The file's text. `key` is what names the file, for the message."""

    def fail(rule: str, remedy: str) -> SpecError:
        return SpecError(where=ascii(str(path))[1:-1][:300], key=key, value=None, rule=rule, remedy=remedy)

    try:
        if path.is_dir():
            raise fail("is a directory", "Name a file in it")
        if not path.exists():
            raise fail("there is no such file", "Check the path; paths in a file are relative to that file")
        if not path.is_file():
            raise fail("is not a regular file", "Name a plain file")
        if path.stat().st_size > max_bytes:
            raise fail(f"has more than {max_bytes:,} bytes", "This is no job file; check the path")
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise fail(f"cannot be read ({reason})", "Check the path and its permissions") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise fail(f"byte {error.start} is not UTF-8 text", "Save the file as UTF-8") from None


def read_yaml(path: Path, *, key: str) -> Document:
    return parse_yaml(read_text(path, key=key), str(path))


def read_json(path: Path, *, key: str, max_bytes: int = 64 * 1024 * 1024) -> Any:
    """A JSON file's content; nothing is promised of its shape."""
    text = read_text(path, key=key, max_bytes=max_bytes)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        rule = f"line {error.lineno}, column {error.colno}: not JSON ({error.msg})"
    except (RecursionError, ValueError):
        rule = "is nested too deeply or holds a number that is too long"
    raise SpecError(where=str(path), key=key, value=None, rule=rule, remedy="Is it cut off? Write it again")


def parse_yaml(text: str, where: str) -> Document:
    """YAML text as plain data. Every failure is a SpecError that names the line."""
    try:
        _check_nesting(text, where)
        node = yaml.SafeLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{where}:{mark.line + 1}" if mark else where
        raise _bad(at, "(YAML)", f"not valid YAML: {error.problem or error.context}", "Fix this line") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise _bad(where, "(YAML)", f"not valid YAML: {ascii(reason)[1:-1]}", "Is this a text file?") from None
    builder = _Builder(where)
    data = None if node is None else builder.build(node, ())
    return Document(data, builder.origins)


def _bad(where: str, key: str, rule: str, remedy: str, value: object = None) -> SpecError:
    return SpecError(where=where, key=key, value=shown(value), rule=rule, remedy=remedy)


def _check_nesting(text: str, where: str) -> None:
    """The composer recurses; the event stream does not. So depth is checked there first."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            at = f"{where}:{event.start_mark.line + 1}"
            raise _bad(at, "(YAML)", f"nested deeper than {MAX_DEPTH} levels", "Flatten it")


class _Builder:
    """From YAML's nodes to plain data, counting every node so that aliases cannot explode."""

    def __init__(self, where: str) -> None:
        self.where, self.num_nodes = where, 0
        self.origins: dict[Keys, str] = {}

    def build(self, node: yaml.Node, keys: Keys) -> Any:
        at = f"{self.where}:{node.start_mark.line + 1}"
        self.origins[keys] = at
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES or len(keys) > MAX_DEPTH:
            raise _bad(at, dotted(keys[:4]), "aliases blow the file up beyond all reason", "Write it without aliases")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, keys, at)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*keys, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        return self.mapping(node, keys)

    def mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at = f"{self.where}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise _bad(at, dotted(keys), "a key must be a plain word", "Write key: value")
            key = key_node.value
            if key in result:
                raise _bad(at, dotted((*keys, key)), "is written twice", "Keep one of the two")
            result[key] = self.build(value_node, (*keys, key))
        return result

    def scalar(self, node: yaml.ScalarNode, keys: Keys, at: str) -> Any:
        text, kind = node.value, node.tag.rsplit(":", 1)[-1]
        if not node.tag.startswith("tag:yaml.org,2002:"):
            raise _bad(at, dotted(keys), f"the tag {node.tag[:40]!r} is not allowed", "Write a plain value")
        if node.style is not None or kind not in ("null", "bool", "int", "float", "str", "timestamp"):
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() in ("true", "yes", "on")
        if _INT.fullmatch(text):
            return int(text.replace("_", ""))
        if text.lower() in _SPECIAL:
            return float(_SPECIAL[text.lower()])
        return float(text.replace("_", "")) if _FLOAT.fullmatch(text) and len(text) < 400 else text
