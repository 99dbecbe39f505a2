"""An optical switch behind RESTCONF, on loopback, for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from atlas.fabric.restconf import RESOURCE


class Device(BaseHTTPRequestHandler):
    """A small RESTCONF server. `mode`: ok, refuses, no-change or garbage."""

    mode = "ok"
    rows: ClassVar[list[dict[str, Any]]] = []
    refuses_after: ClassVar[int] = 10**9
    num_changes: ClassVar[int] = 0
    seen: ClassVar[list[str]] = []

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append(self.path)
        if self.mode == "refuses" or self.num_changes >= self.refuses_after:
            error = {"error-type": "application", "error-tag": "in-use", "error-message": "another user holds the lock"}
            return self.answer(409, {"ietf-restconf:errors": {"error": [error]}})
        type(self).num_changes += 1
        if self.mode != "no-change":
            type(self).rows = body[RESOURCE]["cross-connect"]
        return self.answer(204, None)

    def do_GET(self) -> None:
        if self.mode == "garbage":
            return self.answer(200, [1])
        return self.answer(200, {RESOURCE: {"cross-connect": [{**row, "oper-status": "up"} for row in self.rows]}})

    def answer(self, status: int, body: Any) -> None:
        raw = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def running() -> Iterator[tuple[str, type[Device]]]:
    """Its RESTCONF root, and a class that has its state."""
    kind = type(
        "OwnDevice", (Device,), {"rows": [], "seen": [], "mode": "ok", "refuses_after": 10**9, "num_changes": 0}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/restconf", kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
