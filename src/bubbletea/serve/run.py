"""Runs a service on an event loop, from its start until it is drained, together with its workers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from atlas.errors import AtlasError
from bubbletea.serve.assemble import AssembledService, WorkersAt
from bubbletea.serve.folder import private_folder
from bubbletea.serve.http import HttpServer

Workers = Callable[[str, str], AbstractContextManager[object]]
"""Starts the workers, given the address and the token file."""
BACKLOG = 2048
"""Connections that wait to be accepted, as uvicorn's own default. The kernel may allow fewer."""


@dataclass(frozen=True)
class ListenSettings:
    """Where the service listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    handoff_port: int = 0
    anywhere: bool = False
    """The hand-off listens on `host`, not on loopback."""
    drain_s: float = 30.0
    workers: WorkersAt | None = None
    """Of a run that others start; None: this service starts its own workers."""


async def run(
    parts: AssembledService, where: ListenSettings, workers: Workers, on_start: Callable[[HttpServer], None]
) -> None:
    """Runs until a signal or `HttpServer.drain`; then admitted requests are finished or handed back."""
    server = HttpServer(parts.api.app, parts.service, where.drain_s)
    with _listening(where) as sock, private_folder() as folder, ExitStack() as stack:
        server.port = sock.getsockname()[1]
        handoff = (where.host if where.anywhere else "127.0.0.1", where.handoff_port)
        try:
            address = await parts.start(folder, handoff, workers=where.workers)
            stack.enter_context(workers(address, str(folder / "token")))
            on_start(server)
            await server.serve([sock])
        finally:
            await parts.close()


def _listening(where: ListenSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        return socket.create_server((where.host, where.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise AtlasError(
            f"{where.host}:{where.port}: cannot listen there ({error.strerror}). Choose another --host or --port"
        ) from None
