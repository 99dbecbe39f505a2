"""The wire format of keys and values: a frame (`bubbletea.frames`) of kind KV for some tokens of one layer.

    fields    v 1, ticket, model, layer, start, stop, dtype, shape [2, K, stop - start, E], digest
    payload   the keys, then the values: C order, little endian, keys as attention uses them (rotated)

`model` identifies the model: a decode engine with another one refuses the block. `digest` is the first half of SHA-256
over the payload (twice as fast as BLAKE2b on current processors): a damaged block is an error, never wrong tokens.
Knows torch; not requests or sockets. Shape letters: K heads of keys and values (of the whole model), E head width.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atlas.errors import WorkerError
from bubbletea.frames import Payload, WireFrame

KV, FETCH, END, GONE, RELEASE = 16, 17, 18, 19, 20
"""Kinds of frames. A decode engine sends FETCH {ticket, start, stop, layers} and receives KV ... and END {blocks}, or
GONE {why}; after RELEASE {ticket} the service may drop it."""
VERSION = 1
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class KvBlock:
    """Keys and values of tokens `start` to `stop`, exclusive, in one layer."""

    ticket: str
    model: str
    layer: int
    start: int
    stop: int
    kv: Tensor
    """[2, K, stop - start, E], in host memory."""


def pack_block(block: KvBlock) -> tuple[dict[str, Any], Payload]:
    """The fields and the payload of its frame."""
    payload = bytes_of(block.kv)
    fields = {
        "v": VERSION,
        "ticket": block.ticket,
        "model": block.model,
        "layer": block.layer,
        "start": block.start,
        "stop": block.stop,
        "dtype": NAMES[block.kv.dtype],
        "shape": list(block.kv.shape),
        "digest": digest(payload),
    }
    return fields, payload


def unpack_block(frame: WireFrame, *, model: str | None = None) -> KvBlock:
    """Refuses a block that is damaged, of another version, or (if `model` is given) of another model."""
    fields = frame.fields
    try:
        if fields["v"] != VERSION:
            raise WorkerError(f"keys and values in format {fields['v']}, this side reads {VERSION}: update one of them")
        dtype, shape = DTYPES[fields["dtype"]], [int(n) for n in fields["shape"]]
        layer, start, stop = (int(fields[name]) for name in ("layer", "start", "stop"))
        ticket, given = str(fields["ticket"]), str(fields["model"])
        promised = str(fields["digest"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WorkerError(f"a block of keys and values without a valid {error}") from None
    if model is not None and given != model:
        raise WorkerError(f"keys and values of model {given}, this side runs {model}: serve the same model on both")
    right = len(shape) == 4 and shape[0] == 2 and shape[2] == stop - start > 0 and min(shape) > 0 <= min(start, layer)
    if not right or math.prod(shape) * dtype.itemsize != len(frame.payload):
        raise WorkerError(f"a block of shape {shape} for tokens {start} to {stop} in {len(frame.payload)} bytes")
    if digest(frame.payload) != promised:
        raise WorkerError(f"keys and values of layer {layer}, tokens {start} to {stop}, were damaged on the way")
    data = frame.payload if isinstance(frame.payload, bytearray) else bytearray(frame.payload)
    return KvBlock(ticket, given, layer, start, stop, torch.frombuffer(data, dtype=dtype).view(shape))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, without a copy if it is contiguous."""
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def digest(payload: Payload) -> str:
    return hashlib.sha256(payload).hexdigest()[:32]
