"""The folder in which a service keeps its token and the socket of its workers: private to this user, and gone when the
service is, however it ends. A small process waits for the service's end and removes the folder, also after kill -9.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMOVE = 'read -r _; rm -rf -- "$1"'
"""`read` returns when the pipe is closed, which the kernel does when we end."""


@contextmanager
def private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bubbletea-"))
    remover = subprocess.Popen(
        ["/bin/sh", "-c", REMOVE, "bubbletea-cleanup", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the service's to hear
    )
    try:
        yield folder
    finally:
        remover.communicate()
