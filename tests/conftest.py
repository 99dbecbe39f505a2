"""One hypothesis profile for all tests: no deadline (the first example may compile numba) and the same examples on
every run, so that a failing test fails for everyone. `HYPOTHESIS_PROFILE=explore` draws new examples.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
