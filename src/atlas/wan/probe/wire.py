"""The probe's protocol: both ends prove that they have the token, then exchange bounded JSON messages, then raw bytes.

The token itself is never sent, and nothing is unpickled. It is not encrypted: no message holds a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

from atlas.errors import AtlasError

HELLO = b"ATLP1"
NONCE_BYTES, PROOF_BYTES = 16, hashlib.sha256().digest_size
MAX_MESSAGE_BYTES = 4 << 20
"""A sink's answer at its longest: 64 streams of 30 s in bins of 2 ms."""
CONNECT_TIMEOUT_S = 10.0
MIN_TOKEN_CHARS = 16
"""64 bits where the token is hexadecimal."""


class ProbeError(AtlasError):
    """The other end of a probe is absent, is not a probe, or did not do what it should."""


class HungUpError(ProbeError):
    """The other end closed the connection in the middle of a message."""


def require_token(token: str) -> str:
    if not token:
        raise AtlasError("a probe needs a token. Give --token-file FILE or $ATLAS_PROBE_TOKEN, the same on every host")
    if len(token) < MIN_TOKEN_CHARS:
        raise AtlasError(
            f"the probe's token has {len(token)} characters: at least {MIN_TOKEN_CHARS} are needed. "
            "Make one with `openssl rand -hex 16` and give it to every host"
        )
    return token


def connect(address: tuple[str, int], token: str) -> socket.socket:
    """Connects to an agent and checks that it has the token."""
    where = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ProbeError(
            f"no probe answers at {where}: {error.strerror or error}. Start `atlas wan probe --listen` there"
        ) from None
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = read_exactly(sock, len(HELLO) + NONCE_BYTES)
        if not greeting.startswith(HELLO):
            raise ProbeError(f"{where} is not a probe of this release")
        theirs, ours = greeting[len(HELLO) :], os.urandom(NONCE_BYTES)
        sock.sendall(ours + _proof(token, b"client", theirs, ours))
        if not hmac.compare_digest(read_exactly(sock, PROOF_BYTES), _proof(token, b"server", ours, theirs)):
            raise ProbeError(f"{where} has another token. Give both ends the same one")
    except HungUpError:
        sock.close()
        raise ProbeError(f"the probe at {where} closed the connection: its token differs, or it is too busy") from None
    except (OSError, ProbeError) as error:
        sock.close()
        raise error if isinstance(error, ProbeError) else ProbeError(f"the probe at {where}: {error}") from None
    return sock


def has_token(sock: socket.socket, token: str) -> bool:
    """The agent's side of `connect`: whether the client has the token."""
    ours = os.urandom(NONCE_BYTES)
    sock.sendall(HELLO + ours)
    answer = read_exactly(sock, NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", ours, theirs)):
        return False
    sock.sendall(_proof(token, b"server", theirs, ours))
    return True


def _proof(token: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token.encode(), role + first + second, hashlib.sha256).digest()


def send_json(sock: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    sock.sendall(struct.pack("!I", len(data)) + data)


def read_json(sock: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!I", read_exactly(sock, 4))
    if length > MAX_MESSAGE_BYTES:
        raise ProbeError(f"a probe message of {length} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        message = json.loads(read_exactly(sock, length))
    except (ValueError, RecursionError):
        raise ProbeError("a probe message is not JSON") from None
    if not isinstance(message, dict):
        raise ProbeError("a probe message is not an object")
    return message


def read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise HungUpError("the other end closed the connection")
        data += part
    return bytes(data)
