"""One of Sailor's JSON files: every error names the file, the key and the value found there.

Plain dicts instead of pydantic, because these files are large and are read within a plan's few seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atlas.errors import SpecError
from atlas.spec.document import nearest, read_json, wrong

MAX_BYTES = 256 * 1024 * 1024
"""Sailor's largest file has 0.6 MB; its profiles grow with models, GPU types and microbatch sizes."""
FETCH = "Fetch the file again"
"""The remedy for a damaged file."""


class SailorFile:
    """One JSON file. `at("OPT-350", "1")` walks down; a missing key is an error that names the nearest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root: Any = read_json(path, key="file", max_bytes=MAX_BYTES)

    def at(self, *keys: str) -> Any:
        node = self.root
        for depth, key in enumerate(keys):
            if not isinstance(node, dict):
                raise self.bad(keys[:depth], node, "must be an object", FETCH)
            if key not in node:
                above = ".".join(keys[:depth]) or "the file"
                raise self.bad(keys[: depth + 1], None, f"is not in {above}", nearest(key, map(str, node)))
            node = node[key]
        return node

    def keys(self, *keys: str) -> list[str]:
        node = self.at(*keys)
        if not isinstance(node, dict) or not node:
            raise self.bad(keys, node, "must be an object with at least one key", FETCH)
        return list(node)

    def number(self, *keys: str, low: float = 0.0, high: float = 1e18) -> float:
        value = self.at(*keys)
        if not is_number(value) or not low <= value <= high:
            raise self.bad(keys, value, f"must be a number from {low:g} to {high:g}", FETCH)
        return float(value)

    def whole(self, *keys: str, low: int = 1, high: int = 10**12) -> int:
        value = self.number(*keys, low=low, high=high)
        if value != int(value):
            raise self.bad(keys, value, "must be a whole number", FETCH)
        return int(value)

    def bad(self, keys: Iterable[str], value: object, rule: str, remedy: str) -> SpecError:
        return wrong(self.path, ".".join(keys) or "file", rule, remedy, value)


def is_number(value: object) -> bool:
    """A finite int or float; not JSON's true or NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
