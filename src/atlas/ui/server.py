"""The page's HTTP server: the page, its state as JSON, server-sent events, what-if. The standard library's server, a
thread for each client: a page has a few, and 256 at most.

Loopback needs no token, but the host name in the request must be loopback's too, so that a foreign page cannot read
this one through a DNS name of its own. Any other address needs the token: in the address once, then in a cookie. A
client that does not read is disconnected; it holds one thread and no memory, since all clients share one version of the
state.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from atlas.addresses import LOOPBACK, is_loopback
from atlas.errors import AtlasError
from atlas.ui.live_run import LiveRun

MAX_STREAMS, MAX_CONNECTIONS = 256, 512
"""Open pages, each with one stream of events, and connections of all clients."""
MAX_BODY, SEND_BUFFER = 64 << 10, 64 << 10
"""Bytes of a question, and of what a client has not read yet: small, so that one that does not read is found soon."""
SHUTDOWN_POLL_S = 0.1
"""Between two looks of the server at whether it should close."""
SEND_S = 10.0
"""A client that reads nothing for this long is disconnected."""
ALIVE_S = 15.0
"""A stream without news sends a comment this often, so that both sides notice a lost connection."""
PAUSE_S = 0.5
"""Least time between two events to one client."""
COOKIE = "atlas_token"
"""Holds the token after it has left the address bar."""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy: the page loads nothing from elsewhere, and no other page may embed it."""

PostHandler = Callable[[dict[str, Any]], dict[str, Any]]
"""From the JSON body of a POST to the JSON answer."""


class PageServer(ThreadingHTTPServer):
    """Serves one run. `answers`: by path, a function from a JSON body to a JSON answer."""

    daemon_threads = True
    request_queue_size = MAX_STREAMS

    def __init__(
        self,
        run: LiveRun,
        page: Callable[[], str],
        answers: dict[str, PostHandler],
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
    ) -> None:
        self.run, self.page, self.answers, self.token = run, page, answers, token
        if not is_loopback(host) and not token:
            raise AtlasError(f"{host} is not a loopback address: a page there needs a token")
        self.closing = threading.Event()
        self._slots, self.streams = threading.Semaphore(MAX_CONNECTIONS), threading.Semaphore(MAX_STREAMS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), PageHandler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise AtlasError(f"{host}:{port}: {why}. Choose another port, or 0 for any") from error
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(SHUTDOWN_POLL_S,), daemon=True, name="page")
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnected is not an error."""

    def close(self) -> None:
        self.closing.set()
        self.run.close()
        self.shutdown()
        self.server_close()
        self._thread.join()


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = SEND_S

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    def do_GET(self) -> None:
        if not self._admitted():
            return
        path, run = urlsplit(self.path).path, self.server.run
        if path == "/":
            self._send(self.server.page().encode(errors="replace"), "text/html; charset=utf-8")
        elif path == "/api/state":
            self._json(run.state())
        elif path == "/api/timeline":
            self._send(run.timeline_json(), "application/json")
        elif path == "/events":
            self._stream()
        else:
            self._refuse(404, "Not found. Paths: /, /events, /api/state, /api/timeline")

    def do_POST(self) -> None:
        if not self._admitted():
            return
        answer = self.server.answers.get(urlsplit(self.path).path)
        if answer is None:
            return self._refuse(404, f"Not found. Paths for POST: {', '.join(sorted(self.server.answers)) or 'none'}")
        kind = (self.headers.get("Content-Type") or "").partition(";")[0].strip()
        length = self.headers.get("Content-Length") or ""
        if kind != "application/json" or not length.isdecimal() or int(length) > MAX_BODY:
            return self._refuse(400, f"Send JSON with its Content-Length, at most {MAX_BODY} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return self._refuse(400, f"The body is not a JSON object: {error}")
        try:
            self._json(answer(body))
        except AtlasError as error:
            self._json({"error": str(error)}, 422)

    # ---- who may ask -------------------------------------------------------------------------------------------------
    def _admitted(self) -> bool:
        token = self.server.token
        if not token:
            return self._named_loopback()
        given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        bearer = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if not any(hmac.compare_digest(one.encode(), token.encode()) for one in (given, bearer, self._cookie())):
            self._refuse(401, "Open the address with its ?token=..., as it was printed at the start")
            return False
        if given and urlsplit(self.path).path == "/":
            # The token leaves the address bar; a cookie of this site alone has it from now on.
            self.send_response(303)
            self.send_header("Location", "/")
            self.send_header("Set-Cookie", f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        return True

    def _named_loopback(self) -> bool:
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            name = ""
        origin = self.headers.get("Origin")
        foreign = origin is not None and urlsplit(origin).netloc != self.headers.get("Host")
        if not is_loopback(name) or foreign:
            self._refuse(403, "Open this page as 127.0.0.1 or localhost")
            return False
        return True

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    # ---- answers -----------------------------------------------------------------------------------------------------
    def _stream(self) -> None:
        """Server-sent events: the state without its curves, whenever it has changed."""
        server, run = self.server, self.server.run
        if not server.streams.acquire(blocking=False):
            return self._refuse(503, f"{MAX_STREAMS} pages are open already: close one")
        try:
            self.send_response(200)
            self._headers("text/event-stream")
            self.end_headers()
            seen = -1
            while not server.closing.is_set():
                version = run.wait(seen, ALIVE_S)
                if version == seen:
                    self.wfile.write(b": alive\n\n")
                else:
                    self.wfile.write(b"data: " + json.dumps(run.state(series=False)).encode() + b"\n\n")
                seen = version
                time.sleep(PAUSE_S)
        except (OSError, ValueError):
            pass  # it went away, or does not read
        finally:
            server.streams.release()

    def _json(self, data: Any, code: int = 200) -> None:
        self._send(json.dumps(data).encode(), "application/json", code)

    def _send(self, body: bytes, kind: str, code: int = 200) -> None:
        self.send_response(code)
        self._headers(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _headers(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")

    def _refuse(self, code: int, text: str) -> None:
        self._send(f"{text}\n".encode(), "text/plain; charset=utf-8", code)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


def page_address(text: str, flag: str) -> tuple[str, int]:
    """`8642`, `0.0.0.0:8642` or `[::1]:8642`."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]") if colon else LOOPBACK
    if not port.isdecimal() or int(port) > 65535 or not host:
        raise AtlasError(
            f"{flag} {text}: must be PORT or HOST:PORT, with a port up to 65535. Write 8642, or "
            "0.0.0.0:8642 for other hosts too"
        )
    return host, int(port)
