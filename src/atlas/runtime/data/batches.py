"""The data of each training step. The global batch of a step depends on (dataset, length, seed, step) alone; a worker
reads only the rows of its microbatch, and any layout of pipelines and microbatches reads the same rows.

To resume is to ask for a later step: there is no state. Knows shards and the order of samples; not torch, not workers.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError
from atlas.runtime.assignment import SHIPPED
from atlas.runtime.data.order import Positions, SampleOrder
from atlas.runtime.data.shard import SUFFIX, TokenShard, open_shard, verify_shard
from atlas.runtime.data.tokenize import sample_text, tokenize
from atlas.runtime.data.tokenizers import ByteTokenizer

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TokenBatch:
    """Sequences, and the next token after each of their tokens."""

    tokens: Ids
    """[B, L]"""
    targets: Ids


@dataclass(frozen=True)
class Dataset:
    """Shards of one tokenizer, in order."""

    shards: tuple[TokenShard, ...]

    @classmethod
    def open(cls, *paths: Path, verify: bool = False) -> Dataset:
        """Folders of shards, or single shards. `verify` reads every token once and compares checksums."""
        shards = tuple(shard for path in paths for shard in _shards_at(path))
        for shard in shards:
            _require_alike(shards[0], shard)
            if verify:
                verify_shard(shard)
        return cls(shards)

    @property
    def vocabulary(self) -> int:
        return self.shards[0].header.vocabulary

    @property
    def num_tokens(self) -> int:
        return sum(shard.header.num_tokens for shard in self.shards)

    @cached_property
    def digest(self) -> str:
        """Of its content, not of its path: a resumed run compares it."""
        digest = hashlib.sha256(self.shards[0].header.tokenizer.encode())
        for shard in self.shards:
            digest.update(shard.header.sha256 + shard.header.num_tokens.to_bytes(8, "little"))
        return digest.hexdigest()

    def require_vocabulary(self, vocabulary: int) -> None:
        """Raise if a model of `vocabulary` tokens cannot read this dataset."""
        if self.vocabulary > vocabulary:
            raise AtlasError(
                f"{self.shards[0].path}: tokens of a vocabulary of {self.vocabulary}, but the model has {vocabulary}. "
                "Give the model a larger vocabulary, or tokenize with its own tokenizer"
            )


def _shards_at(path: Path) -> list[TokenShard]:
    if not path.is_dir():
        return [open_shard(path)]
    found = [open_shard(file) for file in sorted(path.glob(f"*{SUFFIX}"))]
    if not found:
        raise AtlasError(f"{path}: no shards (*{SUFFIX}) in this folder. Write some with `atlas data tokenize`")
    numbers, expected = {shard.header.index for shard in found}, found[0].header.num_shards
    missing = sorted(set(range(expected)) - numbers)
    if missing:
        raise AtlasError(f"{path}: shard {missing[0]} of {expected} is missing. Copy the whole folder again")
    if len(found) != expected:
        raise AtlasError(
            f"{path}: {len(found)} shards, but {found[0].path.name} is one of {expected}. "
            "Keep each tokenization in a separate folder, and name the folders one after the other"
        )
    return found


def _require_alike(first: TokenShard, shard: TokenShard) -> None:
    for what in ("tokenizer", "vocabulary", "dtype"):
        ours, theirs = getattr(first.header, what), getattr(shard.header, what)
        if ours != theirs:
            raise AtlasError(
                f"{shard.path}: {what} {theirs}, but {first.path} has {ours}. "
                "Shards of one training must have the same tokenizer: tokenize them again"
            )


class Batches:
    """`batch`: of the whole run; `rows`: a worker's part of it."""

    def __init__(self, dataset: Dataset, *, length: int, global_batch: int, seed: int) -> None:
        self.dataset, self.length, self.global_batch = dataset, length, global_batch
        # The last token of a sequence is only a target, and the next sequence begins with it.
        counts = [(shard.header.num_tokens - 1) // length for shard in dataset.shards]
        self._ends = np.cumsum(counts)
        self.num_samples = int(self._ends[-1])
        self._require_enough(counts)
        self.order = SampleOrder(self.num_samples, seed)
        # Once a step: for the few rows of a microbatch it costs the same.
        self._samples = lru_cache(maxsize=2)(self._samples_of)

    def _samples_of(self, step: int) -> Positions:
        return self.order.samples(step * self.global_batch + np.arange(self.global_batch, dtype=np.int64))

    def _require_enough(self, counts: Sequence[int]) -> None:
        for shard, count in zip(self.dataset.shards, counts, strict=True):
            if not count:
                raise AtlasError(
                    f"{shard.path}: {shard.header.num_tokens} tokens, but one sequence takes {self.length + 1}. "
                    "Choose a shorter sequence, or tokenize into fewer, longer shards"
                )
        if self.num_samples < self.global_batch:
            paths = ", ".join(str(shard.path) for shard in self.dataset.shards[:3])
            raise AtlasError(
                f"{paths}: {self.num_samples} sequences of {self.length} tokens, but one batch takes "
                f"{self.global_batch}. Add data, or choose a smaller batch or shorter sequences"
            )

    def batch(self, step: int) -> TokenBatch:
        """All sequences of a step; steps count from 0."""
        return self.rows(step, 0, self.global_batch)

    def rows(self, step: int, first: int, last: int) -> TokenBatch:
        """Rows `first` up to `last` of the step's global batch."""
        rows = np.empty((last - first, self.length + 1), np.int64)
        for row, sample in zip(rows, self._samples(step)[first:last], strict=True):
            self._read(int(sample), row)
        return TokenBatch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))

    def _read(self, sample: int, row: Ids) -> None:
        number = int(np.searchsorted(self._ends, sample, side="right"))
        shard = self.dataset.shards[number]
        start = (sample - (int(self._ends[number - 1]) if number else 0)) * self.length
        row[:] = shard.tokens[start : start + self.length + 1]
        if row.max() >= shard.header.vocabulary:
            raise AtlasError(
                f"{shard.path}: token {row.max()} at {start + int(row.argmax())} is outside its vocabulary of "
                f"{shard.header.vocabulary}: the file is damaged. Copy it again, or tokenize again"
            )


def open_dataset(folder: str) -> Dataset:
    """The shards of a folder, or of the text that ships."""
    return _shipped() if folder == SHIPPED else Dataset.open(Path(folder))


@cache
def _shipped() -> Dataset:
    """The shipped text by bytes, written once per process; shards stay readable after their folder is deleted."""
    with tempfile.TemporaryDirectory(prefix="atlas-text-") as folder:
        tokenize([sample_text()], Path(folder) / "tokens", ByteTokenizer())
        return Dataset.open(Path(folder) / "tokens")
