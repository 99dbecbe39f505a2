"""Fixtures that several tests of tvcache share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from text_environment import Notebook

from tvcache import Cache, Tool


@pytest.fixture
def executed() -> list[str]:
    return []


@pytest.fixture
def forks() -> list[int]:
    return []


@pytest.fixture
def make(executed: list[str], forks: list[int]) -> Callable[[], Notebook]:
    return lambda: Notebook([], executed, forks)


@pytest.fixture
def cache() -> Cache:
    return Cache(tools=[Tool("read", "reads")], audit=0.0)
