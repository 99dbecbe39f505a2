"""Reads a file that may be malicious. Checks encoding, size, nesting, duplicate keys, aliases and numbers.

Returns plain dicts, lists and scalars, and for every key the `file:line` it came from. YAML is read as users expect:
`1e3` is a number, a date stays text. `apply_override` makes one change before validation, as `--set` asks: items of a
list are named by number or by name (`cluster.links[east,west].pair_gbps`). It does not know jobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from atlas.errors import SpecError

Keys = tuple[str | int, ...]
"""A place in a document: ("cluster", "datacenters", 0, "nodes")."""

YAML_WIDTH = 110
"""Columns of the YAML files that Atlas writes."""
MAX_BYTES = 512 * 1024
"""Of a YAML or JSON file."""
MAX_DEPTH = 24
"""Of nested mappings and lists."""
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


def wrong(where: str | Path, key: str, rule: str, remedy: str, value: object = None) -> SpecError:
    """An error about a file, or a line of it."""
    return SpecError(where=str(where), key=key, value=shown(value), rule=rule, remedy=remedy)


def part_of(data: Any, *keys: str) -> Any:
    """What a document has at these keys; None where it has no such mappings."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def nearest(word: str, known: Iterable[str]) -> str:
    """ "Did you mean X?", or the list of what there is."""
    names = list(known)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(names))}"


def as_path(source: object, key: str) -> Path:
    """The path that a caller of the API named; an error for a value of another type."""
    if not isinstance(source, str | PathLike):
        raise wrong(key, "path", "is neither a path nor an object that `import atlas` returned", "Name a file", source)
    return Path(source)


def read_text(path: Path, *, key: str, max_bytes: int = MAX_BYTES) -> str:
    """The file's text. `key` is what names the file, for the message."""

    def fail(rule: str, remedy: str) -> SpecError:
        return SpecError(where=ascii(str(path))[1:-1][:300], key=key, rule=rule, remedy=remedy)

    try:
        if path.is_dir():
            raise fail("is a folder", "Name a file in it")
        if not path.exists():
            raise fail("there is no such file", "Check the path; paths in a file are relative to that file's folder")
        if not path.is_file():
            raise fail("is not a regular file", "Name a plain file")
        if path.stat().st_size > max_bytes:
            raise fail(f"has more than {max_bytes:,} bytes, too many for such a file", "Check the path")
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
    """A JSON file's content, of any shape."""
    text = read_text(path, key=key, max_bytes=max_bytes)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        rule = f"line {error.lineno}, column {error.colno}: not JSON ({error.msg})"
    except (RecursionError, ValueError):
        rule = "is nested too deeply or holds a number that is too long"
    raise SpecError(where=str(path), key=key, rule=rule, remedy="The file may be truncated: write it again")


def parse_yaml(text: str, where: str) -> Document:
    """YAML text as plain data. Every failure is a SpecError that names the line."""
    try:
        _check_nesting(text, where)
        node = yaml.SafeLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{where}:{mark.line + 1}" if mark else where
        raise wrong(at, "syntax", f"not valid YAML: {error.problem or error.context}", "Fix this line") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise wrong(where, "syntax", f"not valid YAML: {ascii(reason)[1:-1]}", "Name a text file") from None
    builder = _Builder(where)
    data = None if node is None else builder.build(node, ())
    return Document(data, builder.origins)


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
            raise wrong(at, "syntax", f"nested deeper than {MAX_DEPTH} levels", "Flatten it")


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
            rule = f"the file has more than {MAX_NODES:,} values or {MAX_DEPTH} levels, counting what aliases repeat"
            raise wrong(at, dotted(keys[:4]), rule, "Shorten it, or write it without aliases")
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
                raise wrong(at, dotted(keys), "a key must be a plain word", "Write key: value")
            key = key_node.value
            if key in result:
                raise wrong(at, dotted((*keys, key)), "is written twice", "Keep one of the two")
            result[key] = self.build(value_node, (*keys, key))
        return result

    def scalar(self, node: yaml.ScalarNode, keys: Keys, at: str) -> Any:
        text, kind = node.value, node.tag.rsplit(":", 1)[-1]
        if not node.tag.startswith("tag:yaml.org,2002:"):
            raise wrong(at, dotted(keys), f"the tag {node.tag[:40]!r} is not allowed", "Write a plain value")
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


