"""The models that a file of one kind is made of."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel


def sections(kind: Any) -> list[type[BaseModel]]:
    """This model and those of its fields, by name."""
    found: dict[str, type[BaseModel]] = {}

    def walk(one: Any) -> None:
        if isinstance(one, type) and issubclass(one, BaseModel):
            found[one.__name__] = one
            for field in one.model_fields.values():
                walk(field.annotation)
        for inside in get_args(one):
            walk(inside)

    walk(kind)
    return [found[name] for name in sorted(found)]
