"""One hypothesis profile for every test: no deadline (the first example may compile numba), the same examples on
every run, so that a red test is red for everybody. `HYPOTHESIS_PROFILE=explore` draws new ones each time.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
