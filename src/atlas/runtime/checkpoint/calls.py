"""The messages between a remote store and the checkpoint server that answers it: a call is a JSON header and bytes,
and so is its reply. Calls of one node are numbered and served in that order.

Knows the format and its limits; `client` sends calls, `server` answers them. Nothing in it is a pickle.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Mapping
from typing import Any

from atlas.runtime.checkpoint.store import Chunk

CALL_LANE, REPLY_LANE, BULK_LANE = 60_000, 60_001, 60_002
"""Lanes of their own: a copy is never queued before training's traffic. Contents of large files come over BULK_LANE,
which has as many streams as training's; it is opened when a client asks for it (`widen`)."""
PIECE_BYTES = 1 << 20
WINDOW_BYTES = 4 << 20
"""Unanswered bytes of one client: at most this much of a copy may be ahead of training's next send."""
MAX_QUEUED_BYTES = 8 * WINDOW_BYTES
"""Calls of one peer that a server holds; a further one is dropped and answered with an error."""
MAX_HEADER_BYTES = 1 << 16
OWN = "own"
"""The name of the store with a datacenter's own checkpoints."""

_LENGTH = struct.Struct("!I")


def copies_of(datacenter: str) -> str:
    """The name of the store in which another datacenter keeps copies of this one's checkpoints."""
    return f"of-{datacenter}"


def pack(header: Mapping[str, Any], payload: Chunk = b"") -> bytes:
    text = json.dumps(header).encode()
    return b"".join((_LENGTH.pack(len(text)), text, payload))


def unpack(message: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Header and payload; raises ValueError if it is invalid."""
    if len(message) < _LENGTH.size:
        raise ValueError("it has no header")
    (length,) = _LENGTH.unpack_from(message)
    if length > min(MAX_HEADER_BYTES, len(message) - _LENGTH.size):
        raise ValueError(f"its header claims {length} bytes")
    header = json.loads(bytes(message[_LENGTH.size : _LENGTH.size + length]))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, message[_LENGTH.size + length :]


def error_reply(error: OSError) -> dict[str, Any]:
    """The reply to a call that failed."""
    unnumbered = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO  # obstore's have no number
    return {"errno": error.errno or unnumbered, "error": error.strerror or str(error)}
