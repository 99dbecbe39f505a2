"""Reading JSON that somebody else wrote: every access says which file and key it was, and what was there instead.

Knows nothing of Sailor. Plain dicts instead of pydantic, because these files are large and loaded on a 5 s path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from atlas.errors import SpecError

MAX_BYTES = 256 * 1024 * 1024


def bad(where: Path | str, key: str, value: object, rule: str, remedy: str) -> SpecError:
    """The error of this room; long values are cut."""
    text = repr(value)
    return SpecError(
        where=str(where),
        key=key,
        value=value if len(text) <= 80 else text[:77] + "...",
        rule=rule,
        remedy=remedy,
    )


def nearest(given: str, known: Iterable[str]) -> str:
    """`Did you mean 'OPT-350'? Known: ...`."""
    names = list(known)
    close = get_close_matches(given, names, n=1, cutoff=0.4)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return hint + (f"Known: {', '.join(names)}" if names else "The file names none")


def read_text(path: Path, remedy: str = "--from-sailor names the folder with Sailor's files") -> str:
    """The whole file, or why not."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise bad(path, "file", path.stat().st_size, f"is larger than {MAX_BYTES} bytes", "Give the right file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise bad(path, "file", None, "is not text (UTF-8)", "Give the file as Sailor ships it") from None
    except OSError as error:
        raise bad(path, "file", None, f"cannot be read ({error.strerror or error})", remedy) from None


class Document:
    """One JSON file. `at("OPT-350", "1")` walks down; a missing key is an error that names the nearest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.root: Any = json.loads(read_text(path))
        except (ValueError, RecursionError) as error:
            rule = f"is not JSON, or is cut off ({error})"
            raise bad(path, "file", None, rule, "Fetch the file again") from None

    def at(self, *keys: str) -> Any:
        node = self.root
        for depth, key in enumerate(keys):
            if not isinstance(node, dict):
                raise self.bad(keys[:depth], node, "must be an object", "Fetch the file again")
            if key not in node:
                above = ".".join(keys[:depth]) or "the file"
                raise self.bad(keys[: depth + 1], None, f"is not in {above}", nearest(key, map(str, node)))
            node = node[key]
        return node

    def keys(self, *keys: str) -> list[str]:
        node = self.at(*keys)
        if not isinstance(node, dict) or not node:
            raise self.bad(keys, node, "must be an object with at least one key", "Fetch the file again")
        return list(node)

    def number(self, *keys: str, low: float = 0.0, high: float = 1e18) -> float:
        value = self.at(*keys)
        if not is_number(value) or not low <= value <= high:
            raise self.bad(keys, value, f"must be a number from {low:g} to {high:g}", "Fix the file or fetch it again")
        return float(value)

    def whole(self, *keys: str, low: int = 1, high: int = 10**12) -> int:
        value = self.number(*keys, low=low, high=high)
        if value != int(value):
            raise self.bad(keys, value, "must be a whole number", "Fix the file or fetch it again")
        return int(value)

    def bad(self, keys: Iterable[str], value: object, rule: str, remedy: str) -> SpecError:
        return bad(self.path, ".".join(keys) or "file", value, rule, remedy)


def is_number(value: object) -> bool:
    """A finite int or float; JSON's true and NaN are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
