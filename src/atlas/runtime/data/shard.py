"""A shard: one file of tokens behind a header of 256 bytes, mapped into memory, never read whole.

Opening checks the header, its checksum and the file's length; `verify_shard` reads every token. The format is in
docs/data.md. Knows nothing of text, sequences or batches.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError

MAGIC, VERSION = b"ATLASTOK", 1
HEADER_BYTES = 256
SUFFIX = ".tokens"
DTYPES: dict[bytes, np.dtype[Any]] = {b"u1": np.dtype("u1"), b"u2": np.dtype("<u2"), b"u4": np.dtype("<u4")}
_BODY = struct.Struct("<8sII4sIQII32s64s")
"""magic, version, header bytes, dtype, vocabulary, tokens, index, shards, sha256 of the tokens, tokenizer."""
_CRC = struct.Struct("<I")
_CHUNK_BYTES = 1 << 22

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class ShardHeader:
    """The header of a shard."""

    dtype: np.dtype[Any]
    vocabulary: int
    """Every token is less than this."""
    num_tokens: int
    index: int
    """The number of this file in its tokenization."""
    num_shards: int
    sha256: bytes
    """Of the tokens in the file."""
    tokenizer: str
    """`byte`, or `hf:` and the start of the SHA-256 of the tokenizer's file."""

    def pack(self) -> bytes:
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        body = _BODY.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            code,
            self.vocabulary,
            self.num_tokens,
            self.index,
            self.num_shards,
            self.sha256,
            self.tokenizer.encode(),
        ).ljust(HEADER_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))


@dataclass(frozen=True)
class TokenShard:
    """An open shard; `tokens` is a memory map of the file."""

    path: Path
    header: ShardHeader
    tokens: Tokens


def dtype_for(vocabulary: int) -> np.dtype[Any]:
    """The smallest dtype for all tokens."""
    return DTYPES[b"u1" if vocabulary <= 1 << 8 else b"u2" if vocabulary <= 1 << 16 else b"u4"]


def open_shard(path: Path) -> TokenShard:
    """Map a shard; raises AtlasError for an invalid file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
        header = _header(path, start)
        expected = HEADER_BYTES + header.num_tokens * header.dtype.itemsize
        if size != expected:
            what = "cut short" if size < expected else "too long"
            raise _unusable(path, f"{what}: {size:,} bytes, its header says {expected:,}")
        tokens = np.memmap(path, header.dtype, "r", HEADER_BYTES, (header.num_tokens,))
    except OSError as error:
        raise AtlasError(f"{path}: cannot be read: {error.strerror or error}. Check the path") from error
    return TokenShard(path, header, tokens)


def _header(path: Path, start: bytes) -> ShardHeader:
    if start[: len(MAGIC)] != MAGIC:
        raise _unusable(path, "not a shard of tokens: it does not begin with ATLASTOK")
    if len(start) < HEADER_BYTES:
        raise _unusable(path, f"cut short: {len(start)} bytes, the header alone has {HEADER_BYTES}")
    _, version, header_bytes, code, vocabulary, num_tokens, index, num_shards, sha256, name = _BODY.unpack_from(start)
    if (version, header_bytes) != (VERSION, HEADER_BYTES):
        raise _unusable(path, f"format version {version}, this atlas reads version {VERSION}")
    if _CRC.unpack_from(start, HEADER_BYTES - _CRC.size)[0] != zlib.crc32(start[: -_CRC.size]):
        raise _unusable(path, "its header is damaged (checksum)")
    dtype = DTYPES.get(code.rstrip(b"\0"))
    if dtype is None:
        raise _unusable(path, f"tokens of type {code.rstrip(bytes(1))!r}, allowed are u1, u2 and u4")
    if not num_tokens:
        raise _unusable(path, "it holds no tokens")
    return ShardHeader(
        dtype, vocabulary, num_tokens, index, num_shards, sha256, name.rstrip(b"\0").decode(errors="replace")
    )


def verify_shard(shard: TokenShard) -> None:
    """Read all tokens: the checksum must match, and every token must be in the vocabulary."""
    digest, largest = hashlib.sha256(), 0
    for chunk in _chunks(shard.tokens):
        digest.update(chunk.data)
        largest = max(largest, int(chunk.max()))
    if digest.digest() != shard.header.sha256:
        raise _unusable(shard.path, "its tokens are damaged (checksum)")
    if largest >= shard.header.vocabulary:
        raise _unusable(shard.path, f"token {largest} is outside its vocabulary of {shard.header.vocabulary}")


def _chunks(tokens: Tokens) -> Iterator[Tokens]:
    for start in range(0, len(tokens), _CHUNK_BYTES):
        yield np.ascontiguousarray(tokens[start : start + _CHUNK_BYTES])


def _unusable(path: Path, why: str) -> AtlasError:
    return AtlasError(f"{path}: {why}. Write it again with `atlas data tokenize`, or copy it again from its source")


class ShardWriter:
    """Appends tokens to a new file, which becomes a shard when `finish` writes its header."""

    def __init__(self, path: Path, vocabulary: int, tokenizer: str) -> None:
        self.path, self.vocabulary, self.tokenizer = path, vocabulary, tokenizer
        self.dtype = dtype_for(vocabulary)
        self.num_tokens = 0
        self._digest = hashlib.sha256()
        with path.open("xb") as file:
            file.write(bytes(HEADER_BYTES))

    def append(self, tokens: NDArray[Any]) -> None:
        data = np.ascontiguousarray(tokens, self.dtype).data.cast("B")
        with self.path.open("ab") as file:
            file.write(data)
        self._digest.update(data)
        self.num_tokens += len(tokens)

    def finish(self, index: int, num_shards: int) -> ShardHeader:
        sha256 = self._digest.digest()
        header = ShardHeader(self.dtype, self.vocabulary, self.num_tokens, index, num_shards, sha256, self.tokenizer)
        with self.path.open("r+b") as file:
            file.write(header.pack())
        return header
