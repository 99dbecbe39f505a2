"""An S3 server on loopback for tests, in the environment of this process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ABSENT = [name for name in ("obstore", "moto", "flask_cors") if importlib.util.find_spec(name) is None]


@contextmanager
def served() -> Iterator[None]:
    """While this is open, `s3://atlas` is an empty bucket."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
    from common.s3_server import s3_server

    before = dict(os.environ)
    try:
        with s3_server() as environment:
            os.environ.update(environment)
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
