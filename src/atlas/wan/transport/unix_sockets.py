"""Two nodes on one host need no TCP: a listener on a loopback address has a twin, a Unix socket named after it, and who
dials the address tries the twin first. Half the cost of TCP's loopback.

The name is in the abstract namespace: of this network namespace only, nothing on disk, gone with its process. Both ends
make sure that the other belongs to the same user, since anybody may take such a name. A proxy listens at an address of
its own, which has no twin, so what it emulates is not bypassed. Linux only; elsewhere there is TCP.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys

Address = tuple[str, int]


def listen_unix(address: Address, kind: str = "wan") -> socket.socket | None:
    """The twin of a listener at `address`; None where there is none to be had. `kind`: of what is spoken there."""
    if not has_twin(address):
        return None
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(_name(address, kind))
        server.listen(1024)
    except OSError:
        server.close()
        return None
    return server


def dial_unix(address: Address, kind: str = "wan") -> socket.socket | None:
    """A connection to the twin of `address`, if it is there and ours."""
    if not has_twin(address):
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
    return sock.family == getattr(socket, "AF_UNIX", None)


def is_other_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a twin belongs to another user than this one."""
    if not is_unix(sock):
        return False
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", raw)[1] != os.geteuid())


def peer_host(sock: socket.socket) -> str:
    """Where the other end is; a twin is on this host."""
    return "127.0.0.1" if is_unix(sock) else str(sock.getpeername()[0])


def has_twin(address: Address) -> bool:
    """Whether a listener at `address` has one, if it is of our release."""
    try:
        return sys.platform == "linux" and ipaddress.ip_address(address[0]).is_loopback
    except ValueError:
        return False


def _name(address: Address, kind: str) -> str:
    return f"\0atlas {kind} {address[0]} {address[1]}"
