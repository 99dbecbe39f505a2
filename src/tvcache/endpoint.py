"""A server's address, and requests to it: connections are kept; HTTPS with the user's certificates.

Uses only the standard library; independent of the cache.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tvcache.errors import TvcacheError

WRONG_NAME = (62, 64)
"""OpenSSL's codes for a valid certificate of another host name or address."""


@dataclass(frozen=True)
class Certificates:
    """PEM files: `ca` to verify the peer, `cert` and `key` to authenticate to it."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def client_context(self, check_name: bool = True) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.check_hostname = check_name
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise TvcacheError(f"certificates {self.ca}, {self.cert}, {self.key}: {error}. Give PEM files") from None
        return context


class HttpEndpoint:
    """`http://host:port`, or https. A token goes only to this machine or over https."""

    def __init__(self, url: str, token: str = "", certificates: Certificates | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise TvcacheError(f"{url!r} is not the address of a server: give one like http://127.0.0.1:8765")
        try:
            port = parts.port
        except ValueError:
            raise TvcacheError(f"{url!r}: the port is not a number from 1 to 65535") from None
        self.url, self.host, self.tls = url.rstrip("/"), parts.hostname, parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self._certificates = certificates or Certificates()
        self._context = self._certificates.client_context() if self.tls else None
        self._nameless = False
        """The server's certificate has no host name; only its authority, given by the user, is checked."""
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def post(self, path: str, found: Any, timeout_s: float) -> tuple[int, Any]:
        status, _, data = self.request("POST", path, json.dumps(found, ensure_ascii=False).encode(), timeout_s)
        return status, json.loads(data)

    def request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request; retried on a new connection if a kept one is closed, since requests are idempotent."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._exchange(kept, method, path, body, timeout_s)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                pass
        return self._exchange(self._open(timeout_s), method, path, body, timeout_s)

    def close(self) -> None:
        """Close idle connections now, and the others when their requests end."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> HttpEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._context is not None:
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.host, self.port, timeout=timeout_s, context=self._context
            )
        else:
            made = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            made.connect()
            if self._nameless and _host_names(made.sock):
                raise ssl.SSLCertVerificationError(f"{self.url}: the certificate names another host")
        except ssl.SSLCertVerificationError as error:
            made.close()
            if self._nameless or self._certificates.ca is None or error.verify_code not in WRONG_NAME:
                raise
            # Certificates of a private authority, such as those of `atlas wan certs`, may name nodes, not hosts.
            self._nameless, self._context = True, self._certificates.client_context(check_name=False)
            return self._open(timeout_s)
        except BaseException:
            made.close()
            raise
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Keeps the connection if it can be used again, and closes it otherwise."""
        again = False
        try:
            connection.sock.settimeout(timeout_s)
            connection.request(method, path, body, self._headers)
            answer = connection.getresponse()
            data = answer.read()
            with self._lock:
                again = not answer.will_close and not self._closed
                if again:
                    self._idle.append(connection)
            return answer.status, answer.headers, data
        finally:
            if not again:
                connection.close()


def _host_names(connected: socket.socket) -> list[str]:
    assert isinstance(connected, ssl.SSLSocket)
    pairs: Any = (connected.getpeercert() or {}).get("subjectAltName", ())
    return [str(value) for kind, value in pairs if kind in ("DNS", "IP Address")]


def is_loopback(host: str) -> bool:
    """Whether the address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
