"""A private folder for the service's token and the socket of its workers, removed when the service ends. A small
process waits for that end and removes the folder, also after kill -9.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bubbletea.prefill.service_files import cleanup_process

REMOVE = 'read -r _; rm -rf -- "$1"'
"""`read` returns when the service ends."""


@contextmanager
def private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bubbletea-"))
    cleanup = cleanup_process(REMOVE, folder)
    try:
        yield folder
    finally:
        cleanup.communicate()
