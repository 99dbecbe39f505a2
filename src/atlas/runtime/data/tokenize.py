"""Text files to a folder of shards; the folder appears complete or not at all.

A text file is one document, a .jsonl file one per line (its key `text`). Every document ends with the tokenizer's end
token. Knows text and shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from atlas.errors import AtlasError
from atlas.ir.replace import new_folder
from atlas.runtime.data.shard import HEADER_BYTES, SUFFIX, ShardWriter
from atlas.runtime.data.tokenizers import Tokenizer

SHARD_TOKENS = 1 << 27
"""Of one file: 256 MiB at two bytes a token."""
SHORT_FRACTION = 8
"""A last shard shorter than an 8th of the others is appended to the one before."""


def sample_text() -> Path:
    """The public-domain text that ships for the demo and the tests (text/README.md says where it is from)."""
    return Path(str(files("atlas.runtime.data") / "text" / "founding.txt"))


def tokenize(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer,
    *,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Path]:
    """Write the shards of `inputs`, in order, to the new folder `out`; their paths."""
    if shard_tokens < 1:
        raise AtlasError(f"shards of {shard_tokens} tokens: each holds at least one. Choose a larger --shard-tokens")
    with new_folder(out, may_be_empty=True) as part:
        shards = _Shards(part, tokenizer, shard_tokens)
        for done, path in enumerate(inputs):
            progress(path.name, done, len(inputs))
            for document in documents(path):
                shards.append(document)
        if not shards.num_tokens:
            raise AtlasError(f"{', '.join(map(str, inputs))}: no text. Give at least one file that is not empty")
        names = [path.name for path in shards.finish()]
    return [out / name for name in names]


class _Shards:
    """Writes one shard after the other."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self.folder, self.tokenizer, self.shard_tokens = folder, tokenizer, shard_tokens
        self.writers: list[ShardWriter] = []
        self.num_tokens = 0

    def append(self, document: str) -> None:
        tokens = self.tokenizer.encode(document)
        if not len(tokens):
            return
        tokens = np.append(tokens, np.array([self.tokenizer.end], tokens.dtype))
        self.num_tokens += len(tokens)
        while len(tokens):
            if not self.writers or self.writers[-1].num_tokens == self.shard_tokens:
                self.writers.append(self._writer(len(self.writers)))
            writer = self.writers[-1]
            room = self.shard_tokens - writer.num_tokens
            writer.append(tokens[:room])
            tokens = tokens[room:]

    def finish(self) -> list[Path]:
        if len(self.writers) > 1 and self.writers[-1].num_tokens * SHORT_FRACTION < self.shard_tokens:
            last = self.writers.pop()
            written = np.fromfile(last.path, last.dtype, offset=HEADER_BYTES)
            self.writers[-1].append(written)
            last.path.unlink()
        for index, writer in enumerate(self.writers):
            writer.finish(index, len(self.writers))
        return [writer.path for writer in self.writers]

    def _writer(self, index: int) -> ShardWriter:
        path = self.folder / f"shard-{index:05}{SUFFIX}"
        return ShardWriter(path, self.tokenizer.vocabulary, self.tokenizer.id)


def documents(path: Path) -> Iterator[str]:
    """The documents of a file."""
    try:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text(path, number, line)
    except UnicodeDecodeError as error:
        raise AtlasError(
            f"{path}: not UTF-8 at byte {error.start}. Convert it first, for instance with iconv -t utf-8"
        ) from error


def _text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise AtlasError(
            f'{path}: line {number}: every line must have the form {{"text": "..."}}. Fix or remove this line'
        )
    return text
