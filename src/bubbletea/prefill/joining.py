"""How a worker gets a connection to the service of its datacenter: dial, prove the token, send its identity, and
receive its order. One attempt; `plugin` repeats it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from atlas.addresses import is_loopback
from atlas.errors import WorkerError
from atlas.wan.security.credentials import Security
from bubbletea.frames import FrameSocket, greet
from bubbletea.prefill.service_files import ServicePlace
from bubbletea.prefill.service_link import ServiceLink
from bubbletea.prefill.tls import secured

CONNECT_S = 5.0
"""Time limit of a connection to the service."""
SERVICE = "bubbletea"
"""The service's name in its datacenter: `east/bubbletea`, as in certificates."""


class JoinRefused(WorkerError):  # noqa: N818
    """The service has refused this worker; the message has the reason."""


@dataclass(frozen=True)
class WorkerIdentity:
    """The facts that a worker sends when it joins."""

    name: str
    """`p0.s1`"""
    datacenter: str
    worker: int
    """Its number over all cells."""
    plan: str = ""
    """The id of its Program; empty: it does not train."""
    device: str = ""
    """paced, cpu or cuda."""
    memory_bytes: int = 0
    """Reserved for prefill before training; 0: as much as the service wants."""
    security: Security = field(default_factory=Security, compare=False)

    def greeting(self, transport: list[Any], parts: Sequence[Any]) -> dict[str, Any]:
        return {
            "name": self.name,
            "datacenter": self.datacenter,
            "worker": self.worker,
            "pid": os.getpid(),
            "transport": transport,
            "plan": self.plan,
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "parts": list(parts),
        }


def dial(address: str) -> socket.socket:
    """`unix:PATH` or `HOST:PORT`."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_S)
        sock.connect(address.removeprefix("unix:"))
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)


def join(place: ServicePlace, me: WorkerIdentity, transport: list[Any], parts: Sequence[Any] = ()) -> ServiceLink:
    """`parts`: where decode engines fetch from this worker (host, port, whether they need a certificate). Raises
    OSError if nothing listens there, JoinRefused if the service refuses this worker, WorkerError if it is not the
    right one."""
    sock = dial(place.address)
    try:
        connection = _protected(sock, place, me)
        before_ns = time.monotonic_ns()
        answer = greet(connection, place.token, me.greeting(transport, parts))
        offset_ns = int(answer.get("now_ns", 0)) - (before_ns + time.monotonic_ns()) // 2
        if "refused" in answer:
            raise JoinRefused(str(answer["refused"]))
        return ServiceLink(connection, answer, offset_ns)
    except BaseException:
        sock.close()
        raise


def _protected(sock: socket.socket, place: ServicePlace, me: WorkerIdentity) -> FrameSocket:
    peer = f"{me.datacenter}/{SERVICE}"
    if place.tls and me.security.credentials is None:
        raise WorkerError(
            f"{peer} at {place.address} needs certificates: start training with --certs, as you started the service"
        )
    if place.tls:
        return secured(sock, me.security, peer)
    if not place.address.startswith("unix:") and not is_loopback(sock.getpeername()[0]):
        raise WorkerError(f"{peer} at {place.address} is on another host and has no certificates: give it --certs")
    return sock
