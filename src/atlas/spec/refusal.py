"""Pydantic's errors as our messages: file and line, key, value, rule, remedy.

One translation for every kind of file (job, plan, profile). It uses pydantic's kinds of error, not the meaning of the
keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from atlas.errors import SpecError
from atlas.spec.document import Keys, dotted, nearest, shown
from atlas.spec.fields import NAME

MAPPINGS = ("model_type", "model_attributes_type", "dict_type")


def refusal(
    error: ValidationError, where: Callable[[Keys], str], known: Callable[[Keys], Sequence[str]], remedy: str
) -> SpecError:
    """The first thing that is wrong. `known` gives the keys there are at a place, `remedy` what helps otherwise."""
    # A misspelt key is also a missing key: report the former.
    first: Any = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    kind, keys, value = first["type"], tuple(first["loc"]), shown(first["input"])
    if kind == "extra_forbidden":
        rule, remedy, value = "unknown key", nearest(str(keys[-1]), list(known(keys[:-1]))), None
    elif kind == "missing":
        rule, value = "is required and missing", None
        remedy = f"Add {keys[-1]}: to it" if isinstance(keys[-1], str) else "Write one more"
    elif kind in MAPPINGS:
        rule, remedy = "must be a mapping of keys", "Write its keys below it, indented"
    else:
        rule = _plain(first["msg"])
    if keys[-1:] == ("[key]",) and kind != "extra_forbidden":
        keys = keys[:-1]  # pydantic's mark of a key that is wrong itself
    return SpecError(where=where(keys), key=dotted(keys), value=value, rule=rule, remedy=remedy)


def _plain(message: str) -> str:
    """Without pydantic's words for Python's types."""
    message = message.replace(f"match pattern '{NAME}'", "be letters, digits, - and _, a letter or a digit first")
    message = re.sub(r"^(Input|String|Tuple|Dictionary|List) should", "should", message)
    message = message.replace("valid tuple", "list").replace(" after validation", "").replace("\n", " ")
    return message if message.isprintable() else ascii(message)[1:-1]
