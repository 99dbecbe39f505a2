"""A TLS connection that one thread reads while another writes, which Python's own does not allow: OpenSSL's state is
locked for the moment in which it is used, and never while a thread waits for the network.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
from collections.abc import Callable

from atlas.wan.security.credentials import Security, require_name

RECORD_BYTES = 1 << 16
"""Given to OpenSSL at once, while its state is locked: four TLS records."""


class TlsSocket:
    """The methods of a socket that `frames` uses."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self._tls, self._lock = tls, threading.Lock()
        self._timeout_s: float | None = None
        tls.setblocking(False)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def recv_into(self, buffer: memoryview) -> int:
        return self._do(lambda: self._tls.recv_into(buffer))

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        left = memoryview(data).cast("B")
        while left:
            sent = self._do(lambda part=left[:RECORD_BYTES]: self._tls.send(part))  # type: ignore[misc]
            left = left[sent:]

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._tls, how)  # without TLS's close_notify, for which a reader would have to stop

    def close(self) -> None:
        self._tls.close()

    def _do(self, step: Callable[[], int]) -> int:
        while True:
            try:
                with self._lock:
                    return step()
            except ssl.SSLWantReadError:
                self._wait(selectors.EVENT_READ)
            except ssl.SSLWantWriteError:
                self._wait(selectors.EVENT_WRITE)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return 0
            except ssl.SSLError as error:
                raise ConnectionResetError(f"TLS failed: {error.reason or error}") from None

    def _wait(self, event: int) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._tls, event)
            except ValueError:
                raise ConnectionResetError("the connection is closed") from None
            if not selector.select(self._timeout_s):
                raise TimeoutError("the other side does not answer")


def secured(sock: socket.socket, security: Security, peer: str) -> TlsSocket:
    """The connecting side; raises WorkerError if the other side's certificate is not that of `peer`."""
    try:
        tls = security.client_context.wrap_socket(sock)
    except ssl.SSLError as error:
        raise ConnectionResetError(f"TLS refused: {error.reason or error}") from None
    try:
        require_name(tls.getpeercert(), peer)
    except BaseException:
        tls.close()  # `sock` no longer has the connection
        raise
    return TlsSocket(tls)
