"""Frames: how a block of numbers travels between workers. A fixed header with a checksum, the shape, the bytes.

No pickle, every size bounded before anything is allocated: garbage on a port is refused, never executed. Knows
dtype codes and shapes, but no tensors, no sockets beyond "read me n bytes", and no meaning of the payload.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from atlas.errors import WorkerError

MAGIC, VERSION = b"ATLS", 1
MAX_DIMS = 8
MAX_PAYLOAD_BYTES = 1 << 30

ITEM_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}
"""The dtypes that travel; a dtype's code on the wire is its place here, so new ones go at the end."""
DTYPES = tuple(ITEM_BYTES)

_HEADER = struct.Struct("!4sBBBBIIIIBBHI")
"""magic, version, type, direction, 0, epoch, pipeline, stage, microbatch, dtype, dims, 0, checksum of the rest."""
HEADER_BYTES = _HEADER.size


class FrameType(IntEnum):
    """HELLO names the sender, DATA carries numbers, BYE says that the end which follows is meant."""

    HELLO = 0
    DATA = 1
    BYE = 2


@dataclass(frozen=True)
class Frame:
    """One message. `stage` and `microbatch` are the receiver's: what the payload is an input of."""

    type: FrameType
    payload: bytes | bytearray | memoryview = b""
    dtype: str = "uint8"
    shape: tuple[int, ...] = (0,)
    epoch: int = 0
    """Counts restarts: a frame of an older epoch comes from a connection that was given up."""
    direction: int = 0
    pipeline: int = 0
    stage: int = 0
    microbatch: int = 0

    @property
    def wire_bytes(self) -> int:
        return HEADER_BYTES + 4 * len(self.shape) + len(self.payload)


def head(frame: Frame) -> bytes:
    """What precedes the payload on the wire. Raises where the frame contradicts itself or is too large."""
    expected = math.prod(frame.shape) * ITEM_BYTES[frame.dtype]
    if len(frame.payload) != expected or expected > MAX_PAYLOAD_BYTES or len(frame.shape) > MAX_DIMS:
        raise WorkerError(
            f"a frame of {frame.dtype} {list(frame.shape)} has {len(frame.payload)} bytes: it must have {expected}, "
            f"at most {MAX_PAYLOAD_BYTES}, and at most {MAX_DIMS} dimensions"
        )
    fields = (
        MAGIC,
        VERSION,
        frame.type,
        frame.direction,
        0,
        frame.epoch,
        frame.pipeline,
        frame.stage,
        frame.microbatch,
        DTYPES.index(frame.dtype),
        len(frame.shape),
        0,
    )
    shape = struct.pack(f"!{len(frame.shape)}I", *frame.shape)
    start = _HEADER.pack(*fields, 0)[:-4]
    return start + struct.pack("!I", zlib.crc32(shape, zlib.crc32(start))) + shape


def read_frame(read: Callable[[int], bytearray], max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Frame:
    """The next frame from `read(n)`, which returns exactly n bytes or raises."""
    raw = read(HEADER_BYTES)
    magic, version, kind, direction, _, epoch, pipeline, stage, microbatch, dtype, dims, _, checksum = _HEADER.unpack(
        raw
    )
    if magic != MAGIC:
        raise WorkerError(f"these bytes are no frame: they begin with {bytes(magic)!r}, a frame with {MAGIC!r}")
    if version != VERSION:
        raise WorkerError(f"a frame of version {version}, but this side speaks {VERSION}: run the same release on both")
    if dims > MAX_DIMS:
        raise WorkerError(f"a frame of {dims} dimensions: at most {MAX_DIMS} are allowed")
    packed = read(4 * dims)
    if zlib.crc32(packed, zlib.crc32(raw[:-4])) != checksum:
        raise WorkerError("a frame's header does not match its checksum: the stream is damaged")
    if dtype >= len(DTYPES) or kind not in iter(FrameType):
        raise WorkerError(f"a frame of type {kind} and dtype code {dtype}: neither side of this release writes that")
    shape = struct.unpack(f"!{dims}I", packed)
    num_bytes = math.prod(shape) * ITEM_BYTES[DTYPES[dtype]]
    if num_bytes > max_payload_bytes:
        raise WorkerError(f"a frame announces {num_bytes} bytes: at most {max_payload_bytes} are allowed")
    return Frame(FrameType(kind), read(num_bytes), DTYPES[dtype], shape, epoch, direction, pipeline, stage, microbatch)


def read_all(data: bytes, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Iterator[Frame]:
    """The frames of a byte string, for tests and files."""
    at = 0

    def read(num_bytes: int) -> bytearray:
        nonlocal at
        if at + num_bytes > len(data):
            raise WorkerError(f"a frame breaks off: {num_bytes} more bytes expected, {len(data) - at} there")
        at += num_bytes
        return bytearray(data[at - num_bytes : at])

    while at < len(data):
        yield read_frame(read, max_payload_bytes)
