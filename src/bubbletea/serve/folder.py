"""A private folder for the service's token and the socket of its workers, removed when the service ends. A small
process waits for that end and removes the folder, also after kill -9.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMOVE = 'read -r _; rm -rf -- "$1"'
"""`read` returns when the pipe is closed; the kernel closes it when the service ends."""


@contextmanager
def private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bubbletea-"))
    remover = subprocess.Popen(
        ["/bin/sh", "-c", REMOVE, "bubbletea-cleanup", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is handled by the service
    )
    try:
        yield folder
    finally:
        remover.communicate()
