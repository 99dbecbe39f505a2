"""Messages of a worker's processes as JSON lines, and errors as messages."""

from __future__ import annotations

import json
import os
import threading
import traceback
from typing import Any, NoReturn, TextIO

import torch

from atlas.errors import AtlasError, DivergedRunError, WorkerError


class MessageWriter:
    """Writes messages as whole lines, from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()

    def fail(self, error: Exception) -> NoReturn:
        """Report an error and end the process, whatever its other threads do. Call it while `error` is handled: then
        nothing of the failed calls is destroyed before. A process group waits for its operations when it is, and gloo's
        threads may abort an interpreter that ends under them."""
        try:
            self.send(error_message(error))
        finally:
            os._exit(1)


def error_message(error: Exception) -> dict[str, Any]:
    """`user_error`: the user must change something, a restart would not help."""
    if isinstance(error, DivergedRunError):
        return {"error": str(error), "user_error": True, "diverged": error.step}
    if isinstance(error, AtlasError):
        return {"error": str(error), "user_error": not isinstance(error, WorkerError)}
    if isinstance(error, torch.OutOfMemoryError):
        why = str(error).partition(". ")[0]
        text = f"the model does not fit: {why}. Use more stages, or a smaller microbatch"
        return {"error": text, "user_error": True}
    trace = "".join(traceback.format_exception(error))
    return {"error": f"a bug in Atlas:\n{trace}", "user_error": False}
