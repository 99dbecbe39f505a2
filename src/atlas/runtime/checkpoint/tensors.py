"""Tensors to and from a safetensors blob. Written as a stream from the tensors' own memory and hashed on the way, so
that a layer of any size needs no second copy; read by the `safetensors` library once the hash is verified.

Knows the file format. Does not know what the tensors are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.store import Chunk

CHUNK_BYTES = 1 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def stream(tensors: Mapping[str, Tensor]) -> Iterator[Chunk]:
    """A safetensors file, piece by piece. Tensors must be contiguous and on the host."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), name
        assert tensor.device.type == "cpu", name
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        for at in range(0, len(data), CHUNK_BYTES):
            yield data[at : at + CHUNK_BYTES]


class Tally:
    """Counts and hashes the bytes that pass."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._digest = hashlib.sha256()

    def add(self, chunk: Chunk) -> None:
        self._digest.update(chunk)
        self.num_bytes += len(chunk)

    def through(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            self.add(chunk)
            yield chunk

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def chunks_of(file: BinaryIO) -> Iterator[bytes]:
    """What is left in an open file."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def parse(data: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a blob; nothing in it is executed."""
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise AtlasError(f"{where}: not a safetensors file ({error}). Delete this checkpoint or restore it") from error
    return tensors
