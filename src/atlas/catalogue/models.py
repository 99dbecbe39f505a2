"""Public model shapes by name, each with its source; and why some well-known models are not among them.

The 1.3B and 13B rows of GPT-3's table are left out: their heads and widths do not agree there. Knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from atlas.catalogue.table import table_rows
from atlas.errors import SpecError

EXPERTS = (
    "mixtral",
    "deepseek",
    "llama-4",
    "gpt-oss",
    "grok",
    "dbrx",
    "kimi",
    "glm-4.5",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
)
"""Beginnings of the names of mixtures of experts."""


@dataclass(frozen=True)
class PublicModel:
    """Dimensions of a public model; `keys` are those of a job's `model`."""

    name: str
    keys: dict[str, str | int | bool]
    billions: float
    """Parameters, as published."""
    source: str


@cache
def shapes() -> dict[str, PublicModel]:
    found = {}
    for row in table_rows("models.csv"):
        name, billions, source = row.pop("name"), float(row.pop("billions")), row.pop("source")
        keys: dict[str, str | int | bool] = {"family": row.pop("family")}
        keys["tied_embeddings"] = row.pop("tied_embeddings") == "true"
        keys |= {key: int(value) for key, value in row.items()}
        found[name] = PublicModel(name, keys, billions, source)
    return found


def shape(name: str) -> PublicModel:
    """A shape by its name. SpecError with the nearest names, or with the reason why it cannot be priced."""
    known = shapes()
    word = name.strip().lower().replace("_", "-").replace(" ", "-")
    if word in known:
        return known[word]
    if any(word.startswith(start) for start in EXPERTS):
        rule, remedy = "is a mixture of experts, which Atlas cannot simulate", f"Use a dense model: {', '.join(known)}"
    else:
        near = get_close_matches(word, known, n=3, cutoff=0.5)
        rule = "is neither a built-in model nor an existing folder or config.json"
        remedy = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}"
    raise SpecError(where="--model", key="model", value=name, rule=rule, remedy=remedy)
