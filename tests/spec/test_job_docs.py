"""docs/jobs.md and the docstrings name every key a job file may have."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from sections import sections

from atlas.cost.profile import Profile
from atlas.spec import GPUS, Job

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()


@pytest.mark.parametrize("kind", [*sections(Job), *sections(Profile)], ids=lambda kind: kind.__name__)
def test_every_key_has_a_docstring_and_is_on_the_page(kind: type) -> None:
    source = inspect.getsource(kind)
    for name in kind.model_fields:
        assert re.search(rf'\n    {name}: [^\n]*(\n    [^\n]*)?\n    """', source), f"{kind.__name__}.{name}"
        assert re.search(rf"\b{name}\b", PAGE), f"{kind.__name__}.{name}"


def test_every_built_in_gpu_is_on_the_page() -> None:
    assert [name for name in GPUS if name not in PAGE] == []
