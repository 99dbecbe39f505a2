"""Servers on an event loop that limit what callers cost until they have proved who they are: their number, and their
memory and time. And event loops on threads of their own.

Knows connections and TLS. What a caller must prove, and what is said afterwards, is the server's part.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from atlas.errors import AtlasError

T = TypeVar("T")
MAX_GREETING, MAX_CALLERS = 64, 4096
"""Connections that have proved nothing, of which the oldest makes room for a new one, and connections in all."""
BACKLOG = 1024
"""Callers that may wait in the kernel to be accepted. If it is full, a caller tries again a second later."""
NO_DESCRIPTOR_S = 0.05
"""Pause after a failed accept: most likely no file descriptor is left."""

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name=name)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; called on another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class CallerServer:
    """Runs `talk` as a task for each connection, until `close`. `talk` calls `admit` when the caller has proved who it
    is; until then it must use little memory and have a short time limit."""

    def __init__(self, talk: Talk, failed: Callable[[Exception, asyncio.StreamWriter, bool], None]) -> None:
        """`failed`: called with an error that ended a connection, and whether its caller was admitted."""
        self._talk_to, self._failed = talk, failed
        self._socket: socket.socket | None = None
        self._connecting: set[asyncio.Task[Any]] = set()
        self._callers: set[asyncio.Task[None]] = set()
        self._greeting: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Callers that are not admitted, the oldest first."""

    async def listen_at(self, host: str, port: int) -> tuple[str, int]:
        """The IP address and the port that it has got; raises OSError if it cannot listen there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        self.accept_from(listener)
        bound: tuple[str, int] = listener.getsockname()[:2]
        return bound

    def accept_from(self, listener: socket.socket) -> None:
        """Accepts callers from now on."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """One at a time, so that those who were accepted can prove themselves meanwhile. asyncio's own server accepts
        as many at once as its queue has, and new ones would replace all of them."""
        loop = asyncio.get_running_loop()
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            loop.remove_reader(listener)
            loop.call_later(NO_DESCRIPTOR_S, self._accept_again, listener)
            return

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)

        sock.setblocking(False)
        task = asyncio.create_task(loop.connect_accepted_socket(protocol, sock))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # not closed meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def admit(self) -> None:
        """The caller of this task has proved who it is."""
        me = asyncio.current_task()
        assert me is not None
        self._greeting.pop(me, None)

    async def close(self) -> None:
        listener, self._socket = self._socket, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        await asyncio.gather(*self._connecting, return_exceptions=True)  # then they are callers
        for writer in self._greeting.values():
            writer.transport.abort()
        for caller in self._callers:
            caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        if len(self._greeting) >= MAX_GREETING:
            self._greeting.pop(next(iter(self._greeting))).transport.abort()
        if len(self._callers) >= MAX_CALLERS:
            writer.transport.abort()
            return
        self._callers.add(me)
        self._greeting[me] = writer
        try:
            await self._talk_to(reader, writer)
        except (OSError, AtlasError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            self._failed(error, writer, me not in self._greeting)
        except asyncio.CancelledError:
            pass  # cancelled by `close`
        finally:
            self._callers.discard(me)
            self._greeting.pop(me, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def start_tls(writer: asyncio.StreamWriter, context: ssl.SSLContext, timeout_s: float) -> None:
    """Encrypts a connection; of both sides."""
    transport = writer.transport
    try:
        await writer.start_tls(context, ssl_handshake_timeout=timeout_s)
    except AttributeError:  # aborted meanwhile: asyncio loses the transport, and could not close the writer
        writer._transport = transport  # type: ignore[attr-defined]
        raise ConnectionResetError("the other side has closed the connection") from None
