"""A probe's agent on one host: echoes, receives, and measures towards other agents when a survey asks it to.

Listens on one explicit address and serves only clients that have the token. Every connection is bounded in time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from atlas.errors import AtlasError
from atlas.lifetime import Closing
from atlas.wan.probe import measure
from atlas.wan.probe.packet_series import answer_blocks, packet_series
from atlas.wan.probe.wire import CONNECT_TIMEOUT_S, ProbeError, connect, has_token, read_json, require_token, send_json
from atlas.wan.transport.base import is_wildcard

MAX_CONNECTIONS = 256
"""Four surveys with the most streams each. Further connections are closed."""
ECHO_S = 30.0
"""The longest that one connection is echoed: 1000 round trips of 30 ms."""
MEASUREMENTS: dict[str, Callable[..., Any]] = {
    "rtt": measure.round_trips,
    "goodput": measure.goodput,
    "packets": packet_series,
}
"""What a survey may ask for. The other keys of its request are their arguments."""
MEASURE_TIMEOUT_S = measure.MAX_SECONDS + 2 * measure.GRACE_S


class ProbeAgent(Closing):
    """Serves in threads until closed. `address` is where it listens (port 0 takes a free one)."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._token = require_token(token)
        if not host or is_wildcard(host):
            raise AtlasError(f"--listen {host}: a probe listens on one address, not on all. Name the one to measure")
        try:
            self._server = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise AtlasError(f"--listen {host}:{port}: {error.strerror}. Choose an address of this host") from None
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the agent is closed, or when interrupted."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(CONNECT_TIMEOUT_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if has_token(sock, self._token):
                    self._answer(sock, read_json(sock))
        except (OSError, ProbeError):
            pass  # the client went away or sent something else than a request: nothing to do here
        finally:
            self._free.release()

    def _answer(self, sock: socket.socket, request: dict[str, Any]) -> None:
        do = request.get("do")
        if do == "echo":
            _echo(sock)
        elif do == "sink":
            send_json(sock, measure.receive(sock, float(request.get("seconds", 1.0))))
        elif do == "acks":
            answer_blocks(sock, float(request["seconds"]), int(request["block_bytes"]))
        elif isinstance(do, str) and do in MEASUREMENTS:
            sock.settimeout(MEASURE_TIMEOUT_S)
            try:
                answer = self._measure(request)
            except (AtlasError, OSError, KeyError, TypeError, ValueError) as error:
                answer = {"error": f"{error}"}
            send_json(sock, answer)
        else:
            send_json(sock, {"error": f"unknown request {do!r}: use the same release on both ends"})

    def _measure(self, request: dict[str, Any]) -> dict[str, Any]:
        host, port = request.pop("address")
        found: Any = MEASUREMENTS[request.pop("do")]((str(host), int(port)), self._token, **request)
        return found if isinstance(found, dict) else asdict(found)


def ask(address: tuple[str, int], token: str, request: dict[str, Any]) -> dict[str, Any]:
    """Asks an agent to measure something and returns its answer."""
    with connect(address, token) as sock:
        sock.settimeout(MEASURE_TIMEOUT_S)
        try:
            send_json(sock, request)
            answer = read_json(sock)
        except OSError as error:
            raise ProbeError(f"the probe at {address[0]}:{address[1]} stopped answering: {error}") from None
    if "error" in answer:
        raise ProbeError(f"the probe at {address[0]}:{address[1]}: {answer['error']}")
    return answer


def _echo(sock: socket.socket) -> None:
    deadline = time.monotonic() + ECHO_S
    while time.monotonic() < deadline and (data := sock.recv(4096)):
        sock.sendall(data)
