"""A probe's agent on one host: echoes, swallows, and measures towards other agents on a survey's behalf.

Listens where it is told, never on all addresses, and only to who proves to know the token. Every connection is
bounded in time; there are at most `MAX_CONNECTIONS`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from typing import Any

from atlas.errors import AtlasError
from atlas.wan.probe import measure
from atlas.wan.probe.wire import CONNECT_TIMEOUT_S, ProbeError, connect, read_json, require_token, send_json, welcome

MAX_CONNECTIONS = 256
ECHO_S = 30.0


class ProbeAgent:
    """Serves in threads until closed. `address` is where it really listens (port 0 takes a free one)."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._token = require_token(token)
        _require_explicit(host)
        try:
            self._server = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise AtlasError(f"--listen {host}:{port}: {error.strerror}. Choose an address of this host") from None
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until closed, or interrupted."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)

    def __enter__(self) -> ProbeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(CONNECT_TIMEOUT_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if welcome(sock, self._token):
                    self._obey(sock, read_json(sock))
        except (OSError, ProbeError):
            pass  # a caller that goes away or talks nonsense is its own problem
        finally:
            self._slots.release()

    def _obey(self, sock: socket.socket, request: dict[str, Any]) -> None:
        do = request.get("do")
        if do == "echo":
            _echo(sock)
        elif do == "sink":
            send_json(sock, measure.receive(sock, float(request.get("seconds", 1.0))))
        elif do in ("rtt", "goodput"):
            sock.settimeout(measure.MAX_SECONDS + 2 * measure.GRACE_S)
            try:
                answer = self._measure(request)
            except (AtlasError, OSError, KeyError, TypeError, ValueError) as error:
                answer = {"error": f"{error}"}
            send_json(sock, answer)
        else:
            send_json(sock, {"error": f"a probe does not know {do!r}"})

    def _measure(self, request: dict[str, Any]) -> dict[str, Any]:
        host, port = request["address"]
        target = (str(host), int(port))
        if request["do"] == "rtt":
            return measure.as_json(measure.round_trips(target, self._token, int(request["count"])))
        return measure.as_json(
            measure.goodput(
                target,
                self._token,
                int(request["streams"]),
                float(request["seconds"]),
                max_bytes=int(request["max_bytes"]),
                wait_s=min(5.0, float(request.get("wait_s", 0.0))),
            )
        )


def ask(address: tuple[str, int], token: str, request: dict[str, Any]) -> dict[str, Any]:
    """Has an agent measure something; what it found."""
    with connect(address, token) as sock:
        sock.settimeout(measure.MAX_SECONDS + 2 * measure.GRACE_S)
        try:
            send_json(sock, request)
            answer = read_json(sock)
        except OSError as error:
            raise ProbeError(f"the probe at {address[0]}:{address[1]} fell silent: {error}") from None
    if "error" in answer:
        raise ProbeError(f"the probe at {address[0]}:{address[1]}: {answer['error']}")
    return answer


def _echo(sock: socket.socket) -> None:
    deadline = time.monotonic() + ECHO_S
    while time.monotonic() < deadline:
        data = sock.recv(4096)
        if not data:
            return
        sock.sendall(data)


def _require_explicit(host: str) -> None:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise AtlasError(f"--listen {host}: a probe listens on one address, not on all. Name the one to measure")
    if not host:
        raise AtlasError("--listen: a probe listens on one address, not on all. Name the one to measure")
