"""`--set key.path=value`: one change to a job file's data before it is validated.

Items of a list are named by number or by name: `cluster.links[0].latency_ms`, `cluster.links[east,west].pair_gbps`,
`cluster.datacenters.east.nodes`, `placement[east].stages`. It uses the shape of the data only; validation checks the
keys afterwards.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from atlas.errors import SpecError
from atlas.spec.document import Document, Keys, dotted, parse_yaml, shown

_STEP = re.compile(r"\.?([^.\[\]=]+)|\[([^\[\]]+)\]")
PATH_KEYS = ("config", "profile", "trace")
"""Keys whose value is a file. `cluster` is one too when it is text."""


def apply_override(document: Document, text: str) -> Document:
    """The document with one `key=value` changed; the value is read as YAML, an empty one unsets the key."""
    where = f"--set {text[:120]}" if text.isprintable() else f"--set {text[:120]!a}"
    path, equals, value_text = text.partition("=")
    if not equals or not path.strip():
        raise SpecError(where=where, key="--set", value=None, rule="is not key=value", remedy="Write --set pp=4")
    value = parse_yaml(value_text, where).data
    keys = _keys(document.data, _steps(path.strip(), where), where)
    if isinstance(value, str) and (keys[-1] in PATH_KEYS or keys == ("cluster",)):
        value = str(Path.cwd() / value)
    data = _replaced(document.data, keys, value)
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
            value=None,
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
            rule = f"there is no {dotted(keys)} in the job that could be numbered or named"
            remedy = f"Write {dotted(keys)} in the file first, or set what holds for all"
            raise SpecError(where=where, key=f"{dotted(keys)}[{step}]", value=None, rule=rule, remedy=remedy)
        elif isinstance(data, dict) or data is None:
            keys, data = (*keys, step), (data or {}).get(step)
        else:
            rule = f"{dotted(keys)} is {shown(data)!r}, which has no parts"
            raise SpecError(where=where, key=".".join(steps), value=None, rule=rule, remedy="Shorten the path")
    return keys


def _index(items: list[Any], step: str, key: str, where: str) -> int:
    names = [_names(item) for item in items]
    if step.isdecimal() and len(step) < 10 and int(step) < len(items):
        return int(step)
    found = [i for i, known in enumerate(names) if step.replace(" ", "") in known]
    if found:
        return found[0]
    known = ", ".join(n[0] for n in names if n) or "none with a name"
    rule = f"{key} has {len(items)} items ({known[:200]})"
    raise SpecError(where=where, key=f"{key}[{step}]", value=None, rule=rule, remedy="Name one of them, or its number")


def _names(item: Any) -> list[str]:
    """What an item of a list answers to."""
    if not isinstance(item, dict):
        return []
    between = item.get("between")
    if isinstance(between, list) and len(between) == 2:
        a, b = (str(end) for end in between)
        return [f"{a},{b}", f"{b},{a}"]
    return [str(item[key]) for key in ("name", "dc") if key in item]


def _replaced(data: Any, keys: Keys, value: Any) -> Any:
    """A copy of the data with one place changed; what is missing on the way is made."""
    if not keys:
        return value
    first, rest = keys[0], keys[1:]
    if isinstance(first, int):
        return [_replaced(item, rest, value) if i == first else item for i, item in enumerate(data)]
    result = dict(data or {})
    if not rest and value is None:
        result.pop(first, None)
        return result
    result[first] = _replaced(result.get(first), rest, value)
    return result
