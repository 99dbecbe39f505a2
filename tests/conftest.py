"""One hypothesis profile for all tests: no deadline (the first example may compile numba) and the same examples on
every run, so that a failing test fails for everyone. `HYPOTHESIS_PROFILE=explore` draws new examples.

Files that start many processes come first, so that none of them is alone on one core at the end of `make test`. torch
computes on one thread, in the tests and in the processes that they start: the threads of small models mostly wait.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: its children would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

FIRST = ("launch", "runtime", "bubbletea", "wan")
"""Folders of tests, the slowest files first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.nodeid.split("/")[1]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=place)
