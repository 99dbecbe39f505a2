"""The wire between an emulator's user and the process (or thread) that does its work: commands and answers in JSON
lines over a socket pair. The worker ends with the socket, so also when its user crashes. Knows no paths.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import atlas
from atlas.errors import AtlasError

ANSWER_TIMEOUT_S = 60.0
"""The first start of all compiles the forwarder; everything else answers at once."""
END_TIMEOUT_S = 5.0


class Commander:
    """Speaks to one worker. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._socket, self._theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        self._heard = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start_process(self, module: str, fds: Sequence[int] = ()) -> None:
        """`python -m module SOCKET_FD FD...`, of the atlas that we are."""
        source = str(Path(atlas.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        passed = [self._theirs.fileno(), *fds]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is the user's to hear
        )
        self._theirs.close()

    def start_thread(self, serve: Callable[[socket.socket], None]) -> None:
        self._thread = threading.Thread(target=serve, args=(self._theirs,), daemon=True)
        self._thread.start()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The worker's answer, or an error that says what it was asked."""
        with self._lock:
            try:
                self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
                line = self._heard.readline()
            except (OSError, ValueError) as error:
                raise AtlasError(f"{self._name} does not answer {do!r}: {error}") from None
        if not line:
            raise AtlasError(f"{self._name} ended before it answered {do!r}: see its message above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AtlasError(f"{self._name}, {do}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the worker. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)
        else:
            self._theirs.close()
        self._heard.close()
        self._socket.close()
