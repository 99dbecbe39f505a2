"""Warns of certificates that end soon, at the start of a launcher and while it runs: a run may take longer than its
certificates are valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas.errors import AtlasError
from atlas.wan.security.certs import expiry_warnings

EVERY_S = 12 * 3600.0


@contextmanager
def expiry_watch(
    folder: Path | None, datacenter: str, say: Callable[[str], None], every_s: float = EVERY_S
) -> Iterator[None]:
    """Inside the block: warn now and every `every_s` seconds. Without a folder, never."""
    closing = threading.Event()

    def warn() -> None:
        for warning in expiry_warnings(folder, datacenter):
            say(warning)

    def watch() -> None:
        while folder is not None and not closing.wait(every_s):
            try:
                warn()
            except (OSError, ValueError, AtlasError) as error:  # it is being replaced, perhaps
                say(f"warning: the certificates in {folder} cannot be read: {error}")

    warn()
    thread = threading.Thread(target=watch, daemon=True, name="expiry of certificates")
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()
