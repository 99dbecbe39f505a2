"""Rules for the `model:` of a link: it can be read, belongs to the link, and is not given beside a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from atlas.errors import SpecError
from atlas.spec.document import Keys, dotted
from atlas.spec.job import Link, Wan
from atlas.spec.refusal import Where, bad
from atlas.weather.path_model import load_model, require_like


def weather_rules(path: Link | Wan, wan: Wan, where: Where, key: Keys) -> Iterator[SpecError]:
    """A model must be readable and of this link, and is used in place of a trace."""
    if path.model is not None and (path.trace or wan.trace):
        rule = "a link has a trace or a model, not both"
        yield bad(where, (*key, "model"), path.model, rule, "Leave one of the two out")
    elif (path.model or wan.model) is not None and (path.model is not None or path.pair_gbps is not None):
        model = load_model(Path(path.model or wan.model or ""), dotted((*key, "model")))
        require_like(model, path.pair_gbps or wan.pair_gbps, where((*key, "model")), dotted((*key, "model")))
