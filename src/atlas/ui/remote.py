"""Follows the page of a run on another host by its address, and shows it here: one connection, whatever the number of
browsers on this side.

Knows the page's API; not what runs there.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import parse_qs, urlsplit

from atlas.errors import AtlasError
from atlas.ui.live_run import LiveRun

TIMEOUT_S = 30.0
"""The other page sends something every 15 s."""
AGAIN_S = 2.0
"""Pause before a lost connection is opened again."""
MAX_BYTES, MAX_REASON_BYTES = 256 << 20, 200
"""Of an answer, and of the reason of a refusal, that are read."""


class RemoteFollower:
    """`start` follows the page at `url` (with its `?token=`) on a thread of its own."""

    def __init__(self, url: str, run: LiveRun) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise AtlasError(
                f"{url}: not the address of a page. Write it as `atlas train --ui` prints it: http://HOST:PORT"
            )
        self.base, self.run = f"{parts.scheme}://{parts.netloc}", run
        self._token = parse_qs(parts.query).get("token", [""])[0]
        self._timeline: tuple[Any, bytes] = (None, b"")
        self._closed = threading.Event()

    def start(self) -> None:
        """Raises AtlasError where the page does not answer."""
        try:
            self._take()
        except urllib.error.HTTPError as error:
            text = error.read(MAX_REASON_BYTES).decode(errors="replace").strip()
            why = error.reason if not text or text.startswith("<") else text
            raise AtlasError(f"{self.base}: status {error.code}: {why}. Check the address and the token") from error
        except (OSError, HTTPException, ValueError) as error:
            what = getattr(error, "reason", error)
            what = getattr(what, "strerror", None) or what
            raise AtlasError(
                f"{self.base}: no page of a run there ({what}). Check the address and the token"
            ) from error
        threading.Thread(target=self._follow, daemon=True, name="remote page").start()

    def close(self) -> None:
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                with self._open("/events") as lines:
                    for line in lines:
                        if self._closed.is_set():
                            return
                        if line.startswith(b"data: "):
                            self._take()
            except (OSError, HTTPException, ValueError):
                pass  # it ended, or the network did: try again
            self._closed.wait(AGAIN_S)

    def _take(self) -> None:
        with self._open("/api/state") as reply:
            state = json.loads(reply.read(MAX_BYTES))
        if not isinstance(state, dict) or "run" not in state:
            raise ValueError("it is not the page of a run")
        if self._timeline[0] != state.get("timeline_version"):
            with self._open("/api/timeline") as reply:
                self._timeline = (state.get("timeline_version"), reply.read(MAX_BYTES))
        self.run.adopt({**state, "whatif": False}, self._timeline[1])

    def _open(self, path: str) -> Any:
        request = urllib.request.Request(self.base + path)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