_STEP = re.compile(r"\.?([^.\[\]=]+)|\[([^\[\]]+)\]")
PATH_KEYS = ("config", "profile", "trace", "parts")
"""Keys whose value is a file. `cluster` is one too when it is text."""


# ---- --set key.path=value ------------------------------------------------------------------------------------------
def apply_override(document: Document, text: str) -> Document:
    """The document with one `key=value` changed; the value is read as YAML, an empty one unsets the key."""
    where = f"--set {text[:120]}" if text.isprintable() else f"--set {text[:120]!a}"
    path, equals, value_text = text.partition("=")
    if not equals or not path.strip():
        raise SpecError(where=where, key="--set", rule="is not key=value", remedy="Write --set pp=4")
    value = parse_yaml(value_text, where).data
    keys = _keys(document.data, _steps(path.strip(), where), where)
    of_link = keys[-1] == "model" and len(keys) > 1
    if isinstance(value, str) and (keys[-1] in PATH_KEYS or of_link or keys == ("cluster",)):
        value = str(Path.cwd() / value)
    data = replaced(document.data, keys, value)
    origins = {k: at for k, at in document.origins.items() if k[: len(keys)] != keys}
    made = {keys[:end]: where for end in range(1, len(keys) + 1) if keys[:end] not in origins}
    return Document(data, {**origins, **made})


def _steps(path: str, where: str) -> list[str]:
    steps: list[str] = []
    end = 0
    while end < len(path) and len(steps) < 16:
        match = _STEP.match(path, end)
        if match is None:
            break
        steps.append((match[1] or match[2]).strip())
        end = match.end()
    if end < len(path) or not all(steps):
        raise SpecError(
            where=where,
            key=path[:80],
            rule="is not a path of keys",
            remedy="Write it like cluster.links[0].latency_ms or cluster.datacenters.east.nodes",
        )
    return steps


def _keys(data: Any, steps: list[str], where: str) -> Keys:
    """The steps with names of list items turned into their numbers."""
    keys: Keys = ()
    for step in steps:
        if isinstance(data, list):
            index = _index(data, step, dotted(keys), where)
            keys, data = (*keys, index), data[index]
        elif data is None and keys and (step.isdecimal() or "," in step):
            rule = f"the job has no list {dotted(keys)}, so it has no item {step}"
            remedy = f"Write {dotted(keys)} in the file first, or set a key that applies to all"
            raise SpecError(where=where, key=f"{dotted(keys)}[{step}]", rule=rule, remedy=remedy)
        elif isinstance(data, dict) or data is None:
            keys, data = (*keys, step), (data or {}).get(step)
        else:
            rule = f"{dotted(keys)} is {shown(data)!r}, which has no keys below it"
            raise SpecError(where=where, key=".".join(steps), rule=rule, remedy=f"Set {dotted(keys)} itself")
    return keys


def _index(items: list[Any], step: str, key: str, where: str) -> int:
    names = [_names(item) for item in items]
    if step.isdecimal() and len(step) < 10 and int(step) < len(items):
        return int(step)
    found = [i for i, known in enumerate(names) if step.replace(" ", "") in known]
    if found:
        return found[0]
    known = ", ".join(n[0] for n in names if n) or "none with a name"
    rule = f"no such item; {key} has {len(items)} ({known[:200]})"
    raise SpecError(where=where, key=f"{key}[{step}]", rule=rule, remedy="Name one of them, or its number")


def _names(item: Any) -> list[str]:
    """The names by which an item of a list can be addressed."""
    if not isinstance(item, dict):
        return []
    between = item.get("between")
    if isinstance(between, list) and len(between) == 2:
        a, b = (str(end) for end in between)
        return [f"{a},{b}", f"{b},{a}"]
    return [str(item[key]) for key in ("name", "dc") if key in item]


def replaced(data: Any, keys: Keys, value: Any) -> Any:
    """A copy of the data with one place changed; what is missing on the way is made."""
    if not keys:
        return value
    first, rest = keys[0], keys[1:]
    if isinstance(first, int):
        return [replaced(item, rest, value) if i == first else item for i, item in enumerate(data)]
    result = dict(data or {})
    if not rest and value is None:
        result.pop(first, None)
        return result
    result[first] = replaced(result.get(first), rest, value)
    return result
