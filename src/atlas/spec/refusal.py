"""Errors about a user's file: pydantic's errors in our words, several mistakes in one error, the nearest GPU types.

Called only when a file is wrong; `load` has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from atlas.errors import SpecError
from atlas.spec.document import Keys, dotted, nearest, shown
from atlas.spec.fields import NAME
from atlas.spec.gpus import ALIASES, GPUS

M = TypeVar("M", bound=BaseModel)
Where = Callable[[Keys], str]
"""The file and line of a key."""
MOST_MISTAKES = 20
"""That one message lists."""
MAPPINGS = ("model_type", "model_attributes_type", "dict_type")
NUMBERS = ("int_type", "int_parsing", "float_type", "float_parsing")
WORDS = {
    f"match pattern '{NAME}'": "consist of letters, digits, - and _, and begin with a letter or a digit",
    "valid tuple": "list",
    "valid list": "list",
    "be a valid integer": "be a whole number",
    "be a valid number": "be a number",
    "be a valid string": "be text",
    "be a valid boolean": "be true or false",
    "less than or equal to": "at most",
    "greater than or equal to": "at least",
    " after validation": "",
    "\n": " ",
}
"""By pydantic's words: ours."""


def together(errors: Iterable[SpecError]) -> SpecError:
    """One error that lists all of them; there is at least one."""
    found = list({str(error): error for error in errors}.values())
    if len(found) > 1:
        first = f"{len(found)} mistakes:"
        rest = [f"  {error}" for error in found[:MOST_MISTAKES]]
        if len(found) > MOST_MISTAKES:
            rest.append(f"  and {len(found) - MOST_MISTAKES} more")
        found[0].args = ("\n".join([first, *rest]),)
    return found[0]


def bad(where: Where, keys: Keys, value: object, rule: str, remedy: str) -> SpecError:
    return SpecError(where=where(keys), key=dotted(keys), value=value, rule=rule, remedy=remedy)


def near_gpus(name: str, own: Iterable[str] = ()) -> str:
    """ "Did you mean A100-40GB or A100-80GB?": types with the same beginning come before types with a similar name."""
    names = [*GPUS, *ALIASES, *own]
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    alike = [one for one in names if word and re.sub(r"[^a-z0-9]", "", one.lower()).startswith(word)]
    shown = [one for one in alike if ALIASES.get(one) or one not in ALIASES.values()]
    return f"Did you mean {' or '.join(shown[:4])}?" if shown else nearest(name, [*GPUS, *own])


def unknown_gpu(name: str, own: Iterable[str], where: str, key: str) -> SpecError:
    near = near_gpus(name, own)
    remedy = f"{near}{'' if near.endswith('?') else '.'} Or define it under cluster.gpus"
    return SpecError(where=where, key=key, value=name, rule="no such GPU type", remedy=remedy)


def validated(kind: type[M], data: Any, where: Where, remedy: str) -> M:
    """The content of a file of this kind. Raises SpecError with everything that is wrong with it. `remedy` is what
    helps where nothing better is known."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise together(refusals(error, where, kind, remedy)) from None


def refusals(error: ValidationError, where: Where, kind: type[BaseModel], remedy: str) -> list[SpecError]:
    """One error for each thing that is wrong; misspelt keys first."""
    all_: list[Any] = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    misspelt = {tuple(e["loc"])[:-1] for e in all_ if e["type"] == "extra_forbidden"}
    # A misspelt key is also a missing key: report the former.
    wanted = [e for e in all_ if not (e["type"] == "missing" and tuple(e["loc"])[:-1] in misspelt)]
    # A list counts only its items that are right: report those that are wrong.
    wanted = [e for e in wanted if not (e["type"] == "too_short" and any(_inside(one, e) for one in wanted))]
    return [_refusal_of(one, where, kind, remedy) for one in wanted]


def _inside(error: Any, list_: Any) -> bool:
    """Whether an error is one of an item of this list."""
    depth = len(list_["loc"])
    return len(error["loc"]) > depth and error["loc"][:depth] == list_["loc"]


def keys_at(kind: Any, keys: Keys) -> list[str]:
    """The keys that a file may have at a place: the fields of the model there. `kind`: the type of the whole file."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return keys_at(kind.model_fields[str(keys[0])].annotation, keys[1:]) if keys else list(kind.model_fields)
    # An item of tuple[X, ...] or dict[str, X] is one key further; X | None and Annotated[X, ...] are at the same place.
    rest = keys[1:] if get_origin(kind) in (tuple, dict) else keys
    return next((found for inside in get_args(kind) if (found := keys_at(inside, rest))), [])


def _refusal_of(first: Any, where: Where, file: type[BaseModel], remedy: str) -> SpecError:
    kind, keys, value = first["type"], tuple(first["loc"]), shown(first["input"])
    if kind == "extra_forbidden":
        rule, remedy, value = "unknown key", nearest(str(keys[-1]), keys_at(file, keys[:-1])), None
    elif kind == "missing":
        rule, value = "is required and missing", None
        remedy = f"Add {keys[-1]}: to it" if isinstance(keys[-1], str) else "Write one more"
    elif kind in MAPPINGS:
        rule, remedy = "must be a mapping of keys", "Write its keys below it, indented"
    else:
        rule = _plain(first["msg"])
        if kind in NUMBERS and re.match(r"[\d.]", str(first["input"])) and isinstance(first["input"], str):
            remedy = "Write only the number, without quotes or a unit"
    if keys[-1:] == ("[key]",) and kind != "extra_forbidden":
        keys = keys[:-1]  # pydantic's mark of a key that is wrong itself
    return SpecError(where=where(keys), key=dotted(keys), value=value, rule=rule, remedy=remedy)


def _plain(message: str) -> str:
    """Without pydantic's words for Python's types."""
    message = re.sub(r"^(Input|String|Tuple|Dictionary|List) should", "must", message)
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return message if message.isprintable() else ascii(message)[1:-1]
