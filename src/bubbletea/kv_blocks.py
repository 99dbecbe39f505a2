"""The wire format of keys and values: a frame (`bubbletea.frames`) of kind KV for some tokens of one layer.

    fields    v 2, ticket, model, layer, start, stop, dtype, shape [2, K, stop - start, E], checksums
    payload   the keys, then the values: C order, little endian, keys as attention uses them (rotated)

`model` identifies the model: a decode engine with another one refuses the block. `checksums` are the CRC-32 of every
head's keys, then of every head's values: a damaged block is an error, never wrong tokens. They are computed once, also
if several ranks fetch different heads. They do not stop an attacker; a connection beyond loopback is encrypted.
Knows torch; not requests or sockets. Shape letters: K heads of keys and values, E head width.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atlas.errors import WorkerError
from bubbletea.frames import Payload, WireFrame

KV, FETCH, END, GONE, RELEASE, PLACES, PLACE, READ = range(16, 24)
"""Kinds of frames. A decode engine sends FETCH {ticket, start, stop, layers, heads} to every worker that has a part,
and receives KV ... and END {blocks}, or GONE {why}; after RELEASE {ticket}, sent to the service, it may be dropped. To
FETCH with {plane: "nixl"} a worker may answer PLACES {} (NIXL's description of its memory), PLACE ... (a KV frame with
{address, bytes} instead of its payload) and END; the engine sends READ {} when it has read them."""
VERSION = 2
"""Of the layout of a block's payload. Blocks of other versions are refused."""
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
    checksums: tuple[int, ...] = ()
    """Of its 2 K planes; empty: not computed."""

    def checked(self) -> KvBlock:
        """With its checksums."""
        return (
            self if self.checksums else replace(self, checksums=checksums_of(bytes_of(self.kv), 2 * self.kv.shape[1]))
        )

    def of_heads(self, first: int, stop: int) -> KvBlock:
        """Only these heads."""
        count = self.kv.shape[1]
        if (first, stop) == (0, count):
            return self
        keys, values = self.checksums[first:stop], self.checksums[count + first : count + stop]
        return replace(self, kv=self.kv[:, first:stop], checksums=(*keys, *values))


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
        "checksums": list(block.checksums or checksums_of(payload, 2 * block.kv.shape[1])),
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
        stated = tuple(int(one) for one in fields["checksums"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WorkerError(f"a block of keys and values without a valid {error}") from None
    if model is not None and given != model:
        raise WorkerError(f"keys and values of model {given}, this side runs {model}: serve the same model on both")
    right = len(shape) == 4 and shape[0] == 2 and shape[2] == stop - start > 0 and min(shape) > 0 <= min(start, layer)
    if not right or math.prod(shape) * dtype.itemsize != len(frame.payload):
        raise WorkerError(
            f"the shape {shape} of a block does not match its layer {layer}, its tokens {start} to {stop} or its "
            f"{len(frame.payload)} bytes of {fields['dtype']}"
        )
    if checksums_of(frame.payload, 2 * shape[1]) != stated:
        raise WorkerError(f"keys and values of layer {layer}, tokens {start} to {stop}, were damaged on the way")
    data = bytearray(frame.payload) if memoryview(frame.payload).readonly else frame.payload
    return KvBlock(ticket, given, layer, start, stop, torch.frombuffer(data, dtype=dtype).view(shape), stated)


def reach(spans: Iterable[tuple[int, int]]) -> int:
    """How many first tokens spans (first, stop) cover without a gap."""
    end = 0
    for start, stop in sorted(spans):
        if start > end:
            break
        end = max(end, stop)
    return end


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, without a copy if it is contiguous."""
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def checksums_of(payload: Payload, count: int) -> tuple[int, ...]:
    """Of `count` parts of equal size."""
    view = memoryview(payload)
    size = len(view) // count
    return tuple(zlib.crc32(view[i * size : (i + 1) * size]) for i in range(count))
