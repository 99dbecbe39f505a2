"""A model's id, computed by service and decode engine from their own copies of the folder. It differs if config, dtype
or weights differ: keys and values of another fine-tuning would give wrong tokens without an error.

Reads headers and a few bytes of every tensor, not the weights: milliseconds for any size. Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from atlas.errors import WorkerError

IRRELEVANT_KEYS = ("torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache", "architectures")
"""Keys of a config that do not change what is computed."""
MAX_HEADER_BYTES = 100 << 20
"""About the limit of safetensors itself (100 MB)."""
SAMPLE_BYTES = 256
"""Bytes read at the beginning, the middle and the end of each tensor."""


@functools.lru_cache(maxsize=16)
def model_id(folder: Path, dtype: str) -> str:
    """`dtype`: in which the model runs, not that of its file."""
    found = hashlib.blake2b(dtype.encode(), digest_size=12)
    config = _json(folder / "config.json", (folder / "config.json").read_bytes())
    found.update(json.dumps({k: v for k, v in config.items() if k not in IRRELEVANT_KEYS}, sort_keys=True).encode())
    for name, sample in sorted(_samples(folder).items()):
        found.update(name.encode() + sample)
    return found.hexdigest()


def _samples(folder: Path) -> dict[str, bytes]:
    """By name of the tensor, over all files."""
    samples: dict[str, bytes] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            samples |= _samples_of(path, file)
    if not samples:
        raise WorkerError(f"{folder} has no *.safetensors: a model is identified by its weights")
    return samples


def _samples_of(path: Path, file: BinaryIO) -> dict[str, bytes]:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_HEADER_BYTES:
        raise WorkerError(f"{path} is not a safetensors file: its header would have {length} bytes")
    header = _json(path, file.read(length))
    samples: dict[str, bytes] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            parts = [json.dumps([entry["dtype"], entry["shape"]]).encode()]
            for at in (first, (first + last) // 2, max(first, last - SAMPLE_BYTES)):
                file.seek(8 + length + at)
                parts.append(file.read(min(SAMPLE_BYTES, last - at)))
            samples[name] = b"".join(parts)
    return samples


def _json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise WorkerError(f"{path} holds no JSON object where one is expected")
    return content
