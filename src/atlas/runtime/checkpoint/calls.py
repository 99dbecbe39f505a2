"""What a store and its keeper in another datacenter say to each other: a call is a JSON header and bytes, and so is
its answer. Calls of one node are numbered, and taken in that order.

Knows the format and its limits; who calls is `remote`, who answers `keeper`. Nothing in it is a pickle.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Mapping
from typing import Any

from atlas.runtime.checkpoint.store import Chunk

CALL_LANE, ANSWER_LANE = 60_000, 60_001
"""Lanes of their own: a copy never stands in a queue before training."""
PIECE_BYTES = 1 << 20
WINDOW_BYTES = 4 << 20
"""What a caller has under way at most, and so what training may find on its path when it wants to send."""
MAX_QUEUED_BYTES = 8 * WINDOW_BYTES
MAX_HEADER_BYTES = 1 << 16
OWN = "own"
"""The shelf on which a datacenter's own checkpoints lie."""

_LENGTH = struct.Struct("!I")


def shelf_of(datacenter: str) -> str:
    """The shelf on which another datacenter keeps the copies of this one's."""
    return f"of-{datacenter}"


def pack(header: Mapping[str, Any], payload: Chunk = b"") -> bytes:
    text = json.dumps(header).encode()
    return b"".join((_LENGTH.pack(len(text)), text, payload))


def unpack(message: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Header and payload; a ValueError where it is neither."""
    if len(message) < _LENGTH.size:
        raise ValueError("it has no header")
    (length,) = _LENGTH.unpack_from(message)
    if length > min(MAX_HEADER_BYTES, len(message) - _LENGTH.size):
        raise ValueError(f"its header claims {length} bytes")
    header = json.loads(bytes(message[_LENGTH.size : _LENGTH.size + length]))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, message[_LENGTH.size + length :]


def refusal(error: OSError) -> dict[str, Any]:
    """The answer to a call that failed."""
    codes = {PermissionError: errno.EACCES, TimeoutError: errno.ETIMEDOUT}
    return {"errno": error.errno or codes.get(type(error), errno.EIO), "error": error.strerror or str(error)}
