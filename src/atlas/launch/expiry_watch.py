"""Warns of certificates that end soon, at the start of a launcher and while it runs: a run may take longer than its
certificates are valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from atlas.errors import AtlasError
from atlas.wan.security.certs import expiry_warnings

EVERY_S = 12 * 3600.0


class ExpiryWatch:
    """`with ExpiryWatch(folder, datacenter, say):` warns now and every `every_s` seconds. Without a folder, never."""

    def __init__(
        self, folder: Path | None, datacenter: str, say: Callable[[str], None], every_s: float = EVERY_S
    ) -> None:
        self.folder, self.datacenter, self.say, self.every_s = folder, datacenter, say, every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="expiry of certificates")

    def __enter__(self) -> ExpiryWatch:
        self._warn()
        if self.folder is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        if self.folder is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self.every_s):
            try:
                self._warn()
            except (OSError, ValueError, AtlasError) as error:  # it is being replaced, perhaps
                self.say(f"warning: the certificates in {self.folder} cannot be read: {error}")

    def _warn(self) -> None:
        for warning in expiry_warnings(self.folder, self.datacenter):
            self.say(warning)
