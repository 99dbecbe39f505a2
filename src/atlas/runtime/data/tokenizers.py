"""Text to tokens: plain bytes, or a tokenizer file of Hugging Face's `tokenizers`. Does not know text files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError, MissingExtraError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Common names of the end-of-text token, the most common first."""


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    id: str
    """Shards of one training must have the same (at most 64 bytes)."""
    vocabulary: int
    end: int
    """The token between two documents."""

    def encode(self, text: str) -> NDArray[Any]: ...

    def decode(self, tokens: NDArray[Any]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes; documents end with a zero byte. Needs no file and handles any text."""

    id, vocabulary, end = "byte", 256, 0

    def encode(self, text: str) -> NDArray[Any]:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: NDArray[Any]) -> str:
        return np.asarray(tokens, np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers`."""

    def __init__(self, path: Path, end: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as HfTokenizer
        except ImportError as error:
            raise MissingExtraError("tokenizers", "hf", f"the tokenizer {path}") from error
        try:
            data = path.read_bytes()
            self._hf: Any = HfTokenizer.from_str(data.decode())
        except OSError as error:
            raise AtlasError(f"{path}: cannot be read: {error.strerror or error}. Check the path") from error
        except Exception as error:  # the library raises nothing more precise
            raise AtlasError(
                f"{path}: not a tokenizer of Hugging Face's `tokenizers` ({error}). "
                "Give the file `tokenizer.json` of a model, or none for bytes"
            ) from error
        self.id = f"hf:{hashlib.sha256(data).hexdigest()[:32]}"
        self.vocabulary = 1 + max(self._hf.get_vocab(with_added_tokens=True).values())
        self.end = self._end(path, end)

    def _end(self, path: Path, name: str | None) -> int:
        for candidate in ENDS if name is None else (name,):
            token: int | None = self._hf.token_to_id(candidate)
            if token is not None:
                return token
        what = "none of the usual tokens for the end of a text" if name is None else f"no token {name!r}"
        raise AtlasError(f"{path}: it has {what}. Name the token that ends a document with --end TOKEN")

    def encode(self, text: str) -> NDArray[Any]:
        return np.array(self._hf.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: NDArray[Any]) -> str:
        text: str = self._hf.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)
        return text
