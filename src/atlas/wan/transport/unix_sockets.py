"""Connections on one host without TCP: a listener on a loopback address also listens on a Unix socket named after the
address, and a client that connects to the address tries the Unix socket first. It costs half of TCP's loopback.

The name is in the abstract namespace: visible in this network namespace only, nothing on disk, gone with its process.
Both ends check that the other belongs to the same user, because any user may take such a name. A proxy listens at an
address of its own, without a Unix socket, so emulated paths are not bypassed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

from atlas.wan.transport.base import Address

BACKLOG = 1024
"""Connections that may wait to be accepted: all streams of all peers of a large group at once."""


def listen_unix(address: Address, kind: str = "wan") -> socket.socket | None:
    """Listens on the Unix socket of `address`. None if it cannot have one. `kind` names the protocol."""
    if not can_be_unix(address):
        return None
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(_name(address, kind))
        server.listen(BACKLOG)
    except OSError:
        server.close()
        return None
    return server


def dial_unix(address: Address, kind: str = "wan") -> socket.socket | None:
    """Connects to the Unix socket of `address`. None if it does not exist or belongs to another user."""
    if not can_be_unix(address):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(_name(address, kind))
        if not is_other_user(sock):
            return sock
    except OSError:
        pass
    sock.close()
    return None


def is_unix(sock: socket.socket) -> bool:
    return sock.family == socket.AF_UNIX


def is_other_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to another user. False for TCP."""
    if not is_unix(sock):
        return False
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", raw)[1] != os.geteuid())


def peer_host(sock: socket.socket) -> str:
    """The address of the other end; for a Unix socket, that of this host."""
    return "127.0.0.1" if is_unix(sock) else str(sock.getpeername()[0])


def can_be_unix(address: Address) -> bool:
    """Whether a listener at `address` has a Unix socket too."""
    try:
        return ipaddress.ip_address(address[0]).is_loopback
    except ValueError:
        return False


def _name(address: Address, kind: str) -> str:
    return f"\0atlas {kind} {address[0]} {address[1]}"
